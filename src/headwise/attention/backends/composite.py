"""A checked call composed of PyTorch's own operators: what no kernel of ours takes, and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call, as_given
from ..visibility import observed
from . import blockwise as by_rows
from . import sdpa


def output(q: Tensor, k: Tensor, v: Tensor, call: Call, again: bool = False, large: bool = False) -> Tensor:
    """The output (B, H, Tq, Dv) without gates, by PyTorch's fused kernel where that is exact, else by blocks of rows.

    again: it was computed before, and only its gradients are wanted. large: scores are, see rows.LARGE.
    """
    sight = call.sight
    # PyTorch's counters of operations know its products, and not this kernel's backward
    if large or (again and observed()):
        return by_rows.attend(q, k, v, sight, call.scale, call.softcap, call.sinks, call.dropout)
    blind = sdpa.may_lose_nan(sight) and not (sight.readable and by_rows.finite(q) and by_rows.finite(k))
    if call.why_rows() is None and not blind:
        if not sight.readable:
            k, v = by_rows.clean(sight, k, v)
        out = sdpa.attend(q, k, v, sight, call.scale, call.dropout)
        if not sight.readable:
            return out
        # 0 * NaN is NaN, so in a fused kernel a hidden NaN may reach those who may not look at it; a score that
        # overflows makes NaN of its row, and zeros where all scores of the row do
        if by_rows.finite(out) and (not _has_zero_row(out) or by_rows.bounded(q, k, call.scale)):
            return out
    return by_rows.attend(q, k, v, sight, call.scale, call.softcap, call.sinks, call.dropout)


def _has_zero_row(out: Tensor) -> bool:
    """Whether the output (B, H, Tq, Dv) of some query is zero, as where it sees nothing."""
    return bool(out.numel()) and not float(out.detach().abs().amax(-1).min()) > 0


def gated(out: Tensor, call: Call) -> Tensor:
    """Each head's output (B, H, Tq, Dv) times its gate."""
    return out if call.gates is None else out * call.gates.to(out.dtype).view(-1, out.shape[1], 1, 1)


def detached(call: Call) -> Call:
    """The same call with tensors that carry neither gradients nor tangents."""
    mask, slopes, sinks, gates = (
        None if x is None else x.detach() for x in (call.sight.mask, call.sight.slopes, call.sinks, call.gates)
    )
    return replace(call, sight=replace(call.sight, mask=mask, slopes=slopes), sinks=sinks, gates=gates)


class Gradients(NamedTuple):
    """The gradient of each tensor of a call; None where it wants none."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    gates: Tensor | None


def gradients(slope: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, large: bool = False) -> Gradients:
    """What the output's gradient (B, H, Tq, Dv) gives for every tensor of the call, by computing the output again.

    With gradients enabled, as they are in a backward with create_graph=True, the result can be differentiated itself.
    """
    twice = torch.is_grad_enabled()
    given = (q, k, v, call.sight.mask, call.sight.slopes, call.sinks, call.gates)
    learning = [x is not None and x.requires_grad for x in given]
    with torch.enable_grad(), as_given(q):
        if not twice:
            given = tuple(  # type: ignore[assignment]
                None if x is None else x.detach().requires_grad_(wanted)
                for x, wanted in zip(given, learning, strict=True)
            )
        q, k, v, mask, slopes, sinks, gates = given
        call = replace(call, sight=replace(call.sight, mask=mask, slopes=slopes), sinks=sinks, gates=gates)
        out = gated(output(q, k, v, call, again=True, large=large), call)
        wanted = [x for x, learns in zip(given, learning, strict=True) if x is not None and learns]
        found = iter(torch.autograd.grad(out, wanted, slope, create_graph=twice, allow_unused=True))
    return Gradients(*(next(found) if learns else None for learns in learning))
