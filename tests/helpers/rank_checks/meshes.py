"""Process groups for checks that break them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def separate_mesh() -> DeviceMesh:
    """All ranks in a process group of its own, which a check may leave broken."""
    return DeviceMesh.from_group(dist.new_group(list(range(dist.get_world_size()))), "cpu")
