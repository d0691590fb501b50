"""stream_plan: from what KV heads need of the context to a StreamPlan, the KV heads that get a short cache."""

from __future__ import annotations

from typing import Any

from ..errors import HeadwiseError
from ..json_documents import brief
from ..plans import StreamPlan, by_layer_key, is_share
from .context_need_result import ContextNeed

CONTEXT = 4096  # tokens
KVHead = tuple[str, int, int]  # kind, layer, KV head


def stream_plan(
    need: ContextNeed,
    *,
    window: int = 256,
    share: float | None = None,
    cache_bytes: int | None = None,
    context: int = CONTEXT,
) -> StreamPlan:
    """The KV heads that stream, those of the smallest change of output through W_O first.

    The weight that a head loses is a worse guide: it says nothing of the values that it is lost on. Layers with a
    sliding window of their own stay as they are.

    Args:
        need: what `context_need` measured.
        window: one of the windows that it measured.
        share: the share of the KV heads that stream, of layers without a sliding window, from 0 to 1; 0.5 where
            neither it nor cache_bytes is given. Rounded to the nearest number of heads.
        cache_bytes: as few KV heads stream as bring the cache of one sequence down to so many bytes.
        context: the length in tokens at which cache_bytes counts.

    Returns:
        A `StreamPlan`; it prints, diffs, saves, and can be edited.

    Raises:
        HeadwiseError: for a window that was not measured, a share that is none, or a budget that is out of reach.

    Example:
        >>> plan = headwise.stream_plan(need, window=256, share=0.5)
        >>> plan.cache_ratio(4096)
        0.53
    """
    if not isinstance(need, ContextNeed):
        raise HeadwiseError(f"a ContextNeed is expected, as headwise.context_need gives it, got {brief(need)}")
    if window not in need.windows:
        measured = ", ".join(map(str, need.windows))
        raise HeadwiseError(f"window {brief(window)} was not measured; {measured} were")
    if share is not None and cache_bytes is not None:
        raise HeadwiseError("give a share or cache_bytes, not both")
    order = _by_change(need, window)
    if cache_bytes is None:
        share = 0.5 if share is None else share
        if not is_share(share):
            raise HeadwiseError(f"share must be a number from 0 to 1, got {brief(share)}")
        return _plan(need, window, order[: round(share * len(order))])
    return _within_budget(need, window, order, cache_bytes, context)


def _by_change(need: ContextNeed, window: int) -> list[KVHead]:
    """The KV heads that may stream, the smallest change first; those of equal change in the model's order."""
    fixed = {layer[:2] for layer in need.layers if layer.window is not None}
    rows = [row for row in need.rows() if row.window == window and row[:2] not in fixed]
    return [row[:3] for row in sorted(rows, key=lambda row: row.change)]


def _plan(need: ContextNeed, window: int, heads: list[KVHead]) -> StreamPlan:
    streaming: dict[tuple[str, int], list[int]] = {layer[:2]: [] for layer in need.layers}
    for kind, layer, head in heads:
        streaming[kind, layer].append(head)
    return StreamPlan(
        by_layer_key(streaming, need.layers), need.layers, window, need.keep_first, "change of output through W_O"
    )


def _within_budget(need: ContextNeed, window: int, order: list[KVHead], budget: Any, context: Any) -> StreamPlan:
    for name, value in (("cache_bytes", budget), ("context", context)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HeadwiseError(f"{name} must be a whole number of at least 1, got {brief(value)}")
    smallest = _plan(need, window, order)
    if smallest.cache_bytes(context) > budget:
        raise HeadwiseError(
            f"a cache of {budget} bytes at {context} tokens is out of reach: with all heads streaming it takes "
            f"{smallest.cache_bytes(context)}; choose a shorter window or a larger budget"
        )
    low, high = 0, len(order)  # the smallest number of heads that is enough: more heads never take more bytes
    while low < high:
        middle = (low + high) // 2
        if _plan(need, window, order[:middle]).cache_bytes(context) <= budget:
            high = middle
        else:
            low = middle + 1
    return _plan(need, window, order[:low])
