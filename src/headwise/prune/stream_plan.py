"""stream_plan: from what KV heads need of the context to a StreamPlan, the KV heads that get a short cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from ..errors import HeadwiseError
from ..json_documents import brief
from ..plans import StreamPlan, is_share
from ..resampling import ranks
from .context_need_result import GRADIENT, ContextNeed
from .loss_bound import largest_plan
from .sequence_losses import KVHead, plan_of

CONTEXT = 4096  # tokens
CHANGE, LOSS_CHANGE = "change of output through W_O", "change of the loss"


def stream_plan(
    need: ContextNeed | Sequence[ContextNeed],
    *,
    window: int = 256,
    share: float | None = None,
    cache_bytes: int | None = None,
    context: int = CONTEXT,
    max_loss: float | None = None,
    model: nn.Module | None = None,
    batches: Any = None,
) -> StreamPlan:
    """Choose the KV heads that stream, those with the smallest change first.

    Heads are ranked by the change of the loss if `need` has it for every head, else by the change of the output through
    W_O. The lost attention weight is a worse criterion, because it ignores the values that the weight is on. Layers
    with their own sliding window are not changed.

    With max_loss the model runs with plans of several sizes, to find the largest whose loss stays within the bound.
    Streaming heads change the inputs of later layers. So half of the heads that fit are chosen, the change of the other
    heads is measured again while these stream, and the search continues, three times in total. For 90 KV heads this
    takes about 20 passes over the batches. The loss is the mean over the sequences, of labels or of next tokens.

    Args:
        need: the result of `context_need`. With several results, such as one for texts and one for needle prompts, each
            ranks the heads by its own change, and the mean of a head's ranks decides.
        window: one of the windows that was measured.
        share: the share of the KV heads that stream, in layers without a sliding window, from 0 to 1; 0.5 if neither
            share nor cache_bytes is given. Rounded to the nearest number of heads.
        cache_bytes: stream as few KV heads as needed to reduce the cache of one sequence to this many bytes.
        context: the sequence length in tokens at which cache_bytes applies.
        max_loss: stream as many KV heads as possible while the loss increases by at most this share: 0.01 for +1 %.
        model, batches: needed for max_loss, which is measured on them; batches as in `context_need`. Do not use the
            batches on which you report the plan's quality.

    Returns:
        A `StreamPlan`, which can be printed, compared, saved and edited.

    Raises:
        HeadwiseError: for a window that was not measured, an invalid share or bound, a budget that cannot be reached,
            or a bound on the loss without a model and batches.

    Example:
        >>> plan = headwise.stream_plan(need, window=256, share=0.5)
        >>> plan.cache_ratio(4096)
        0.53
        >>> plan = headwise.stream_plan(need, window=256, max_loss=0.01, model=model, batches=batches)
    """
    needs = _check_needs(need, window)
    need = needs[0]
    if sum(choice is not None for choice in (share, cache_bytes, max_loss)) > 1:
        raise HeadwiseError("give one of share, cache_bytes and max_loss")
    if max_loss is None and (model is not None or batches is not None):
        raise HeadwiseError("model and batches are for max_loss, which is not given")
    order = _by_rank(needs, window)
    if max_loss is not None:
        if isinstance(max_loss, bool) or not isinstance(max_loss, (int, float)) or not 0 <= max_loss < math.inf:
            raise HeadwiseError(f"max_loss must be a number of at least 0, such as 0.01 for 1 %, got {brief(max_loss)}")
        if model is None or batches is None:
            raise HeadwiseError("max_loss needs model= and batches=, on which the loss is measured")
        return largest_plan(need, window, order, float(max_loss), model, batches)
    if cache_bytes is None:
        share = 0.5 if share is None else share
        if not is_share(share):
            raise HeadwiseError(f"share must be a number from 0 to 1, got {brief(share)}")
        heads = order[: round(share * len(order))]
    else:
        heads = _within_budget(need, window, order, cache_bytes, context)
    return replace(_plan(need, window, heads), score=" and ".join(dict.fromkeys(map(_score_name, needs))))


def _check_needs(need: Any, window: Any) -> list[ContextNeed]:
    needs = list(need) if isinstance(need, (list, tuple)) else [need]
    if not needs or not all(isinstance(each, ContextNeed) for each in needs):
        raise HeadwiseError(f"a ContextNeed is expected, as headwise.context_need gives it, got {brief(need)}")
    for name in ("layers", "keep_first"):
        if any(getattr(each, name) != getattr(needs[0], name) for each in needs):
            raise HeadwiseError(f"these needs are of different models or settings: their {name} differ")
    for each in needs:
        if window not in each.windows:
            measured = ", ".join(map(str, each.windows))
            raise HeadwiseError(f"window {brief(window)} was not measured; {measured} were")
    return needs


def _by_rank(needs: list[ContextNeed], window: int) -> list[KVHead]:
    """The KV heads that may stream, the smallest mean rank first; those of equal rank in the model's order."""
    changes = [_changes(need, window) for need in needs]
    mean_ranks = np.mean([ranks(np.array(list(change.values()))) for change in changes], axis=0)
    by_head = dict(zip(changes[0], mean_ranks, strict=True))
    return sorted(by_head, key=by_head.__getitem__)


def _changes(need: ContextNeed, window: int) -> dict[KVHead, float]:
    """For each KV head that may stream: the change of the loss if it is known for all heads, else of the output."""
    fixed = {layer[:2] for layer in need.layers if layer.window is not None}
    rows = [row for row in need.rows() if row.window == window and row[:2] not in fixed]
    by_loss = _has_loss_changes(need)
    return {row[:3]: row.loss_change if by_loss else row.change for row in rows}


def _has_loss_changes(need: ContextNeed) -> bool:
    streamable = [sums for layer, sums in zip(need.layers, need.sums, strict=True) if layer.window is None]
    return need.losses is not None and all(np.isfinite(sums.loss).all() for sums in streamable if sums.loss is not None)


def _score_name(need: ContextNeed) -> str:
    if not _has_loss_changes(need):
        return CHANGE
    return f"{LOSS_CHANGE}, by gradient" if need.loss_method == GRADIENT else LOSS_CHANGE


def _plan(need: ContextNeed, window: int, heads: list[KVHead]) -> StreamPlan:
    return plan_of(heads, need.layers, window, need.keep_first)


def _within_budget(need: ContextNeed, window: int, order: list[KVHead], budget: Any, context: Any) -> list[KVHead]:
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
    return order[:low]
