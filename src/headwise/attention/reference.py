"""Multi-head attention in plain NumPy: the specification every faster path must equal, and the one to learn from.

One head asks, for every query: how much does each key concern me?

    scores  = q k^T / sqrt(d_k)          one number a (query, key) pair
    weights = softmax(scores)            a row of them sums to one
    output  = weights v                  the values, mixed by the weights

Multi-head attention projects the same input h times, runs h such heads side by side, lays their outputs
next to each other and mixes them with W_O. Everything here is float64, and nothing is clever.

Scores of finite queries and keys stay finite: one beyond 1e307 in magnitude counts as 1e307, so that a row has a
largest score to subtract. The paths that compute in float32 have the same rule at 1e38: several scores beyond it share
the weight there, of which the largest has all of it here. In compiled graphs, under torch.func and on other devices
PyTorch's own operators decide, and an overflow is NaN. Infinities and NaN in the input are never hidden.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import MaskError
from ..heads import Heads
from . import validation
from .stats import HeadStats

LIMIT = 1e307  # the largest score there is, in magnitude
Array = np.ndarray[Any, Any]


def visible(
    q: Any,
    k: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    window: Any = None,
    lengths: Any = None,
    offset: Any = None,
) -> Array:
    """Which keys each query may look at: (B, Hq, Tq, Tk), True where it may."""
    size = validation.sizes(q, k)
    left, right = validation.band(causal, window)
    start = np.asarray(size.keys - size.queries if offset is None else offset)
    i = np.arange(size.queries)[:, None] + start.reshape(-1, 1, 1, 1)  # (B or 1, 1, Tq, 1): where each query stands
    j = np.arange(size.keys)  # (Tk,)
    seen = np.ones((size.batch, size.heads, size.queries, size.keys), bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    if lengths is not None:
        seen &= j < np.asarray(lengths).reshape(-1, 1, 1, 1)
    if mask is not None:
        seen &= shown_by(mask, size)
    return seen


def shown_by(mask: Any, size: validation.Sizes) -> Array:
    """True where a mask lets a query look: where it is True, or where what it adds is not -inf."""
    mask = np.asarray(mask)
    validation.check_mask(mask.shape, size)
    if mask.dtype == bool:
        return mask
    if mask.dtype.kind != "f":
        raise MaskError(f"mask must be bool (True: may look) or float (added to the scores), got {mask.dtype}")
    shown: Array = mask != -np.inf
    return shown


def weights(
    q: Any,
    k: Any,
    *,
    rows: Any = None,
    heads: Any = None,
    mask: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    **sight: Any,
) -> Array:
    """Where each query looks: q (B, Hq, Tq, D), k (B, Hkv, Tk, D) -> (B, Hq, Tq, Tk).

    A query that may look nowhere gets a row of zeros. With sinks, a row sums to less than one.
    """
    validation.check_options(sight, validation.WEIGHTS)
    size = validation.sizes(q, k)
    seen = visible(q, k, mask=mask, **sight)
    k = np.repeat(np.asarray(k, float), size.group, axis=1)  # query head i reads KV head i // group
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities travel; they are not hidden
        scores = np.asarray(q, float) @ k.swapaxes(-1, -2)  # (B, Hq, Tq, Tk)
        scores *= size.dim**-0.5 if scale is None else scale
        finite = np.isfinite(q).all(-1)[..., None] & np.isfinite(k).all(-1)[:, :, None]
        scores = np.where(finite, np.clip(scores, -LIMIT, LIMIT), scores)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None and np.asarray(mask).dtype != bool:
            scores = scores + mask
        scores = np.where(seen, scores, -np.inf)
        sink = (
            np.full((1, size.heads, 1, 1), -np.inf) if sinks is None else np.reshape(sinks, (1, -1, 1, 1)).astype(float)
        )
        highest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        highest = np.where(highest == -np.inf, 0.0, highest)
        raised = np.exp(scores - highest)
        total = raised.sum(-1, keepdims=True) + np.exp(sink - highest)
        row = np.where(seen, raised / np.where(total == 0, 1.0, total), 0.0)
    return row[:, validation.pick("head", heads, size.heads)][:, :, validation.pick("row", rows, size.queries)]


def mix(a: Array, v: Any, seen: Array) -> Array:
    """The values mixed by the weights, (B, Hq, Tq, Dv): a query sums over the keys it may look at, no others."""
    v = np.repeat(np.asarray(v, float), a.shape[1] // v.shape[1], axis=1)  # (B, Hq, Tk, Dv)
    out = np.zeros((*a.shape[:3], v.shape[-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h, i in np.ndindex(*a.shape[:3]):
            keys = seen[b, h, i]
            out[b, h, i] = a[b, h, i, keys] @ v[b, h, keys]
    return out


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    gates: Any = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
    **how: Any,
) -> Array:
    """Scaled dot-product attention of every head: (B, Hq, Tq, Dv). `how` is what `weights` takes.

    dropout sets that share of the weights to zero and divides the others by 1 - dropout.
    """
    validation.check_options(how, (*validation.ATTEND, "rng"))
    size = validation.sizes(q, k, v)
    a = weights(q, k, **how)
    if dropout:
        kept = (rng or np.random.default_rng()).random(a.shape) >= dropout
        a = np.where(kept, a / (1 - dropout), 0.0) if dropout < 1 else np.zeros_like(a)
    out = mix(a, v, visible(q, k, **_sight(how)))
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
    **how: Any,
) -> tuple[Array, HeadStats]:
    """attend's output and what each head does with its weights, from the whole T x T of them."""
    validation.check_options(how, (*validation.ATTEND, "rng"))
    size = validation.sizes(q, k, v)
    validation.check_classes(classes or {}, size, lambda keys: keys.dtype == bool)
    attended = {name: how.pop(name) for name in ("gates", "dropout", "rng") if name in how}
    a = weights(q, k, **how)  # (B, H, Tq, Tk), before dropout
    seen = visible(q, k, **_sight(how))
    asked = np.ones((size.batch, size.queries), bool) if queries is None else np.asarray(queries)
    validation.check_queries(asked, size, asked.dtype == bool)
    real = asked[:, None] & seen.any(-1)  # (B, H, Tq): those that count and may look somewhere

    offset = how.get("offset")
    start = np.reshape(size.keys - size.queries if offset is None else offset, (-1, 1, 1, 1))
    away = np.arange(size.keys) - (np.arange(size.queries)[:, None] + start)  # (B or 1, 1, Tq, Tk): j - i
    logs = np.log(a, where=a > 0, out=np.zeros_like(a))
    per_query = {
        "entropy": -(a * logs).sum(-1),
        "confidence": a.max(-1, initial=0.0),
        "first": (a * _first_key(size, how, asked)[:, None, None]).sum(-1),
    }
    if not cross:
        per_query["distance"] = (a * abs(away)).sum(-1)
        for name, step in (("previous", -1), ("next", 1), ("self", 0)):
            per_query[name] = (a * (away == step)).sum(-1)
    if how.get("sinks") is not None:
        per_query["sink"] = 1 - a.sum(-1)
    for name, keys in (classes or {}).items():
        per_query[f"share:{name}"] = (a * np.asarray(keys)[:, None, None]).sum(-1)
    sums = {name: np.where(real, values, 0.0).sum(-1) for name, values in per_query.items()}
    return attend(q, k, v, **how, **attended), HeadStats(sums, real.sum(-1).astype(float))


def _sight(how: dict[str, Any]) -> dict[str, Any]:
    """Of all that weights takes, what says who may look where."""
    return {name: how[name] for name in validation.VISIBILITY if name in how}


def _first_key(size: validation.Sizes, how: dict[str, Any], asked: Array) -> Array:
    """(B, Tk), True at the first key that exists for a sequence: that the mask shows to some query, within its length.

    A window does not make a key cease to exist, so only mask and lengths count.
    """
    there = np.ones((size.batch, size.heads, size.queries, size.keys), bool)
    if how.get("mask") is not None:
        there &= shown_by(how["mask"], size)
    if how.get("lengths") is not None:
        there &= np.arange(size.keys) < np.asarray(how["lengths"]).reshape(-1, 1, 1, 1)
    exists = (there & asked[:, None, :, None]).any((1, 2))  # (B, Tk)
    return exists & (np.cumsum(exists, -1) == 1)


class MultiHeadAttention:
    """Split, run, concatenate, project: the whole module in NumPy.

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

    def __call__(self, query: Any, key: Any = None, value: Any = None, **how: Any) -> Array:
        """query (B, Tq, d_model) -> (B, Tq, d_model). Self-attention unless a key (B, Tk, ...) is given."""
        q, k, v = self.project(query, key, value)
        return self.join(attend(q, k, v, **how))

    def weights(self, query: Any, key: Any = None, **how: Any) -> Array:
        """Where each query looks: (B, H, Tq, Tk)."""
        q, k, _ = self.project(query, key)
        return weights(q, k, **how)

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
        """One projection for all heads at once, then a reshape: a head is a slice of the result, never of x."""
        y = np.asarray(x, float) @ weight + (0.0 if bias is None else bias)  # (B, T, H * d_k)
        return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)  # (B, H, T, d_k)

    def join(self, out: Array) -> Array:
        """The heads laid side by side and mixed by W_O."""
        y = out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)  # (B, T, H * d_k)
        mixed: Array = y @ self.W_O + (0.0 if self.b_O is None else self.b_O)
        return mixed
