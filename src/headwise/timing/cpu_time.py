"""Times that can be compared, on machines that do other things too: one thread, its processor time, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..lab.store import Lab
from .interleaved_race import SHORTEST, race

Run = Callable[[], Any]


def seconds(lab: Lab, name: str, made_of: dict[str, Any], contestants: Callable[[], Mapping[str, Run]]) -> list[Any]:
    """[{contestant: seconds a call}], one entry a race; as many races as the budget has random starts.

    On the CPU the processor time of one thread counts, which others on the machine change little; on a GPU the clock.
    """
    rounds, shortest = lab.budget.pick((1, 0.0), (2, SHORTEST), (5, SHORTEST))
    gpu = lab.device.startswith("cuda")
    clock = time.perf_counter if gpu else time.process_time

    def run() -> list[Any]:
        with one_thread():
            waiting = {who: _finished(run, gpu) for who, run in contestants().items()}
            return [race(waiting, rounds=rounds, shortest=shortest, clock=clock) for _ in lab.starts]

    return lab.piece(name, {**made_of, "rounds": rounds, "races": len(lab.starts)}, run)


def where(device: str) -> str:
    return "one thread of the CPU" if not device.startswith("cuda") else device


def ratios(races: list[Any], slow: str, fast: str) -> list[float]:
    """How many times faster `fast` was, race by race."""
    return [times[slow] / times[fast] for times in races]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finished(run: Run, gpu: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The same call, done when it returns."""

    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode():
            run()
        if gpu:
            torch.cuda.synchronize()
        return ()

    return call
