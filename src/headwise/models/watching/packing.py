"""Several sequences in one row: where each has its queries and its keys, and statistics of each alone.

Sequences are packed by position_ids that start again, by cumulative lengths (`cu_seq_lens_q`, as flash attention and
continuous batching take them), and in the pages of a paged cache, which adds the cached keys inside of the attention
function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.stats import HeadStats
from ...errors import UnsupportedError
from . import lazy_masks
from .call_reader import Given, Reading
from .lazy_masks import Recipe


class Sequence(NamedTuple):
    """One of the sequences of a call."""

    row: int  # of the batch
    queries: slice
    keys: slice
    whole: bool  # whether its first token is among the keys

    @property
    def offset(self) -> int:
        """At which of its keys its first query stands."""
        return (self.keys.stop - self.keys.start) - (self.queries.stop - self.queries.start)


@dataclass(frozen=True)
class PackedReading(Reading):
    """A call on packed sequences. Statistics have one row per sequence instead of one per row of the batch."""

    sequences: tuple[Sequence, ...] = ()

    def first_keys(self) -> Tensor:
        """(B, Tk) bool: each sequence's first token."""
        first = torch.zeros(self.k.shape[0], self.k.shape[2], dtype=torch.bool, device=self.k.device)
        for one in self.sequences:
            first[one.row, one.keys.start] = one.whole
        return first

    def alone(self, one: Sequence) -> Reading:
        """One sequence as a call of its own."""
        row, how = slice(one.row, one.row + 1), dict(self.how, offset=one.offset)
        if self.recipe is not None:
            how["mask"] = self.recipe.rows(one.queries.start, one.queries.stop)
        mask = how["mask"]
        if mask is not None:
            mask = mask if mask.shape[0] == 1 else mask[row]
            mask = mask if mask.shape[2] == 1 or self.recipe is not None else mask[:, :, one.queries]
            how["mask"] = mask[..., one.keys]
        q, k, v = self.q[row, :, one.queries], self.k[row, :, one.keys], self.v[row, :, one.keys]
        return Reading(q, k, v, how, self.comparable)

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        parts = [self.alone(one).stats(*_of(one, real, classes)) for one in self.sequences]
        return _side_by_side(parts)

    def observe(
        self, real: Tensor | None, classes: dict[str, Tensor], dropout: float = 0.0
    ) -> tuple[Tensor, HeadStats]:
        out = self.q.new_zeros(*self.q.shape[:3], self.v.shape[3])
        parts = []
        for one in self.sequences:
            own, stats = self.alone(one).observe(*_of(one, real, classes), dropout)
            out[one.row, :, one.queries] = own[0]
            parts.append(stats)
        return out, _side_by_side(parts)


def _of(one: Sequence, real: Tensor | None, classes: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    row = slice(one.row, one.row + 1)
    return None if real is None else real[row, one.queries], {name: x[row, one.keys] for name, x in classes.items()}


def _side_by_side(parts: list[HeadStats]) -> HeadStats:
    names = [name for name in parts[0] if all(name in part for part in parts)]
    sums = {name: torch.cat([part.sums[name] for part in parts]) for name in names}
    return HeadStats(sums, torch.cat([part.count for part in parts]))


def packed(reading: Reading, given: Given, recipe: Recipe | None) -> Reading:
    """The same reading, seen as the sequences that are packed in it, where there are any."""
    sequences = _by_lengths(given) or _by_numbers(given, reading, recipe)
    if not sequences:
        return reading
    if given.mask is None:
        reading = replace(reading, k=given.key, v=given.value, how=_apart(given, reading, sequences, recipe))
    return PackedReading(**{**vars(reading), "comparable": True}, sequences=tuple(sequences))


def _by_lengths(given: Given) -> list[Sequence]:
    """From the cumulative lengths that the attention function is given."""
    ends_q, ends_k = (given.more.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    if not isinstance(ends_q, Tensor) or not isinstance(ends_k, Tensor):
        return []
    q, k, positions = ends_q.tolist(), ends_k.tolist(), given.more.get("position_ids")
    fits = (
        given.query.shape[0] == 1 and len(q) == len(k) and q[-1] <= given.query.shape[2] and k[-1] <= given.key.shape[2]
    )
    if not fits:
        raise UnsupportedError(
            f"{type(given.module).__name__} is given lengths that end at {q[-1]} and {k[-1]}, with queries "
            f"{tuple(given.query.shape)} and keys {tuple(given.key.shape)}; what is packed there is not known"
        )
    sequences = []
    for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False):
        if b > a:
            known = isinstance(positions, Tensor) and positions.dim() == 2
            past = int(positions[0, a]) if known and isinstance(positions, Tensor) else d - c - (b - a)
            sequences.append(Sequence(0, slice(a, b), slice(c, d), whole=d - c >= past + b - a))
    return sequences


def _by_numbers(given: Given, reading: Reading, recipe: Recipe | None) -> list[Sequence]:
    """From the number of the sequence that each token belongs to."""
    numbers = None if recipe is None else recipe.sequence_numbers
    if numbers is None:
        numbers = _restarts(given, reading)
    if numbers is None or numbers.shape[1] != given.query.shape[2] or numbers.shape[1] != given.key.shape[2]:
        return []
    sequences = []
    for row, own in enumerate(numbers.expand(given.query.shape[0], -1).tolist()):
        starts = [i for i in range(len(own)) if i == 0 or own[i] != own[i - 1]]
        for a, b in zip(starts, [*starts[1:], len(own)], strict=True):
            sequences.append(Sequence(row, slice(a, b), slice(a, b), whole=True))
    return sequences if len(sequences) > given.query.shape[0] else []


def _restarts(given: Given, reading: Reading) -> Tensor | None:
    """The same from position_ids, where no query looks from one sequence into another."""
    positions = given.more.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    numbers = (positions.diff(dim=-1) != 1).cumsum(-1)
    if not bool(numbers[:, -1].any()):
        return None
    numbers = torch.nn.functional.pad(numbers, (1, 0))
    mask = reading.how["mask"]
    if mask is None or reading.recipe is not None:
        # sdpa and eager hide nothing that a mask does not hide; flash attention looks at the positions itself
        return None if given.implementation in ("sdpa", "eager", "headwise") else numbers
    shown = mask if mask.dtype == torch.bool else mask > -torch.inf
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return None if shown.shape[-2:] != same.shape[-2:] or bool((shown & ~same).any()) else numbers


def _apart(given: Given, reading: Reading, sequences: list[Sequence], recipe: Recipe | None) -> dict[str, Any]:
    """What the function itself hides: other sequences, and what comes later where it is causal."""
    (batch, _, queries, _), keys = given.query.shape, given.key.shape[2]
    if batch * queries * keys > lazy_masks.LARGE:
        raise UnsupportedError(
            f"{type(given.module).__name__} attends on {len(sequences)} packed sequences of {queries} tokens in all "
            "without a mask; watch shorter batches of them"
        )
    if recipe is not None and recipe.sequence_numbers is not None and (recipe.queries, recipe.keys) == (queries, keys):
        return dict(reading.how, mask=recipe.rows(0, queries), causal=False, window=None)
    said = given.more.get("is_causal")
    causal = bool(getattr(given.module, "is_causal", True) if said is None else said)
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool, device=given.query.device)
    for one in sequences:
        block = mask[one.row, 0, one.queries, one.keys]
        block.fill_(True)
        if causal:
            block.copy_(block.tril(one.offset))
    return dict(reading.how, mask=mask, causal=False, window=None)


# paged caches

PAGES = ("cache", "read_index", "write_index", "block_table", "k_cache", "v_cache")


def is_paged(given: Given) -> bool:
    return hasattr(given.more.get("cache"), "layer_to_allocator")


@contextmanager
def pages_read(given: Given) -> Iterator[list[Given]]:
    """Inside, the attention function is called; afterwards the list has the call with the keys that it read."""
    cache, read = given.more["cache"], []
    if given.more.get("block_table") is not None:
        raise UnsupportedError(
            f"{type(given.module).__name__} reads its keys from the pages of a cache inside of its attention kernel; "
            'they cannot be watched there, use attn_implementation="sdpa"'
        )
    plain = cache.update

    def update(*args: Any, **kwargs: Any) -> Any:
        key, value = plain(*args, **kwargs)
        lengths = kwargs.get("kwargs") or (args[3] if len(args) > 3 else {})
        more = {name: x for name, x in {**given.more, **lengths}.items() if name not in PAGES}
        read.append(given._replace(key=key, value=value, more=more))
        return key, value

    own = vars(cache).get("update")
    cache.update = update
    try:
        yield read
    finally:
        if own is None:
            del cache.update
        else:
            cache.update = own
    if not read:
        raise UnsupportedError(
            f"{type(given.module).__name__} was given a paged cache, and its attention function "
            f"({given.implementation}) did not read it; its statistics would be wrong"
        )
