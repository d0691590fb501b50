"""Induction and duplicate-token scores: random tokens repeated once, and where the second occurrence attends.

Where every token is drawn at random, nothing but the repetition can be a reason to attend to its first occurrence
(a duplicate-token head) or to the token after it (an induction head).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import HeadwiseError
from ...models.text_inputs import vocabulary_size as embedded_tokens
from ...models.watching.call_reader import Reading
from ...models.watching.eager import EagerReading
from ...models.watching.layers import Layer
from ...resampling import poisson_counts
from ...role_definitions import ARGMAX, CROSS, RoleScore, repetition_scores
from .corpus import Batch, EncodedText, TextEncoder
from .observer import BatchSums, Observer, visible
from .sums import Tally, identity

SEQUENCES, LENGTH = 4, 50  # random tokens in each sequence, before it is repeated


class RepeatedTokens(NamedTuple):
    """Sequences of random tokens, each repeated once."""

    lines: list[EncodedText]
    begin: int  # the position of the first random token
    length: int  # of each half


def repeated_tokens(encoder: TextEncoder, vocabulary: int, seed: int) -> RepeatedTokens:
    """The sequences, with the special tokens that the tokenizer puts around a text."""
    [template] = encoder.lines(["a"])
    begin = next((i for i, special in enumerate(template.special) if not special), 0)
    end = next((i for i, special in enumerate(reversed(template.special)) if not special), 0)
    length = min(LENGTH, (encoder.length - begin - end) // 2)
    if length < 2:
        raise HeadwiseError(
            f"there is room for {encoder.length} tokens; repeated random tokens need at least 4 and the special tokens"
        )
    special = set(getattr(encoder.tokenizer, "all_special_ids", ()))
    choices = np.array([token for token in range(vocabulary) if token not in special])
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(SEQUENCES):
        half = random.choice(choices, length, replace=len(choices) < length).tolist()
        ids = template.ids[:begin] + half + half + (template.ids[-end:] if end else [])
        is_special = [True] * begin + [False] * 2 * length + [True] * end
        lines.append(EncodedText(ids, is_special, list(range(len(ids))), list(range(len(ids))), False))
    return RepeatedTokens(lines, begin, length)


def measure_repetition(observer: Observer, encoder: TextEncoder, vocabulary: int, seed: int, replicates: int) -> Tally:
    """Induction and duplicate scores of every head; the bootstrap resamples tokens here, not texts."""
    repeated = repeated_tokens(encoder, vocabulary, seed)
    counts = np.ones(vocabulary, np.int64)
    source = encoder.tokens(repeated.lines, counts)
    target = encoder.tokens(repeated.lines, counts, shift=True) if encoder.start is not None else None
    identities = np.array([identity(f"{seed}/{i}") for i in range(SEQUENCES)], np.uint64)
    with _observing_repetition(observer, repeated):
        layers = observer.run(Batch(source, target, identities, 0))
    tally = Tally(replicates=replicates)
    for key, sums in layers.items():
        units = np.array([identity(f"{seed}/{key[0]}/{i}") for i in range(len(sums.top))], np.uint64)
        layer = tally.open(key, sums.way, sums.names, sums.top.shape[2] - 1)
        layer.add(sums.top, sums.bottom, poisson_counts(units, replicates))
    tally.count(identities, int(source.real.sum()), 0)
    return tally


@contextmanager
def _observing_repetition(observer: Observer, repeated: RepeatedTokens) -> Iterator[None]:
    """Inside this context the observer measures the repetition scores from each attention call."""

    def measure(layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        way = observer.way(layer, reading)
        if way != CROSS:
            # a decoder beside an encoder begins with one more token
            begin = repeated.begin + (1 if observer.tokens(layer.kind)[0] is observer.target else 0)
            observer.layers[layer.key] = _repetition_sums(reading, begin, repeated.length, way)

    before, observer.measure = observer.measure, measure
    try:
        yield
    finally:
        observer.measure = before


def _repetition_sums(reading: Reading | EagerReading, begin: int, length: int, way: str) -> BatchSums:
    """Each second occurrence of a token is a unit of its own: (B * occurrences, S, H + 1)."""
    rows = range(begin + length, min(begin + 2 * length, reading.q.shape[2]))
    weights = reading.weights(list(rows), None)
    visible_counts = visible(reading, rows, weights).sum(-1).cpu()  # (B, rows)
    a = weights.cpu().double()  # (B, H, rows, Tk); not every device has float64
    scores = repetition_scores()
    first_occurrences = torch.arange(begin, begin + len(rows))
    targets = [_targets(score, first_occurrences, a.shape[-1]) for score in scores]
    strongest = a.argmax(-1)
    parts = [a.gather(-1, target[None, None, :, None].expand(*a.shape[:2], -1, 1))[..., 0] for target in targets]
    parts += [(strongest == target).double() for target in targets]
    top = torch.stack(parts, -1).permute(0, 2, 3, 1).flatten(0, 1)  # (B * rows, S, H)
    equal = (1.0 / visible_counts.clamp(min=1).double()).flatten()[:, None, None].expand(-1, len(parts), 1)
    sums = torch.cat([top, equal], -1).numpy()
    names = [score.name for score in scores]
    return BatchSums((*names, *(name + ARGMAX for name in names)), way, sums, np.ones(sums.shape[:2]))


def _targets(score: RoleScore, first_occurrences: Tensor, keys: int) -> Tensor:
    """The key that counts for each second occurrence, (rows,)."""
    assert score.function is not None
    targets = score.function(first_occurrences)
    if targets.shape != first_occurrences.shape or targets.min() < 0 or targets.max() >= keys:
        raise HeadwiseError(
            f"the function of {score.name!r} must give one position from 0 to {keys - 1} for each of "
            f"{len(first_occurrences)} tokens, got {tuple(targets.shape)} from {targets.min()} to {targets.max()}"
        )
    return targets


def vocabulary_size(model: Any, tokenizer: Any) -> int:
    """How many tokens both the tokenizer and the model know."""
    embedded = embedded_tokens(model)
    return len(tokenizer) if embedded is None else min(len(tokenizer), embedded)
