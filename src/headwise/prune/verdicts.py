"""The rules by which reports decide that a smaller cache is not worth its cost."""

from __future__ import annotations

LARGEST_CACHE = 0.9  # share of the full cache
LARGEST_LOSS = 0.02  # increase of the mean loss by merging KV heads, relative to the full model
LARGEST_STREAMING_LOSS = 0.01  # the same by streaming heads
LARGEST_NEEDLE_LOSS = 0.02  # fewer answers than with full attention, as a share of the prompts
LEAST_NEEDLES = 0.1  # accuracy with full attention below which retrieval proves nothing

GROUPING_RULE = (
    f"Called not worth it: a loss of more than {LARGEST_LOSS:.0%} above the full model's on the measuring texts, or a "
    f"cache of more than {LARGEST_CACHE:.2f} of the full one."
)
STREAMING_RULE = (
    f"Called not worth it: a cache of more than {LARGEST_CACHE:.2f} of the full one at the reporting length; a loss of "
    f"more than {LARGEST_STREAMING_LOSS:.0%} above that of full attention; an increase that is not below that of "
    f"random choice (95 % interval); or, where full attention answers at least {LEAST_NEEDLES:.0%} of the needle "
    f"prompts, more than {100 * LARGEST_NEEDLE_LOSS:.0f} points fewer answers."
)


def loss_verdict(change: float | None, largest: float = LARGEST_LOSS) -> str | None:
    """Why a change of the loss is too much, or None."""
    if change is None or change <= largest:
        return None
    return f"the loss rises by {change:.2%}, and {largest:.0%} is the limit"


def cache_verdict(share: float | None) -> str | None:
    """Why a cache is not small enough, or None. share: None where the model has no cache."""
    if share is None:
        return "the model generates nothing, so that it has no KV cache to make smaller"
    if share <= LARGEST_CACHE:
        return None
    return f"the cache is still {share:.2f} of the full one, and {LARGEST_CACHE:.2f} is the limit"


def choice_verdict(ratio_high: float | None) -> str | None:
    """Why a choice is no better than random, or None. ratio_high: the upper end of its increase over random's."""
    if ratio_high is None or ratio_high < 1:
        return None
    return "its loss is not clearly below that of random choice"


def needle_verdict(full: float | None, plan: float | None) -> str | None:
    """Why fewer needles are found, or None."""
    if full is None or plan is None or full < LEAST_NEEDLES or full - plan <= LARGEST_NEEDLE_LOSS:
        return None
    return f"it answers {100 * (full - plan):.0f} points fewer of the needle prompts"
