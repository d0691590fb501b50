"""Attention of one chunk of queries to one chunk of keys (a part), and the merging of parts: forward and backward.

Both are chunks of one sequence; `offset` is the position of the first query relative to the first key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import dispatch
from ..attention.backends import blockwise, sdpa
from ..attention.call import AttentionCall, build_call


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

    @property
    def depends_on_positions(self) -> bool:
        """Whether attention depends on more than the order of tokens."""
        return not (self.left is None and self.right in (None, 0) and self.slopes is None and self.lengths is None)

    def call(self, q: Tensor, k: Tensor, v: Tensor, query: range, key: range) -> AttentionCall:
        """The validated call of one part, whose queries and keys have these positions in the sequence."""
        lengths = None
        if self.lengths is not None:
            lengths = (self.lengths - key.start).clamp(0, len(key))
        return build_call(
            q, k, v, window=(self.left, self.right), lengths=lengths, offset=query.start - key.start,
            scale=self.scale, softcap=self.softcap, slopes=self.slopes,
        )  # fmt: skip


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


def backward_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> PartGradients:
    """The gradients of a part, from the output and the log-sum-exp over all parts."""
    computed = dispatch.gradients_from_lse(grad, q, k, v, out, lse, call)
    if computed is not None:
        return PartGradients(*computed)
    size, group = call.size, call.size.group
    ungrouped = replace(call, visibility=replace(call.visibility, size=replace(size, kv_heads=size.heads)))
    if call.softcap is None and q.dtype == out.dtype == grad.dtype and sdpa.has_backward(ungrouped):
        keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        gradients = sdpa.backward(grad, q, keys, values, out, lse, ungrouped)
        return PartGradients(
            gradients[0], *(x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in gradients[1:])
        )
    return _backward_blockwise(grad, q, k, v, out, lse, call)


def _backward_blockwise(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> PartGradients:
    """With p = exp(s - lse): dv = p' do, ds = p (do v' - do . out), dq = ds k, dk = ds' q, block by block of rows."""
    k, v = blockwise.zero_hidden_keys(call.visibility, k, v)
    dtype = blockwise.upcast(q[:0]).dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    finite_lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # weights of 0 for a query with no visible keys
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    for part in blockwise.parts(call):
        batch, kv_heads, heads = part.batch, part.kv_heads, part.heads
        for rows, low, high in blockwise.row_blocks(part.call.visibility):
            if high <= low:
                continue
            query_index, key_index = (batch, heads, rows), (batch, kv_heads, slice(low, high))
            s = blockwise.scores(q[query_index], k[batch, kv_heads], part.call, rows, low, high)
            p = (s - finite_lse[query_index][..., None].to(dtype)).exp()
            do = grad[query_index].to(dtype)
            ds = p * (
                blockwise.grouped_matmul(do, v[key_index].to(dtype).transpose(-1, -2)) - delta[query_index][..., None]
            )
            if call.softcap is not None:
                raw_scores = blockwise.grouped_matmul(
                    blockwise.upcast(q[query_index]) * call.scale, blockwise.upcast(k[key_index]).transpose(-1, -2)
                )
                ds = ds * (1 - torch.tanh(raw_scores / call.softcap).square())
            dq[query_index] = blockwise.grouped_matmul(ds, k[key_index].to(dtype)) * call.scale
            count = kv_heads.stop - kv_heads.start
            dk[key_index] += (
                blockwise.group_rows(ds, count).transpose(-1, -2)
                @ blockwise.group_rows(q[query_index].to(dtype), count)
                * call.scale
            )
            dv[key_index] += blockwise.group_rows(p, count).transpose(-1, -2) @ blockwise.group_rows(do, count)
    return PartGradients(dq.to(q.dtype), dk, dv)
