"""Attention of some queries on some keys, with all that is needed to put parts together: forward and backward.

A part's queries and keys are chunks of one sequence; `offset` says where the first query stands among the part's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.backends import blockwise as by_rows
from ..attention.backends import blockwise_stats, sdpa
from ..attention.backends.blockwise_stats import Rows
from ..attention.functional import Call, call_of


@dataclass(frozen=True)
class How:
    """What all parts of one call share."""

    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    slopes: Tensor | None  # (Hq,), ALiBi's
    lengths: Tensor | None  # (B,), of the whole sequences

    def heads(self, some: slice) -> How:
        """The same for some query heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[some])

    def call(self, q: Tensor, k: Tensor, v: Tensor, query: range, key: range) -> Call:
        """The checked call of queries on keys, whose tokens these are."""
        ends = None
        if self.lengths is not None:
            ends = (self.lengths - key.start).clamp(0, len(key))
        return call_of(
            q, k, v, window=(self.left, self.right), lengths=ends, offset=query.start - key.start,
            scale=self.scale, softcap=self.softcap, slopes=self.slopes,
        )  # fmt: skip


def attended(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and each row's log-sum-exp (B, H, Tq), -inf where it may look at nothing."""
    if call.why_not_kernel(q) is not None:
        return _by_rows(q, k, v, call)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    kernel = call.kernel
    out: Tensor = kernel.run(q, k, v, call.sight, call.scale, call.softcap, extra=kernel.Extra(lse=lse))
    return out, lse


def _by_rows(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The same in PyTorch, by blocks of rows."""
    sight = call.sight
    k, v = by_rows.clean(sight, k, v)
    odd = by_rows.holds_odd(v, sight)
    dtype = by_rows.inside(q[:0]).dtype
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    group = sight.size.group
    for batch, kv_heads, part in by_rows.parts(sight):
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        for rows, low, high in by_rows.blocks(part):
            if high <= low:
                continue
            s = by_rows.scores(
                q[batch, heads, rows], k[batch, kv_heads], part, rows, low, high, call.scale, call.softcap
            )
            top = by_rows.ground(s.amax(-1), None)
            e = s.sub_(top[..., None]).exp_()
            total = e.sum(-1)
            lse[batch, heads, rows] = top + total.log()
            seen = part.allowed(rows, low, high) if odd else None
            mixed = by_rows.mix(e, v[batch, kv_heads, low:high], seen)
            out[batch, heads, rows] = (mixed / torch.where(total == 0, 1, total)[..., None]).to(q.dtype)
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Put the output of further keys to what there is, in place: each counts by its share of all the weight."""
    more_lse = more_lse.to(lse.dtype)
    ahead = more_lse - lse
    share = ahead.masked_fill_((more_lse == -torch.inf) & (lse == -torch.inf), 0.0).sigmoid_()
    out.lerp_(more.to(out.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, more_lse))


@dataclass(frozen=True)
class Slopes:
    """The gradients of one part."""

    q: Tensor
    k: Tensor
    v: Tensor


def backward(slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call) -> Slopes:
    """The gradients of a part, from the output and the log-sum-exp over all parts."""
    sight, group = call.sight, call.sight.size.group
    alone = replace(sight, size=replace(sight.size, kv_heads=sight.size.heads))
    if call.softcap is None and q.dtype == out.dtype == slope.dtype and sdpa.has_backward(alone, call.scale):
        keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        found = sdpa.backward(slope, q, keys, values, out, lse, alone, call.scale)
        return Slopes(found[0], *(x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in found[1:]))
    return _backward_by_rows(slope, q, k, v, out, lse, call)


def _backward_by_rows(slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call) -> Slopes:
    """With p = exp(s - lse): dv = p' do, ds = p (do v' - do . out), dq = ds k, dk = ds' q, block by block of rows."""
    sight, group = call.sight, call.sight.size.group
    k, v = by_rows.clean(sight, k, v)
    dtype = by_rows.inside(q[:0]).dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    calm = lse.masked_fill(lse == -torch.inf, torch.inf)  # a query that sees nothing gets weights of 0
    delta = (slope.to(dtype) * out.to(dtype)).sum(-1)
    for batch, kv_heads, part in by_rows.parts(sight):
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        for rows, low, high in by_rows.blocks(part):
            if high <= low:
                continue
            here, there = (batch, heads, rows), (batch, kv_heads, slice(low, high))
            s = by_rows.scores(q[here], k[batch, kv_heads], part, rows, low, high, call.scale, call.softcap)
            p = (s - calm[here][..., None].to(dtype)).exp()
            do = slope[here].to(dtype)
            ds = p * (by_rows.by_group(do, v[there].to(dtype).transpose(-1, -2)) - delta[here][..., None])
            if call.softcap is not None:
                capped = by_rows.by_group(
                    by_rows.inside(q[here]) * call.scale, by_rows.inside(k[there]).transpose(-1, -2)
                )
                ds = ds * (1 - torch.tanh(capped / call.softcap).square())
            dq[here] = by_rows.by_group(ds, k[there].to(dtype)) * call.scale
            count = kv_heads.stop - kv_heads.start
            dk[there] += by_rows.grouped(ds, count).transpose(-1, -2) @ by_rows.grouped(q[here], count) * call.scale
            dv[there] += by_rows.grouped(p, count).transpose(-1, -2) @ by_rows.grouped(do, count)
    return Slopes(dq.to(q.dtype), dk, dv)


def observed(
    q: Tensor, k: Tensor, v: Tensor, call: Call, first: Tensor, classes: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Rows]:
    """The output, the log-sum-exp, and what is kept of every query for its statistics."""
    out, kept = blockwise_stats.rows_of(q, k, v, call.sight, call.scale, call.softcap, None, first, classes, False)
    assert out is not None  # there are values
    return out, by_rows.ground(kept.most, None) + kept.on[..., 0].log(), kept


def joined(kept: Rows, more: Rows) -> Rows:
    """What is kept of queries over two sets of keys."""
    most = torch.maximum(kept.most, more.most)
    base = by_rows.ground(most, None)
    a, b = based(kept, base), based(more, base)
    return Rows(most, a.spread + b.spread, a.far + b.far, a.at + b.at, a.on + b.on, a.lit | b.lit)


def based(kept: Rows, base: Tensor) -> Rows:
    """The same with exp taken of the scores less `base` (B, H, Tq), which is at least the largest."""
    shift = by_rows.ground(kept.most, None) - base
    factor = shift.exp()
    return replace(
        kept,
        spread=factor * (kept.spread + kept.on[..., 0] * shift),
        far=factor * kept.far,
        at=factor[..., None] * kept.at,
        on=factor[..., None] * kept.on,
    )


def nothing_seen(q: Tensor, classes: int) -> Rows:
    """What is kept of queries (B, H, Tq, D) before they have seen a key."""
    return Rows.empty(by_rows.inside(q[:0]), q.shape[:3], 1 + len(blockwise_stats.STEPS), classes)
