"""Attention of one chunk of queries to one chunk of keys (a part), and the merging of parts: forward and backward.

Both are chunks of one sequence; `offset` is the position of the first query relative to the first key.
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
class PartOptions:
    """The options that all parts of one call share."""

    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    slopes: Tensor | None  # (Hq,), of ALiBi
    lengths: Tensor | None  # (B,), of the whole sequences

    def for_heads(self, heads: slice) -> PartOptions:
        """The options of some query heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])

    def call(self, q: Tensor, k: Tensor, v: Tensor, query: range, key: range) -> Call:
        """The validated call of one part, whose queries and keys have these positions in the sequence."""
        lengths = None
        if self.lengths is not None:
            lengths = (self.lengths - key.start).clamp(0, len(key))
        return call_of(
            q, k, v, window=(self.left, self.right), lengths=lengths, offset=query.start - key.start,
            scale=self.scale, softcap=self.softcap, slopes=self.slopes,
        )  # fmt: skip


def attend_part(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and each row's log-sum-exp (B, H, Tq), -inf where a row has no visible keys."""
    if call.why_not_kernel(q) is not None:
        return _attend_blockwise(q, k, v, call)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    kernel = call.kernel
    out: Tensor = kernel.run(q, k, v, call.sight, call.scale, call.softcap, extra=kernel.Extra(lse=lse))
    return out, lse


def _attend_blockwise(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`attend_part` in PyTorch, by blocks of rows."""
    sight = call.sight
    k, v = by_rows.clean(sight, k, v)
    nonfinite = by_rows.holds_odd(v, sight)
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
            seen = part.allowed(rows, low, high) if nonfinite else None
            mixed = by_rows.mix(e, v[batch, kv_heads, low:high], seen)
            out[batch, heads, rows] = (mixed / torch.where(total == 0, 1, total)[..., None]).to(q.dtype)
    return out, lse


def merge_part(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into the output so far, in place, each weighted by its share of the softmax denominator."""
    part_lse = part_lse.to(lse.dtype)
    difference = part_lse - lse
    share = difference.masked_fill_((part_lse == -torch.inf) & (lse == -torch.inf), 0.0).sigmoid_()
    out.lerp_(part_out.to(out.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


@dataclass(frozen=True)
class PartGradients:
    """The gradients of one part's queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


def backward_part(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call) -> PartGradients:
    """The gradients of a part, from the output and the log-sum-exp over all parts."""
    sight, group = call.sight, call.sight.size.group
    ungrouped = replace(sight, size=replace(sight.size, kv_heads=sight.size.heads))
    if call.softcap is None and q.dtype == out.dtype == grad.dtype and sdpa.has_backward(ungrouped, call.scale):
        keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        gradients = sdpa.backward(grad, q, keys, values, out, lse, ungrouped, call.scale)
        return PartGradients(
            gradients[0], *(x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in gradients[1:])
        )
    return _backward_blockwise(grad, q, k, v, out, lse, call)


def _backward_blockwise(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> PartGradients:
    """With p = exp(s - lse): dv = p' do, ds = p (do v' - do . out), dq = ds k, dk = ds' q, block by block of rows."""
    sight, group = call.sight, call.sight.size.group
    k, v = by_rows.clean(sight, k, v)
    dtype = by_rows.inside(q[:0]).dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    finite_lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # weights of 0 for a query with no visible keys
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    for batch, kv_heads, part in by_rows.parts(sight):
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        for rows, low, high in by_rows.blocks(part):
            if high <= low:
                continue
            here, there = (batch, heads, rows), (batch, kv_heads, slice(low, high))
            s = by_rows.scores(q[here], k[batch, kv_heads], part, rows, low, high, call.scale, call.softcap)
            p = (s - finite_lse[here][..., None].to(dtype)).exp()
            do = grad[here].to(dtype)
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
    return PartGradients(dq.to(q.dtype), dk, dv)


def attend_part_with_stats(
    q: Tensor, k: Tensor, v: Tensor, call: Call, first: Tensor, classes: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Rows]:
    """The output, the log-sum-exp, and the sums of every row for its statistics."""
    out, rows = blockwise_stats.rows_of(q, k, v, call.sight, call.scale, call.softcap, None, first, classes, False)
    assert out is not None  # there are values
    return out, by_rows.ground(rows.most, None) + rows.on[..., 0].log(), rows


def join_rows(rows: Rows, other: Rows) -> Rows:
    """The sums of the same rows over two sets of keys."""
    most = torch.maximum(rows.most, other.most)
    base = by_rows.ground(most, None)
    a, b = rebase_rows(rows, base), rebase_rows(other, base)
    return Rows(most, a.spread + b.spread, a.far + b.far, a.at + b.at, a.on + b.on, a.lit | b.lit)


def rebase_rows(rows: Rows, base: Tensor) -> Rows:
    """The sums with `base` (B, H, Tq), at least the largest score, subtracted before `exp`."""
    shift = by_rows.ground(rows.most, None) - base
    factor = shift.exp()
    return replace(
        rows,
        spread=factor * (rows.spread + rows.on[..., 0] * shift),
        far=factor * rows.far,
        at=factor[..., None] * rows.at,
        on=factor[..., None] * rows.on,
    )


def empty_rows(q: Tensor, classes: int) -> Rows:
    """The sums of queries (B, H, Tq, D) over no keys."""
    return Rows.empty(by_rows.inside(q[:0]), q.shape[:3], 1 + len(blockwise_stats.STEPS), classes)
