"""Multi-head attention in plain NumPy: the specification that every backend must equal, and the code to learn from.

For every query, one head computes how relevant each key is:

    scores  = q k^T / sqrt(d_k)          one number per (query, key) pair
    weights = softmax(scores)            each row sums to one
    output  = weights v                  the values, averaged by the weights

Multi-head attention projects the same input h times, runs h such heads in parallel, concatenates their outputs
and multiplies them by W_O. Everything here is float64 and written for clarity.

Scores of finite queries and keys stay finite: one beyond 1e307 in magnitude counts as 1e307, so that each row has a
maximum to subtract. Backends that compute in float32 clip at 1e38: several scores beyond it share the weight there,
while here the largest of them has all of it. In compiled graphs, under torch.func and on other devices PyTorch's own
operators compute the scores, and an overflow is NaN. Infinities and NaN in the input are never hidden.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import numpy as np

from ..errors import MaskError, ShapeError
from ..heads import Heads
from . import dropout as generator
from . import validation
from .options import (
    ATTEND,
    VISIBILITY,
    WEIGHTS,
    AttendOptions,
    KeepFirst,
    VisibilityOptions,
    WeightOptions,
    Window,
    check_options,
)
from .stats import HeadStats, stats_from_weights

LIMIT = 1e307  # the largest magnitude of a score
Array = np.ndarray[Any, Any]


class ReferenceOptions(AttendOptions[Any], total=False):
    """attend's options, and the seed of dropout's generator."""

    seed: int


def visible(
    q: Any,
    k: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    window: Window | None = None,
    keep_first: KeepFirst = 0,
    starts: Any = None,
    lengths: Any = None,
    offset: Any = None,
) -> Array:
    """Which keys each query may attend to: (B, Hq, Tq, Tk), True where it may."""
    size = validation.sizes(q, k)
    offsets = _offsets(size, offset).reshape(-1, 1, 1)
    i = np.arange(size.queries)[:, None] + offsets  # (B or 1, Tq, 1): key positions of the queries
    j = np.arange(size.keys)  # (Tk,)
    existing = existing_keys(size, mask, starts, lengths)  # (B, Hq, Tq, Tk)
    before = existing.any((1, 2)).cumsum(-1) == 0  # (B, Tk): the keys before the first
    first = before.sum(-1) if starts is None else np.asarray(starts)  # (B,)
    windows = validation.head_windows(causal, window, keep_first, size.heads)
    allowed = np.empty_like(existing)
    for head in range(size.heads):
        left, right, count = windows[head] if isinstance(windows[0], tuple) else windows
        inside = np.ones((size.batch, size.queries, size.keys), bool)
        if left is not None:
            inside &= j >= i - left
        if right is not None:
            inside &= j <= i + right
        kept = (j >= first.reshape(-1, 1, 1)) & (j < first.reshape(-1, 1, 1) + count)
        allowed[:, head] = inside | (kept & (j <= i) if causal else kept)
    return allowed & existing


def _offsets(size: validation.Sizes, offset: Any) -> Array:
    """The key positions of first queries, shared or (B,)."""
    if offset is None:
        return np.asarray(size.keys - size.queries)
    offsets = np.asarray(validation.within_far(offset) if isinstance(offset, int) else offset)
    if isinstance(offset, bool) or offsets.shape or offsets.dtype.kind not in "iu":
        validation.check_per_sequence("offset", offsets.shape, offsets.dtype.kind in "iu", size)
    return offsets


def _key_counts(name: str, counts: Any, size: validation.Sizes) -> Array:
    """starts or lengths, (B, 1, 1, 1)."""
    counts = np.asarray(counts)
    validation.check_per_sequence(name, counts.shape, counts.dtype.kind in "iu", size)
    validation.check_key_counts(name, counts.min(initial=0), counts.max(initial=0), size)
    return counts.reshape(-1, 1, 1, 1)


def existing_keys(size: validation.Sizes, mask: Any = None, starts: Any = None, lengths: Any = None) -> Array:
    """True where a key exists for a query, (B, Hq, Tq, Tk): from starts on, below lengths, and shown by the mask."""
    existing = np.ones((size.batch, size.heads, size.queries, size.keys), bool)
    if starts is not None:
        existing &= np.arange(size.keys) >= _key_counts("starts", starts, size)
    if lengths is not None:
        existing &= np.arange(size.keys) < _key_counts("lengths", lengths, size)
    if mask is not None:
        existing &= shown_by(mask, size)
    return existing


def shown_by(mask: Any, size: validation.Sizes) -> Array:
    """True where a mask lets a query attend: where it is True, or where it adds anything but -inf."""
    mask = np.asarray(mask)
    validation.check_mask(mask.shape, size)
    if mask.dtype == bool:
        return mask
    if mask.dtype.kind != "f":
        raise MaskError(f"mask must be bool (True: may attend) or float (added to the scores), got {mask.dtype}")
    shown: Array = mask != -np.inf
    return shown


def weights(
    q: Any,
    k: Any,
    *,
    rows: Any = None,
    heads: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    **options: Unpack[VisibilityOptions[Any]],
) -> Array:
    """Attention weights: q (B, Hq, Tq, D), k (B, Hkv, Tk, D) -> (B, heads, rows, Tk). Arguments as headwise.weights.

    A query with no visible keys gets a row of zeros. With sinks, a row sums to less than one.
    """
    check_options(options, WEIGHTS)
    size = validation.sizes(q, k)
    a = softmax(q, k, scale=scale, softcap=softcap, sinks=sinks, **options).weights
    return a[:, validation.pick("head", heads, size.heads)][:, :, validation.pick("row", rows, size.queries)]


class Softmax(NamedTuple):
    """The steps from products to weights."""

    logits: Array  # (B, Hq, Tq, Tk): scale * q.k, before softcap and mask
    lse: Array  # (B, Hq, Tq): the log-sum-exp of a query's scores and sink; -inf without visible keys and sink
    weights: Array  # (B, Hq, Tq, Tk)


def softmax(
    q: Any,
    k: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    **options: Unpack[VisibilityOptions[Any]],
) -> Softmax:
    """The weights of every query and key, and what they are computed from."""
    size = validation.sizes(q, k)
    validation.check_numbers(scale, softcap)
    if sinks is not None:
        validation.check_per_head("sinks", np.shape(sinks), size)
    allowed, mask = visible(q, k, **options), options.get("mask")
    k = np.repeat(np.asarray(k, float), size.group, axis=1)  # query head i reads KV head i // group
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and infinities propagate
        logits = np.asarray(q, float) @ k.swapaxes(-1, -2)  # (B, Hq, Tq, Tk)
        logits *= size.dim**-0.5 if scale is None else scale
        finite = np.isfinite(q).all(-1)[..., None] & np.isfinite(k).all(-1)[:, :, None]
        scores = logits = np.where(finite, np.clip(logits, -LIMIT, LIMIT), logits)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None and np.asarray(mask).dtype != bool:
            scores = scores + mask
        scores = np.where(allowed, scores, -np.inf)
        sink = (
            np.full((1, size.heads, 1, 1), -np.inf) if sinks is None else np.reshape(sinks, (1, -1, 1, 1)).astype(float)
        )
        maximum = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        maximum = np.where(maximum == -np.inf, 0.0, maximum)
        exponentials = np.exp(scores - maximum)
        total = exponentials.sum(-1, keepdims=True) + np.exp(sink - maximum)
        a = np.where(allowed, exponentials / np.where(total == 0, 1.0, total), 0.0)
        return Softmax(logits, (maximum + np.log(total))[..., 0], a)


def average_values(a: Array, v: Any, allowed: Array) -> Array:
    """The values averaged by the weights, (B, Hq, Tq, Dv): a query sums over its visible keys only."""
    v = np.repeat(np.asarray(v, float), a.shape[1] // v.shape[1], axis=1)  # (B, Hq, Tk, Dv)
    out = np.zeros((*a.shape[:3], v.shape[-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h, i in np.ndindex(*a.shape[:3]):
            keys = allowed[b, h, i]
            out[b, h, i] = a[b, h, i, keys] @ v[b, h, keys]
    return out


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    gates: Any = None,
    dropout: float = 0.0,
    seed: int = 0,
    **options: Unpack[WeightOptions[Any]],
) -> Array:
    """Scaled dot-product attention of every head: (B, Hq, Tq, Dv). Arguments as headwise.attend.

    dropout sets a share of the weights to zero, as `dropout.retained` determines from the seed, and divides the others
    by the probability of being retained.
    """
    check_options(options, (*ATTEND, "seed"))
    v = np.asarray(v)
    size = validation.sizes(q, k, v)
    validation.check_numbers(None, None, dropout)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ShapeError(f"seed must be a whole number, got {seed!r}")
    if gates is not None:
        validation.check_per_head("gates", np.shape(gates), size, batched=True)
    a = weights(q, k, **options)
    if dropout:
        a = np.where(generator.retained(seed, dropout, *a.shape), a * generator.factor(dropout), 0.0)
    out = average_values(a, v, visible(q, k, **_visibility_options(options)))
    if gates is not None:
        out = out * np.asarray(gates, float).reshape(-1, size.heads, 1, 1)
    return out


def head_stats(
    q: Any,
    k: Any,
    v: Any,
    *,
    queries: Any = None,
    classes: dict[str, Any] | None = None,
    cross: bool = False,
    received: bool = False,
    **options: Unpack[ReferenceOptions],
) -> tuple[Array, HeadStats]:
    """attend's output and the statistics of each head, computed from all T x T weights. Arguments as head_stats."""
    check_options(options, (*ATTEND, "seed"))
    size = validation.sizes(q, k, v)
    if isinstance(classes, dict):
        classes = {name: np.asarray(keys) for name, keys in classes.items()}
    validation.check_classes(classes or {}, size, lambda keys: keys.dtype == bool)
    counted = np.ones((size.batch, size.queries), bool) if queries is None else np.asarray(queries)
    validation.check_queries(counted, size, counted.dtype == bool)
    of_weights: Any = {name: value for name, value in options.items() if name in WEIGHTS}
    offset = options.get("offset")
    rows = softmax(q, k, **of_weights)
    stats = stats_from_weights(
        rows.weights,  # (B, H, Tq, Tk), before dropout
        offset=_offsets(size, offset),
        queries=counted,
        classes=classes,
        cross=cross,
        sinks=options.get("sinks") is not None,
        visible=visible(q, k, **_visibility_options(options)),
        first=_first_key(size, options, counted),
        logits=rows.logits,
        lse=rows.lse,
        received=received,
    )
    return attend(q, k, v, **options), stats


def _visibility_options(options: Any) -> dict[str, Any]:
    """The options of attend that `visible` takes."""
    return {name: options[name] for name in VISIBILITY if name in options}


def _first_key(size: validation.Sizes, options: Any, counted: Array) -> Array:
    """(B, Tk), True at the first existing key of a sequence: one that the mask shows to some query.

    A window does not make a key cease to exist, so only mask, starts and lengths matter.
    """
    shown = existing_keys(size, options.get("mask"), options.get("starts"), options.get("lengths"))
    exists = (shown & counted[:, None, :, None]).any((1, 2))  # (B, Tk)
    return exists & (np.cumsum(exists, -1) == 1)


class MultiHeadAttention:
    """Project, split into heads, attend, concatenate, project: the whole module in NumPy.

    W_Q (d_model, h * d_k), W_K and W_V (d_model, h_kv * d_k), W_O (h * d_k, d_model), applied as x @ W + b.
    A bias may be None.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        seed: int = 0,
    ):
        self.heads = Heads.split(d_model, num_heads, num_kv_heads, head_dim)
        inner, inner_kv = self.heads.query * self.heads.dim, self.heads.kv * self.heads.dim
        rng = np.random.default_rng(seed)
        self.W_Q, self.W_K, self.W_V, self.W_O = (
            rng.normal(size=shape) / math.sqrt(shape[0])
            for shape in ((d_model, inner), (d_model, inner_kv), (d_model, inner_kv), (inner, d_model))
        )
        self.b_Q: Array | None = np.zeros(inner)
        self.b_K: Array | None = np.zeros(inner_kv)
        self.b_V: Array | None = np.zeros(inner_kv)
        self.b_O: Array | None = np.zeros(d_model)

    def __call__(self, query: Any, key: Any = None, value: Any = None, **options: Unpack[ReferenceOptions]) -> Array:
        """query (B, Tq, d_model) -> (B, Tq, d_model). Self-attention unless a key (B, Tk, ...) is given."""
        q, k, v = self.project(query, key, value)
        return self.join(attend(q, k, v, **options))

    def weights(self, query: Any, key: Any = None, **options: Unpack[WeightOptions[Any]]) -> Array:
        """Attention weights: (B, H, Tq, Tk)."""
        q, k, _ = self.project(query, key)
        return weights(q, k, **options)

    def project(self, query: Any, key: Any = None, value: Any = None) -> tuple[Array, Array, Array]:
        """The three projections, split into heads: (B, H, T, d_k) each."""
        key = query if key is None else key
        value = key if value is None else value
        return (
            self.split(query, self.W_Q, self.b_Q, self.heads.query),
            self.split(key, self.W_K, self.b_K, self.heads.kv),
            self.split(value, self.W_V, self.b_V, self.heads.kv),
        )

    def split(self, x: Any, weight: Array, bias: Array | None, heads: int) -> Array:
        """One projection for all heads at once, then a reshape: a head is a slice of the projection, never of x."""
        x = np.asarray(x, float)
        if x.ndim != 3 or x.shape[2] != len(weight):
            raise ShapeError(f"the input must be (B, T, {len(weight)}), got {validation.shown(x.shape)}")
        y = x @ weight + (0.0 if bias is None else bias)  # (B, T, H * d_k)
        return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)  # (B, H, T, d_k)

    def join(self, out: Array) -> Array:
        """The heads' outputs concatenated and multiplied by W_O."""
        y = out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)  # (B, T, H * d_k)
        joined: Array = y @ self.W_O + (0.0 if self.b_O is None else self.b_O)
        return joined
