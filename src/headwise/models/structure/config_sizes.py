"""Sizes that a model states, in its config or its shape: how many positions it has, and how many heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...shapes import Shape
from .projections import layer_shapes


def max_positions(model: Any) -> int | None:
    """The largest number of tokens that a text model has positions for; None where its config sets no limit."""
    if not hasattr(model, "config"):
        shape = getattr(model, "shape", None)
        return shape.max_length if isinstance(shape, Shape) else None
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions - _unused_positions(model) if positions else None


def head_count(model: Any) -> int:
    """Query heads of all layers of a text model, by its config or its layers; at least 1."""
    if not hasattr(model, "config"):
        return sum(query for _, _, query, _ in layer_shapes(model)) or 1
    config = model.config.get_text_config()
    return (getattr(config, "num_attention_heads", None) or 1) * (getattr(config, "num_hidden_layers", None) or 1)


def _unused_positions(model: Any) -> int:
    """RoBERTa and its kin begin to count after the padding token's number."""
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
