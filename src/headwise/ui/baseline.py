"""Uniform attention: the statistics of a head that spreads its weight evenly over all visible keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..inspection import STATISTICS
from .capture import LayerRecord

OFFSETS = (("previous", -1), ("next", 1), ("self", 0))


class EqualAttention:
    """Statistics of uniform attention over the visible keys, accumulated block by block while the weights are read."""

    def __init__(self, record: LayerRecord, delimiter: np.ndarray) -> None:
        self.record, self.delimiter = record, delimiter
        self.comparable = "distance" in record.layer.stats
        self.sums: dict[str, float] = dict.fromkeys(STATISTICS, 0.0)
        self.rows = 0

    def observe(self, blocks: Any) -> Any:
        """Pass the blocks on, and add each to the sums."""
        for first, block in blocks:
            self._add(first, block.max(0) > 0)
            yield first, block

    def _add(self, first: int, visible: np.ndarray) -> None:
        """(rows, Tk) bool."""
        count = visible.sum(1)
        has_keys = count > 0
        share = np.divide(1.0, count, out=np.zeros(len(count)), where=has_keys)
        rows, width = visible.shape
        queries, keys = np.arange(first, first + rows, dtype=np.int32), np.arange(width, dtype=np.int32)
        distances = abs(queries[:, None] - keys)
        distances *= visible
        self.rows += int(has_keys.sum())
        for name, values in (
            ("entropy", np.log(np.maximum(count, 1))),
            ("confidence", share),
            ("distance", distances.sum(1) * share),
            ("first", visible[:, 0] * share),
            ("delimiter", visible[:, self.delimiter].sum(1) * share),
            *((name, _diagonal(visible, queries + offset) * share) for name, offset in OFFSETS),
        ):
            self.sums[name] += float(values.sum())

    def statistics(self) -> dict[str, float]:
        absent = () if self.comparable else ("distance", "previous", "next", "self")
        return {name: total / max(self.rows, 1) for name, total in self.sums.items() if name not in absent}


def _diagonal(visible: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The entries of (rows, Tk) at one key per row, False where there is no such key."""
    exists = (keys >= 0) & (keys < visible.shape[1])
    values: np.ndarray = exists & visible[np.arange(len(keys)), np.where(exists, keys, 0)]
    return values
