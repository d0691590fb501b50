"""Pruned models against the full ones: the time that removing heads saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import headwise

from .cases import Case, PreparedCase
from .limits import matmul_limit


def run_attention_layers(model: Any, hidden: Tensor) -> Tensor:
    """Every attention layer of a BERT, from its projections to its output, on the same input."""
    for layer in model.encoder.layer:
        out = layer.attention(hidden)[0]
    result: Tensor = out
    return result


def _halved(quick: bool, *, batch: int, tokens: int) -> PreparedCase:
    """Half of the heads of every layer; which ones does not change the time."""
    model = headwise.load("minilm")
    plan = {layer: list(range(0, 12, 2)) for layer in range(6)}
    pruned, zeroed = headwise.prune_heads(model, plan), headwise.prune_heads(model, plan, zero=True)  # all shapes kept
    hidden = torch.randn(batch, tokens, 384, generator=torch.Generator().manual_seed(0))
    flops = 6 * batch * tokens * (2 * 4 * 384 * 192 + 4 * tokens * 192)
    return PreparedCase(
        lambda: run_attention_layers(pruned, hidden),
        {"all heads, half of them zeroed": lambda: run_attention_layers(zeroed, hidden)},
        "prune_heads: 6 of 12 heads in each of 6 layers",
        (matmul_limit(flops),),
    )


CASES = {
    "pruned": Case(
        "pruned",
        "attention layers of MiniLM, half the heads removed, batch 32 x 128",
        _halved,
        {"batch": 32, "tokens": 128},
        {"batch": 1, "tokens": 7},
        {"all heads, half of them zeroed": 1.67},
    )
}
