"""The weights that a transformers model itself returns, for models that cannot be watched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-2  # of a row's sum, in 16 bits


def output_attentions(model: Any, inputs: dict[str, Tensor]) -> list[Tensor] | None:
    """Every layer's weights (B, H, T, T) from one pass with output_attentions=True.

    Args:
        model: a transformers model that reads one text by itself.
        inputs: of the pass.

    Returns:
        One tensor per layer that returns its weights; None where the model returns none, or returns something else
        than weights between the tokens that sum to 1.
    """
    with torch.no_grad():
        attentions = getattr(model(**inputs, output_attentions=True), "attentions", None)
    layers = [layer for layer in attentions or () if layer is not None]
    return layers if layers and all(map(_is_weights, layers)) else None


def _is_weights(layer: Any) -> bool:
    """Whether these are weights between the tokens of one text, each row with a sum of 1."""
    if not isinstance(layer, Tensor) or layer.dim() != 4 or layer.shape[2] != layer.shape[3]:
        return False
    return bool(((layer.float().sum(-1) - 1).abs() <= ROUNDING).all())
