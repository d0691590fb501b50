"""The output together with the weights, for callers who want both: one pass over blocks of rows where possible."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .backends import blockwise
from .call import AttentionCall
from .recomputation import separate_input
from .torch_modes import in_forward_mode, in_transform, is_observed, needs_gradient, without_autocast

BLOCK = blockwise.BLOCK // 2  # scores held at once: the weights are held beside them


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, average: bool = False
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) of a validated call without gates, and the weights that made it, after dropout.

    The weights are (B, H, Tq, Tk), or their mean over the heads (B, Tq, Tk). Both carry gradients.
    """
    plain = call.visibility.readable and not (is_observed() or in_transform() or in_forward_mode())
    if call.dropout or not plain:
        weights = F.dropout(dispatch.weights(q, k, call), call.dropout)
        (v,) = blockwise.zero_hidden_keys(call.visibility, v, whole=True)
        return blockwise.grouped_matmul(weights, v), weights.mean(1) if average else weights
    if not needs_gradient(q, k, v, call.sinks, call.visibility.mask):
        with without_autocast(q):
            return _by_blocks(q, k, v, call, average)
    weights = RecomputedWeights.apply(q, k, call.sinks, call.visibility.mask, call, average)
    return dispatch.attend(q, k, v, call), weights


class RecomputedWeights(torch.autograd.Function):
    """Weights that store nothing for their gradient: most callers drop them, and the others recompute them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, sinks: Tensor | None, mask: Tensor | None, call: AttentionCall, average: bool
    ) -> Tensor:
        call = call.with_tensors(mask, call.visibility.slopes, sinks, None)
        ctx.save_for_backward(q, k, sinks, mask)
        ctx.call, ctx.average = call, average
        with without_autocast(q):
            return _by_blocks(q, k, None, call, average)[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs: list[Any] = [None if x is None else separate_input(x, create_graph) for x in ctx.saved_tensors]
            q, k, sinks, mask = inputs
            weights = dispatch.weights(q, k, ctx.call.with_tensors(mask, ctx.call.visibility.slopes, sinks, None))
            weights = weights.mean(1) if ctx.average else weights
            leaves = [x for x in inputs if x is not None and x.requires_grad]
            grads = iter(torch.autograd.grad(weights, leaves, grad, create_graph=create_graph))
        return *(next(grads) if x is not None and x.requires_grad else None for x in inputs), None, None


def _by_blocks(q: Tensor, k: Tensor, v: Tensor | None, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
    """The output (empty without v) and the weights, without gradients; a block of rows at a time stays in the cache."""
    q, k = q.detach().contiguous(), k.detach().contiguous()  # each is read several times
    call, size = call.detach(), call.size
    (k,) = blockwise.zero_hidden_keys(call.visibility, k)
    nonfinite = False
    if v is not None:
        (v,) = blockwise.zero_hidden_keys(call.visibility, v.detach().contiguous())
        nonfinite = blockwise.has_hidden_nonfinite(v, call.visibility)
    value_dim = 0 if v is None else size.value_dim
    out = q.new_empty(size.batch, size.queries, size.heads, value_dim).transpose(1, 2)
    sums = blockwise.upcast(q[:0]).dtype
    weights = q.new_zeros(size.batch, *(() if average else (size.heads,)), size.queries, size.keys, dtype=sums)
    scratch = blockwise.Scratch(blockwise.upcast(q[:0]))
    for part in blockwise.parts(call, BLOCK):
        q_part, k_part = part.of_queries(q), part.of_keys(k)
        for rows, low, high in blockwise.row_blocks(part.call.visibility):
            s = blockwise.scores(q_part[:, :, rows], k_part, part.call, rows, low, high, scratch)
            a, visible = blockwise.softmax(s, part.call), part.call.visibility.allowed(rows, low, high)
            if visible is not None and not blockwise.all_finite(a):
                a.masked_fill_(~visible, 0)  # a NaN in the row must not reach hidden keys
            if v is not None:
                values = blockwise.key_slice(part.of_keys(v), low, high)
                out[part.batch, part.heads, rows] = blockwise.sum_values(a, values, visible if nonfinite else None)
            if average:
                weights[part.batch, rows, low:high] += a.sum(1)
            else:
                weights[part.batch, part.heads, rows, low:high] = a
    if average:
        weights /= size.heads
    return out, weights.to(q.dtype)
