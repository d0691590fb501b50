"""`random`: uniform random numbers; the baseline that every score has to beat."""

from __future__ import annotations

import numpy as np
import torch

from ..registry import score
from ..scoring import ScoringRun


# not additive: one row for the model, whatever the batches
@score("random", signed=False, normalised=False, additive=False, trained=False, runs_model=False, loss="none")
def random_scores(scoring: ScoringRun) -> list[np.ndarray]:
    return [torch.rand(1, len(scoring.units(layer)), generator=scoring.random).numpy() for layer in scoring.layers]
