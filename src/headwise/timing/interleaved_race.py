"""Interleaved races: every contestant in every round, the best round of each counts.

A machine that also does other things slows all contestants down alike, and a best time is the least disturbed one.
"""

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

MIN_TURN = 20e-3  # seconds; a faster call is repeated within its turn, so that all contestants run on warm caches
RTOL, ATOL = 1e-3, 1e-4


class Mismatch(HeadwiseError):
    """Two contestants that should compute the same do not; their times cannot be compared."""


def race(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    min_turn: float = MIN_TURN,
    min_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds per call of each contestant, the best of all rounds.

    Every round times every contestant once, in another order each time, so that a slow phase of the machine affects
    all of them and none always runs on the cache, or the heat, of the same neighbour.

    Args:
        contestants: name -> a function without arguments.
        rounds: how often each is timed.
        min_turn: a call that takes less than these seconds is repeated within its turn.
        min_seconds: rounds go on until the race has taken this long.
        clock: seconds, from any start.

    Returns:
        name -> seconds per call.

    Example:
        >>> race({"sum": lambda: x.sum(), "matmul": lambda: x @ x}, rounds=5)
        {'sum': 0.0001, 'matmul': 0.004}
    """
    repeats = {name: _repeats(run, min_turn, clock) for name, run in contestants.items()}
    best = dict.fromkeys(contestants, math.inf)
    order = random.Random(0)
    round_count, start = 0, clock()
    while round_count < rounds or clock() - start < min_seconds:
        round_count += 1
        for name in order.sample(list(contestants), len(contestants)):
            best[name] = min(best[name], _time(contestants[name], repeats[name], clock))
    return best


def verify(ours: Contestant, peers: Mapping[str, Contestant], atol: float = ATOL) -> None:
    """Raise Mismatch unless every peer gives the output of `ours`."""
    expected = _tensors(ours())
    for name, run in peers.items():
        outputs = _tensors(run())
        if len(outputs) != len(expected) or any(a.shape != b.shape for a, b in zip(outputs, expected, strict=True)):
            raise Mismatch(f"{name} gives shapes {_shapes(outputs)}, headwise {_shapes(expected)}")
        for a, b in zip(outputs, expected, strict=True):
            if not torch.allclose(a, b, rtol=RTOL, atol=atol):
                raise Mismatch(f"{name} and headwise differ by {(a - b).abs().max().item():.2g}")


def synchronize() -> None:
    """Wait until an accelerator, where there is one, has finished its queue."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _repeats(run: Contestant, min_turn: float, clock: Callable[[], float]) -> int:
    """How often to call within one turn; the first call of all warms up and is not timed."""
    run()
    return max(1, math.ceil(min_turn / max(_time(run, 1, clock), 1e-9)))


def _time(run: Contestant, repeats: int, clock: Callable[[], float]) -> float:
    synchronize()
    start = clock()
    for _ in range(repeats):
        run()
    synchronize()
    return (clock() - start) / repeats


def _tensors(output: Output) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
