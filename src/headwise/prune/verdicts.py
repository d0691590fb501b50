"""When a smaller cache is not worth its cost: the rules that the reports apply and state, all in one place."""

from __future__ import annotations

LARGEST_LOSS = 0.02  # increase of the mean loss, relative to the full model
LARGEST_CACHE = 0.9  # share of the full cache


def loss_verdict(change: float | None) -> str | None:
    """Why a change of the loss is too much, or None."""
    if change is None or change <= LARGEST_LOSS:
        return None
    return f"the loss rises by {change:.1%}, and {LARGEST_LOSS:.0%} is the limit"


def cache_verdict(share: float | None) -> str | None:
    """Why a cache is not small enough, or None. share: None where the model has no cache."""
    if share is None:
        return "the model generates nothing, so that it has no KV cache to make smaller"
    if share <= LARGEST_CACHE:
        return None
    return f"the cache is still {share:.2f} of the full one, and {LARGEST_CACHE:.2f} is the limit"


GROUPING_RULE = (
    f"Called not worth it: a loss of more than {LARGEST_LOSS:.0%} above the full model's on the measuring texts, or a "
    f"cache of more than {LARGEST_CACHE:.2f} of the full one."
)
