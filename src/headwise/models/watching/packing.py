"""Packed sequences: where each sequence of a row has its queries and keys, and statistics of each by itself.

Sequences are packed by position_ids that start again, by cumulative lengths (`cu_seq_lens_q`, as flash attention and
continuous batching take them), and in the pages of a paged cache, which adds the cached keys inside the attention
function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.stats import HeadStats, concatenate
from ...errors import UnsupportedError
from . import lazy_masks
from .call_reader import ModelCall, Reading
from .lazy_masks import MaskRecipe


class PackedSequence(NamedTuple):
    """One of the sequences of a call."""

    row: int  # of the batch
    queries: slice
    keys: slice
    whole: bool  # whether its first token is among the keys

    @property
    def offset(self) -> int:
        """Which of its keys is at the position of its first query."""
        return (self.keys.stop - self.keys.start) - (self.queries.stop - self.queries.start)


@dataclass(frozen=True)
class PackedReading(Reading):
    """A call on packed sequences. Statistics have one row per sequence instead of one per row of the batch."""

    sequences: tuple[PackedSequence, ...] = ()

    def first_keys(self) -> Tensor:
        """(B, Tk) bool: each sequence's first token."""
        first = torch.zeros(self.k.shape[0], self.k.shape[2], dtype=torch.bool, device=self.k.device)
        for sequence in self.sequences:
            first[sequence.row, sequence.keys.start] = sequence.whole
        return first

    def single(self, sequence: PackedSequence) -> Reading:
        """One sequence as a separate call."""
        row, options = slice(sequence.row, sequence.row + 1), dict(self.options, offset=sequence.offset)
        queries, keys = sequence.queries, sequence.keys
        if self.recipe is not None:
            options["mask"] = self.recipe.rows(queries.start, queries.stop)
        mask = options["mask"]
        if mask is not None:
            mask = mask if mask.shape[0] == 1 else mask[row]
            mask = mask if mask.shape[2] == 1 or self.recipe is not None else mask[:, :, queries]
            options["mask"] = mask[..., keys]
        return Reading(self.q[row, :, queries], self.k[row, :, keys], self.v[row, :, keys], options, self.comparable)

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        parts = [self.single(sequence).stats(*_arguments_of(sequence, real, classes)) for sequence in self.sequences]
        return concatenate(parts)

    def observe(
        self, real: Tensor | None, classes: dict[str, Tensor], dropout: float = 0.0
    ) -> tuple[Tensor, HeadStats]:
        output = self.q.new_zeros(*self.q.shape[:3], self.v.shape[3])
        parts = []
        for sequence in self.sequences:
            out, stats = self.single(sequence).observe(*_arguments_of(sequence, real, classes), dropout)
            output[sequence.row, :, sequence.queries] = out[0]
            parts.append(stats)
        return output, concatenate(parts)


def _arguments_of(
    sequence: PackedSequence, real: Tensor | None, classes: dict[str, Tensor]
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The real queries and the classes of keys of one sequence."""
    row = slice(sequence.row, sequence.row + 1)
    own_classes = {name: x[row, sequence.keys] for name, x in classes.items()}
    return None if real is None else real[row, sequence.queries], own_classes


def split_packed(reading: Reading, call: ModelCall, recipe: MaskRecipe | None) -> Reading:
    """The same reading, as the sequences that are packed in it, where there are any."""
    sequences = _from_lengths(call) or _from_numbers(call, reading, recipe)
    if not sequences:
        return reading
    if call.mask is None:
        reading = replace(
            reading, k=call.key, v=call.value, options=_separate_sequences(call, reading, sequences, recipe)
        )
    return PackedReading(**{**vars(reading), "comparable": True}, sequences=tuple(sequences))


def _from_lengths(call: ModelCall) -> list[PackedSequence]:
    """The sequences by the cumulative lengths that are passed to the attention function."""
    ends_q, ends_k = (call.options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    if not isinstance(ends_q, Tensor) or not isinstance(ends_k, Tensor):
        return []
    q, k, positions = ends_q.tolist(), ends_k.tolist(), call.options.get("position_ids")
    fits = call.query.shape[0] == 1 and len(q) == len(k) and q[-1] <= call.query.shape[2] and k[-1] <= call.key.shape[2]
    if not fits:
        raise UnsupportedError(
            f"{type(call.module).__name__} is given lengths that end at {q[-1]} and {k[-1]}, with queries "
            f"{tuple(call.query.shape)} and keys {tuple(call.key.shape)}; what is packed there is not known"
        )
    sequences = []
    for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False):
        if b > a:
            has_positions = isinstance(positions, Tensor) and positions.dim() == 2
            past = int(positions[0, a]) if has_positions and isinstance(positions, Tensor) else d - c - (b - a)
            sequences.append(PackedSequence(0, slice(a, b), slice(c, d), whole=d - c >= past + b - a))
    return sequences


def _from_numbers(call: ModelCall, reading: Reading, recipe: MaskRecipe | None) -> list[PackedSequence]:
    """The sequences by the number of the sequence that each token belongs to."""
    numbers = None if recipe is None else recipe.sequence_numbers
    if numbers is None:
        numbers = _numbers_from_positions(call, reading)
    if numbers is None or numbers.shape[1] != call.query.shape[2] or numbers.shape[1] != call.key.shape[2]:
        return []
    sequences = []
    for row, row_numbers in enumerate(numbers.expand(call.query.shape[0], -1).tolist()):
        starts = [i for i in range(len(row_numbers)) if i == 0 or row_numbers[i] != row_numbers[i - 1]]
        for a, b in zip(starts, [*starts[1:], len(row_numbers)], strict=True):
            sequences.append(PackedSequence(row, slice(a, b), slice(a, b), whole=True))
    return sequences if len(sequences) > call.query.shape[0] else []


def _numbers_from_positions(call: ModelCall, reading: Reading) -> Tensor | None:
    """(B, T): sequence numbers from position_ids that start again, unless queries see keys of another sequence."""
    positions = call.options.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    numbers = (positions.diff(dim=-1) != 1).cumsum(-1)
    if not bool(numbers[:, -1].any()):
        return None
    numbers = torch.nn.functional.pad(numbers, (1, 0))
    mask = reading.options["mask"]
    if mask is None or reading.recipe is not None:
        # sdpa and eager hide only what a mask hides; flash attention reads the positions itself
        return None if call.implementation in ("sdpa", "eager", "headwise") else numbers
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    same_sequence = numbers[:, None, :, None] == numbers[:, None, None, :]
    return None if visible.shape[-2:] != same_sequence.shape[-2:] or bool((visible & ~same_sequence).any()) else numbers


def _separate_sequences(
    call: ModelCall, reading: Reading, sequences: list[PackedSequence], recipe: MaskRecipe | None
) -> dict[str, Any]:
    """Options with a mask of what the attention function itself hides: other sequences, and later keys if causal."""
    (batch, _, queries, _), keys = call.query.shape, call.key.shape[2]
    if batch * queries * keys > lazy_masks.LARGE:
        raise UnsupportedError(
            f"{type(call.module).__name__} attends on {len(sequences)} packed sequences of {queries} tokens in all "
            "without a mask; watch shorter batches of them"
        )
    if recipe is not None and recipe.sequence_numbers is not None and (recipe.queries, recipe.keys) == (queries, keys):
        return dict(reading.options, mask=recipe.rows(0, queries), causal=False, window=None)
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool, device=call.query.device)
    for sequence in sequences:
        block = mask[sequence.row, 0, sequence.queries, sequence.keys]
        block.fill_(True)
        if call.causal_module:
            block.copy_(block.tril(sequence.offset))
    return dict(reading.options, mask=mask, causal=False, window=None)


# paged caches

PAGE_OPTIONS = ("cache", "read_index", "write_index", "block_table", "k_cache", "v_cache")


def is_paged(call: ModelCall) -> bool:
    """Whether the attention function itself reads keys from a paged cache."""
    return hasattr(call.options.get("cache"), "layer_to_allocator")


@contextmanager
def record_pages(call: ModelCall) -> Iterator[list[ModelCall]]:
    """Inside, the attention function is called; afterwards the list has the call with the keys that it read."""
    cache, calls = call.options["cache"], []
    if call.options.get("block_table") is not None:
        raise UnsupportedError(
            f"{type(call.module).__name__} reads its keys from the pages of a cache inside of its attention kernel; "
            'they cannot be watched there, use attn_implementation="sdpa"'
        )
    original_update = cache.update

    def update(*args: Any, **kwargs: Any) -> Any:
        key, value = original_update(*args, **kwargs)
        lengths = kwargs.get("kwargs") or (args[3] if len(args) > 3 else {})
        options = {name: x for name, x in {**call.options, **lengths}.items() if name not in PAGE_OPTIONS}
        calls.append(call._replace(key=key, value=value, options=options))
        return key, value

    instance_update = vars(cache).get("update")
    cache.update = update
    try:
        yield calls
    finally:
        if instance_update is None:
            del cache.update
        else:
            cache.update = instance_update
    if not calls:
        raise UnsupportedError(
            f"{type(call.module).__name__} was given a paged cache, and its attention function "
            f"({call.implementation}) did not read it; its statistics would be wrong"
        )
