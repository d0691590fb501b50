"""Attention as PyTorch operators: graphs, tracers, counters and profilers see one node and its shapes.

If nothing is recording, backends are called directly, which has several times less overhead. `headwise::attend`
dispatches like any call and has gradients, so a recorded call works for every input. In compiled and profiled training
it also returns each row's log-sum-exp, from which `headwise::attend_gradients` computes the gradients. Operators take
flat arguments and no `int | Tensor`, so offset, start and end are passed twice: as a number, and as a tensor that
replaces it where given.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .backends import composite
from .backends.native import library
from .backends.protocol import ExtraOutputs, apply_gates
from .call import AttentionCall, StatsRequest, build_call, build_request
from .options import Band, KeepFirst, Window
from .stats import COLUMNS, SHARE, HeadStats
from .torch_internals import DispatchKeyGuard, dispatch_modes
from .torch_modes import needs_gradient

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? offsets, Tensor? starts, Tensor? ends, Tensor? slopes, "
    "Tensor? sinks, Tensor? gates, Tensor? queries, Tensor? classes, Tensor? seed, SymInt left, SymInt right, "
    "int keep_first, int[] windows, bool causal, SymInt offset, SymInt start, SymInt end, float scale, float softcap, "
    "float dropout, bool stats, bool lse"
)
SCHEMA = f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
GRADIENTS_SCHEMA = (
    f"(Tensor grad_out, Tensor out, Tensor row_lse, bool of_mask, bool of_sinks, {ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
HAS_BACKWARD = DispatchKeyGuard is not None  # whether there is an operator for gradients
ALIGNED = -(1 << 62)  # as offset: Tk - Tq, whatever they are
ALL = -1  # as end: all keys, however many
ABSENT = -1  # as start: none


class Arguments(NamedTuple):
    """The operator's arguments, by the names of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    gates: Tensor | None
    queries: Tensor | None
    classes: Tensor | None  # (B, classes, Tk) of zeros and ones
    seed: Tensor | None  # of dropout, () int64: a compiled graph draws it anew in every run
    left: int  # -1: open
    right: int
    keep_first: int
    windows: list[int]  # left, right and keep_first of each query head, where they differ
    causal: bool
    offset: int
    start: int
    end: int
    scale: float
    softcap: float  # 0: none
    dropout: float
    stats: bool
    lse: bool  # whether each row's log-sum-exp is wanted, for gradients; the call then has no gates

    def call(self) -> AttentionCall:
        """The call, validated again: a recorded graph may run on other sizes than it was recorded with."""
        starts, ends = self.starts, self.ends
        if starts is None and self.start != ABSENT:
            starts = torch.full(self.q.shape[:1], self.start, device=self.q.device)
        if ends is None and self.end != ALL:
            ends = torch.full(self.q.shape[:1], self.end, device=self.q.device)
        offset = None if self.offset == ALIGNED else self.offset
        window, keep_first = self._windows()
        call = build_call(
            self.q,
            self.k,
            self.v,
            mask=self.mask,
            causal=self.causal,
            window=window,
            keep_first=keep_first,
            starts=starts,
            lengths=ends,
            offset=offset if self.offsets is None else self.offsets,
            slopes=self.slopes,
            scale=self.scale,
            softcap=self.softcap or None,
            sinks=self.sinks,
            gates=self.gates,
            dropout=self.dropout,
        )
        return call if self.seed is None else replace(call, seed=int(self.seed))

    def _windows(self) -> tuple[Window, KeepFirst]:
        """window and keep_first, of all heads or of each."""
        if not self.windows:
            return _open_sides(self.left, self.right), self.keep_first
        left, right, keep_first = self.windows[::3], self.windows[1::3], self.windows[2::3]
        return [_open_sides(*sides) for sides in zip(left, right, strict=True)], keep_first

    def request(self, call: AttentionCall) -> StatsRequest:
        """The statistics that are requested; classes are named by their number."""
        marks = () if self.classes is None else self.classes.bool().unbind(1)
        return build_request(self.q, call.size, self.queries, {str(i): keys for i, keys in enumerate(marks)})


def _open_sides(left: int, right: int) -> Band:
    """A band whose negative sides are open."""
    return None if left < 0 else left, None if right < 0 else right


def _attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, Tq, Dv); if stats, the sums (COLUMNS and classes, B, H); if lse, log-sum-exps (B, H, Tq)."""
    x = Arguments(*arguments)
    with torch.no_grad():
        call = x.call()
        out, sums, lse = _with_stats(x, call) if x.stats else _output(x, call)
        return out, _no_sums(x.q) if sums is None else sums, _lse_like(x.q, x.lse) if lse is None else lse


def _output(x: Arguments, call: AttentionCall) -> tuple[Tensor, None, Tensor | None]:
    if dispatch.why_not_one_pass(x.q, call) is None:
        outputs = dispatch.one_pass_backend(call).run(x.q, x.k, x.v, call, ExtraOutputs(lse=x.lse))
        return outputs.out, None, outputs.lse
    return _contiguous_tokens(dispatch.run_in_torch(x.q, x.k, x.v, call)), None, None


def _with_stats(x: Arguments, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, all columns of sums ("sink" and positional ones, too, whether they apply or not), and the lse."""
    request = x.request(call)
    if dispatch.one_pass_backend(call) is library and dispatch.why_not_one_pass(x.q, call) is None:
        sums = x.q.new_empty(_column_count(x.classes, True), *x.q.shape[:2], dtype=torch.float64)
        lse = _lse_like(x.q, True) if x.lse else None
        return library.run_into(x.q, x.k, x.v, call, request, sums, lse), sums, lse
    out, stats = dispatch.run_in_torch_with_stats(x.q, x.k, x.v, call, request)
    if call.dropout:
        out = dispatch.run_in_torch(x.q, x.k, x.v, call)
    named = {"sink": torch.zeros_like(stats.count), **stats.sums, **stats.maxima, "count": stats.count}
    sums = torch.stack([named[name] for name in (*COLUMNS, *(SHARE + name for name in request.classes))])
    return _contiguous_tokens(out), sums.double(), None


def _no_sums(q: Tensor) -> Tensor:
    return q.new_empty(0, *q.shape[:2], dtype=torch.float64)


def _lse_like(q: Tensor, wanted: bool) -> Tensor:
    """Log-sum-exps of no rows, or of all, which are not known: NaN."""
    return q.new_full((*q.shape[:2], q.shape[2] if wanted else 0), torch.nan, dtype=torch.float32)


def _contiguous_tokens(out: Tensor) -> Tensor:
    """A copy in the memory layout that `_shapes` promises: (B, Tq, H, Dv)."""
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _column_count(classes: Tensor | None, stats: bool) -> int:
    return (len(COLUMNS) + (0 if classes is None else classes.shape[1])) if stats else 0


_operator = torch.library.custom_op("headwise::attend", _attend, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _shapes(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Arguments(*arguments, **keywords)
    batch, heads, queries, _ = x.q.shape
    out = x.q.new_empty(batch, queries, heads, x.v.shape[3]).transpose(1, 2)
    sums = x.q.new_empty(_column_count(x.classes, x.stats), batch, heads, dtype=torch.float64)
    return out, sums, x.q.new_empty(batch, heads, queries if x.lse else 0, dtype=torch.float32)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    out, _, lse = output
    ctx.save_for_backward(*tensors, *((out, lse) if Arguments(*inputs).lse else (None, None)))
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def _backward(ctx: Any, grad_out: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of every tensor that requires one. Only the output carries any."""
    *tensors, out, lse = ctx.saved_tensors
    saved = zip(tensors, ctx.numbers, strict=True)
    x = Arguments(*(tensor if number is None else number for tensor, number in saved))
    if lse is None or torch.is_grad_enabled():  # the kernel has no second derivatives
        of = composite.gradients(grad_out, x.q, x.k, x.v, x.call())
    else:
        required = dict(zip(Arguments._fields, ctx.needs_input_grad, strict=True))
        of = _call_gradients(grad_out, out, lse, x, required["mask"], required["sinks"])
    gradients = of.q, of.k, of.v, of.mask, None, None, None, of.slopes, of.sinks, of.gates
    return *gradients, *(None for _ in x[len(gradients) :])


_operator.register_autograd(_backward, setup_context=_save_inputs)


def _attend_gradients(
    grad_out: Tensor, out: Tensor, lse: Tensor, of_mask: bool, of_sinks: bool, *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v (B, H, T, D), in memory (B, T, H, D), and of mask and sinks where they are wanted."""
    x = Arguments(*arguments)
    with torch.no_grad():
        call = x.call()
        q, k, v = (tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v))
        mask, sinks = _detach(call.visibility.mask, of_mask), _detach(call.sinks, of_sinks)
        call = call.with_tensors(mask, call.visibility.slopes, sinks, None)
        # where the kernel declines, PyTorch's autograd takes over, which is switched off inside of operators
        with DispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            of = dispatch.gradients(grad_out, q, k, v, out, lse, call)
        heads = (
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in ((q, of.q), (k, of.k), (v, of.v))  # None: nothing depends on it
        )
        others = (q.new_empty(0) if gradient is None else gradient.contiguous() for gradient in (of.mask, of.sinks))
        return *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads), *others


def _detach(x: Tensor | None, requires_grad: bool) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_(requires_grad)


_gradients_operator = torch.library.custom_op(
    "headwise::attend_gradients", _attend_gradients, mutates_args=(), schema=GRADIENTS_SCHEMA
)


@_gradients_operator.register_fake
def _gradient_shapes(
    grad_out: Tensor, out: Tensor, row_lse: Tensor, of_mask: bool, of_sinks: bool, *arguments: Any, **keywords: Any
) -> tuple[Tensor, ...]:
    x = Arguments(*arguments, **keywords)
    heads = (tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2) for tensor in (x.q, x.k, x.v))
    others = ((x.mask, of_mask), (x.sinks, of_sinks))
    return *heads, *(x.q.new_empty(0) if y is None or not wanted else y.new_empty(y.shape) for y, wanted in others)


def _call_gradients(
    grad_out: Tensor, out: Tensor, lse: Tensor, x: Arguments, of_mask: bool, of_sinks: bool
) -> composite.Gradients:
    """Pass a backward call to its operator."""
    count_operations()
    of_q, of_k, of_v, mask, sinks = _gradients_operator(grad_out, out, lse, of_mask, of_sinks, *x)
    return composite.Gradients(of_q, of_k, of_v, mask if of_mask else None, None, sinks if of_sinks else None, None)


def count_operations() -> None:
    """Let FlopCounterMode count as it counts PyTorch's own attention: both products over all pairs, hidden or not.

    Its module imports Triton, so it is used only where it is already loaded; active counters have copied the formulas.
    """
    flops = sys.modules.get("torch.utils.flop_counter")
    if flops is None:
        return
    operators = {
        torch.ops.headwise.attend: lambda q, k, v, *others, **keywords: flops.sdpa_flop_count(q, k, v),
        torch.ops.headwise.attend_gradients: _gradient_operations,
    }
    for operator, count in operators.items():
        if operator not in flops.flop_registry:
            flops.register_flop_formula(operator)(count)
        for mode in dispatch_modes():
            formulas = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if isinstance(formulas, dict):
                formulas.setdefault(operator, flops.flop_registry[operator])


def _gradient_operations(
    grad_out: Any, out: Any, lse: Any, of_mask: bool, of_sinks: bool, *shapes: Any, **_: Any
) -> int:
    """Floating-point operations of a backward call: five products over all pairs, of which three are as wide as q."""
    q, k, v = shapes[:3]
    return int(2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3]))


def why_not(request: StatsRequest) -> str | None:
    """Why the operator cannot give these statistics, or None."""
    if request.received:
        return "the operator does not sum the weight that each key receives"
    if len(request.classes) > library.MAX_CLASSES:
        return f"the operator takes up to {library.MAX_CLASSES} classes of keys"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The output (B, H, Tq, Dv), as one node of a graph; where gradients are wanted, gates are nodes of their own."""
    return _output_and_sums(q, k, v, call, None)[0]


def head_stats(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest) -> tuple[Tensor, HeadStats]:
    """The output and the statistics, as one node of a graph. Only the output carries gradients."""
    out, sums = _output_and_sums(q, k, v, call, request)
    has_sinks, names = call.sinks is not None, list(request.classes)
    return out, HeadStats.from_columns(sums.detach().unbind(), names, cross=request.cross, sinks=has_sinks)


def _output_and_sums(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest | None
) -> tuple[Tensor, Tensor]:
    learning = needs_gradient(q, k, v, call.visibility.mask, call.sinks, call.gates)
    if not learning or not HAS_BACKWARD or dispatch.why_not_one_pass(q, call) is not None:
        return _call_operator(q, k, v, call, request)[:2]
    out, sums, _ = _call_operator(q, k, v, replace(call, gates=None), request, lse=True)
    return apply_gates(out, call), sums


def _call_operator(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest | None, lse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    if not torch.compiler.is_compiling():
        count_operations()
    return _operator(*_flatten(q, k, v, call, request, lse))  # type: ignore[no-any-return, unused-ignore]


def gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> composite.Gradients:
    """The gradients of a call without gates, as one node of a graph."""
    mask, sinks = call.visibility.mask, call.sinks
    of_mask, of_sinks = mask is not None and mask.requires_grad, sinks is not None and sinks.requires_grad
    return _call_gradients(grad_out, out, lse, _flatten(q, k, v, call, None, True), of_mask, of_sinks)


def _flatten(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest | None, lse: bool
) -> Arguments:
    """A call as the operators' arguments."""
    visibility = call.visibility
    offset = ALIGNED if visibility.aligned else visibility.offset
    start: int | Tensor = visibility.start
    # keys are kept from `start` on, or from the first one that the mask shows: the operator finds that one itself
    has_starts = isinstance(start, Tensor) or start != 0 or (visibility.keep_first and visibility.keep_start is start)
    end: int | Tensor = visibility.end
    if end is call.size.keys or (not isinstance(end, Tensor) and end == call.size.keys):
        end = ALL
    return Arguments(
        q,
        k,
        v,
        mask=visibility.mask,
        offsets=offset if isinstance(offset, Tensor) else None,
        starts=start if isinstance(start, Tensor) else None,
        ends=end if isinstance(end, Tensor) else None,
        slopes=visibility.slopes,
        sinks=call.sinks,
        gates=call.gates,
        queries=None if request is None else request.queries,
        classes=None if request is None else request.stacked_classes(),
        seed=_seed(call),
        left=-1 if visibility.left is None else visibility.left,
        right=-1 if visibility.right is None else visibility.right,
        keep_first=visibility.keep_first,
        windows=[n for window in visibility.windows or () for n in window.numbers()],
        causal=visibility.causal,
        offset=0 if isinstance(offset, Tensor) else offset,
        start=ABSENT if isinstance(start, Tensor) or not has_starts else start,
        end=0 if isinstance(end, Tensor) else end,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        dropout=call.dropout,
        stats=request is not None,
        lse=lse,
    )


def _seed(call: AttentionCall) -> Tensor | None:
    """The seed of dropout as a tensor."""
    if call.seed is None or isinstance(call.seed, Tensor):
        return call.seed
    return torch.tensor(call.seed, dtype=torch.int64, device="cpu")
