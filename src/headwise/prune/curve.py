"""Quality against the share of heads kept, for several scores and seeds: where quality falls off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import HeadwiseError
from ..models.batches import batch_size
from ..models.copying import copy_model
from ..models.intervene.masking import mask_heads
from .importance import importance
from .plan import plan
from .quality import Quality, quality

SCORES = ("michel", "output", "magnitude", "random")
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.25)


@dataclass(frozen=True)
class Curve:
    """Quality at each share of heads kept: {score: (seeds, shares)}."""

    shares: tuple[float, ...]
    values: dict[str, np.ndarray]
    full: Quality

    def to_json(self) -> dict[str, Any]:
        return {
            "quality": self.full.name,
            "lower_is_better": self.full.lower_is_better,
            "full": self.full.value,
            "keep": list(self.shares),
            "scores": {name: table.tolist() for name, table in self.values.items()},
        }


def curve(
    model: Any,
    scoring: list[Any],
    measuring: list[Any],
    *,
    scores: Sequence[str] = SCORES,
    shares: Sequence[float] = SHARES,
    seeds: int = 3,
    unit: str = "head",
    per: str = "model",
    progress: Callable[[int, int], None] | None = None,
) -> Curve:
    """The quality of the masked model at every share of heads, for every score and seed.

    Args:
        model: the full model; it is masked, not cut.
        scoring: the batches that heads are scored on.
        measuring: the batches that quality is measured on.
        scores: names of the scores to compare.
        shares: the shares of heads to keep.
        seeds: a seed resamples the texts to score with, and is that of the score itself.
        unit, per: as in `plan`.
        progress: called with the number of finished steps and their total number.
    """
    if seeds < 1:
        raise HeadwiseError(f"seeds must be at least 1, got {seeds}")
    full = copy_model(model)  # the masks are on the model itself
    values: dict[str, np.ndarray] = {}
    total, step = len(scores) * seeds * len(shares), 0
    for score in scores:
        table = np.zeros((seeds, len(shares)))
        for seed in range(seeds):
            random = np.random.default_rng(seed)
            batches = [_resample(batch, random) for batch in scoring] if seed else scoring
            head_scores = importance(model, batches, score, seed=seed)
            for column, share in enumerate(shares):
                with mask_heads(model, plan(head_scores, share, unit=unit, per=per).heads):
                    table[seed, column] = quality(model, full, measuring).value
                step += 1
                if progress:
                    progress(step, total)
        values[score] = table
    return Curve(tuple(shares), values, quality(model, model, measuring))


def _resample(batch: Any, random: np.random.Generator) -> Any:
    """As many texts as a batch has, drawn from it with replacement."""
    size = batch_size(batch)
    rows = torch.from_numpy(random.integers(0, size, size))
    if isinstance(batch, torch.Tensor):
        return batch[rows]
    if isinstance(batch, tuple):
        return tuple(x[rows] if isinstance(x, torch.Tensor) and len(x) == size else x for x in batch)
    return {name: x[rows] if isinstance(x, torch.Tensor) and len(x) == size else x for name, x in batch.items()}
