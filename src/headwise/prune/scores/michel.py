"""`michel`: the gradient of a gate on each head, example by example (Michel, Levy and Neubig 2019)."""

from __future__ import annotations

import numpy as np

from ..gate_gradients import gate_gradients
from ..registry import score
from ..scoring import ScoringRun


@score("michel", signed=True, normalised=True, additive=True, trained=False, runs_model=True, loss="gradient")
def michel(scoring: ScoringRun) -> list[np.ndarray]:
    """|dL / d gate|, the mean over examples; each layer divided by its norm."""
    return gate_gradients(scoring, per_token=False)
