"""Random tokens repeated once: who finds the same token's place before, and who the token after it.

Where every token is drawn at random, nothing but the repetition can be a reason to look there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import HeadwiseError
from ...models.watching.call_reader import Reading
from ...models.watching.eager import EagerReading
from ...models.watching.layers import Layer
from ...resampling import poisson_counts
from .corpus import Batch, Encoder, Line
from .observer import Found, Observer, visible
from .roles import ARGMAX, CROSS, PROBES
from .sums import Tally, identity

SEQUENCES, LENGTH = 4, 50
NAMES = (*PROBES, *(name + ARGMAX for name in PROBES))


def lines(encoder: Encoder, vocabulary: int, seed: int) -> tuple[list[Line], int, int]:
    """The sequences, with what the tokenizer puts around a text; where they begin and how long each half is."""
    [around] = encoder.lines(["a"])
    begin = next((i for i, special in enumerate(around.special) if not special), 0)
    end = next((i for i, special in enumerate(reversed(around.special)) if not special), 0)
    length = min(LENGTH, (encoder.length - begin - end) // 2)
    if length < 2:
        raise HeadwiseError(
            f"there is room for {encoder.length} tokens; repeating random ones takes at least 4 and what goes around"
        )
    special = set(getattr(encoder.tokenizer, "all_special_ids", ()))
    allowed = np.array([token for token in range(vocabulary) if token not in special])
    drawing = np.random.default_rng(seed)
    made = []
    for _ in range(SEQUENCES):
        half = drawing.choice(allowed, length, replace=len(allowed) < length).tolist()
        ids = around.ids[:begin] + half + half + (around.ids[-end:] if end else [])
        marks = [True] * begin + [False] * 2 * length + [True] * end
        made.append(Line(ids, marks, list(range(len(ids))), list(range(len(ids))), False))
    return made, begin, length


def probe(observer: Observer, encoder: Encoder, vocabulary: int, seed: int, replicates: int) -> Tally:
    """Induction and duplicate scores of every head; what is resampled here are tokens, not texts."""
    made, begin, length = lines(encoder, vocabulary, seed)
    paired = encoder.start is not None
    counts = np.ones(vocabulary, np.int64)
    source = encoder.tokens(made, counts)
    target = encoder.tokens(made, counts, shift=True) if paired else None
    names = np.array([identity(f"{seed}/{i}") for i in range(SEQUENCES)], np.uint64)
    with repeating(observer, begin, length):
        found = observer.run(Batch(source, target, names, 0))
    tally = Tally(replicates=replicates)
    for key, one in found.items():
        units = np.array([identity(f"{seed}/{key[0]}/{i}") for i in range(len(one.top))], np.uint64)
        tally.open(key, one.way, one.names, one.top.shape[2] - 1).add(
            one.top, one.bottom, poisson_counts(units, replicates)
        )
    tally.count(names, int(source.real.sum()), 0)
    return tally


@contextmanager
def repeating(observer: Observer, begin: int, length: int) -> Iterator[None]:
    """Meanwhile the observer takes from each call what the repetition tells."""

    def each(layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        way = observer.way(layer, reading)
        if way != CROSS:
            shifted = begin + (1 if observer.tokens(layer.kind)[0] is observer.target else 0)
            observer.found[layer.key] = _found(reading, shifted, length, way)

    before, observer.take = observer.take, each
    try:
        yield
    finally:
        observer.take = before


def _found(reading: Reading | EagerReading, begin: int, length: int, way: str) -> Found:
    """Each second place of a token is a unit of its own: (B * places, S, H + 1)."""
    last = min(begin + 2 * length, reading.q.shape[2])
    rows = range(begin + length, last)
    weights = reading.weights(list(rows), None)
    seen = visible(reading, rows, weights).sum(-1).cpu()  # (B, places)
    a = weights.cpu().double()  # (B, H, places, Tk); not every device has float64
    before = torch.arange(begin, begin + len(rows))
    wanted = (before + 1, before)  # the order of PROBES
    strongest = a.argmax(-1)
    parts = [a.gather(-1, at[None, None, :, None].expand(*a.shape[:2], -1, 1))[..., 0] for at in wanted]
    parts += [(strongest == at).double() for at in wanted]
    top = torch.stack(parts, -1).permute(0, 2, 3, 1).flatten(0, 1)  # (B * places, S, H)
    equal = (1.0 / seen.clamp(min=1).double()).flatten()[:, None, None].expand(-1, len(NAMES), 1)
    whole = torch.cat([top, equal], -1).numpy()
    return Found(NAMES, way, whole, np.ones(whole.shape[:2]))


def vocabulary_of(model: Any, tokenizer: Any) -> int:
    """Tokens that both the tokenizer and the model know."""
    embedding = model.get_input_embeddings()
    return min(len(tokenizer), int(embedding.weight.shape[0]))
