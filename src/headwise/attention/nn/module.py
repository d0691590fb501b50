"""MultiHeadAttention: project, split into heads, attend in all of them at once, concatenate, project by W_O."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from ...errors import CacheError, ShapeError, UnsupportedError
from ...heads import Heads
from ...shapes import check_at_least
from .. import functional, validation
from ..head_layout import join_heads, split_heads
from ..options import AttendOptions, KeepFirst, Window, check_options
from ..stats import HeadStats
from ..torch_modes import autocast_enabled
from ..validation import band, shown, window_pairs
from ..visibility_options import check_tensor
from . import conversion
from .kv_cache import KVCache, MemoryCache, SlidingCache, restored_on_error, update_cache
from .positions import Alibi, Rotary
from .streamed_cache import StreamedCache

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


Selection = int | slice | Iterable[int] | None  # of rows or heads; None for all


class FactoryOptions(TypedDict, total=False):
    """Where and in which dtype parameters are created."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ModuleOptions(TypedDict, total=False):
    """The options of `MultiHeadAttention.forward` that `weights` and `stats` share."""

    mask: Tensor | None
    causal: bool
    window: Window | None
    keep_first: KeepFirst
    lengths: Tensor | None
    gates: Tensor | None
    cache: KVCache | None
    positions: Tensor | None


OPTIONS = tuple(ModuleOptions.__annotations__)


class Projected(NamedTuple):
    """The queries, keys and values of every head, and the options of the call on them."""

    q: Tensor  # (B, H, Tq, d_k)
    k: Tensor  # (B, Hkv, Tk, d_k)
    v: Tensor  # (B, Hkv, Tk, d_k)
    options: AttendOptions[Tensor]
    slopes: Tensor | None  # (H,) of Alibi

    def weights(self, rows: Selection = None, heads: Selection = None) -> Tensor:
        """(B, heads, rows, Tk), before dropout."""
        return functional.weights_with_slopes(self.q, self.k, rows, heads, slopes=self.slopes, **self.options)

    def attend(self) -> Tensor:
        """(B, H, Tq, d_k)."""
        return functional.attend_with_slopes(self.q, self.k, self.v, slopes=self.slopes, **self.options)

    def stats(
        self, queries: Tensor | None, classes: dict[str, Tensor] | None, cross: bool, received: bool
    ) -> HeadStats:
        """The statistics of every head."""
        counted: Any = {"queries": queries, "classes": classes, "cross": cross, "received": received}
        options: Any = {**self.options, **counted}
        return functional.head_stats_with_slopes(self.q, self.k, self.v, slopes=self.slopes, **options)[1]


# sees the calls of a module (its projected inputs, its cache, whether it is cross-attention) and gives their output
Observer = Callable[["MultiHeadAttention", Projected, KVCache | None, bool], Tensor]
observers: dict[nn.Module, Observer] = {}


class MultiHeadAttention(nn.Module):
    """Multi-head attention: h heads, each softmax(Q K^T / sqrt(d_k)) V with its own W_Q, W_K, W_V; W_O combines them.

    W_Q, W_K, W_V and W_O are linear layers over all heads at once: head i owns rows i * d_k to (i + 1) * d_k of the
    first three and those columns of W_O. Batch first; True in a mask means "may attend".

    Args:
        d_model: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads; fewer than num_heads is grouped-query attention, one is multi-query.
        head_dim: d_k; d_model / num_heads by default.
        kdim: width of key inputs, for cross-attention; d_model by default.
        vdim: width of value inputs; d_model by default.
        bias: whether the projections have biases.
        out_bias: whether W_O has a bias; as `bias` by default.
        dropout: the probability of dropping a weight in training.
        position: Rotary(...) rotates queries and keys, Alibi(...) adds its bias to the scores.
        qk_norm: "rms" or "layer", normalises each head's queries and keys.
        softcap: c replaces each score s by c * tanh(s / c).
        sinks: one learned logit per head in the softmax denominator.

    Example:
        >>> attention = headwise.MultiHeadAttention(512, num_heads=8, num_kv_heads=2, position=headwise.Rotary())
        >>> y = attention(x, causal=True)                                   # (B, T, 512)
        >>> y, a = attention(x, causal=True, need_weights=True)             # a (B, 8, T, T)
        >>> cache = headwise.KVCache()
        >>> y = attention(x[:, -1:], causal=True, cache=cache)              # one decoding step
    """

    is_split = False  # whether this process holds a part of its heads or tokens
    partition: Any = None  # of a module whose heads are split over processes: how to get at all of them

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
            position.rotated_dim(self.heads.dim)
        elif isinstance(position, Alibi):
            position.for_heads(num_heads)
        elif position is not None:
            raise UnsupportedError(f"position must be Rotary(...), Alibi(...) or None, got {position!r}")
        if qk_norm is not None and qk_norm not in NORMS:
            raise UnsupportedError(f"qk_norm must be None, {' or '.join(map(repr, NORMS))}, got {qk_norm!r}")
        self.kdim = d_model if kdim is None else kdim
        self.vdim = d_model if vdim is None else vdim
        self.dropout, self.position, self.qk_norm, self.softcap = dropout, position, qk_norm, softcap
        # each head's number before pruning; None for a head of zeros that pads its group
        self.head_numbers: tuple[int | None, ...] = tuple(range(num_heads))

        factory: FactoryOptions = {"device": device, "dtype": dtype}
        inner, inner_kv = self.heads.query * self.heads.dim, self.heads.kv * self.heads.dim
        self.W_Q = nn.Linear(d_model, inner, bias, **factory)
        self.W_K = nn.Linear(self.kdim, inner_kv, bias, **factory)
        self.W_V = nn.Linear(self.vdim, inner_kv, bias, **factory)
        self.W_O = nn.Linear(inner, d_model, bias if out_bias is None else out_bias, **factory)
        self.q_norm = NORMS[qk_norm](self.heads.dim, eps=1e-6, **factory) if qk_norm else None
        self.k_norm = NORMS[qk_norm](self.heads.dim, eps=1e-6, **factory) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None
        self.reset_parameters()

    @property
    def whole_heads(self) -> Heads:
        """The heads of all processes, if `heads` are those of this process only."""
        return self.heads if self.partition is None else self.partition.heads

    def reset_parameters(self) -> None:
        """Set Glorot-uniform weights, zero biases and zero sinks."""
        for linear in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: Window | None = None,
        keep_first: KeepFirst = 0,
        lengths: Tensor | None = None,
        cache: KVCache | None = None,
        gates: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: Window | None = None,
        keep_first: KeepFirst = 0,
        lengths: Tensor | None = None,
        cache: KVCache | None = None,
        gates: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: Window | None = None,
        keep_first: KeepFirst = 0,
        lengths: Tensor | None = None,
        cache: KVCache | None = None,
        gates: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query (B, Tq, d_model) -> (B, Tq, d_model). Self-attention unless a key is given.

        Args:
            query: (B, Tq, d_model).
            key: (B, Tk, kdim) for cross-attention; the query by default.
            value: (B, Tk, vdim); the key by default.
            mask: as in `attend`, and so are causal, window, keep_first, lengths and gates.
            cache: keys and values of earlier calls; lengths then include the cached keys.
            positions: (T,) or (B, T), the token positions for Rotary; by default they continue after the cache.
            need_weights: also return the weights before dropout, (B, H, Tq, Tk).

        Returns:
            The output (B, Tq, d_model), or with need_weights the pair (output, weights).
        """
        dropout = self.dropout if self.training else 0.0
        observer = observers.get(self) if observers else None
        without_options = cache is None and mask is lengths is gates is positions is None
        if without_options and not need_weights and observer is None and self._is_plain():
            q, k, v = self._project_plain(query, key, value)
            out = functional.attend_side_by_side(
                q, k, v, self.heads.dim, causal=causal, window=window, keep_first=keep_first,
                softcap=self.softcap, dropout=dropout,
            )  # fmt: skip
            return self.W_O(out)
        with nullcontext() if cache is None else restored_on_error(cache):
            projected = self.project(
                query, key, value, cache=cache, positions=positions,
                mask=mask, causal=causal, window=window, keep_first=keep_first, lengths=lengths, gates=gates,
            )  # fmt: skip
            if dropout:
                projected.options["dropout"] = dropout
            # (B, H, Tq, d_k)
            if isinstance(cache, StreamedCache):
                _check_unobserved(need_weights or observer is not None)
                out = cache.attend(projected)
            elif observer is None:
                out = projected.attend()
            else:
                out = observer(self, projected, cache, _is_cross(query, key))
        out = self.W_O(join_heads(out))
        return (out, projected.weights()) if need_weights else out

    def weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        rows: Selection = None,
        heads: Selection = None,
        **options: Unpack[ModuleOptions],
    ) -> Tensor:
        """Attention weights (B, heads, rows, Tk). rows and heads as in headwise.weights, other options as in forward.

        Example:
            >>> attention.weights(x, rows=-1, heads=[0, 3], causal=True)  # (B, 2, 1, T)
        """
        check_options(options, OPTIONS)
        if options.get("cache") is not None:
            raise CacheError("weights takes no cache, since it makes no values for it; use forward(need_weights=True)")
        return self.project(query, key, None, values=False, **options).weights(rows, heads)

    def stats(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        queries: Tensor | None = None,
        classes: dict[str, Tensor] | None = None,
        received: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> HeadStats:
        """Exact statistics of every head. queries, classes and received as in head_stats, other options as in forward.

        Example:
            >>> attention.stats(x, causal=True).entropy  # (H,)
        """
        check_options(options, OPTIONS)
        cache = options.get("cache")
        _check_unobserved(isinstance(cache, StreamedCache))
        with torch.no_grad(), nullcontext() if cache is None else restored_on_error(cache):
            projected = self.project(query, key, value, **options)
            return projected.stats(queries, classes, _is_cross(query, key), received)

    def prune_heads(self, heads: Iterable[int]) -> MultiHeadAttention:
        """A smaller module without these query heads; its output equals this module's with their gates at zero.

        A KV head is removed together with its last query head. Uneven groups are padded with zeroed heads.
        """
        return conversion.pruned(self, heads)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, batch_first: bool | None = None) -> MultiHeadAttention:
        """The same attention with the same weights, for inputs (B, T, d_model).

        A module with batch_first=False takes (T, B, d_model), which would be misread silently. It is refused unless you
        pass batch_first=True to confirm that inputs will be transposed. `headwise.replace_attention` keeps PyTorch's
        arguments.
        """
        return conversion.from_torch(cls, module, batch_first)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention as an nn.MultiheadAttention (batch first); raises an error if it has no counterpart."""
        return conversion.to_torch(self)

    def extra_repr(self) -> str:
        h = self.heads
        heads = f"{h.kind}: d_model={h.width}, {h.query} query and {h.kv} key/value heads of {h.dim}"
        variants = {"position": self.position, "softcap": self.softcap, "dropout": self.dropout or None}
        return ", ".join([heads, *(f"{name}={value}" for name, value in variants.items() if value is not None)])

    def project(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        window: Window | None = None,
        keep_first: KeepFirst = 0,
        lengths: Tensor | None = None,
        gates: Tensor | None = None,
        values: bool = True,
    ) -> Projected:
        """q, k and v of every head, including the cache; with values=False v is k. Options as in forward.

        forward, weights and stats share this method; subclasses that split heads or tokens over ranks override it.
        """
        position = self.position
        w_q = self.W_Q  # read once: a module's attributes are slow
        _check_input("query", query, w_q, self.heads.width)
        self._check_keys(query, key, value, values)
        cross = _is_cross(query, key)
        if cache is not None:
            _check_cache(cache, cross, key, value, self)
            window = _window_of(cache, window, keep_first)
        if cross and isinstance(position, Alibi):
            raise UnsupportedError("Alibi is about distances within one sequence; cross-attention has none")
        if positions is not None:
            _check_positions(positions, query)
        elif isinstance(position, Rotary):
            positions = (KVCache() if cache is None else cache).positions(query.shape[1], query.device)
        q = self._split(w_q, query, self.q_norm, positions)
        offset = None
        if cache is None:
            k, v = self._keys_and_values(query, key, value, positions, values)
        else:
            cache.layer = weakref.ref(self)
            if isinstance(cache, MemoryCache) and cache.memory is not None:
                k, v = cache.memory.k, cache.memory.v
            else:
                k, v = self._keys_and_values(query, key, value, positions, values)
                k, v, lengths, offset = update_cache(cache, k, v, lengths)
            if isinstance(cache, MemoryCache):
                cache.queries += query.shape[1]
        options: AttendOptions[Tensor] = {
            "mask": mask, "causal": causal, "window": window, "keep_first": keep_first,
            "lengths": lengths, "offset": offset,
            "softcap": self.softcap, "sinks": self.sinks, "gates": gates,
        }  # fmt: skip
        slopes = None
        if isinstance(position, Alibi):
            exact = torch.promote_types(q.dtype, torch.float32)  # and not torch.get_default_dtype()
            slopes = torch.tensor(position.for_heads(self.heads.query), dtype=exact, device=query.device)
        return Projected(q, k, v, options, slopes)

    def _is_plain(self) -> bool:
        """Whether the plain projections are used: no positions, norms or sinks, and `project` not overridden."""
        return (
            self.position is None
            and self.q_norm is None
            and self.sinks is None
            and type(self).project is MultiHeadAttention.project
        )

    def _project_plain(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, Tq, H * d_k), k and v (B, Tk, Hkv * d_k): the heads side by side."""
        modules: dict[str, Any] = self._modules  # a module's attributes are slow
        w_q = modules["W_Q"]
        _check_input("query", query, w_q, self.heads.width)
        self._check_keys(query, key, value, True)
        key = query if key is None else key
        return w_q(query), modules["W_K"](key), modules["W_V"](key if value is None else value)

    def _keys_and_values(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, positions: Tensor | None, values: bool
    ) -> tuple[Tensor, Tensor]:
        if key is not None and key is not query and positions is not None:
            positions = torch.arange(key.shape[1], device=key.device)
        key = query if key is None else key
        k = self._split(self.W_K, key, self.k_norm, positions)
        return k, self._split(self.W_V, key if value is None else value) if values else k

    def _split(
        self, linear: nn.Linear, x: Tensor, norm: nn.Module | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """(B, T, width) -> (B, heads, T, d_k): every head projects the whole of x; rotated if positions are given."""
        y, dim = linear(x), self.heads.dim  # (B, T, heads * d_k)
        if norm is not None:
            y = norm(y.unflatten(-1, (-1, dim))).flatten(-2)
        y = split_heads(y, dim)
        return y if positions is None or not isinstance(self.position, Rotary) else self.position(y, positions)

    def _check_keys(self, query: Tensor, key: Tensor | None, value: Tensor | None, values: bool) -> None:
        if key is None:
            if value is not None:
                raise ShapeError("a value was given without its key; give both")
            if self.kdim != self.heads.width:
                raise ShapeError(f"keys of this module are {self.kdim} wide and queries {self.heads.width}: give a key")
        else:
            _check_input("key", key, self.W_K, self.kdim)
            if key.shape[0] != query.shape[0]:
                raise ShapeError(
                    f"query has {query.shape[0]} sequences and key {key.shape[0]}; each query needs its keys"
                )
        if value is not None:
            _check_input("value", value, self.W_V, self.vdim)
            if key is not None and value.shape[:2] != key.shape[:2]:
                raise ShapeError(f"key is {shown(key.shape)} and value {shown(value.shape)}; each key needs a value")
        elif values and self.vdim != self.kdim:
            raise ShapeError(f"values of this module are {self.vdim} wide and keys {self.kdim}: give a value")


def _check_input(name: str, x: Any, linear: nn.Module, width: int) -> None:
    weight = linear._parameters.get("weight")
    if type(x) is Tensor and type(weight) is nn.Parameter:
        dense, alike = x.layout is torch.strided and not x.is_nested, x.dtype is weight.dtype
        if dense and alike and x.device == weight.device and x.dim() == 3 and x.shape[2] == width:
            return  # most inputs
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != width:
        hint = f"; add a batch axis: {name}[None]" if x.dim() == 2 and x.shape[1] == width else ""
        raise ShapeError(f"{name} must be (B, T, {width}), got {shown(x.shape)}{hint}")
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return  # a quantized layer checks its own input
    if x.device != weight.device:
        raise ShapeError(f"{name} is on {x.device} and the module on {weight.device}; bring them together with .to()")
    if x.dtype != weight.dtype and not autocast_enabled(x):
        raise ShapeError(f"{name} is {x.dtype} and the module {weight.dtype}; use {name}.to({weight.dtype})")


def _check_positions(positions: Tensor, query: Tensor) -> None:
    batch, tokens = query.shape[:2]
    check_tensor("positions", positions)
    whole = not (positions.is_floating_point() or positions.dtype == torch.bool)
    if tuple(positions.shape) not in ((tokens,), (batch, tokens)) or not whole:
        got = f"{positions.dtype} {shown(positions.shape)}"
        raise ShapeError(f"positions must be whole numbers ({tokens},) or ({batch}, {tokens}), got {got}")


def _check_cache(cache: KVCache, cross: bool, key: Tensor | None, value: Tensor | None, layer: nn.Module) -> None:
    kind = type(cache).__name__
    if not isinstance(cache, KVCache):
        raise CacheError(f"cache must be a KVCache(), StaticCache(), SlidingCache() or MemoryCache(), got {kind}")
    if cross and not isinstance(cache, MemoryCache):
        raise CacheError(f"cross-attention reads one fixed memory: give it a MemoryCache(), not a {kind}")
    if not cross and isinstance(cache, MemoryCache):
        raise CacheError("a MemoryCache keeps one fixed memory, for cross-attention; self-attention takes a KVCache()")
    cache.check_layer(layer)
    if isinstance(cache, MemoryCache) and key is not None:
        if cache.memory is not None:
            expected, got = (cache.memory.k.shape[0], cache.memory.k.shape[2]), tuple(key.shape[:2])
            if expected != got:
                words = f"the cache holds a memory {shown(expected)}, got one of {shown(got)}"
                raise CacheError(f"{words}; .reset() it first")
        cache.check_memory(key, key if value is None else value)


def _is_cross(query: Tensor, key: Tensor | None) -> bool:
    """Whether keys come from another sequence than queries."""
    return key is not None and key is not query


def _check_unobserved(wanted: bool) -> None:
    if wanted:
        raise UnsupportedError(
            "heads that stream have different numbers of keys in their cache, so there are no weights and statistics "
            "with it; use a KVCache()"
        )


def _window_of(cache: KVCache, window: Window | None, keep_first: KeepFirst) -> Window | None:
    """A sliding cache implies its window."""
    if not isinstance(cache, SlidingCache):
        return window
    if type(keep_first) is not int or keep_first != 0:
        raise CacheError("a SlidingCache drops the first keys, which keep_first would need; use a KVCache()")
    if window is None:
        return cache.window - 1, 0
    for left, _ in (band(False, pair) for pair in window_pairs(window)):
        if left is None or left > cache.window - 1:
            raise CacheError(f"a window of {window} reaches further back than the {cache.window} keys this cache keeps")
    return window
