"""What the machine itself allows: the speed of its matrix products and of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..timing.interleaved_race import Contestant

SIDE = 1536  # of the matrices: large enough for full speed


@dataclass(frozen=True, slots=True)
class Limit:
    """A lower bound on the time of a case: `scale` times that of the fastest of `ways`."""

    name: str
    ways: tuple[Contestant, ...]
    scale: float = 1.0


def matmul_limit(flops: float) -> Limit:
    """The time that this many floating-point operations take at the speed of a large sgemm."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return Limit("sgemm", (lambda: a @ b,), flops / (2 * SIDE**3))


def row_sums(x: Tensor) -> Tensor:
    """Read x once by a matrix-vector product."""
    return torch.mv(x.flatten(0, -2), x.new_ones(x.shape[-1]))


def norm(x: Tensor) -> Tensor:
    """Read x once by its norm."""
    return torch.linalg.vector_norm(x)


def total(x: Tensor) -> Tensor:
    """Read x once by its sum."""
    return x.sum()


def read_limit(k: Tensor, v: Tensor) -> Limit:
    """The time to read the bytes of K and V once, in the fastest of three ways.

    Which one it is depends on the processor and on the number of threads, which PyTorch uses for the total alone.
    """
    floats = [x if x.dtype == torch.float32 else x.view(torch.float32) for x in (k, v)]  # the same bytes, only read
    ways = tuple(partial(_read_both, read, *floats) for read in (row_sums, norm, total))
    return Limit("reading K and V once", ways)


def contestants(limits: Sequence[Limit]) -> dict[str, Contestant]:
    """Every way of every limit, under a name of its own."""
    return {_name(limit, index): way for limit in limits for index, way in enumerate(limit.ways)}


def slowest(limits: Sequence[Limit], times: Mapping[str, float]) -> tuple[str, float]:
    """Name and seconds of the limit that takes the most time: a case that is subject to all of them cannot be faster.

    Args:
        limits: those of a case.
        times: seconds per call of each of their `contestants`.
    """
    seconds = {
        limit.name: limit.scale * min(times[_name(limit, index)] for index in range(len(limit.ways)))
        for limit in limits
    }
    return max(seconds.items(), key=lambda item: item[1])


def _name(limit: Limit, index: int) -> str:
    return f"limit: {limit.name}, way {index}"


def _read_both(read: Callable[[Tensor], Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return read(k), read(v)
