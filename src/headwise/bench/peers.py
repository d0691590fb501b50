"""The peers that headwise is compared with, each called as its users would call it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..attention.nn.module import MultiHeadAttention


class Unavailable(Exception):
    """A peer that does not run here; the message says why."""


def textbook(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and weights, with the T x T matrix in memory: q, k, v (B, H, T, D)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(dim=-1)
    return weights @ v, weights


def textbook_stats(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output, with entropy, largest weight and distance of every head computed from the T x T weights."""
    out, weights = textbook(q, k, v)
    queries, keys = (torch.arange(n, device=q.device) for n in weights.shape[-2:])
    distance = (queries[:, None] - keys).abs()
    torch.special.entr(weights).sum(-1).mean((0, 2))
    weights.amax(-1).mean((0, 2))
    (weights * distance).sum(-1).mean((0, 2))
    return out


def heads_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other, stacked at the end."""
    return torch.stack([textbook(q[:, i], k[:, i], v[:, i])[0] for i in range(q.shape[1])], dim=1)


def repeat_kv(kv: Tensor, heads: int) -> Tensor:
    """Every KV head repeated for each query head that reads it: (B, Hkv, T, D) -> (B, heads, T, D)."""
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


class Textbook(nn.Module):
    """Three projections, T x T softmax, W_O; on the parameters of a MultiHeadAttention."""

    def __init__(self, attn: MultiHeadAttention) -> None:
        super().__init__()
        self.heads = attn.heads
        self.W_Q, self.W_K, self.W_V, self.W_O = attn.W_Q, attn.W_K, attn.W_V, attn.W_O

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (W(x).unflatten(-1, (self.heads.query, -1)).transpose(1, 2) for W in (self.W_Q, self.W_K, self.W_V))
        out, _ = textbook(q, k, v)
        return self.W_O(out.transpose(1, 2).flatten(2))


class HeadLoop(Textbook):
    """The same with a loop: each head projects with its own rows of W_Q, W_K, W_V."""

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for i in range(self.heads.query):
            rows = slice(i * self.heads.dim, (i + 1) * self.heads.dim)
            q, k, v = (F.linear(x, W.weight[rows], W.bias[rows]) for W in (self.W_Q, self.W_K, self.W_V))
            outs.append(textbook(q, k, v)[0])
        return self.W_O(torch.cat(outs, dim=-1))


class TorchModule(nn.Module):
    """nn.MultiheadAttention with the same parameters, without weights as a result."""

    def __init__(self, attn: MultiHeadAttention) -> None:
        super().__init__()
        self.inner = attn.to_torch()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def bert(attn: MultiHeadAttention) -> Callable[[Tensor], Tensor]:
    """transformers' BERT self-attention with sdpa and its output projection, without the residual and the norm."""
    try:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertSelfAttention
    except ImportError as error:
        raise Unavailable(f"transformers is not installed ({error})") from None
    config = BertConfig(hidden_size=attn.heads.width, num_attention_heads=attn.heads.query, attn_implementation="sdpa")
    peer = BertSelfAttention(config).eval()
    peer.query, peer.key, peer.value = attn.W_Q, attn.W_K, attn.W_V
    return lambda x: attn.W_O(peer(x)[0])


def flex(q: Tensor, k: Tensor, v: Tensor, visible: Callable[..., Tensor] | None = None) -> Callable[[], Tensor]:
    """Compiled FlexAttention with its block mask; compiled now, so that a failure is known before the race."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        blocks = (
            None if visible is None else create_block_mask(visible, None, None, q.shape[2], k.shape[2], device="cpu")
        )
        compiled = torch.compile(flex_attention, dynamic=False)  # fixed sizes: the fastest code it has
        compiled(q, k, v, block_mask=blocks)
    except Exception as error:  # any failure of torch.compile is a result, not an error of the benchmark
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unavailable(f"does not compile here: {lines[0][:120]}") from None
    return lambda: compiled(q, k, v, block_mask=blocks)
