"""Times that can be compared: contestants in turns, the whole race repeated, and what the ratios say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..harness import SHORTEST, race
from .store import Lab

Run = Callable[[], Any]


def seconds(lab: Lab, name: str, made_of: dict[str, Any], contestants: Callable[[], Mapping[str, Run]]) -> list[Any]:
    """[{contestant: seconds a call}], one entry a race; as many races as the budget has random starts."""
    rounds, shortest = lab.budget.pick((1, 0.0), (2, SHORTEST), (3, SHORTEST))
    asked = {**made_of, "rounds": rounds, "races": len(lab.starts), "threads": torch.get_num_threads()}

    def run() -> list[Any]:
        waiting = {who: _finished(run, lab.device) for who, run in contestants().items()}
        return [race(waiting, rounds=rounds, shortest=shortest) for _ in lab.starts]

    return lab.piece(name, asked, run)


def ratios(races: list[Any], slow: str, fast: str) -> list[float]:
    """How many times faster `fast` was, race by race."""
    return [times[slow] / times[fast] for times in races]


def _finished(run: Run, device: str) -> Callable[[], tuple[Tensor, ...]]:
    """The same call, done when it returns."""

    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode():
            run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return ()

    return call
