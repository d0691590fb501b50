"""What the machine itself allows: the speed of its matrix products and of its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..timing.interleaved_race import Contestant

SIDE = 1536  # of the matrices: large enough for full speed


@dataclass(frozen=True, slots=True)
class Limit:
    """A lower bound on the time of a case: `scale` times that of a call of `run`."""

    name: str
    run: Contestant
    scale: float = 1.0


def matmul_limit(flops: float) -> Limit:
    """The time that this many floating-point operations take at the speed of a large sgemm."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return Limit("sgemm", lambda: a @ b, flops / (2 * SIDE**3))


def read_limit(k: Tensor, v: Tensor) -> Limit:
    """The time to read K and V once; a matrix-vector product is the fastest way that torch has."""
    pairs = [(t.flatten(0, -2), t.new_ones(t.shape[-1])) for t in (k, v)]
    return Limit("reading K and V once", lambda: tuple(torch.mv(rows, ones) for rows, ones in pairs))
