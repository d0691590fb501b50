"""`sink`: the weight that does not go to the first token, which is where heads without work attend."""

from __future__ import annotations

import numpy as np

from ..registry import score
from ..scoring import ScoringRun, mean_statistic


@score("sink", signed=False, normalised=False, additive=True, trained=False, runs_model=True, loss="none")
def weight_off_the_sink(scoring: ScoringRun) -> list[np.ndarray]:
    return mean_statistic(scoring, "first", lambda weight: 1 - weight)
