"""Conversion between the two layouts of projected inputs: all heads side by side, and a separate axis for the heads."""

from __future__ import annotations

import torch
from torch import Tensor


def split_heads(x: Tensor, dim: int) -> Tensor:
    """(B, T, heads * d_k) -> (B, heads, T, d_k)."""
    batch, tokens, width = x.shape
    if tokens == 1 and not torch.jit.is_tracing():  # one view in decoding, whose overhead is what counts
        return x.view(batch, width // dim, 1, dim)
    return x.view(batch, tokens, width // dim, dim).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, T, d_k) -> (B, T, heads * d_k)."""
    if x.shape[2] == 1 and not torch.jit.is_tracing():
        return x.reshape(x.shape[0], 1, x.shape[1] * x.shape[3])
    return x.transpose(1, 2).flatten(2)
