"""The parts of stacks: the feed-forward layer, the block around MultiHeadAttention, the embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ShapeError
from ...shapes import Shape, check_at_least, check_known
from ..stats import HeadStats
from .kv_cache import KVCache, MemoryCache
from .module import NORMS, FactoryOptions, MultiHeadAttention
from .positions import Alibi, Rotary, sinusoidal_at
from .streamed_keys import StreamingHeads

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": F.silu,  # on the gate, which then multiplies the other half
}


class FeedForward(nn.Module):
    """W_down act(W_up x); with SwiGLU, W_down (silu(W_gate x) * W_up x). x (..., d_model) -> the same shape."""

    def __init__(
        self, d_model: int, ffn: int, activation: str = "gelu", *, bias: bool = True, **factory: Unpack[FactoryOptions]
    ) -> None:
        super().__init__()
        check_known("activation", activation, ACTIVATIONS)
        check_at_least(1, "ffn", ffn)
        self.activation = activation
        self.up = nn.Linear(d_model, ffn, bias=bias, **factory)
        self.gate = nn.Linear(d_model, ffn, bias=bias, **factory) if activation == "swiglu" else None
        self.down = nn.Linear(ffn, d_model, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        return self.down(act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """Self-attention, optional cross-attention and the feed-forward layer, each with its residual and norm.

    Args:
        d_model: width of the input and the output.
        num_heads: query heads; num_kv_heads, head_dim, bias, out_bias, qk_norm and position as MultiHeadAttention's.
        ffn: width of the feed-forward layer; 4 * d_model by default.
        activation: "relu", "gelu", "gelu_tanh" or "swiglu".
        norm: "layer" or "rms"; norm_eps is its epsilon.
        pre_norm: x + f(norm(x)), as in most current models; otherwise norm(x + f(x)), as in the Transformer of 2017.
        cross: whether there is cross-attention to a memory.
        ffn_bias: whether the feed-forward layer has biases; as `bias` by default.
        window: the number of tokens that each token sees, itself included.
        dropout: the dropout probability of attention weights and of each sublayer's output.

    Example:
        >>> block = headwise.TransformerBlock(512, 8, num_kv_heads=2, norm="rms", activation="swiglu")
        >>> block(x, causal=True).shape  # x (B, T, 512)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        ffn: int | None = None,
        activation: str = "gelu",
        norm: str = "layer",
        norm_eps: float = 1e-5,
        pre_norm: bool = True,
        cross: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        ffn_bias: bool | None = None,
        qk_norm: str | None = None,
        position: Rotary | Alibi | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_known("norm", norm, NORMS)
        factory: FactoryOptions = {"device": device, "dtype": dtype}
        attention: dict[str, Any] = {
            "head_dim": head_dim,
            "bias": bias,
            "out_bias": out_bias,
            "dropout": dropout,
            "qk_norm": qk_norm,
        }

        def new_norm() -> nn.Module:
            return NORMS[norm](d_model, eps=norm_eps, **factory)

        def new_attention(position: Rotary | Alibi | None) -> MultiHeadAttention:
            made = MultiHeadAttention(d_model, num_heads, num_kv_heads, position=position, **attention, **factory)
            for head_norm in filter(None, (made.q_norm, made.k_norm)):
                head_norm.eps = norm_eps
            return made

        if window is not None:
            check_at_least(1, "window", window)
        self.pre_norm, self.window = pre_norm, None if window is None else (window - 1, 0)
        self.streams: StreamingHeads | None = None  # set by headwise.streaming while its context is active
        self.attention, self.attention_norm = new_attention(position), new_norm()
        # positions of query and memory are not comparable, so cross-attention has no rotary positions
        self.cross = new_attention(None) if cross else None
        self.cross_norm = new_norm() if cross else None
        ffn_bias = bias if ffn_bias is None else ffn_bias
        self.ffn = FeedForward(d_model, 4 * d_model if ffn is None else ffn, activation, bias=ffn_bias, **factory)
        self.ffn_norm = new_norm()
        self.dropout = nn.Dropout(dropout)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window of {self.window[0] + 1} keys"
        return f"norms {'before' if self.pre_norm else 'after'} the sublayers{window}"

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        lengths: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: KVCache | None = None,
        memory_cache: MemoryCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, d_model), memory (B, S, d_model) for cross-attention -> (B, T, d_model). Masks as in attend."""
        if (memory is None) != (self.cross is None):
            raise ShapeError("a block with cross=True needs memory (B, S, d_model), and one without has no use for it")

        def attend_to_self(y: Tensor) -> Tensor:
            visible: Any = {"mask": mask, "causal": causal, "lengths": lengths, **self._windows()}
            out: Tensor = self.attention(y, cache=cache, positions=positions, **visible)
            return out

        x = self._add(x, self.attention_norm, attend_to_self)
        cross = self.cross
        if cross is not None:
            x = self._add(x, self.cross_norm, lambda y: cross(y, memory, mask=memory_mask, cache=memory_cache))
        return self._add(x, self.ffn_norm, self.ffn)

    def stats(
        self,
        x: Tensor,
        *,
        queries: Tensor | None = None,
        classes: dict[str, Tensor] | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> HeadStats:
        """Statistics of the self-attention's heads on x (B, T, d_model); options as in MultiHeadAttention.stats."""
        x = self.attention_norm(x) if self.pre_norm else x
        return self.attention.stats(
            x, queries=queries, classes=classes, mask=mask, causal=causal, lengths=lengths, positions=positions,
            **self._windows(),
        )  # fmt: skip

    def _windows(self) -> Any:
        """The options window and keep_first of the self-attention."""
        return {"window": self.window} if self.streams is None else self.streams.windows(self.attention.heads.query)

    def _add(self, x: Tensor, norm: Any, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


class Embedding(nn.Module):
    """Embeddings of tokens, and of token types and positions where the shape has them: ids (B, T) -> (B, T, d_model).

    positions (T,) or (B, T) count from the first token; RoBERTa's padding tokens are at -1.
    """

    def __init__(self, shape: Shape, dropout: float = 0.0, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.shape = shape
        width = shape.embedding_width or shape.width

        def table(rows: int) -> nn.Embedding | None:
            return nn.Embedding(rows, width, **factory) if rows else None

        self.tokens = nn.Embedding(shape.vocab, width, **factory)
        self.positions, self.types = table(shape.position_rows), table(shape.token_types)
        self.norm = NORMS[shape.norm](width, eps=shape.norm_eps, **factory) if shape.embedding_norm else None
        self.project = nn.Linear(width, shape.width, **factory) if width != shape.width else None
        self.dropout = nn.Dropout(dropout)
        for embedding in filter(None, (self.tokens, self.positions, self.types)):
            nn.init.normal_(embedding.weight, std=shape.width**-0.5)  # logits of a tied head then start around 1

    def extra_repr(self) -> str:
        return f"positions: {self.shape.positions}"

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)  # (B, T, d)
        if self.shape.scale_embeddings:
            x = x * math.sqrt(self.shape.width)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        if self.positions is not None:
            x = x + self.positions(positions + self.shape.position_offset)  # (T, d) or (B, T, d)
        elif self.shape.positions == "sinusoidal":
            x = x + sinusoidal_at(positions, x.shape[-1]).to(x.dtype)
        x = self.dropout(x if self.norm is None else self.norm(x))
        return x if self.project is None else self.project(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, vocab), by the table of tokens: a tied output layer."""
        return F.linear(hidden, self.tokens.weight)
