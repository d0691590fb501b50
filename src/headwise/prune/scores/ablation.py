"""`ablation`: the damage of removing each unit alone, one pass per unit; the ground truth for the other scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...models.batches import run
from ...models.intervene.masking import mask_heads
from ..registry import score
from ..scoring import ScoringRun


@score("ablation", signed=False, normalised=False, additive=True, trained=False, runs_model=True, loss="damage")
def ablation(scoring: ScoringRun) -> list[np.ndarray]:
    """The damage without each unit, minus the damage of the full model."""
    parts: list[list[np.ndarray]] = [[] for _ in scoring.layers]
    total = sum(len(scoring.units(layer)) for layer in scoring.layers) * len(scoring.batches)
    step = 0
    with torch.no_grad():
        for batch in scoring.batches:
            full = run(scoring.model, batch)
            base = scoring.objective.damage(full, batch, full)
            for layer_parts, layer in zip(parts, scoring.layers, strict=True):
                columns = []
                for heads in scoring.units(layer):
                    removed: dict[Any, Any] = {layer.key: heads}
                    with mask_heads(scoring.model, removed):
                        output = run(scoring.model, batch)
                    columns.append((scoring.objective.damage(output, batch, full) - base).double().cpu().numpy())
                    step += 1
                    scoring.progress(step, total)
                layer_parts.append(np.stack(columns, 1))
    return [np.concatenate(layer_parts) for layer_parts in parts]
