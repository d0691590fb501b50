"""A call composed of PyTorch's own operators: for calls that none of our kernels supports, and for every gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall
from ..recomputation import separate_input
from ..torch_modes import is_observed, needs_gradient, without_autocast
from . import blockwise, sdpa
from .protocol import apply_gates


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, recompute: bool = False, large: bool = False
) -> Tensor:
    """The output (B, H, Tq, Dv), by PyTorch's fused kernel where that is exact, else by blocks of rows.

    recompute: the output was computed before; only its gradients are needed. large: scores are large (blockwise.LARGE).
    """
    # PyTorch's counters of operations know matrix products, but not the fused kernel's backward
    out = None if large or (recompute and is_observed()) else _fused(q, k, v, call)
    return blockwise.run(q, k, v, call).out if out is None else apply_gates(out, call)


def _fused(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor | None:
    """The output of PyTorch's fused kernel without gates, or None where it would not be exact."""
    visibility = call.visibility
    if sdpa.why_not(q, call) is not None:
        return None
    if not visibility.readable:
        if sdpa.may_lose_nan(visibility):
            return None
        k, v = blockwise.zero_hidden_keys(visibility, k, v)
        return sdpa.attend(q, k, v, call)
    if sdpa.may_lose_nan(visibility) and not (blockwise.all_finite(q) and blockwise.all_finite(k)):
        return None
    learning = q.dtype != torch.float64 and needs_gradient(q, k)
    if learning and not blockwise.score_bound(q, k, call.scale) < blockwise.LARGE:
        return None
    out = sdpa.attend(q, k, v, call)
    # 0 * NaN is NaN, so in a fused kernel a hidden NaN may reach queries that do not see it; a score that overflows
    # makes NaN of its row, and zeros where all scores of the row overflow
    exact = blockwise.all_finite(out) and (not _has_zero_row(out) or blockwise.products_are_bounded(q, k, call.scale))
    return out if exact else None


def _has_zero_row(out: Tensor) -> bool:
    """Whether the output (B, H, Tq, Dv) of some query is zero, as for a query with no visible keys."""
    return bool(out.numel()) and not float(out.detach().abs().amax(-1).min()) > 0


class Gradients(NamedTuple):
    """The gradient of each tensor of a call; None where none is required."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    gates: Tensor | None


def gradients(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, large: bool = False) -> Gradients:
    """The gradients of all tensors of a call from the gradient of its output (B, H, Tq, Dv), by recomputing the output.

    With gradients enabled, as they are in a backward with create_graph=True, the result is itself differentiable.
    """
    create_graph = torch.is_grad_enabled()
    tensors = (q, k, v, call.visibility.mask, call.visibility.slopes, call.sinks, call.gates)
    required = [x is not None and x.requires_grad for x in tensors]
    with torch.enable_grad(), without_autocast(q):
        inputs: list[Any] = [None if x is None else separate_input(x, create_graph) for x in tensors]
        q, k, v, *others = inputs
        out = attend(q, k, v, call.with_tensors(*others), recompute=True, large=large)
        leaves = [x for x, needed in zip(inputs, required, strict=True) if needed]
        grads = iter(torch.autograd.grad(out, leaves, grad_out, create_graph=create_graph, allow_unused=True))
    return Gradients(*(next(grads) if needed else None for needed in required))
