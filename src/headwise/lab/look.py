"""Where the heads of a lab model look, and how unlike two heads are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.nn.blocks import TransformerBlock
from ..attention.nn.stack import Decoder


@torch.no_grad()
def patterns(model: Decoder, ids: Tensor) -> Tensor:
    """Every weight of every head: ids (B, T) -> (layers, heads, B, T, T). Small models only: nothing is summed up."""
    found: list[Tensor] = []

    def look(block: TransformerBlock, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        seen = block.attention.weights(block.attention_norm(inputs[0]), causal=True)  # (B, heads, T, T)
        found.append(seen.transpose(0, 1))

    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in model.blocks]
    try:
        model.eval()(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """Jensen-Shannon, in nats, of rows (..., T): 0 for equal rows, ln 2 where they have no key in common."""
    middle = (a + b) / 2
    return (_kl(a, middle) + _kl(b, middle)) / 2


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return torch.special.xlogy(a, a / b.clamp(min=1e-30)).sum(-1)


def unlike(one: Tensor, other: Tensor) -> Tensor:
    """How unlike the heads of two layers are: (heads, B, T, T) twice -> (heads, heads), the mean over the queries.

    The first query of a text has one key to look at and is left out.
    """
    rows = [[divergence(a[:, 1:], b[:, 1:]).mean() for b in other] for a in one]
    return torch.stack([torch.stack(row) for row in rows])
