"""From a text to the tokens of a model: cleaned, encoded, and no longer than the model and the memory allow."""

from __future__ import annotations

import math
import sys
from typing import Any

from ..errors import HeadwiseError
from ..models.structure import head_count, max_positions
from .words import unknown_pieces

LISTED_UNKNOWN = 5  # unknown words that a note names
WEIGHTS_LIMIT = 2**30  # bytes of all heads' matrices, which are in memory at once


def clean_text(text: str) -> str:
    """A text without bytes that are no text, which a shell may pass; an empty one is refused."""
    if not isinstance(text, str):
        raise HeadwiseError(f"a text is a string, got {type(text).__name__}; give one sentence at a time")
    if not text.strip():
        raise HeadwiseError("the text is empty; give a sentence")
    return text.encode("utf-8", "replace").decode()


def encode(
    text: str, name: str, model: Any, tokenizer: Any, truncate: bool | None, *, weights: bool = True
) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer's encoding of a text that fits the model, and notes about it.

    truncate: cut a longer text; None where nobody could ask for that, so that the error does not propose it.
    weights: whether all heads' matrices will be in memory at once, which allows fewer tokens.
    """
    options = {"return_offsets_mapping": bool(tokenizer.is_fast), "return_special_tokens_mask": True, "verbose": False}
    encoded = tokenizer(text, truncation=False, **options)
    count = len(encoded["input_ids"])
    if all(encoded["special_tokens_mask"]):
        raise HeadwiseError(f"the tokenizer of {name} makes no token of {text!r}; give another text")
    limit, reason = token_limit(model, weights)
    if count <= limit:
        return encoded, _unknown_note(text, encoded, tokenizer)
    if not truncate:
        remedy = "shorten it" if truncate is None else "shorten it, or cut it by truncate=True"
        raise HeadwiseError(f"the text has {count:,} tokens, {name} takes {limit:,} ({reason}); {remedy}")
    encoded = tokenizer(text, truncation=True, max_length=limit, **options)
    return encoded, (f"cut to {limit:,} of {count:,} tokens", *_unknown_note(text, encoded, tokenizer))


def _unknown_note(text: str, encoded: Any, tokenizer: Any) -> tuple[str, ...]:
    """A note where the model reads [UNK] instead of what the text has."""
    places = unknown_pieces(text, encoded, tokenizer)
    spans = encoded.get("offset_mapping")
    if not places:
        return ()
    if spans is None:
        return (f"{len(places)} tokens are unknown: the model reads {tokenizer.unk_token} there",)
    names = list(dict.fromkeys(text[slice(*spans[place])].strip() for place in places))
    rest = f" and {len(names) - LISTED_UNKNOWN} more" if len(names) > LISTED_UNKNOWN else ""
    return (f"the model reads {tokenizer.unk_token}, unknown, for {', '.join(names[:LISTED_UNKNOWN])}{rest}",)


def token_limit(model: Any, weights: bool) -> tuple[int, str]:
    """The largest number of tokens that a model has positions and memory for, and what limits it."""
    heads, positions = head_count(model), max_positions(model)
    in_memory = math.isqrt(WEIGHTS_LIMIT // (4 * heads)) if weights else sys.maxsize
    limits = [(in_memory, f"the weights of {heads} heads on more would take over {WEIGHTS_LIMIT >> 30} GiB")]
    if positions is not None:
        limits.append((positions, "its positions"))
    return min(limits)
