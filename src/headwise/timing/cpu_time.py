"""Races on one thread in processor time, which other work on the machine changes little."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .interleaved_race import MIN_TURN, race


def race_on_one_thread(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    races: int,
    rounds: int,
    min_turn: float = MIN_TURN,
    device: str = "cpu",
) -> list[dict[str, float]]:
    """{contestant: seconds per call}, one entry per race.

    On the CPU the processor time of one thread counts, on a GPU the clock.

    Args:
        contestants: name -> a function without arguments; what it returns is not looked at.
        races: how many races to run, one after the other.
        rounds, min_turn: of each race, as in `race`.
        device: where the contestants compute.
    """
    gpu = device.startswith("cuda")
    clock = time.perf_counter if gpu else time.process_time
    with one_thread():
        waiting = {name: _until_finished(run, gpu) for name, run in contestants.items()}
        return [race(waiting, rounds=rounds, min_turn=min_turn, clock=clock) for _ in range(races)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, PyTorch computes on one thread; the earlier number is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _until_finished(run: Callable[[], Any], gpu: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The same call, which returns only when a GPU has finished it."""

    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode():
            run()
        if gpu:
            torch.cuda.synchronize()
        return ()

    return call
