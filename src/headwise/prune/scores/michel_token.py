"""`michel-token`: as `michel`, with the magnitude taken token by token, so that tokens do not cancel each other."""

from __future__ import annotations

import numpy as np

from ..gate_gradients import gate_gradients
from ..registry import score
from ..scoring import ScoringRun


@score("michel-token", signed=False, normalised=False, additive=True, trained=False, runs_model=True, loss="gradient")
def michel_token(scoring: ScoringRun) -> list[np.ndarray]:
    """The sum over tokens of |z . dL/dz|, z being a head's output."""
    return gate_gradients(scoring, per_token=True)
