"""Fair timing on a machine that does other things too: all contestants in every round, the best of each is kept."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import HeadwiseError

Output: TypeAlias = Tensor | tuple[Tensor, ...]
Contestant: TypeAlias = Callable[[], Output]

SHORTEST = 20e-3  # seconds; a call faster than this is repeated within its turn, so that all run on warm caches
RTOL, ATOL = 1e-3, 1e-4


class Mismatch(HeadwiseError):
    """Two contestants that should give the same do not; their times cannot be compared."""


def race(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    shortest: float = SHORTEST,
    spell: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds a call of each contestant, the best of `rounds`, or of as many as `spell` seconds allow if that is more.

    Every round times every contestant once, in another order each time, so that a slow spell of the machine hits all of
    them and nobody always runs on the cache, or the heat, of the same neighbour.
    """
    repeats = {name: _repeats(run, shortest, clock) for name, run in contestants.items()}
    best = dict.fromkeys(contestants, math.inf)
    shuffle = random.Random(0)
    done, start = 0, clock()
    while done < rounds or clock() - start < spell:
        done += 1
        for name in shuffle.sample(list(contestants), len(contestants)):
            best[name] = min(best[name], _time(contestants[name], repeats[name], clock))
    return best


def drawn(*shape: int, generator: torch.Generator) -> Tensor:
    """Normal numbers of a CPU's generator, the same wherever tensors are made by default."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def verify(ours: Contestant, peers: Mapping[str, Contestant], atol: float = ATOL) -> None:
    """Raise Mismatch unless every peer gives what ours gives."""
    expected = _tensors(ours())
    for name, run in peers.items():
        got = _tensors(run())
        if len(got) != len(expected) or any(a.shape != b.shape for a, b in zip(got, expected, strict=True)):
            raise Mismatch(f"{name} gives shapes {_shapes(got)}, headwise {_shapes(expected)}")
        for a, b in zip(got, expected, strict=True):
            if not torch.allclose(a, b, rtol=RTOL, atol=atol):
                raise Mismatch(f"{name} and headwise differ by {(a - b).abs().max().item():.2g}")


def _repeats(run: Contestant, shortest: float, clock: Callable[[], float]) -> int:
    """How often to call within one turn; the first call of all warms up and is not looked at."""
    run()
    return max(1, math.ceil(shortest / max(_time(run, 1, clock), 1e-9)))


def _time(run: Contestant, repeats: int, clock: Callable[[], float]) -> float:
    settle()
    start = clock()
    for _ in range(repeats):
        run()
    settle()
    return (clock() - start) / repeats


def settle() -> None:
    """A GPU has done all it was told to."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _tensors(output: Output) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
