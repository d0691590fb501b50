"""`variance`: how far a head's output moves from its mean over all tokens, weighed by W_O."""

from __future__ import annotations

import numpy as np

from ...models.intervene.head_outputs import mean_head_outputs
from ..registry import score
from ..scoring import ScoringRun, mean_over_tokens, output_weights


# not additive: the mean is taken over all batches
@score("variance", signed=False, normalised=False, additive=False, trained=False, runs_model=True, loss="none")
def output_variance(scoring: ScoringRun) -> list[np.ndarray]:
    """The squared distance to the mean output, each feature weighed by the squared norm of its column of W_O."""
    mean = {name: x.float() for name, x in mean_head_outputs(scoring.model, scoring.batches).items()}
    columns = {site.key: output_weights(scoring, site).square().sum(1) for site in scoring.sites}  # (H, head_dim)
    return mean_over_tokens(
        scoring,
        lambda site, heads: ((heads - mean[site.name].to(heads.device)).square() * columns[site.key]).sum(-1),
    )
