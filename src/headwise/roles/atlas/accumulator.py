"""Sums of batches that are not yet in a tally: several batches are added at once, which costs as much as adding one.

Which batches are added together changes the last bits of the sums; so the pending batches are part of a checkpoint,
and a run that was interrupted ends with the same bits as one that was not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...json_documents import anything, count, items, mapping, string
from ...resampling import poisson_counts
from .corpus import Batch
from .observer import BatchSums
from .sums import LARGEST_SUM, Key, Tally, are_counts

TEXTS_AT_ONCE = 512  # texts that are added at once


class PendingBatch(NamedTuple):
    """The sums of one batch that are not in the tally yet."""

    layers: dict[Key, BatchSums]
    identities: np.ndarray  # (B,) uint64
    tokens: int
    cut: int  # texts that were too long


class Accumulator:
    """A tally, and the batches that are still to be added to it."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.pending: list[PendingBatch] = []

    def add(self, layers: dict[Key, BatchSums], batch: Batch) -> None:
        """Take the sums of one batch; the tally changes when TOGETHER texts are pending, or with `flush`."""
        self.pending.append(PendingBatch(layers, batch.identities, batch.tokens, batch.cut))
        if sum(len(batch.identities) for batch in self.pending) >= TEXTS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Add all pending batches to the tally."""
        weights = [poisson_counts(batch.identities, self.tally.replicates) for batch in self.pending]
        for key in dict.fromkeys(key for batch in self.pending for key in batch.layers):
            parts = []
            for batch, counts in zip(self.pending, weights, strict=True):
                if key in batch.layers:
                    new = batch.layers[key]
                    parts.append((new.top, new.bottom, counts))
                    sums = self.tally.open(key, new.way, new.names, new.top.shape[2] - 1)
            sums.add(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        for batch in self.pending:
            self.tally.count(batch.identities, batch.tokens, batch.cut)
        self.pending = []

    def facts(self) -> list[dict[str, Any]]:
        """The pending batches without their arrays, as JSON."""
        return [
            {
                "tokens": batch.tokens,
                "cut": batch.cut,
                "layers": [[*key, sums.way, list(sums.names)] for key, sums in batch.layers.items()],
            }
            for batch in self.pending
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the pending batches, flat."""
        arrays = {}
        for number, batch in enumerate(self.pending):
            arrays[f"{number}/identities"] = batch.identities
            for (kind, layer), sums in batch.layers.items():
                arrays[f"{number}/{kind}/{layer}/top"] = sums.top
                arrays[f"{number}/{kind}/{layer}/bottom"] = sums.bottom
        return arrays

    def restore(self, facts: Any, arrays: dict[str, np.ndarray]) -> None:
        """Make pending again what `facts` and `arrays` gave; a ValueError where they do not fit each other."""
        remaining = dict(arrays)
        for number, batch in enumerate(items(facts, "waiting", lambda x, path: mapping(x, path, anything))):
            identities = remaining.pop(f"{number}/identities")
            if identities.dtype != np.uint64 or identities.ndim != 1:
                raise ValueError(f"identities of batch {number} are {identities.dtype} {identities.shape}")
            layers: dict[Key, BatchSums] = {}
            for kind, layer, way, names in items(batch["layers"], "layers", anything):
                top, bottom = (remaining.pop(f"{number}/{kind}/{layer}/{part}") for part in ("top", "bottom"))
                sums = BatchSums(tuple(items(names, "names", string)), string(way, "way"), top, bottom)
                heads = [x.top.shape[1] - 1 for key, x in self.tally.sums.items() if key == (kind, layer)]
                _check_pending(sums, len(identities), heads)
                layers[string(kind, "kind"), count(layer, "layer")] = sums
            tokens, cut = count(batch["tokens"], "tokens"), count(batch["cut"], "cut")
            self.pending.append(PendingBatch(layers, identities, tokens, cut))
        if remaining:
            raise ValueError(f"array {min(remaining)!r} belongs to no batch")


def _check_pending(sums: BatchSums, texts: int, heads: list[int]) -> None:
    """heads: how many the layer has, where earlier batches have shown it."""
    shape = (texts, len(sums.names))
    top, bottom = sums.top, sums.bottom
    wrong = top.ndim != 3 or top.shape[:2] != shape or top.shape[2] < 2 or bottom.shape != shape
    if wrong or (heads and top.shape[2] - 1 != heads[0]) or {top.dtype, bottom.dtype} != {np.dtype(np.float64)}:
        raise ValueError(f"a batch has arrays {top.dtype} {top.shape} and {bottom.dtype} {bottom.shape}")
    if not all((np.abs(x) <= LARGEST_SUM).all() for x in (top, bottom)):
        raise ValueError("a batch has values that are not finite, or too large")
    if not are_counts(bottom):
        raise ValueError("a batch has counts that are negative, or too close to zero")
