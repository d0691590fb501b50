"""`confidence`: the largest weight of a head's rows, the mean over queries."""

from __future__ import annotations

import numpy as np

from ..registry import score
from ..scoring import ScoringRun, mean_statistic


@score("confidence", signed=False, normalised=False, additive=True, trained=False, runs_model=True, loss="none")
def confidence(scoring: ScoringRun) -> list[np.ndarray]:
    return mean_statistic(scoring, "confidence")
