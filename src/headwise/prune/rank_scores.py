"""Every score held against ablation, which is the truth: how well it ranks the heads, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .importance import SCORES, importance

MICHEL_2019 = "8 of 96 in the WMT model of Michel, Levy and Neubig (2019)"
LEFT_OUT = ("ablation", "l0")  # the truth itself, and what must be trained


@dataclass(frozen=True)
class Ranked:
    """One score beside ablation."""

    score: str
    correlation: float  # Spearman's, of the ranks of all heads
    seconds: float


@dataclass(frozen=True)
class Against:
    """All scores, the best first."""

    objective: str  # what ablation counts
    rows: list[Ranked]
    seconds: float  # of ablation
    heads: int
    alone: int | None  # heads whose removal alone is seen; None where damage is a distance, which is never below 0

    def words(self) -> str:
        """How many single heads matter."""
        if self.alone is None:
            return "Any change adds to a distance from the full model: it cannot tell how many heads matter alone."
        return (
            f"{self.alone} of {self.heads} heads matter alone: without one of them the loss changes, and its 95 % "
            f"interval leaves zero out ({MICHEL_2019})."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def against_ablation(
    model: Any, batches: list[Any], *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Against:
    """Score all heads in every way that needs no training, on the same batches."""
    started = time.perf_counter()
    truth = importance(model, batches, "ablation", seed=seed, progress=progress)
    taken = time.perf_counter() - started
    rows = []
    for score in SCORES:
        if score in LEFT_OUT:
            continue
        started = time.perf_counter()
        found = importance(model, batches, score, seed=seed)
        rows.append(Ranked(score, truth.correlation(found), time.perf_counter() - started))
    rows.sort(key=lambda row: -row.correlation)
    heads = sum(1 for _ in truth.rows())
    return Against(truth.objective, rows, taken, heads, None if truth.relative else truth.significant())
