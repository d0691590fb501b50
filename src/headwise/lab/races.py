"""Timed contestants of a claim: races within the budget, kept in the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..timing.cpu_time import race_on_one_thread
from ..timing.interleaved_race import MIN_TURN
from .store import Lab


def seconds(
    lab: Lab, name: str, key: dict[str, Any], contestants: Callable[[], Mapping[str, Callable[[], Any]]]
) -> list[Any]:
    """[{contestant: seconds per call}], one entry per race; as many races as the budget has random starts."""
    rounds, min_turn = lab.budget.pick((1, 0.0), (2, MIN_TURN), (5, MIN_TURN))

    def run() -> list[Any]:
        return race_on_one_thread(
            contestants(), races=len(lab.starts), rounds=rounds, min_turn=min_turn, device=lab.device
        )

    return lab.piece(name, {**key, "rounds": rounds, "races": len(lab.starts)}, run)


def device_name(device: str) -> str:
    """What the races ran on, in words."""
    return "one thread of the CPU" if not device.startswith("cuda") else device


def ratios(races: list[Any], slow: str, fast: str) -> list[float]:
    """How many times faster `fast` was, race by race."""
    return [times[slow] / times[fast] for times in races]
