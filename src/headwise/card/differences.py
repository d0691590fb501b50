"""Two cards side by side, and what the difference means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..terminal import format_bytes, one_line
from .card import Card
from .explain import big, change
from .types import Counts

CONTEXT = 32_768
ROWS = (
    ("layers", "layers"), ("width", "width"), ("query_heads", "query heads"), ("kv_heads", "key/value heads"),
    ("head_dim", "d_k"), ("value_dim", "d_v"), ("latent", "latent per token"), ("window", "window"), ("ffn",
    "feed-forward width"),
    ("experts", "experts"), ("experts_per_token", "experts per token"), ("vocab", "vocabulary"), ("context", "context"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs between two cards: rows of (name, first value, second value), and sentences."""

    names: tuple[str, str]
    rows: tuple[tuple[str, Any, Any], ...]
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(map(one_line, self.sentences))

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "rows": [list(row) for row in self.rows], "sentences": list(self.sentences)}


def diff(a: Any, b: Any, *, context: int = CONTEXT, dtype: str = "bf16", batch: int = 1) -> Diff:
    """Compare two models.

    Args:
        a: The first model: a `Card`, or anything that `read` takes.
        b: The second model.
        context: Tokens at which the KV caches are compared.
        dtype: Data type of the caches.
        batch: Sequences at once.

    Returns:
        Rows of what differs and sentences about it; `print` it, or use `to_json`.

    Example:
        >>> print(headwise.card.diff("llama2-7b", "llama3-8b"))
        From llama2-7b to llama3-8b:
        4 times fewer KV heads, so the cache at 32k falls from 16 to 4 GiB (bf16).
        ...
    """
    from .reading import read

    first, second = (card if isinstance(card, Card) else read(card) for card in (a, b))
    rows = tuple(row for row in _rows(first, second, context, dtype, batch) if row[1] != row[2])
    sentences = tuple(_sentences(first, second, context, dtype, batch))
    if not rows:
        sentences = (f"{first.name} and {second.name} have the same shape.",)
    return Diff((first.name, second.name), rows, sentences)


def _rows(a: Card, b: Card, context: int, dtype: str, batch: int) -> Iterator[tuple[str, Any, Any]]:
    yield "model type", a.model_type, b.model_type
    yield "attention", a.attention.kind, b.attention.kind
    for key, title in ROWS:
        yield title, a.main.numbers.get(key), b.main.numbers.get(key)
    yield "parameters", a.parameters.total, b.parameters.total
    yield "active", a.parameters.active, b.parameters.active
    yield f"cache at {context:,}", a.kv_cache(context, dtype, batch), b.kv_cache(context, dtype, batch)


def times(a: int, b: int, noun: str) -> str:
    """ "4 times fewer KV heads", "1.5 times more layers"."""
    if a == b:
        return f"as many {noun}"
    factor = max(a, b) / min(a, b)
    return f"{factor:.3g} times {'fewer' if b < a else 'more'} {noun}"


def _sentences(a: Card, b: Card, context: int, dtype: str, batch: int) -> Iterator[str]:
    first, second = a.main.numbers, b.main.numbers
    yield f"From {a.name} to {b.name}:"
    latent = "MLA" in (a.attention.kind, b.attention.kind)  # with MLA, KV heads say nothing about the cache
    keys = (("layers", "layers"), ("query_heads", "query heads"), ("kv_heads", "KV heads"))[: 2 if latent else 3]
    changes = {
        key: times(first[key] or 0, second[key] or 0, noun)
        for key, noun in keys
        if first.get(key) and second.get(key) and first[key] != second[key]
    }
    before, after = a.kv_cache(context, dtype, batch), b.kv_cache(context, dtype, batch)
    yield _cache(changes, before, after, context, dtype)
    if a.attention.kind != b.attention.kind:
        yield f"Attention goes from {a.attention.kind} to {b.attention.kind}."
    for key, noun in (("head_dim", "d_k"), ("width", "The width"), ("window", "The window"), ("latent", "The latent")):
        if first.get(key) != second.get(key):
            yield f"{noun} goes from {_number(first.get(key))} to {_number(second.get(key))}."
    yield from _parameters(a, b)


def _number(got: int | None) -> str:
    return "none" if got is None else f"{got:,}"


def _cache(changes: dict[str, str], before: int, after: int, context: int, dtype: str) -> str:
    words = ", ".join(changes.values())
    words = words[:1].upper() + words[1:]
    length = f"{context // 1024}k" if context % 1024 == 0 else f"{context:,}"
    if not before and not after:
        return f"{words + '. ' if words else ''}Neither keeps a cache."
    if before == after:
        return f"{words + '. ' if words else ''}The cache at {length} stays at {format_bytes(before)} ({dtype})."
    falls = after < before
    explains = any(("fewer" in changes.get(key, "")) == falls for key in ("layers", "kv_heads") if key in changes)
    start = f"{words}, so the" if explains else f"{words}. The" if words else "The"
    return f"{start} cache at {length} {'falls' if falls else 'grows'} {change(before, after)} ({dtype})."


def _parameters(a: Card, b: Card) -> Iterator[str]:
    first, second = a.parameters, b.parameters
    if not isinstance(first, Counts) or not isinstance(second, Counts):
        for card in (a, b):
            if not isinstance(card.parameters, Counts):
                yield f"Parameters of {card.name}: {card.parameters}."
        return
    if first.total != second.total:
        yield f"Parameters: {big(first.total)} to {big(second.total)} ({second.total - first.total:+,})."
    if first.idle or second.idle:
        yield f"A token uses {big(first.active)} of them in {a.name} and {big(second.active)} in {b.name}."
