"""The attention patterns of a lab model's heads, and the divergence between heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.nn.blocks import TransformerBlock
from ..attention.nn.stack import Decoder


@torch.no_grad()
def patterns(model: Decoder, ids: Tensor) -> Tensor:
    """All attention weights: ids (B, T) -> (layers, heads, B, T, T). For small models: every weight is stored."""
    layers: list[Tensor] = []

    def record(block: TransformerBlock, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        weights = block.attention.weights(block.attention_norm(inputs[0]), causal=True)  # (B, heads, T, T)
        layers.append(weights.transpose(0, 1))

    hooks = [block.register_forward_pre_hook(record, with_kwargs=True) for block in model.blocks]
    try:
        model.eval()(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(layers)


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """Jensen-Shannon divergence of rows (..., T), in nats: 0 for equal rows, ln 2 for rows without a common key."""
    mixture = (a + b) / 2
    return (_kl(a, mixture) + _kl(b, mixture)) / 2


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return torch.special.xlogy(a, a / b.clamp(min=1e-30)).sum(-1)


def head_divergences(first: Tensor, second: Tensor) -> Tensor:
    """Mean divergence over queries between all heads of two layers: (heads, B, T, T) twice -> (heads, heads).

    The first query of each text has a single visible key and is left out.
    """
    rows = [[divergence(a[:, 1:], b[:, 1:]).mean() for b in second] for a in first]
    return torch.stack([torch.stack(row) for row in rows])
