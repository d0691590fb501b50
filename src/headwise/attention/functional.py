"""attend, weights, head_stats, explain: attention of all heads at once, in PyTorch. The rules stand in reference.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from ..errors import UnsupportedError
from . import validation
from .backends import blockwise as by_rows
from .backends import blockwise_stats, sdpa
from .backends.composite import detached, gated, gradients, output
from .backends.native import library, operators
from .call import Call, as_given, autocast, call_of, check_counted, known_form, learns
from .stats import HeadStats
from .validation import Window
from .visibility import check_no_vmap, check_values, forward_mode, observed, recorded

# so that torch.export can hand statistics out of a graph
register_pytree_node(
    HeadStats,
    lambda stats: ([*stats.sums.values(), stats.count], tuple(stats.sums)),
    lambda leaves, names: HeadStats(dict(zip(names, leaves, strict=False)), list(leaves)[-1]),
    serialized_type_name="headwise.HeadStats",
)


OPTIONS = (*validation.ATTEND, "slopes")  # of the functions below that pass them on


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Scaled dot-product attention: q (B, Hq, Tq, D), k (B, Hkv, Tk, D), v (B, Hkv, Tk, Dv) -> (B, Hq, Tq, Dv).

    Query head i reads KV head i // (Hq // Hkv). A bool mask says True where a query may look; a float mask is added
    to the scores; either broadcasts to (B, Hq, Tq, Tk). Query i stands at key i + offset, Tk - Tq by default. causal:
    no key after that one. window=(left, right): so many before and after, None for open. lengths (B,): keys at or
    past it do not exist. sinks (Hq,) join the softmax's denominator. gates (Hq,) or (B, Hq) multiply each head's
    output. A query that may look nowhere gets zeros.
    """
    if lengths is offset is sinks is gates is None and not dropout:
        form = known_form(q, k, v, mask, causal, window, scale, softcap)
        if form is not None:
            return library.run_form(form, q, k, v, mask)
    check_values(v)
    q, k, v = autocast(q, k, v)
    call = call_of(
        q, k, v, mask=mask, causal=causal, window=window, lengths=lengths, offset=offset,
        scale=scale, softcap=softcap, sinks=sinks, gates=gates, dropout=dropout,
    )  # fmt: skip
    return run(q, k, v, call)


def weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Any = None,
    heads: Any = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Where each query looks: (B, heads, rows, Tk), for the chosen query rows and heads (all by default).

    A query that may look nowhere gets a row of zeros; with sinks a row sums to less than one.
    """
    q, k = autocast(q, k)
    call = call_of(
        q, k, mask=mask, causal=causal, window=window, lengths=lengths, offset=offset,
        scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return look(q, k, call, rows, heads)


def head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    cross: bool = False,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, HeadStats]:
    """attend's output and exact statistics of every head's weights, without ever holding T x T of them.

    queries (B, Tq) bool: those that count, all by default. classes: a name -> (B, Tk) bool, keys whose share of the
    weight is wanted. cross=True: query and key positions mean different things, so there is no distance.
    The statistics are of the weights before dropout and carry no gradient; the output does.
    """
    if lengths is offset is sinks is gates is None and not dropout and not classes:
        form = known_form(q, k, v, mask, causal, window, scale, softcap)
        if form is not None:
            if queries is not None:
                check_counted(q, validation.sizes(q, k, v), queries, None)
            return library.head_stats_form(form, q, k, v, mask, queries, cross)
    check_values(v)
    q, k, v = autocast(q, k, v)
    call = call_of(
        q, k, v, mask=mask, causal=causal, window=window, lengths=lengths, offset=offset,
        scale=scale, softcap=softcap, sinks=sinks, gates=gates, dropout=dropout,
    )  # fmt: skip
    return observe(q, k, v, call, queries, classes, cross)


def statistics(
    q: Tensor,
    k: Tensor,
    *,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    cross: bool = False,
    **how: Any,
) -> HeadStats:
    """head_stats without values and output: what the heads do with weights that someone else applies."""
    validation.check_options(how, OPTIONS)
    q, k = autocast(q, k)
    v = k[..., :1]  # one column stands in for the values
    call = call_of(q, k, v, **how)
    check_counted(q, call.sight.size, queries, classes)
    few = len(classes or {}) <= library.MOST_CLASSES
    if few and (call.is_recorded() or call.why_not_kernel(q) is None):
        with torch.no_grad():
            return observe(q, k, v, call, queries, classes, cross)[1]
    with torch.no_grad(), as_given(q):
        return blockwise_stats.head_stats(
            q, k, None, call.sight, call.scale, call.softcap, call.sinks, queries, classes or {}, cross
        )[1]


def one_pass(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> bool:
    """Whether head_stats takes output and statistics from one native pass."""
    validation.check_options(how, OPTIONS)
    call = call_of(*autocast(q, k, v), **how)
    return call.why_not_kernel(q) is None and not learns(q, k, v, call.sinks, call.gates)


def explain(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> str:
    """Which way attend would take with these arguments, and why."""
    validation.check_options(how, OPTIONS)
    check_values(v)
    q, k, v = autocast(q, k, v)
    call = call_of(q, k, v, **how)
    instead = call.why_not_kernel(q)
    if instead is None:
        return f"{call.kernel.NAME}: {call.kernel.explain(call.sight)}"
    why = call.why_rows()
    way = f"rows: {why}; blocks of query rows in PyTorch" if why else f"fused: {sdpa.explain(call.sight)}"
    return f"{way} ({instead})"


def run(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """attend, for a call that was checked."""
    given = q, k, v, call.sight, call.scale, call.softcap, call.sinks, call.gates
    if call.is_recorded():
        return operators.run(*given)[0]
    if call.why_not_kernel(q) is None:
        compiling = torch.compiler.is_compiling()
        learning = learns(q, k, v, call.sinks, call.gates)
        if observed() and not (compiling and learning):  # a compiler knows PyTorch's own operators' gradients
            return operators.run(*given)[0]
        if not learning:
            out: Tensor = call.kernel.run(*given)
            return out
        if not compiling:
            return gated(OnePass.apply(q, k, v, call.sinks, call), call)
    with as_given(q):
        return gated(output(q, k, v, call), call)


class OnePass(torch.autograd.Function):
    """The one-pass kernel's output without gates, where gradients are wanted; backward computes the weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        kernel = call.kernel
        out: Tensor = kernel.run(q, k, v, call.sight, call.scale, call.softcap, sinks, extra=kernel.Extra(lse=lse))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call: Call = ctx.call
        with as_given(q):
            fits = call.why_rows() is None and sdpa.has_backward(call.sight, call.scale)
            tame = by_rows.finite(out) and by_rows.largest(lse) < by_rows.LARGE
            if fits and not torch.is_grad_enabled() and tame:
                return *sdpa.backward(slope, q, k, v, out, lse, call.sight, call.scale), None, None
        of = gradients(slope, q, k, v, replace(call, sinks=sinks, gates=None), large=not tame)
        return of.q, of.k, of.v, of.sinks, None


def look(q: Tensor, k: Tensor, call: Call, rows: Any = None, heads: Any = None) -> Tensor:
    """weights, for a call that was checked."""
    sight, sinks, size = call.sight, call.sinks, call.sight.size
    (k,) = by_rows.clean(sight, k, whole=True)
    if heads is not None:
        chosen = validation.pick("head", heads, size.heads)
        q, k, sight = q[:, chosen], k[:, [h // size.group for h in chosen]], sight.chosen(chosen)
        sinks = None if sinks is None else sinks[chosen]
    at: slice | Tensor = slice(0, size.queries)
    if rows is not None:
        at = torch.tensor(validation.pick("row", rows, size.queries), dtype=torch.long, device=q.device)
        q = q[:, :, at]
    with as_given(q):
        s = by_rows.scores(q, k, sight, at, 0, size.keys, call.scale, call.softcap)
        e, total = by_rows.raised(s, sinks)
        a, seen = e / total, sight.allowed(at, 0, size.keys)
        if seen is not None:
            a = torch.where(seen, a, 0)  # a NaN in the row must not reach the keys it may not look at
        return a.to(q.dtype)


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    cross: bool = False,
) -> tuple[Tensor, HeadStats]:
    """head_stats, for a call that was checked."""
    check_no_vmap()
    check_counted(q, call.sight.size, queries, classes)
    classes = classes or {}
    given = call.sight, call.scale, call.softcap, call.sinks
    wants_gradient = learns(q, k, v, call.sight.mask, call.sinks, call.gates) or forward_mode()
    few = len(classes) <= library.MOST_CLASSES
    if call.is_recorded() and few:
        out, stats = operators.head_stats(q, k, v, *given, call.gates, queries, classes, cross)
        return out, stats
    if not wants_gradient and few and call.why_not_kernel(q) is None:
        way = operators if observed() and call.kernel is library else call.kernel
        found: tuple[Tensor, HeadStats] = way.head_stats(q, k, v, *given, call.gates, queries, classes, cross)
        return found
    apart = wants_gradient or call.dropout > 0
    plain = detached(call)
    with torch.no_grad(), as_given(q):
        once, stats = blockwise_stats.head_stats(
            q.detach(), k.detach(), None if apart else v, plain.sight, call.scale, call.softcap, plain.sinks,
            queries, classes, cross,
        )  # fmt: skip
    if once is None:
        return run(q, k, v, call), stats
    return gated(once, call), stats


def links(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    count: int,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    cross: bool = False,
) -> tuple[Tensor, HeadStats, library.Links]:
    """observe, and with it the `count` largest weights of every row and their keys."""
    check_no_vmap()
    if recorded():
        raise UnsupportedError(
            "links cannot be recorded by torch.jit.trace or make_fx; call them outside, or use weights"
        )
    found = library.Links.empty(q, count)
    learning = learns(q, k, v, call.sight.mask, call.sinks, call.gates)
    fits = 0 < count <= library.MOST_LINKS and len(classes or {}) <= library.MOST_CLASSES
    fits = fits and call.kernel is library and call.why_not_kernel(q) is None
    if fits and not learning and not observed():
        given = call.sight, call.scale, call.softcap, call.sinks, call.gates
        return *library.head_stats(q, k, v, *given, queries, classes or {}, cross, found), found
    found.weight.zero_()
    found.key.fill_(-1)
    keys = min(count, call.sight.size.keys)
    for first in range(0, call.sight.size.queries, by_rows.ROWS):
        rows = range(first, min(first + by_rows.ROWS, call.sight.size.queries))
        with torch.no_grad():
            weight, key = look(q, k, call, rows).float().topk(keys)
        found.weight[:, :, rows.start : rows.stop, :keys] = weight
        found.key[:, :, rows.start : rows.stop, :keys] = key.masked_fill(weight == 0, -1)
    return *observe(q, k, v, call, queries, classes, cross), found
