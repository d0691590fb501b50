"""`output`: the norm of what a head adds to the residual stream."""

from __future__ import annotations

import numpy as np
import torch

from ..registry import score
from ..scoring import ScoringRun, mean_over_tokens, output_weights


@score("output", signed=False, normalised=False, additive=True, trained=False, runs_model=True, loss="none")
def output_norm(scoring: ScoringRun) -> list[np.ndarray]:
    """|W_O z|, z being a head's output, the mean over tokens."""
    # |W z|^2 = z' (W' W) z, which never makes (tokens, H, width)
    grams = {site.key: (w := output_weights(scoring, site)).transpose(1, 2) @ w for site in scoring.sites}
    return mean_over_tokens(
        scoring,
        lambda site, heads: torch.einsum("...hd,hde,...he->...h", heads, grams[site.key], heads).clamp(min=0).sqrt(),
    )
