"""MultiHeadAttention: project, split into heads, attend in all of them at once, join, mix with W_O."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...errors import CacheError, ShapeError, UnsupportedError
from ...heads import Heads
from ...shapes import check_at_least
from .. import call as calls
from .. import functional, validation
from ..functional import Call
from ..stats import HeadStats
from ..validation import Window, band, shown
from ..visibility import check_tensor
from . import conversion
from .kv_cache import KVCache, MemoryCache, SlidingCache, taken_in, unless_it_fails
from .positions import Alibi, Rotary

OPTIONS = ("mask", "causal", "window", "lengths", "gates", "cache", "positions")  # of weights and stats, as in forward
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class MultiHeadAttention(nn.Module):
    """h heads, each softmax(Q K^T / sqrt(d_k)) V with its own W_Q, W_K, W_V; W_O mixes them.

    W_Q, W_K, W_V and W_O are linear layers over all heads at once: head i owns rows i * d_k to (i + 1) * d_k of the
    first three and those columns of W_O. Fewer num_kv_heads: grouped-query attention; one: multi-query.
    kdim and vdim are the widths of key and value inputs (cross-attention). position: Rotary(...) turns queries and
    keys, Alibi(...) adds its bias. qk_norm: "rms" or "layer", over each head's queries and keys. sinks: a learned
    number a head in the softmax's denominator. Batch first; True in a mask means "may look".
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        position: Rotary | Alibi | None = None,
        qk_norm: Literal["rms", "layer"] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.heads = Heads.split(d_model, num_heads, num_kv_heads, head_dim)
        validation.check_numbers(None, softcap, dropout)
        for name, size in (("kdim", kdim), ("vdim", vdim)):
            if size is not None:
                check_at_least(1, name, size)
        if isinstance(position, Rotary):
            position.turned(self.heads.dim)
        elif isinstance(position, Alibi):
            position.for_heads(num_heads)
        elif position is not None:
            raise UnsupportedError(f"position must be Rotary(...), Alibi(...) or None, got {position!r}")
        if qk_norm is not None and qk_norm not in NORMS:
            raise UnsupportedError(f"qk_norm must be None, {' or '.join(map(repr, NORMS))}, got {qk_norm!r}")
        self.kdim = d_model if kdim is None else kdim
        self.vdim = d_model if vdim is None else vdim
        self.dropout, self.position, self.qk_norm, self.softcap = dropout, position, qk_norm, softcap
        self.head_numbers: tuple[int | None, ...] = tuple(range(num_heads))  # before pruning; None: a head of zeros

        here: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, inner_kv = self.heads.query * self.heads.dim, self.heads.kv * self.heads.dim
        self.W_Q = nn.Linear(d_model, inner, bias, **here)
        self.W_K = nn.Linear(self.kdim, inner_kv, bias, **here)
        self.W_V = nn.Linear(self.vdim, inner_kv, bias, **here)
        self.W_O = nn.Linear(inner, d_model, bias if out_bias is None else out_bias, **here)
        self.q_norm = NORMS[qk_norm](self.heads.dim, eps=1e-6, **here) if qk_norm else None
        self.k_norm = NORMS[qk_norm](self.heads.dim, eps=1e-6, **here) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(num_heads, **here)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform weights, zero biases and sinks."""
        for linear in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: Window | None = None,
        lengths: Tensor | None = None,
        cache: KVCache | None = None,
        gates: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        """query (B, Tq, d_model) -> (B, Tq, d_model); with need_weights also (B, H, Tq, Tk), before dropout.

        Self-attention unless a key (B, Tk, kdim) is given; value defaults to key. mask, causal, window, lengths and
        gates are attend's. With a cache, keys and values of earlier calls are there too, and lengths count them.
        positions, (T,) or (B, T), say where the tokens stand for Rotary; by default they follow the cache.
        """
        q, k, v, call = self._call(
            query, key, value, mask=mask, causal=causal, window=window, lengths=lengths, gates=gates,
            cache=cache, positions=positions, dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        out = self.W_O(functional.run(q, k, v, call).transpose(1, 2).flatten(2))  # (B, Tq, H * d_k) -> (B, Tq, d_model)
        return (out, functional.look(q, k, call)) if need_weights else out

    def weights(
        self, query: Tensor, key: Tensor | None = None, *, rows: Any = None, heads: Any = None, **how: Any
    ) -> Tensor:
        """Where each query looks: (B, heads, rows, Tk). `how`: mask, causal, window, lengths, positions."""
        validation.check_options(how, OPTIONS)
        if how.get("cache") is not None:
            raise CacheError("weights takes no cache, since it makes no values for it; use forward(need_weights=True)")
        q, k, _, call = self._call(query, key, None, values=False, **how)
        return functional.look(q, k, call, rows, heads)

    def stats(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        queries: Tensor | None = None,
        classes: dict[str, Tensor] | None = None,
        **how: Any,
    ) -> HeadStats:
        """Exact statistics of every head. queries and classes as in head_stats; `how` as in weights."""
        validation.check_options(how, OPTIONS)
        with torch.no_grad():
            q, k, v, call = self._call(query, key, value, **how)
            return functional.observe(q, k, v, call, queries, classes, cross=_crosses(query, key))[1]

    def prune_heads(self, heads: Iterable[int]) -> MultiHeadAttention:
        """A smaller module without these query heads, whose output equals this one's with them gated to zero.

        A KV head goes when its last query head goes. Groups left uneven are filled up with heads of zeros.
        """
        return conversion.pruned(self, heads)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, batch_first: bool | None = None) -> MultiHeadAttention:
        """The same attention with the same weights, for inputs (B, T, d_model).

        A module with batch_first=False takes (T, B, d_model), which could be mistaken for it without a word: it is
        refused unless batch_first=True says that inputs will be transposed.
        """
        return conversion.from_torch(cls, module, batch_first)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention as PyTorch's module (batch first), or an error where it has no such thing."""
        return conversion.to_torch(self)

    def extra_repr(self) -> str:
        h = self.heads
        return f"{h.kind}: d_model={h.width}, {h.query} query and {h.kv} key/value heads of {h.dim}"

    def _call(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        *,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        window: Window | None = None,
        lengths: Tensor | None = None,
        dropout: float = 0.0,
        values: bool = True,
        **how: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Call]:
        """q, k and v of every head, (B, H, T, d_k), and the checked call on them; values=False: keys in place of v."""
        self._check(query, key, value, values)
        cross = _crosses(query, key)
        _check_cache(cache, cross, key, self)
        if cross and isinstance(self.position, Alibi):
            raise UnsupportedError("Alibi is about distances within one sequence; cross-attention has none")
        if positions is not None:
            _check_positions(positions, query)
        elif isinstance(self.position, Rotary):
            positions = (KVCache() if cache is None else cache).positions(query.shape[1], query.device)
        q = self._turn(self._split(self.W_Q, query, self.q_norm), positions)
        how |= {"window": _window_of(cache, window), "softcap": self.softcap, "sinks": self.sinks, "dropout": dropout}
        if isinstance(self.position, Alibi):
            how["slopes"] = torch.tensor(self.position.for_heads(self.heads.query), device=query.device)
        with unless_it_fails(cache):
            if cache is not None:
                cache.layer = weakref.ref(self)
            if isinstance(cache, MemoryCache) and cache.held is not None:
                k, v, offset = cache.held.k, cache.held.v, None
            else:
                k, v = self._keys_and_values(query, key, value, positions, values)
                k, v, lengths, offset = taken_in(cache, k, v, lengths)
            if isinstance(cache, MemoryCache):
                cache.asked += query.shape[1]
            q, k, v = calls.autocast(q, k, v)
            return q, k, v, calls.call_of(q, k, v, lengths=lengths, offset=offset, **how)

    def _keys_and_values(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, positions: Tensor | None, values: bool
    ) -> tuple[Tensor, Tensor]:
        if key is not None and key is not query and positions is not None:
            positions = torch.arange(key.shape[1], device=key.device)
        key = query if key is None else key
        k = self._turn(self._split(self.W_K, key, self.k_norm), positions)
        return k, self._split(self.W_V, key if value is None else value, None) if values else k

    def _split(self, linear: nn.Linear, x: Tensor, norm: nn.Module | None) -> Tensor:
        """(B, T, width) -> (B, heads, T, d_k): every head projects the whole of x."""
        y = linear(x).unflatten(-1, (-1, self.heads.dim))  # (B, T, heads, d_k)
        return (y if norm is None else norm(y)).transpose(1, 2)

    def _turn(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if not isinstance(self.position, Rotary):
            return x
        assert positions is not None
        return self.position(x, positions)

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None, values: bool) -> None:
        linears = self.W_Q, self.W_K, self.W_V
        for name, x, linear in zip(("query", "key", "value"), (query, key, value), linears, strict=True):
            if x is not None or name == "query":
                _check_input(name, x, linear)
        if key is None and value is not None:
            raise ShapeError("a value was given without its key; give both")
        if key is None and self.kdim != self.heads.width:
            raise ShapeError(f"keys of this module are {self.kdim} wide and queries {self.heads.width}: give a key")
        if values and value is None and self.vdim != self.kdim:
            raise ShapeError(f"values of this module are {self.vdim} wide and keys {self.kdim}: give a value")
        if key is not None and key.shape[0] != query.shape[0]:
            raise ShapeError(f"query has {query.shape[0]} sequences and key {key.shape[0]}; each query needs its keys")
        if key is not None and value is not None and value.shape[:2] != key.shape[:2]:
            raise ShapeError(f"key is {shown(key.shape)} and value {shown(value.shape)}; each key needs a value")


def _check_input(name: str, x: Any, linear: nn.Linear) -> None:
    check_tensor(name, x)
    width = linear.in_features
    if x.dim() != 3 or x.shape[2] != width:
        hint = f"; add a batch axis: {name}[None]" if x.dim() == 2 and x.shape[1] == width else ""
        raise ShapeError(f"{name} must be (B, T, {width}), got {shown(x.shape)}{hint}")
    weight: object = linear.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return  # quantized: it knows itself what it takes
    if x.device != weight.device:
        raise ShapeError(f"{name} is on {x.device} and the module on {weight.device}; bring them together with .to()")
    if x.dtype != weight.dtype and not calls.autocasts(x):
        raise ShapeError(f"{name} is {x.dtype} and the module {weight.dtype}; use {name}.to({weight.dtype})")


def _check_positions(positions: Tensor, query: Tensor) -> None:
    batch, tokens = query.shape[:2]
    check_tensor("positions", positions)
    whole = not (positions.is_floating_point() or positions.dtype == torch.bool)
    if tuple(positions.shape) not in ((tokens,), (batch, tokens)) or not whole:
        got = f"{positions.dtype} {shown(positions.shape)}"
        raise ShapeError(f"positions must be whole numbers ({tokens},) or ({batch}, {tokens}), got {got}")


def _check_cache(cache: KVCache | None, cross: bool, key: Tensor | None, layer: nn.Module) -> None:
    if cache is None:
        return
    kind = type(cache).__name__
    if not isinstance(cache, KVCache):
        raise CacheError(f"cache must be a KVCache(), StaticCache(), SlidingCache() or MemoryCache(), got {kind}")
    if cross and not isinstance(cache, MemoryCache):
        raise CacheError(f"cross-attention reads one fixed memory: give it a MemoryCache(), not a {kind}")
    if not cross and isinstance(cache, MemoryCache):
        raise CacheError("a MemoryCache keeps one fixed memory, for cross-attention; self-attention takes a KVCache()")
    cache.check_layer(layer)
    if isinstance(cache, MemoryCache) and cache.held is not None and key is not None:
        want, got = (cache.held.k.shape[0], cache.held.k.shape[2]), tuple(key.shape[:2])
        if want != got:
            raise CacheError(f"the cache holds a memory {shown(want)}, got one of {shown(got)}; .reset() it first")


def _crosses(query: Tensor, key: Tensor | None) -> bool:
    return key is not None and key is not query


def _window_of(cache: KVCache | None, window: Window | None) -> Window | None:
    """A sliding cache implies its window."""
    if not isinstance(cache, SlidingCache):
        return window
    if window is None:
        return cache.window - 1, 0
    left, _ = band(False, window)
    if left is None or left > cache.window - 1:
        raise CacheError(f"a window of {window} looks further back than the {cache.window} keys this cache keeps")
    return window
