"""Attention of some queries on some keys, with all that is needed to put parts together: forward and backward.

A part's queries and keys are chunks of one sequence; `offset` says where the first query stands among the part's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import dispatch
from ..attention.backends import blockwise, blockwise_stats, sdpa
from ..attention.backends.blockwise_stats import RowSums
from ..attention.backends.protocol import ExtraOutputs
from ..attention.call import AttentionCall, StatsRequest, build_call
from ..attention.stats import STEPS


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

    def call(self, q: Tensor, k: Tensor, v: Tensor, query: range, key: range) -> AttentionCall:
        """The checked call of queries on keys, whose tokens these are."""
        ends = None
        if self.lengths is not None:
            ends = (self.lengths - key.start).clamp(0, len(key))
        return build_call(
            q, k, v, window=(self.left, self.right), lengths=ends, offset=query.start - key.start,
            scale=self.scale, softcap=self.softcap, slopes=self.slopes,
        )  # fmt: skip


def attended(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and each row's log-sum-exp (B, H, Tq), -inf where it may look at nothing."""
    if dispatch.why_not_one_pass(q, call) is not None:
        return _by_rows(q, k, v, call)
    outputs = dispatch.one_pass_backend(call).run(q, k, v, call, ExtraOutputs(lse=True))
    assert outputs.lse is not None  # it was requested
    return outputs.out, outputs.lse


def _by_rows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The same in PyTorch, by blocks of rows."""
    k, v = blockwise.zero_hidden_keys(call.visibility, k, v)
    odd = blockwise.has_hidden_nonfinite(v, call.visibility)
    dtype = blockwise.upcast(q[:0]).dtype
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    for part in blockwise.parts(call):
        batch, kv_heads, heads = part.batch, part.kv_heads, part.heads
        for rows, low, high in blockwise.row_blocks(part.call.visibility):
            if high <= low:
                continue
            s = blockwise.scores(q[batch, heads, rows], k[batch, kv_heads], part.call, rows, low, high)
            top = blockwise.row_maximum(s.amax(-1), None)
            e = s.sub_(top[..., None]).exp_()
            total = e.sum(-1)
            lse[batch, heads, rows] = top + total.log()
            seen = part.call.visibility.allowed(rows, low, high) if odd else None
            mixed = blockwise.sum_values(e, v[batch, kv_heads, low:high], seen)
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


def backward(slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall) -> Slopes:
    """The gradients of a part, from the output and the log-sum-exp over all parts."""
    size, group = call.size, call.size.group
    alone = replace(call, visibility=replace(call.visibility, size=replace(size, kv_heads=size.heads)))
    if call.softcap is None and q.dtype == out.dtype == slope.dtype and sdpa.has_backward(alone):
        keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        found = sdpa.backward(slope, q, keys, values, out, lse, alone)
        return Slopes(found[0], *(x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in found[1:]))
    return _backward_by_rows(slope, q, k, v, out, lse, call)


def _backward_by_rows(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Slopes:
    """With p = exp(s - lse): dv = p' do, ds = p (do v' - do . out), dq = ds k, dk = ds' q, block by block of rows."""
    k, v = blockwise.zero_hidden_keys(call.visibility, k, v)
    dtype = blockwise.upcast(q[:0]).dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    calm = lse.masked_fill(lse == -torch.inf, torch.inf)  # a query that sees nothing gets weights of 0
    delta = (slope.to(dtype) * out.to(dtype)).sum(-1)
    for part in blockwise.parts(call):
        batch, kv_heads, heads = part.batch, part.kv_heads, part.heads
        for rows, low, high in blockwise.row_blocks(part.call.visibility):
            if high <= low:
                continue
            here, there = (batch, heads, rows), (batch, kv_heads, slice(low, high))
            s = blockwise.scores(q[here], k[batch, kv_heads], part.call, rows, low, high)
            p = (s - calm[here][..., None].to(dtype)).exp()
            do = slope[here].to(dtype)
            ds = p * (blockwise.grouped_matmul(do, v[there].to(dtype).transpose(-1, -2)) - delta[here][..., None])
            if call.softcap is not None:
                capped = blockwise.grouped_matmul(
                    blockwise.upcast(q[here]) * call.scale, blockwise.upcast(k[there]).transpose(-1, -2)
                )
                ds = ds * (1 - torch.tanh(capped / call.softcap).square())
            dq[here] = blockwise.grouped_matmul(ds, k[there].to(dtype)) * call.scale
            count = kv_heads.stop - kv_heads.start
            dk[there] += (
                blockwise.group_rows(ds, count).transpose(-1, -2) @ blockwise.group_rows(q[here], count) * call.scale
            )
            dv[there] += blockwise.group_rows(p, count).transpose(-1, -2) @ blockwise.group_rows(do, count)
    return Slopes(dq.to(q.dtype), dk, dv)


def observed(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, first: Tensor, classes: dict[str, Tensor]
) -> tuple[Tensor, Tensor, RowSums]:
    """The output, the log-sum-exp, and what is kept of every query for its statistics."""
    out, kept = blockwise_stats.row_sums(q, k, v, call, first, StatsRequest(classes=classes))
    assert out is not None  # there are values
    return out, blockwise.row_maximum(kept.largest, None) + kept.class_sums[..., 0].log(), kept


def joined(kept: RowSums, more: RowSums) -> RowSums:
    """What is kept of queries over two sets of keys."""
    largest = torch.maximum(kept.largest, more.largest)
    base = blockwise.row_maximum(largest, None)
    a, b = based(kept, base), based(more, base)
    return RowSums(
        largest=largest,
        weighted_scores=a.weighted_scores + b.weighted_scores,
        distances=a.distances + b.distances,
        single_keys=a.single_keys + b.single_keys,
        class_sums=a.class_sums + b.class_sums,
        has_keys=a.has_keys | b.has_keys,
    )


def based(kept: RowSums, base: Tensor) -> RowSums:
    """The same with exp taken of the scores less `base` (B, H, Tq), which is at least the largest."""
    shift = blockwise.row_maximum(kept.largest, None) - base
    factor = shift.exp()
    return replace(
        kept,
        weighted_scores=factor * (kept.weighted_scores + kept.class_sums[..., 0] * shift),
        distances=factor * kept.distances,
        single_keys=factor[..., None] * kept.single_keys,
        class_sums=factor[..., None] * kept.class_sums,
    )


def nothing_seen(q: Tensor, classes: int) -> RowSums:
    """What is kept of queries (B, H, Tq, D) before they have seen a key."""
    return RowSums.empty(blockwise.upcast(q[:0]), q.shape[:3], 1 + len(STEPS), classes)
