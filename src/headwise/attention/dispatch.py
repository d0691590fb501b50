"""Which backend computes a call, and computing it there.

A one-pass kernel (native on the CPU, triton on CUDA) takes what it can; PyTorch's own operators take the rest: its
fused kernel where that is exact (sdpa), blocks of query rows otherwise (blockwise, blockwise_stats).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import operators, validation  # operators imports this module: a recorded operator is dispatched here again
from .backends import blockwise, blockwise_stats, composite, sdpa
from .backends.native import library
from .backends.protocol import NO_EXTRA, Backend, ExtraOutputs, Outputs, StrongestKeys, apply_gates
from .backends.row_sums import RowSums
from .backends.triton import launch
from .call import AttentionCall, StatsRequest
from .dropout import recorded_seeds
from .head_layout import split_heads
from .stats import HeadStats
from .torch_modes import (
    in_forward_mode,
    in_transform,
    is_observed,
    is_readable,
    is_recording,
    needs_gradient,
    without_autocast,
)

SEEDS = 1 << 62  # of dropout in compiled graphs

# ---- the choice


def one_pass_backend(call: AttentionCall) -> Backend:
    """The one-pass kernel for the device of a call."""
    return launch if launch.serves(call.visibility.device) else library


def why_not_one_pass(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
    """Why PyTorch computes this call instead of a one-pass kernel, or None."""
    if in_forward_mode():
        return "forward-mode derivatives go through PyTorch's own operators"
    if in_transform():
        return "torch.func transforms PyTorch's own operators"
    backend = one_pass_backend(call)
    reason = backend.why_not(q, call, extra)
    if reason is not None:
        return reason
    if call.dropout and is_recording():
        return "a recorded graph draws its dropout anew in every run"
    if needs_gradient(call.visibility.slopes):
        return "the slopes require a gradient"
    if needs_gradient(call.visibility.mask) and not (backend is library and library.has_mask_gradient(call)):
        return "the mask requires a gradient"
    return None


def must_be_operator(call: AttentionCall) -> bool:
    """Whether a recorder needs the call as one operator, which must work for other sizes and values."""
    return is_recording() and not (call.dropout or in_forward_mode() or in_transform())


def explain(q: Tensor, call: AttentionCall) -> str:
    """Which backend would compute a call, and why no faster one."""
    instead = why_not_one_pass(q, call)
    if instead is None:
        backend = one_pass_backend(call)
        return f"{backend.NAME}: {backend.explain(call)}"
    call = _simplify(call)
    reason = sdpa.why_not(q, call)
    if reason is None:
        return f"{sdpa.NAME}: {sdpa.explain(call)} ({instead})"
    return f"{blockwise.NAME}: {reason}; {blockwise.explain(call)} ({instead})"


def draw_seed(q: Tensor, call: AttentionCall) -> AttentionCall:
    """The call with a dropout seed from PyTorch's generator, if our own generator is used."""
    if not call.dropout or call.seed is not None:
        return call
    if recorded_seeds and torch.compiler.is_compiling():
        return replace(call, seed=recorded_seeds[-1])
    if not call.visibility.readable and why_not_one_pass(q, call) is not None:
        return call
    if torch.compiler.is_compiling():  # as a part of the graph, which draws it in every run
        return replace(call, seed=torch.randint(SEEDS, (), device="cpu"))
    return replace(call, seed=int(torch.empty((), dtype=torch.int64, device="cpu").random_()))


# ---- attend


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The output (B, H, Tq, Dv) of a validated call."""
    if must_be_operator(call):
        return operators.attend(q, k, v, call)
    call = draw_seed(q, call)
    if why_not_one_pass(q, call) is None:
        if is_observed():
            return operators.attend(q, k, v, call)
        if not needs_gradient(q, k, v, call.sinks, call.gates, call.visibility.mask):
            return one_pass_backend(call).run(q, k, v, call).out
        return apply_gates(OnePass.apply(q, k, v, call.sinks, call.visibility.mask, call, NO_EXTRA, []), call)
    return run_in_torch(q, k, v, call)


def attend_with_template(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, template: library.Template) -> Tensor:
    """The output of a call that looks like an earlier one, in the layout of its template."""
    if template.training_call is None:
        return library.run_template(template, q, k, v, mask)
    return RepeatedOnePass.apply(q, k, v, draw_seed(q, template.training_call), template)


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) of a call and each row's log-sum-exp (B, H, Tq), in which sinks take part.

    -inf for a query with no visible keys and no sink. Neither has a gradient.
    """
    if why_not_one_pass(q, call, ExtraOutputs(lse=True)) is not None:
        out, lse = blockwise.attend_with_lse(q, k, v, call)
        return apply_gates(out, call), lse
    outputs = one_pass_backend(call).run(q, k, v, call, ExtraOutputs(lse=True))
    assert outputs.lse is not None  # it was requested
    return outputs.out, outputs.lse


def attend_with_rows(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, classes: Mapping[str, Tensor], has_first: bool
) -> tuple[Tensor, Tensor, RowSums]:
    """The output of a call to some keys of longer sequences, each row's log-sum-exp, and its sums for statistics.

    The call has no sinks, gates, mask or dropout. There are no gradients.

    Args:
        classes: {name: (B, Tk) bool}.
        has_first: whether key 0 is the first of the sequences.
    """
    request = StatsRequest(classes=classes)
    extra = ExtraOutputs(stats=request, lse=True, rows=True)
    if why_not_one_pass(q, call, extra) is None:
        outputs = one_pass_backend(call).run(q, k, v, call, extra)
        assert outputs.lse is not None and outputs.rows is not None  # they were requested
        if not has_first:
            outputs.rows.single_keys[..., 0] = 0
        return outputs.out, outputs.lse, outputs.rows
    first = torch.full((call.size.batch,), 0 if has_first else -1, device=q.device)
    out, rows = blockwise_stats.row_sums(q, k, v, call, first, request)
    assert out is not None  # there are values
    return out, blockwise.row_maximum(rows.largest, None) + rows.class_sums[..., 0].log(), rows


def run_in_torch(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The output by PyTorch's own operators."""
    with without_autocast(q):
        return composite.attend(q, k, v, _simplify(call))


def _simplify(call: AttentionCall) -> AttentionCall:
    """Lengths in place of a padding mask: with them, PyTorch's operators skip keys that do not exist."""
    return call if call.visibility.mask is None else replace(call, visibility=call.visibility.without_padding())


class OnePass(torch.autograd.Function):
    """A one-pass kernel's output without gates, where gradients are needed; backward computes the weights again.

    All that the kernel computed in the forward pass, statistics included, is appended to `collected`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        call: AttentionCall,
        extra: ExtraOutputs,
        collected: list[Outputs],
    ) -> Tensor:
        call = call.with_tensors(mask, call.visibility.slopes, sinks, None)
        outputs = one_pass_backend(call).run(q, k, v, call, extra._replace(lse=True))
        collected.append(outputs)
        ctx.save_for_backward(q, k, v, sinks, mask, outputs.out, outputs.lse)
        ctx.call = call.with_copied_positions()
        return outputs.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, mask, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call.with_tensors(mask, ctx.call.visibility.slopes, sinks, None)
        of = _observed_gradients(grad_out, q, k, v, out, lse, call)
        return of.q, of.k, of.v, of.sinks, of.mask, None, None, None


class RepeatedOnePass(torch.autograd.Function):
    """The same for a call that looks like an earlier one, without sinks and mask, in the layout of its template."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, template: library.Template) -> Tensor:
        size = call.size
        lse = q.new_empty((size.batch, size.heads, size.queries), dtype=torch.float32)
        out = library.run_template(template, q, k, v, None, lse=lse, seed=call.seed or 0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.head_dim = call, template.head_dim
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        dim = ctx.head_dim
        q, k, v, out, grad_out = (split_heads(x, dim) if dim else x for x in (*tensors, grad_out))
        of = _observed_gradients(grad_out, q, k, v, out, lse, ctx.call)
        joined = (
            gradient.transpose(1, 2).reshape(x.shape) if dim and gradient is not None else gradient
            for x, gradient in zip(tensors, (of.q, of.k, of.v), strict=False)
        )
        return *joined, None, None


def _observed_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> composite.Gradients:
    """The gradients of a call without gates, as one operator where operators are observed."""
    if not (is_observed() and _is_first_derivative(grad_out) and one_pass_backend(call) is library):
        return gradients(grad_out, q, k, v, out, lse, call)
    if operators.HAS_BACKWARD:
        return operators.gradients(grad_out, q, k, v, out, lse, call)
    return composite.gradients(grad_out, q, k, v, call)


def gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> composite.Gradients:
    """The gradients of a call without gates: by a one-pass kernel where it has them, else by PyTorch's operators."""
    large = True
    if not _has_kernel_backward(call, lse, grad_out, q, k, v, out):
        with without_autocast(q):
            large = not (blockwise.all_finite(out) and blockwise.max_magnitude(lse) < blockwise.LARGE)
    else:
        backward = launch.backward if one_pass_backend(call) is launch else library.backward
        of = backward(grad_out, q, k, v, out, lse, call)
        if of is not None:
            return composite.Gradients(of.q, of.k, of.v, of.mask, None, of.sinks, None)
    return composite.gradients(grad_out, q, k, v, call, large)


def gradients_from_lse(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k and v by a one-pass kernel; None where it does not compute them.

    The output and the log-sum-exp may be over more keys than the call has: its part of the gradients is then given.
    """
    if is_observed() or not _has_kernel_backward(call, lse, grad_out, q, k, v, out):
        return None
    backward = launch.backward if one_pass_backend(call) is launch else library.backward
    computed = backward(grad_out, q, k, v, out, lse, call)
    return None if computed is None else (computed.q, computed.k, computed.v)


def _has_kernel_backward(call: AttentionCall, lse: Tensor, grad_out: Tensor, q: Tensor, *others: Tensor) -> bool:
    """Whether a one-pass kernel computes this call's gradients."""
    if not _is_first_derivative(grad_out):
        return False
    # hooks on saved tensors may have changed their dtypes and devices
    if lse.dtype != torch.float32 or any(x.dtype != q.dtype for x in (grad_out, *others)):
        return False
    if one_pass_backend(call) is launch:
        return launch.why_not_backward(q, call, lse, grad_out, *others) is None
    return is_readable(lse, grad_out, q, *others) and library.why_not(q, call) is None


def _is_first_derivative(grad_out: Tensor) -> bool:
    """Whether single gradients are wanted: kernels have no second derivatives, and a batch of gradients no storage."""
    return not torch.is_grad_enabled() and torch._C._has_storage(grad_out)


# ---- head_stats


def head_stats(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest) -> tuple[Tensor, HeadStats]:
    """The output and the statistics of a validated call."""
    learning = needs_gradient(q, k, v, call.visibility.mask, call.sinks, call.gates) or in_forward_mode()
    if must_be_operator(call) and operators.why_not(request) is None:
        return operators.head_stats(q, k, v, call, request)
    extra = ExtraOutputs(stats=request)
    call = draw_seed(q, call)
    if why_not_one_pass(q, call, extra) is None:
        backend = one_pass_backend(call)
        if is_observed():
            return operators.head_stats(q, k, v, call, request)
        if not learning:
            return _with_stats(backend.run(q, k, v, call, extra))
        collected: list[Outputs] = []
        out = OnePass.apply(q, k, v, call.sinks, call.visibility.mask, call, extra, collected)
        return apply_gates(out, call), _with_stats(collected[0])[1]
    if not learning and not call.dropout:
        return run_in_torch_with_stats(q, k, v, call, request)
    stats = _stats_in_torch(q.detach(), k.detach(), call.detach(), request)
    return attend(q, k, v, call), stats


def run_in_torch_with_stats(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest
) -> tuple[Tensor, HeadStats]:
    """The output and the statistics by PyTorch's own operators, without gradients."""
    with torch.no_grad(), without_autocast(q):
        plain = _simplify(call).detach()
        return _with_stats(blockwise_stats.run(q.detach(), k.detach(), v.detach(), plain, ExtraOutputs(stats=request)))


def _with_stats(outputs: Outputs) -> tuple[Tensor, HeadStats]:
    """The output and the statistics that were requested."""
    assert outputs.stats is not None
    return outputs.out, outputs.stats


def stats_without_values(q: Tensor, k: Tensor, call: AttentionCall, request: StatsRequest) -> HeadStats:
    """The statistics of a validated call whose values are one column of its keys, in place of real ones."""
    with torch.no_grad():
        extra = ExtraOutputs(stats=request)
        if (must_be_operator(call) and operators.why_not(request) is None) or why_not_one_pass(q, call, extra) is None:
            return head_stats(q, k, k[..., :1], call, request)[1]
        return _stats_in_torch(q, k, call, request)


def _stats_in_torch(q: Tensor, k: Tensor, call: AttentionCall, request: StatsRequest) -> HeadStats:
    with torch.no_grad(), without_autocast(q):
        return blockwise_stats.stats_without_values(q, k, _simplify(call), request)


# ---- weights


def weights(q: Tensor, k: Tensor, call: AttentionCall, rows: Any = None, heads: Any = None) -> Tensor:
    """The weights (B, heads, rows, Tk) of a validated call, for the selected query rows and heads."""
    size = call.size
    (k,) = blockwise.zero_hidden_keys(call.visibility, k, whole=True)
    if heads is not None:
        selected = validation.pick("head", heads, size.heads)
        q, k = q[:, selected], k[:, [h // size.group for h in selected]]
        sinks = None if call.sinks is None else call.sinks[selected]
        call = replace(call, visibility=call.visibility.select_heads(selected), sinks=sinks)
    at: slice | Tensor = slice(0, size.queries)
    if rows is not None:
        at = torch.tensor(validation.pick("row", rows, size.queries), dtype=torch.long, device=q.device)
        q = q[:, :, at]
    with without_autocast(q):
        s = blockwise.scores(q, k, call, at, 0, size.keys)
        a, visible = blockwise.softmax(s, call), call.visibility.allowed(at, 0, size.keys)
        if visible is not None and not (call.visibility.readable and blockwise.all_finite(a)):
            a = torch.where(visible, a, 0)  # a NaN in the row must not reach hidden keys
        return a.to(q.dtype)


def strongest_keys(q: Tensor, k: Tensor, call: AttentionCall, count: int) -> StrongestKeys:
    """The `count` largest weights of every row and their keys, (B, H, Tq, count or all keys) in int64 and q's dtype."""
    call = replace(call, dropout=0.0)  # weights are those before dropout
    count, queries = min(count, call.size.keys), range(call.size.queries)
    keys = torch.empty(*q.shape[:3], count, dtype=torch.long, device=q.device)
    strongest = StrongestKeys(keys, torch.empty_like(keys, dtype=q.dtype))
    remaining = list(queries)
    extra = ExtraOutputs(strongest=count)
    with torch.no_grad():
        if count and not is_observed() and why_not_one_pass(q, call, extra) is None:
            found = one_pass_backend(call).run(q, k, k[..., :1], call, extra).strongest
            assert found is not None  # they were requested
            strongest.keys.copy_(found.keys)
            strongest.weights.copy_(found.weights)
            # rows that see fewer keys are filled up with hidden ones below
            remaining = (found.keys < 0).any(-1).any(1).any(0).nonzero().flatten().tolist()
        for first in range(0, len(remaining), blockwise.ROWS):
            rows = remaining[first : first + blockwise.ROWS]
            top = weights(q, k, call, rows).topk(count)
            strongest.keys[:, :, rows], strongest.weights[:, :, rows] = top.indices, top.values
    return strongest
