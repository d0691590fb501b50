"""Streaming heads (Xiao et al. 2023 and 2024): the attention weight on the first and the recent keys of a long text.

A head that puts no weight on the keys between them needs no full cache. Only queries that have such keys count. The
weights of a sample of queries are computed exactly, by the model's own rules.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....models.watching.call_reader import Reading
from ....models.watching.eager import EagerReading
from ....models.watching.layers import Layer
from ....role_definitions import CAUSAL
from ....role_definitions.probes import KEEP_FIRST, SMALLER_WINDOWS, WINDOW, streaming_score
from ..export import WORDS
from ..observer import BatchSums, visible
from .long_text import NAME, token_passages
from .subject import Measurement, Subject

TEXTS, LENGTH = 8, 1024  # passages, and tokens of each
QUERIES = 64  # of each passage and window, evenly spaced


def measure(subject: Subject) -> Measurement:
    """The weight that every head keeps in each window that the model's positions leave room for."""
    length = LENGTH if subject.positions is None else min(LENGTH, subject.positions)
    windows = [window for window in (*SMALLER_WINDOWS, WINDOW) if 2 * (KEEP_FIRST + window) <= length]
    if not windows:
        raise UnsupportedError(
            f"a window of {SMALLER_WINDOWS[0]} and {KEEP_FIRST} first tokens needs texts of twice as many; this model "
            f"has {subject.positions} positions"
        )
    texts = token_passages(subject.tokenizer, length, TEXTS, subject.seed)
    units = []

    def take(layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        if subject.is_measured(layer.kind):
            subject.observer.layers[layer.key] = window_sums(reading, windows)

    with subject.observing(take) as observer:
        for number, ids in enumerate(texts):
            name = f"{subject.seed}/streaming/{number}"
            units.append((observer.run(subject.batch([ids], [name])), name))
    tokens = sum(map(len, texts))
    facts = {
        "texts": len(texts), "tokens": tokens, "windows": windows, "corpus": NAME,
        WORDS: f"{len(texts)} passages of {length} tokens from {NAME}; windows of {', '.join(map(str, windows))}",
    }  # fmt: skip
    return Measurement(subject.tally(units, tokens), facts)


def window_sums(reading: Reading | EagerReading, windows: list[int]) -> BatchSums:
    """For one text: the weight on the first KEEP_FIRST keys and on each window, summed over a sample of queries."""
    queries = reading.q.shape[2]
    top, bottom = [], []
    for window in windows:
        first_query = KEEP_FIRST + window
        rows = sorted({int(i) for i in np.linspace(first_query, queries - 1, QUERIES)}) if first_query < queries else []
        if not rows:
            top.append(np.zeros(reading.q.shape[1] + 1))
            bottom.append(0.0)
            continue
        weights = reading.weights(rows, None)[0].double().cpu()  # (H, rows, Tk)
        retained = retained_keys(rows, weights.shape[-1], window)
        seen = visible(reading, rows, None)[0].cpu()
        equal = ((seen & retained).sum(-1).double() / seen.sum(-1).clamp(min=1)).sum()
        top.append(np.array([*(weights * retained).sum((-1, -2)).numpy(), equal.item()]))
        bottom.append(float(len(rows)))
    names = tuple(streaming_score(window) for window in windows)
    return BatchSums(names, CAUSAL, np.stack(top)[None], np.array([bottom]))


def retained_keys(rows: list[int], keys: int, window: int) -> Tensor:
    """(rows, keys) bool: the first KEEP_FIRST keys and the last `window` up to each query, its own included."""
    query, key = torch.tensor(rows)[:, None], torch.arange(keys)
    return (key < KEEP_FIRST) | ((key > query - window) & (key <= query))
