"""Which rows of a parameter a rank stores, which it computes with, and what is sent between the two. Needs no torch.

A parameter is stored as PyTorch's DTensor shards it, in equal chunks, whatever its heads. A rank computes with whole
heads. Where the two differ, it fetches the rows that it lacks in forward and returns their gradients in backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RowPlan:
    """The rows of one parameter, along the dimension that is split; columns for a row-parallel layer.

    Args:
        count: rows of the whole parameter.
        needed: the rows that each rank computes with; a row may be needed by several.
    """

    count: int
    needed: tuple[range, ...]

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """The rows that each rank stores."""
        return tuple([range(self.count)] * len(self.needed)) if self.replicated else chunk_ranges(*self._size)

    @property
    def replicated(self) -> bool:
        """Whether every rank stores all rows: where chunks would leave a rank without any, which FSDP2 cannot shard."""
        count, ranks = self._size
        return -(-count // ranks) * (ranks - 1) >= count

    @property
    def local(self) -> bool:
        """Whether every rank stores the rows that it needs, and no others."""
        return not self.replicated and self.chunks == self.needed

    @property
    def _size(self) -> tuple[int, int]:
        return self.count, len(self.needed)

    def sent(self, rank: int) -> dict[int, range]:
        """The rows that a rank sends in forward, by the rank that needs them; it gets their gradients back."""
        return self._overlaps(rank, self.chunks[rank], self.needed)

    def received(self, rank: int) -> dict[int, range]:
        """The rows that a rank gets in forward, by the rank that stores them; it returns their gradients."""
        return self._overlaps(rank, self.needed[rank], self.chunks)

    def _overlaps(self, rank: int, rows: range, ranges: tuple[range, ...]) -> dict[int, range]:
        if self.replicated:
            return {}
        first = bisect_right(ranges, rows.start, key=lambda x: x.stop)  # ranges are in order: most do not overlap
        last = bisect_left(ranges, rows.stop, key=lambda x: x.start)
        overlaps = {peer: overlap(rows, ranges[peer]) for peer in range(first, last) if peer != rank}
        return {peer: common for peer, common in overlaps.items() if common}

    def sent_count(self, rank: int) -> int:
        return sum(map(len, self.sent(rank).values()))

    def received_count(self, rank: int) -> int:
        return sum(map(len, self.received(rank).values()))

    def own(self, rank: int) -> range:
        """The rows that a rank both stores and needs."""
        return overlap(self.chunks[rank], self.needed[rank])


def chunk_ranges(count: int, ranks: int) -> tuple[range, ...]:
    """Consecutive ranges as torch.chunk and DTensor's Shard have them: all but the last ones of one size."""
    size = -(-count // ranks)
    return tuple(range(min(size * rank, count), min(size * (rank + 1), count)) for rank in range(ranks))


def overlap(a: range, b: range) -> range:
    """The intersection of two ranges."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))
