"""attend, weights, head_stats, explain: attention of all heads, in PyTorch. reference.py is the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

from torch import Tensor

from . import dispatch, repeated_calls, validation
from .backends.native import library
from .backends.protocol import ExtraOutputs, StrongestKeys
from .call import StatsRequest, build_call, build_request
from .head_layout import join_heads, split_heads
from .options import ATTEND, CALL, AttendOptions, CallOptions, KeepFirst, Window, check_options
from .stats import HeadStats, flatten_stats, unflatten_stats
from .torch_internals import register_pytree_node
from .torch_modes import cast_inputs, needs_gradient
from .visibility_options import check_values

# so that torch.export can return statistics from a graph
register_pytree_node(
    HeadStats,
    flatten_stats,
    unflatten_stats,
    serialized_type_name="headwise.HeadStats",
)


# while a model with its own attention code is watched: answers calls of attend, or returns None
observer: Callable[..., Tensor | None] | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    keep_first: KeepFirst = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Scaled dot-product attention of every head: (B, Hq, Tq, D) -> (B, Hq, Tq, Dv).

    Query i is at key position i + offset. A query with no visible keys (a fully masked row) gets zeros.

    Args:
        q: queries (B, Hq, Tq, D).
        k: keys (B, Hkv, Tk, D). Query head i reads KV head i // (Hq // Hkv).
        v: values (B, Hkv, Tk, Dv). Dv may differ from D.
        mask: broadcastable to (B, Hq, Tq, Tk). bool: True means "may attend"; float: added to the scores.
        causal: hide the keys after a query's own position.
        window: (left, right), how many keys before and after its own position a query sees; None for no limit. Or one
            such pair per query head.
        keep_first: the number of first keys of the sequence that stay visible regardless of the window; or one number
            per query head. The first key is the one at `starts`, or else the first that lengths and mask show to any
            query.
        starts: (B,) integers; keys before this position do not exist (left padding).
        lengths: (B,) integers; keys at or past this position do not exist (right padding).
        offset: an int, or (B,) integers; Tk - Tq by default, so that cached decoding needs no offset.
        scale: multiplies q.k; 1 / sqrt(D) by default.
        softcap: c replaces each score s by c * tanh(s / c), before the mask.
        sinks: (Hq,) extra logits in the softmax denominator.
        gates: (Hq,) or (B, Hq), multiply each head's output; differentiable.
        dropout: the probability of dropping a weight. The seed is drawn from PyTorch's generator and alone determines
            which weights are dropped, independent of backend, threads and blocking (`headwise.attention.dropout`).

    Returns:
        (B, Hq, Tq, Dv) in the dtype of q.

    Raises:
        ShapeError: sizes, dtypes or devices do not fit.
        MaskError: mask, window, keep_first, starts, lengths or offset are not as described.

    Example:
        >>> q, k, v = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64)
        >>> headwise.attend(q, k, v, causal=True, window=(3, 0)).shape
        torch.Size([2, 8, 5, 64])
    """
    if observer is not None:
        output = observer(
            q, k, v, mask=mask, causal=causal, window=window, keep_first=keep_first, starts=starts, lengths=lengths,
            offset=offset, scale=scale, softcap=softcap, sinks=sinks, gates=gates, dropout=dropout,
        )  # fmt: skip
        if output is not None:
            return output
    if starts is lengths is offset is sinks is gates is None:
        template = repeated_calls.find_template(
            q, k, v, mask, causal, window, keep_first, scale, softcap, dropout=dropout
        )
        if template is not None:
            return dispatch.attend_with_template(q, k, v, mask, template)
    check_values(v)
    q, k, v = cast_inputs(q, k, v)
    call = build_call(
        q, k, v, mask=mask, causal=causal, window=window, keep_first=keep_first, starts=starts, lengths=lengths,
        offset=offset, scale=scale, softcap=softcap, sinks=sinks, gates=gates, dropout=dropout,
    )  # fmt: skip
    return dispatch.attend(q, k, v, call)


def weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: int | slice | Iterable[int] | None = None,
    heads: int | slice | Iterable[int] | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    keep_first: KeepFirst = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention weights: q (B, Hq, Tq, D), k (B, Hkv, Tk, D) -> (B, heads, rows, Tk).

    A query with no visible keys gets a row of zeros; with sinks a row sums to less than one.

    Args:
        rows: query rows to compute: an int, a slice or a sequence of ints; all by default.
        heads: query heads to compute, in the same forms.

    The other arguments are those of `attend`.

    Returns:
        The weights before dropout; each row sums to one, or to zero.

    Raises:
        ShapeError: sizes, dtypes or devices do not fit.
        MaskError: mask, window, keep_first, starts, lengths or offset are not as described.

    Example:
        >>> headwise.weights(q, k, rows=-1, heads=[0, 3], causal=True)[0, 1, 0]  # head 3, last query: (Tk,)
    """
    q, k = cast_inputs(q, k)
    call = build_call(
        q, k, mask=mask, causal=causal, window=window, keep_first=keep_first, starts=starts, lengths=lengths,
        offset=offset, scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return dispatch.weights(q, k, call, rows, heads)


def head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    cross: bool = False,
    received: bool = False,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    keep_first: KeepFirst = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, HeadStats]:
    """attend's output and exact statistics of every head's weights, in memory that does not grow with Tq x Tk.

    The statistics are of the weights before dropout and carry no gradient; the output does.

    Args:
        queries: (B, Tq) bool, the queries that count in the statistics; all by default.
        classes: {name: (B, Tk) bool}, classes of keys whose share of the weight to measure.
        cross: whether this is cross-attention: positions of queries and keys are not comparable, so there is no
            distance, previous, next or self.
        received: whether to compute `stats.received` (B, Hq, Tk), the weight each key receives. PyTorch computes it in
            blocks of queries, because the kernels know the weights of a row only after they have seen all of its keys.

    The other arguments are those of `attend`.

    Returns:
        The output (B, Hq, Tq, Dv) and a `HeadStats`.

    Raises:
        ShapeError: sizes, dtypes or devices do not fit.
        MaskError: mask, window, keep_first, starts, lengths or offset are not as described.

    Example:
        >>> out, stats = headwise.head_stats(q, k, v, causal=True, classes={"delimiter": is_delimiter})
        >>> stats.entropy, stats.share("delimiter")  # (Hq,) each, the mean over all queries
    """
    if starts is lengths is offset is sinks is gates is None and not (dropout or classes or received):
        template = repeated_calls.find_template(q, k, v, mask, causal, window, keep_first, scale, softcap)
        if template is not None and template.training_call is None:
            if queries is not None:
                build_request(q, validation.sizes(q, k, v), queries)
            return library.run_template_with_stats(template, q, k, v, mask, queries, cross)
    check_values(v)
    q, k, v = cast_inputs(q, k, v)
    call = build_call(
        q, k, v, mask=mask, causal=causal, window=window, keep_first=keep_first, starts=starts, lengths=lengths,
        offset=offset, scale=scale, softcap=softcap, sinks=sinks, gates=gates, dropout=dropout,
    )  # fmt: skip
    return dispatch.head_stats(q, k, v, call, build_request(q, call.size, queries, classes, cross, received))


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttendOptions[Tensor]]) -> str:
    """Which backend attend would use for these arguments, and why not a faster one.

    Takes the arguments of `attend` and computes nothing.

    Args:
        q: queries, as in `attend`.
        k: keys.
        v: values.
        options: the other arguments of `attend`.

    Returns:
        One line: the backend, and the reason.

    Raises:
        ShapeError: sizes, dtypes or devices do not fit.
        MaskError: mask, window, keep_first, starts, lengths or offset are not as described.

    Example:
        >>> headwise.explain(q, k, v, causal=True)
        'native: one pass in AVX2 (this build has AVX-512, AVX2, plain C)'
    """
    check_options(options, ATTEND)
    check_values(v)
    q, k, v = cast_inputs(q, k, v)
    return dispatch.explain(q, build_call(q, k, v, **options))


# ---- for the rest of the package


def attend_side_by_side(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    keep_first: KeepFirst = 0,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """attend on projections with their heads side by side: q (B, Tq, Hq * D), k and v (B, Tk, Hkv * D).

    The output is (B, Tq, Hq * D). The native kernel reads this layout directly, without splitting and joining heads.
    """
    template = repeated_calls.find_template(q, k, v, None, causal, window, keep_first, None, softcap, head_dim, dropout)
    if template is not None:
        return dispatch.attend_with_template(q, k, v, None, template)
    q, k, v = split_heads(q, head_dim), split_heads(k, head_dim), split_heads(v, head_dim)
    visible: Any = {"causal": causal, "window": window, "keep_first": keep_first}
    return join_heads(attend(q, k, v, softcap=softcap, dropout=dropout, **visible))


def attend_with_slopes(
    q: Tensor, k: Tensor, v: Tensor, *, slopes: Tensor | None = None, **options: Unpack[AttendOptions[Tensor]]
) -> Tensor:
    """attend with ALiBi's slopes (Hq,)."""
    if slopes is None:
        return attend(q, k, v, **options)
    q, k, v = cast_inputs(q, k, v)
    return dispatch.attend(q, k, v, build_call(q, k, v, slopes=slopes, **options))


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[CallOptions[Tensor]]) -> tuple[Tensor, Tensor]:
    """attend's output and each row's log-sum-exp (B, Hq, Tq), sinks included; neither has a gradient."""
    check_options(options, CALL)
    q, k, v = cast_inputs(q, k, v)
    return dispatch.attend_with_lse(q, k, v, build_call(q, k, v, **options))


def weights_with_slopes(
    q: Tensor, k: Tensor, rows: Any = None, heads: Any = None, **options: Unpack[CallOptions[Tensor]]
) -> Tensor:
    """weights with ALiBi's slopes (Hq,); gates and dropout have no effect."""
    q, k = cast_inputs(q, k)
    return dispatch.weights(q, k, build_call(q, k, **options), rows, heads)


def head_stats_with_slopes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    cross: bool = False,
    received: bool = False,
    slopes: Tensor | None = None,
    **options: Unpack[AttendOptions[Tensor]],
) -> tuple[Tensor, HeadStats]:
    """head_stats with ALiBi's slopes (Hq,)."""
    if slopes is None:
        return head_stats(q, k, v, queries=queries, classes=classes, cross=cross, received=received, **options)
    q, k, v = cast_inputs(q, k, v)
    call = build_call(q, k, v, slopes=slopes, **options)
    return dispatch.head_stats(q, k, v, call, build_request(q, call.size, queries, classes, cross, received))


def head_stats_without_values(
    q: Tensor,
    k: Tensor,
    *,
    queries: Tensor | None = None,
    classes: Mapping[str, Tensor] | None = None,
    cross: bool = False,
    **options: Unpack[CallOptions[Tensor]],
) -> HeadStats:
    """head_stats without values and output: the statistics of weights that are applied elsewhere."""
    check_options(options, CALL)
    q, k = cast_inputs(q, k)
    call = build_call(q, k, k[..., :1], **options)  # one column of the keys in place of values
    return dispatch.stats_without_values(q, k, call, build_request(q, call.size, queries, classes, cross))


def strongest_keys(q: Tensor, k: Tensor, count: int, **options: Unpack[CallOptions[Tensor]]) -> StrongestKeys:
    """The `count` strongest keys of every query and their weights, (B, Hq, Tq, count), in descending order.

    Fewer if there are fewer keys; a query that sees fewer keys also gets hidden keys, with weight 0. Computed in one
    native pass if possible, without storing Tq x Tk weights.
    """
    check_options(options, CALL)
    q, k = cast_inputs(q, k)
    return dispatch.strongest_keys(q, k, build_call(q, k, k[..., :1], **options), count)


def is_one_pass(
    q: Tensor, k: Tensor, v: Tensor, *, gradient: bool = False, **options: Unpack[CallOptions[Tensor]]
) -> bool:
    """Whether head_stats computes output and statistics in one pass of a kernel; gradient: also where one is needed."""
    check_options(options, CALL)
    q, k, v = cast_inputs(q, k, v)
    call = build_call(q, k, v, **options)
    if dispatch.why_not_one_pass(q, call, ExtraOutputs(stats=StatsRequest())) is not None:
        return False
    return gradient or not needs_gradient(q, k, v, call.sinks, call.gates, call.visibility.mask)
