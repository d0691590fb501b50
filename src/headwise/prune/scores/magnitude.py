"""`magnitude`: the norm of a head's weights; a baseline that needs no data."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...models.structure.linear_layers import whole_weight
from ...models.structure.projections import projections
from ...models.structure.sites import Site
from ..registry import score
from ..scoring import ScoringRun, in_rows


# not additive: one row for the model, whatever the batches
@score("magnitude", signed=False, normalised=False, additive=False, trained=False, runs_model=False, loss="none")
def weight_norm(scoring: ScoringRun) -> list[np.ndarray]:
    """The Euclidean norm over W_Q, W_K, W_V and W_O; what a KV group shares counts for each of its heads."""
    rows = [[_squared_norms(scoring, site).sqrt().double().cpu().numpy()[None]] for site in scoring.sites]
    return scoring.sum_units(rows)


def _squared_norms(scoring: ScoringRun, site: Site) -> Tensor:
    """(H,): the sum of squares of all weights of each query head."""
    layer = projections(scoring.model, site)
    out = in_rows(layer.out, whole_weight(layer.out).float())
    squares = out.square().sum(0).view(layer.query, -1).sum(1)
    group = layer.query // layer.kv
    for part in layer.parts:
        weight = in_rows(part.linear, whole_weight(part.linear).float())
        blocks = part.layout(layer.query, layer.kv)
        block_squares = weight.square().sum(1).view(len(blocks), -1).sum(1)
        for (role, number), square in zip(blocks, block_squares, strict=True):
            heads = [number] if role == "q" else list(range(number * group, (number + 1) * group))
            squares[heads] += square
    return squares
