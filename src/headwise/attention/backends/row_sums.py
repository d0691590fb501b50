"""The sums of every query's scores over some keys, for its statistics; sums over other keys can be merged with them.

With s a row's scores, m the largest of them and e = exp(s - m), all sums of e are relative to m, as in flash attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blockwise import row_maximum

# of RowSums.table; sums over the classes of keys follow. The kernel's names are compared with them (ROW_SUMS in call.h)
ROW_COLUMNS = (
    *("largest", "largest_logit", "has_keys", "weighted_scores", "distances"),
    *("first", "previous", "next", "self", "total"),
)
ADDITIVE = slice(ROW_COLUMNS.index("distances"), None)  # columns that are sums of e
SINGLE_KEYS = slice(ROW_COLUMNS.index("first"), ROW_COLUMNS.index("total"))
CLASSES = slice(ROW_COLUMNS.index("total"), None)
LOW = -1e4  # exp of it is 0 in every precision, and 0 times it is not NaN


@dataclass(frozen=True)
class RowSums:
    """What is kept of every query's scores: (ROW_COLUMNS and classes, B, H, Tq)."""

    table: Tensor

    @classmethod
    def empty(cls, like: Tensor, shape: tuple[int, ...], classes: int) -> RowSums:
        """For (B, H, Tq) queries and no keys yet."""
        table = like.new_zeros(len(ROW_COLUMNS) + classes, *shape)
        table[:2] = -torch.inf  # largest, largest_logit
        return cls(table)

    @property
    def largest(self) -> Tensor:
        """The largest score."""
        return self.table[0]

    @property
    def largest_logit(self) -> Tensor:
        """The largest scale * q.k of a visible key."""
        return self.table[1]

    @property
    def has_keys(self) -> Tensor:
        """1 where any key is visible, otherwise 0."""
        return self.table[2]

    @property
    def weighted_scores(self) -> Tensor:
        """sum e (s - m)."""
        return self.table[3]

    @property
    def distances(self) -> Tensor:
        """sum e |i - j|."""
        return self.table[4]

    @property
    def single_keys(self) -> Tensor:
        """(B, H, Tq, 4): e at the first key, and at the previous, next and own position."""
        return self.table[SINGLE_KEYS].movedim(0, -1)

    @property
    def class_sums(self) -> Tensor:
        """(B, H, Tq, 1 + classes): sum e over all keys, and over each class of them."""
        return self.table[CLASSES].movedim(0, -1)

    def rebase(self, base: Tensor) -> None:
        """Subtract `base` (B, H, Tq), at least the largest score, before `exp` in place of the largest; in place."""
        shift = (self.largest - base).clamp_(min=LOW)  # no keys: exp gives 0
        factor = shift.exp()
        self.weighted_scores.addcmul_(self.table[CLASSES][0], shift).mul_(factor)
        self.table[ADDITIVE].mul_(factor)

    def merge(self, index: Any, other: RowSums) -> None:
        """Take in the sums of some rows over other keys, in place; `other` is overwritten.

        index: of these rows, in (B, H, Tq).
        """
        rows = RowSums(self.table[(slice(None), *index)])
        largest = torch.maximum(rows.largest, other.largest)
        base = row_maximum(largest, None)
        rows.rebase(base)
        other.rebase(base)
        rows.table[3:].add_(other.table[3:])
        torch.maximum(rows.table[1:3], other.table[1:3], out=other.table[1:3])
        rows.table[1:3] = other.table[1:3]
        rows.largest.copy_(largest)
