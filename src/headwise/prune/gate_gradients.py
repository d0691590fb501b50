"""The gradient of the loss with respect to a gate on each head, for all heads in one backward pass per batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import HeadwiseError
from ..models.batches import batch_size, run
from ..models.intervene.head_outputs import head_outputs
from ..models.structure.sites import Site
from .scoring import ScoringRun, refuse_quantized


def gate_gradients(scoring: ScoringRun, *, per_token: bool) -> list[np.ndarray]:
    """Per layer (examples, units): dL / d gate; with per_token, magnitudes are summed over the tokens instead."""
    refuse_quantized(scoring.model)
    parts: list[list[np.ndarray]] = [[] for _ in scoring.layers]
    for step, batch in enumerate(scoring.batches):
        gradients = _batch_gradients(scoring, step, batch, per_token)
        for layer_parts, layer_gradients in zip(parts, gradients, strict=True):
            layer_parts.append(layer_gradients.double().cpu().numpy())
        scoring.progress(step + 1, len(scoring.batches))
    if not any(np.abs(part).max() > 0 for layer_parts in parts for part in layer_parts):
        raise HeadwiseError(
            "the loss has no slope here (a distance to the full model has none at the full model); "
            "use ablation, or a loss of labels or text"
        )
    return scoring.sum_units(parts)


def _batch_gradients(scoring: ScoringRun, step: int, batch: Any, per_token: bool) -> list[Tensor]:
    """Per layer (B, H), zeros for a layer that did not run."""
    size = batch_size(batch)
    gates: dict[int, Tensor] = {}
    token_sums: dict[int, Tensor] = {}

    def tap(site: Site, heads: Tensor, real: Tensor | None) -> Tensor:  # heads (..., H, head_dim)
        row = scoring.row(site)
        gate = gates[row] = torch.ones(size, heads.shape[-2], device=heads.device, requires_grad=True)
        expanded = gate.repeat_interleave(heads.shape[0] // size, 0).to(heads.dtype)
        out = heads * expanded.view(-1, *[1] * (heads.dim() - 3), heads.shape[-2], 1)
        if per_token:
            out.register_hook(lambda grad: token_sums.__setitem__(row, _sum_tokens(out.detach() * grad, size)))
        return out

    with torch.enable_grad(), head_outputs(scoring.model, tap):
        output = run(scoring.model, batch)
        loss = scoring.objective.gradient(output, batch, scoring.batch_random(step))
    if not loss.requires_grad:
        raise HeadwiseError("the loss has no gradient; it must be made of the model's output by torch operations")
    loss.sum().backward()
    gradients = token_sums if per_token else {row: gate.grad for row, gate in gates.items() if gate.grad is not None}
    return [gradients.get(row, torch.zeros(size, layer.query)) for row, layer in enumerate(scoring.layers)]


def _sum_tokens(product: Tensor, size: int) -> Tensor:
    """The sum over tokens of |z . dL/dz|, z (..., H, head_dim) being the head outputs: (B, H)."""
    return product.sum(-1).abs().reshape(size, -1, product.shape[-2]).sum(1)
