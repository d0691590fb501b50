"""Random tensors that are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def random_normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Normal numbers from a generator of the CPU, moved to the default device."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())
