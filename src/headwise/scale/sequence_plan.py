"""Which tokens live on which rank (context parallel), and which of them another rank needs, as data. Needs no torch.

In a causal model late tokens attend to more keys than early ones. So the sequence is cut into twice as many chunks as
there are ranks, and rank r gets chunk r from the front and chunk r from the back ("zigzag"): equal work on all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .head_plan import check_ranks, even_ranges, format_numbers


@dataclass(frozen=True)
class SequencePlan:
    """One sequence over ranks.

    Args:
        tokens: of the whole sequence.
        ranks: number of ranks.
        left: how many keys before its own position a query may attend to; None for all.
        right: the same for keys after it; 0 for causal attention.
        zigzag: a chunk from either end per rank; otherwise consecutive chunks, one per rank.
    """

    tokens: int
    ranks: int
    left: int | None = None
    right: int | None = None
    zigzag: bool = True

    def __post_init__(self) -> None:
        check_ranks(self.ranks)

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """The tokens of each chunk."""
        return tuple(even_ranges(self.tokens, 2 * self.ranks if self.zigzag else self.ranks))

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks on a rank, by number."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def positions(self, rank: int) -> list[int]:
        """The positions of a rank's tokens in the whole sequence, in the rank's order."""
        return [i for chunk in self.chunks_of(rank) for i in self.chunks[chunk]]

    def token_count(self, rank: int) -> int:
        """The number of tokens on a rank."""
        return sum(len(self.chunks[chunk]) for chunk in self.chunks_of(rank))

    def chunk_slice(self, rank: int, chunk: int) -> slice:
        """Where a chunk's tokens are among those of its rank."""
        chunks = self.chunks_of(rank)
        start = sum(len(self.chunks[c]) for c in chunks[: chunks.index(chunk)])
        return slice(start, start + len(self.chunks[chunk]))

    @cached_property
    def attended(self) -> tuple[range, ...]:
        """For each chunk of queries, the chunks with a key that one of its tokens may attend to."""
        return self._reach(self.left, self.right)

    @cached_property
    def attending(self) -> tuple[range, ...]:
        """For each chunk of keys, the chunks with a query that may attend to one of them."""
        return self._reach(self.right, self.left)

    def _reach(self, before: int | None, after: int | None) -> tuple[range, ...]:
        """For each chunk, the consecutive chunks within so many tokens before and after it; none of an empty chunk."""
        chunks = [chunk for chunk in self.chunks if chunk]  # empty ones come last
        starts, stops = [chunk.start for chunk in chunks], [chunk.stop for chunk in chunks]
        ranges = []
        for chunk in chunks:
            first = 0 if before is None else bisect_right(stops, chunk.start - before)
            end = len(chunks) if after is None else bisect_right(starts, chunk.stop - 1 + after)
            ranges.append(range(first, max(first, end)))
        return (*ranges, *[range(0)] * (len(self.chunks) - len(chunks)))

    def attends(self, query: int, key: int) -> bool:
        """Whether any token of chunk `query` may attend to any token of chunk `key`."""
        return key in self.attended[query]

    def needed_chunks(self, rank: int, source: int) -> list[int]:
        """The chunks of rank `source` to which some token of `rank` may attend."""
        reach = [self.attended[query] for query in self.chunks_of(rank)]
        return [key for key in self.chunks_of(source) if any(key in keys for keys in reach)]

    def tokens_sent(self, rank: int) -> int:
        """Tokens whose keys and values a rank sends in a forward pass, counted once per receiving rank."""
        return sum(len(self.chunks[key]) * self._other_ranks(rank, self.attending[key]) for key in self.chunks_of(rank))

    def _other_ranks(self, rank: int, chunks: range) -> int:
        """How many ranks besides this one hold one of these consecutive chunks."""
        if self.zigzag:  # chunk r and chunk 2R - 1 - r are on rank r
            front = range(chunks.start, min(chunks.stop, self.ranks))
            back = range(2 * self.ranks - chunks.stop, 2 * self.ranks - max(chunks.start, self.ranks))
            both = len(range(max(front.start, back.start), min(front.stop, back.stop)))
            return len(front) + len(back) - both - (rank in front or rank in back)
        return len(chunks) - (rank in chunks)

    def tokens_received(self, rank: int) -> int:
        """Tokens whose keys and values a rank receives; in a backward pass it sends their gradients back."""
        needed = [self.attended[query] for query in self.chunks_of(rank)]
        common = range(max(keys.start for keys in needed), min(keys.stop for keys in needed))
        total = sum(map(self._token_total, needed)) - (self._token_total(common) if len(needed) > 1 else 0)
        own = [chunk for chunk in self.chunks_of(rank) if any(chunk in keys for keys in needed)]
        return total - sum(len(self.chunks[chunk]) for chunk in own)

    def _token_total(self, chunks: range) -> int:
        """The tokens of consecutive chunks."""
        return self.chunks[chunks[-1]].stop - self.chunks[chunks.start].start if chunks else 0

    def bytes_sent(self, rank: int, token_bytes: int) -> int:
        """Bytes that a rank sends in a forward pass.

        token_bytes: of one token's keys and values, over all KV heads and sequences.
        """
        return self.tokens_sent(rank) * token_bytes

    def bytes_sent_backward(self, rank: int, token_bytes: int, gradient_bytes: int) -> int:
        """Bytes that a rank sends in a backward pass: keys and values again, and the gradients of received ones."""
        return self.tokens_sent(rank) * token_bytes + self.tokens_received(rank) * gradient_bytes

    def pairs(self, rank: int) -> int:
        """Pairs of a query and a visible key on a rank, which its computing time is proportional to."""
        total = 0
        for chunk in map(self.chunks.__getitem__, self.chunks_of(rank)):
            ends = self.tokens * len(chunk)
            if self.right is not None:
                ends = _clipped_sum(chunk.start + self.right + 1, len(chunk), 0, self.tokens)
            starts = 0 if self.left is None else _clipped_sum(chunk.start - self.left, len(chunk), 0, self.tokens)
            total += ends - starts
        return total

    def to_json(self) -> dict[str, Any]:
        ranks = range(self.ranks)
        return {
            "tokens": self.tokens,
            "ranks": self.ranks,
            "zigzag": self.zigzag,
            "chunks": [[self.chunks[c].start, self.chunks[c].stop] for c in range(len(self.chunks))],
            "held": [list(self.chunks_of(rank)) for rank in ranks],
            "sent": [self.tokens_sent(rank) for rank in ranks],
        }

    def __str__(self) -> str:
        lines = [f"{self.tokens} tokens in {len(self.chunks)} chunks over {self.ranks} ranks"]
        for rank in range(self.ranks):
            tokens = " and ".join(format_numbers(self.chunks[c]) for c in self.chunks_of(rank))
            lines.append(f"  rank {rank}: tokens {tokens}; sends the keys and values of {self.tokens_sent(rank)}")
        return "\n".join(lines)


def _clipped_sum(first: int, count: int, low: int, high: int) -> int:
    """The sum of this many consecutive whole numbers, each brought into low ... high first."""
    below = min(count, max(0, low - first))
    above = min(count - below, max(0, first + count - 1 - high))
    between = count - below - above
    return below * low + above * high + between * (first + below) + between * (between - 1) // 2
