"""What a head would score that looks at all it can see equally: what every statistic is held against."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..inspection.result import STATISTICS
from .capture import Seen


class Equal:
    """The statistics of a head that looks at all it can see equally, gathered while the weights pass by."""

    def __init__(self, seen: Seen, delimiter: np.ndarray) -> None:
        self.seen, self.delimiter = seen, delimiter
        self.comparable = "distance" in seen.layer.stats
        self.sums: dict[str, float] = dict.fromkeys(STATISTICS, 0.0)
        self.rows = 0
        self.later = False  # whether any query sees a key after it

    def passing(self, blocks: Any) -> Any:
        for first, block in blocks:
            self._add(first, block.max(0) > 0)
            yield first, block

    def _add(self, first: int, visible: np.ndarray) -> None:
        """(rows, Tk) bool."""
        count = visible.sum(1)
        real = count > 0
        each = np.divide(1.0, count, out=np.zeros(len(count)), where=real)
        rows, keys = visible.shape
        at, place = np.arange(first, first + rows, dtype=np.int32), np.arange(keys, dtype=np.int32)
        self.later = self.later or bool((visible & (place > at[:, None])).any())
        apart = abs(at[:, None] - place)
        apart *= visible
        self.rows += int(real.sum())
        for name, part in (
            ("entropy", np.log(np.maximum(count, 1))),
            ("confidence", each),
            ("distance", apart.sum(1) * each),
            ("first", visible[:, 0] * each),
            ("delimiter", visible[:, self.delimiter].sum(1) * each),
            *((name, _diagonal(visible, at + by) * each) for name, by in (("previous", -1), ("next", 1), ("self", 0))),
        ):
            self.sums[name] += float(part.sum())

    def statistics(self) -> dict[str, float]:
        absent = () if self.comparable else ("distance", "previous", "next", "self")
        return {name: total / max(self.rows, 1) for name, total in self.sums.items() if name not in absent}


def _diagonal(visible: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(rows, Tk) at one key a row, False where there is no such key."""
    there = (keys >= 0) & (keys < visible.shape[1])
    found: np.ndarray = there & visible[np.arange(len(keys)), np.where(there, keys, 0)]
    return found
