"""Attention as an operator of PyTorch's: graphs, tracers, counters and profilers see one node and its shapes.

Where nothing looks on, native.py is called directly, which is several times faster to begin. The operator computes
what the native kernel cannot by PyTorch's own, and has gradients, so that a recorded call serves every input. Operators
take no `int | Tensor`, so offset and end come twice: a number, and a tensor that counts where it is given.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...call import Call, call_of, check_counted
from ...stats import SHARE, HeadStats
from ...visibility import Sight
from .. import blockwise_stats
from ..composite import gated, gradients, output
from . import library

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? offsets, Tensor? ends, Tensor? slopes, Tensor? sinks, "
    "Tensor? gates, Tensor? asked, Tensor? classes, SymInt left, SymInt right, SymInt offset, SymInt end, float scale, "
    "float softcap, bool measured) -> (Tensor, Tensor)"
)


ALIGNED = -(1 << 62)  # as offset: Tk - Tq, whatever they are
ALL = -1  # as end: all keys, however many


class Arguments(NamedTuple):
    """What the operator is given, by the names of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    ends: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    gates: Tensor | None
    asked: Tensor | None
    classes: Tensor | None
    left: int
    right: int
    offset: int
    end: int
    scale: float
    softcap: float
    measured: bool

    def call(self) -> Call:
        """The call, checked once more: a recorded graph may be run on other sizes than it was recorded with."""
        ends = self.ends
        if ends is None and self.end != ALL:
            ends = torch.full(self.q.shape[:1], self.end, device=self.q.device)
        offset = None if self.offset == ALIGNED else self.offset
        return call_of(
            self.q, self.k, self.v,
            mask=self.mask,
            window=(None if self.left < 0 else self.left, None if self.right < 0 else self.right),
            lengths=ends,
            offset=offset if self.offsets is None else self.offsets,
            slopes=self.slopes, scale=self.scale, softcap=self.softcap or None, sinks=self.sinks, gates=self.gates,
        )  # fmt: skip


def _attend(*given: Any) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and, if measured, the sums (SUMS and classes, B, H). left, right: -1 is open."""
    x = Arguments(*given)
    with torch.no_grad():
        return _observed(x, x.call()) if x.measured else (_plain(x, x.call()), _no_sums(x.q))


def _plain(x: Arguments, call: Call) -> Tensor:
    if call.why_not_kernel(x.q) is None:
        out: Tensor = call.kernel.run(x.q, x.k, x.v, call.sight, call.scale, call.softcap, call.sinks, call.gates)
        return out
    return _laid_out(gated(output(x.q, x.k, x.v, call), call))


def _observed(x: Arguments, call: Call) -> tuple[Tensor, Tensor]:
    """The output, and the sums of the statistics with "sink" and positions whether wanted or not."""
    classes = {} if x.classes is None else {str(i): keys for i, keys in enumerate(x.classes.bool().unbind(1))}
    check_counted(x.q, call.sight.size, x.asked, classes)
    numbers = call.sight, call.scale, call.softcap, call.sinks
    if call.kernel is library and call.why_not_kernel(x.q) is None:
        sums = x.q.new_empty(_columns(x.classes, True), *x.q.shape[:2], dtype=torch.float64)
        extra = library.Extra(sums, x.asked, x.classes)
        return library.run(x.q, x.k, x.v, *numbers, x.gates, extra), sums
    out, stats = blockwise_stats.head_stats(x.q, x.k, x.v, *numbers, x.asked, classes, False)
    assert out is not None  # there were values
    named = {"sink": torch.zeros_like(stats.count), **stats.sums, "count": stats.count}
    sums = torch.stack([named[name] for name in (*library.SUMS, *(SHARE + name for name in classes))])
    return _laid_out(gated(out, call)), sums.double()


def _no_sums(q: Tensor) -> Tensor:
    return q.new_empty(0, *q.shape[:2], dtype=torch.float64)


def _laid_out(out: Tensor) -> Tensor:
    """In the layout that the shapes below promise, in memory of its own."""
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _columns(classes: Tensor | None, measured: bool) -> int:
    return (len(library.SUMS) + (0 if classes is None else classes.shape[1])) if measured else 0


_operator = torch.library.custom_op("headwise::attend", _attend, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, **more: bool) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    measured = more["measured"] if more else bool(others[-1])
    classes = others[7]
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(_columns(classes, measured), batch, heads, dtype=torch.float64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(*tensors)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def _backward(ctx: Any, slope: Tensor, of_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of every tensor that wants one. The sums carry none."""
    x = Arguments(*(given if n is None else n for given, n in zip(ctx.saved_tensors, ctx.numbers, strict=True)))
    of = gradients(slope, x.q, x.k, x.v, x.call())
    tensors = of.q, of.k, of.v, of.mask, None, None, of.slopes, of.sinks, of.gates
    return *tensors, *(None for _ in x[len(tensors) :])


_operator.register_autograd(_backward, setup_context=_keep)


def count_operations() -> None:
    """Let FlopCounterMode count as PyTorch does its own attention: both products over all pairs, hidden or not.

    Its module imports Triton, so it is looked for where it is loaded already; counters that are at work have copied
    the formulas.
    """
    flops = sys.modules.get("torch.utils.flop_counter")
    if flops is None:
        return
    operator = torch.ops.headwise.attend
    if operator not in flops.flop_registry:
        formula = flops.register_flop_formula(operator)
        formula(lambda q, k, v, *others, out_shape=None, **more: flops.sdpa_flop_count(q, k, v))
    for mode in _get_current_dispatch_mode_stack():
        formulas = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(formulas, dict):
            formulas.setdefault(operator, flops.flop_registry[operator])


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    queries: Tensor | None = None,
    classes: Tensor | None = None,
    measured: bool = False,
) -> tuple[Tensor, Tensor]:
    """attend as one node of a graph."""
    if not torch.compiler.is_compiling():
        count_operations()
    offset = ALIGNED if sight.aligned else sight.offset
    end: int | Tensor = sight.end
    if end is sight.size.keys or (not isinstance(end, Tensor) and end == sight.size.keys):
        end = ALL
    return _operator(  # type: ignore[no-any-return, unused-ignore]
        q, k, v, sight.mask,
        offset if isinstance(offset, Tensor) else None, end if isinstance(end, Tensor) else None,
        sight.slopes, sinks, gates, queries, classes,
        -1 if sight.left is None else sight.left, -1 if sight.right is None else sight.right,
        0 if isinstance(offset, Tensor) else offset, 0 if isinstance(end, Tensor) else end,
        scale, softcap or 0.0, measured,
    )  # fmt: skip


def head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    queries: Tensor | None,
    classes: dict[str, Tensor],
    cross: bool,
) -> tuple[Tensor, HeadStats]:
    """head_stats as one node of a graph. Only the output carries gradients."""
    marks = torch.stack(list(classes.values()), 1).float() if classes else None
    out, sums = run(q, k, v, sight, scale, softcap, sinks, gates, queries, marks, True)
    return out, HeadStats(*library.apart(sums.detach(), list(classes), cross, sinks is not None))
