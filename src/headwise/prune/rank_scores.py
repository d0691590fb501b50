"""Every score against ablation, the ground truth: how well it ranks the heads, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .importance import importance
from .registry import scores

MICHEL_2019 = "8 of 96 in the WMT model of Michel, Levy and Neubig (2019)"


@dataclass(frozen=True)
class RankedScore:
    """One score compared with ablation."""

    score: str
    correlation: float  # Spearman's, over all heads
    seconds: float


@dataclass(frozen=True)
class ScoreComparison:
    """All scores compared with ablation, the best first."""

    objective: str  # what ablation measures
    rows: list[RankedScore]
    seconds: float  # of ablation
    heads: int
    alone: int | None  # heads whose removal alone changes the loss; None where damage is a distance, never below 0

    def summary(self) -> str:
        """How many single heads matter."""
        if self.alone is None:
            return "Any change adds to a distance from the full model: it cannot tell how many heads matter alone."
        return (
            f"{self.alone} of {self.heads} heads matter alone: without one of them the loss changes, and its 95 % "
            f"interval leaves zero out ({MICHEL_2019})."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_with_ablation(
    model: Any, batches: list[Any], *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> ScoreComparison:
    """Score all heads by every score that needs no training, on the same batches; `progress` is that of ablation."""
    start = time.perf_counter()
    truth = importance(model, batches, "ablation", seed=seed, progress=progress)
    ablation_seconds = time.perf_counter() - start
    rows = []
    for score in scores().values():
        if score.trained or score.name == "ablation":
            continue
        start = time.perf_counter()
        head_scores = importance(model, batches, score.name, seed=seed)
        rows.append(RankedScore(score.name, truth.correlation(head_scores), time.perf_counter() - start))
    rows.sort(key=lambda row: -row.correlation)
    heads = sum(1 for _ in truth.rows())
    return ScoreComparison(
        truth.objective, rows, ablation_seconds, heads, None if truth.relative else truth.significant()
    )
