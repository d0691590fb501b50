"""Attention as one PyTorch operator: graphs, tracers, counters and profilers see one node and its shapes.

If nothing is recording, backends are called directly, which has several times less overhead. The operator dispatches
like any call and has gradients, so a recorded call works for every input. Operators take flat arguments and no `int |
Tensor`, so offset, start and end are passed twice: as a number, and as a tensor that replaces it where given.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .backends.composite import gradients
from .backends.native import library
from .call import AttentionCall, StatsRequest, build_call, build_request
from .options import Band, KeepFirst, Window
from .stats import COLUMNS, SHARE, HeadStats
from .torch_internals import dispatch_modes

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? offsets, Tensor? starts, Tensor? ends, Tensor? slopes, "
    "Tensor? sinks, Tensor? gates, Tensor? queries, Tensor? classes, SymInt left, SymInt right, int keep_first, "
    "int[] windows, bool causal, SymInt offset, SymInt start, SymInt end, float scale, float softcap, float dropout, "
    "int seed, bool stats) "
    "-> (Tensor, Tensor)"
)
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
    seed: int  # of dropout
    stats: bool

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
        return replace(call, seed=self.seed) if self.dropout else call

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


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and, if stats, the sums (COLUMNS and classes, B, H)."""
    x = Arguments(*arguments)
    with torch.no_grad():
        call = x.call()
        return _with_stats(x, call) if x.stats else (_output(x, call), _no_sums(x.q))


def _output(x: Arguments, call: AttentionCall) -> Tensor:
    if dispatch.why_not_one_pass(x.q, call) is None:
        return dispatch.one_pass_backend(call).run(x.q, x.k, x.v, call).out
    return _contiguous_tokens(dispatch.run_in_torch(x.q, x.k, x.v, call))


def _with_stats(x: Arguments, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output, and all columns of sums: "sink" and positional ones, too, whether they apply or not."""
    request = x.request(call)
    if dispatch.one_pass_backend(call) is library and dispatch.why_not_one_pass(x.q, call) is None:
        sums = x.q.new_empty(_column_count(x.classes, True), *x.q.shape[:2], dtype=torch.float64)
        return library.run_into(x.q, x.k, x.v, call, request, sums), sums
    out, stats = dispatch.run_in_torch_with_stats(x.q, x.k, x.v, call, request)
    if call.dropout:
        out = dispatch.run_in_torch(x.q, x.k, x.v, call)
    named = {"sink": torch.zeros_like(stats.count), **stats.sums, **stats.maxima, "count": stats.count}
    sums = torch.stack([named[name] for name in (*COLUMNS, *(SHARE + name for name in request.classes))])
    return _contiguous_tokens(out), sums.double()


def _no_sums(q: Tensor) -> Tensor:
    return q.new_empty(0, *q.shape[:2], dtype=torch.float64)


def _contiguous_tokens(out: Tensor) -> Tensor:
    """A copy in the memory layout that `_shapes` promises: (B, Tq, H, Dv)."""
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _column_count(classes: Tensor | None, stats: bool) -> int:
    return (len(COLUMNS) + (0 if classes is None else classes.shape[1])) if stats else 0


_operator = torch.library.custom_op("headwise::attend", _attend, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, **keywords: bool) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    stats = keywords["stats"] if keywords else bool(others[-1])
    classes = others[Arguments._fields.index("classes") - 3]
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(_column_count(classes, stats), batch, heads, dtype=torch.float64)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(*tensors)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def _backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of every tensor that requires one. The sums carry none."""
    saved = zip(ctx.saved_tensors, ctx.numbers, strict=True)
    x = Arguments(*(tensor if number is None else number for tensor, number in saved))
    of = gradients(grad_out, x.q, x.k, x.v, x.call())
    tensors = of.q, of.k, of.v, of.mask, None, None, None, of.slopes, of.sinks, of.gates
    return *tensors, *(None for _ in x[len(tensors) :])


_operator.register_autograd(_backward, setup_context=_save_inputs)


def count_operations() -> None:
    """Let FlopCounterMode count as it counts PyTorch's own attention: both products over all pairs, hidden or not.

    Its module imports Triton, so it is used only where it is already loaded; active counters have copied the formulas.
    """
    flops = sys.modules.get("torch.utils.flop_counter")
    if flops is None:
        return
    operator = torch.ops.headwise.attend
    if operator not in flops.flop_registry:
        formula = flops.register_flop_formula(operator)
        formula(lambda q, k, v, *others, out_shape=None, **keywords: flops.sdpa_flop_count(q, k, v))
    for mode in dispatch_modes():
        formulas = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(formulas, dict):
            formulas.setdefault(operator, flops.flop_registry[operator])


def why_not(request: StatsRequest) -> str | None:
    """Why the operator cannot give these statistics, or None."""
    if request.received:
        return "the operator does not sum the weight that each key receives"
    if len(request.classes) > library.MAX_CLASSES:
        return f"the operator takes up to {library.MAX_CLASSES} classes of keys"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The output (B, H, Tq, Dv), as one node of a graph."""
    return _call_operator(q, k, v, call, None)[0]


def head_stats(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest) -> tuple[Tensor, HeadStats]:
    """The output and the statistics, as one node of a graph. Only the output carries gradients."""
    out, sums = _call_operator(q, k, v, call, request)
    has_sinks, names = call.sinks is not None, list(request.classes)
    return out, HeadStats.from_columns(sums.detach().unbind(), names, cross=request.cross, sinks=has_sinks)


def _call_operator(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, request: StatsRequest | None
) -> tuple[Tensor, Tensor]:
    """Pass a call as the operator's flat arguments."""
    if not torch.compiler.is_compiling():
        count_operations()
    visibility = call.visibility
    offset = ALIGNED if visibility.aligned else visibility.offset
    start: int | Tensor = visibility.start
    # keys are kept from `start` on, or from the first one that the mask shows: the operator finds that one itself
    has_starts = isinstance(start, Tensor) or start != 0 or (visibility.keep_first and visibility.keep_start is start)
    end: int | Tensor = visibility.end
    if end is call.size.keys or (not isinstance(end, Tensor) and end == call.size.keys):
        end = ALL
    arguments = Arguments(
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
        seed=call.seed or 0,
        stats=request is not None,
    )
    return _operator(*arguments)  # type: ignore[no-any-return, unused-ignore]
