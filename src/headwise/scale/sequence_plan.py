"""Which tokens live on which rank (context parallel), and which of them another rank needs, as data. Needs no torch.

In a causal model late tokens attend to more keys than early ones. So the sequence is cut into twice as many chunks as
there are ranks, and rank r gets chunk r from the front and chunk r from the back ("zigzag"): equal work on all ranks.
"""

from __future__ import annotations

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

    def attends(self, query: int, key: int) -> bool:
        """Whether any token of chunk `query` may attend to any token of chunk `key`."""
        a, b = self.chunks[query], self.chunks[key]
        if not a or not b:
            return False
        not_before = self.left is None or b.stop - 1 >= a.start - self.left
        return not_before and (self.right is None or b.start <= a.stop - 1 + self.right)

    def needed_chunks(self, rank: int, source: int) -> list[int]:
        """The chunks of rank `source` to which some token of `rank` may attend."""
        return [
            key for key in self.chunks_of(source) if any(self.attends(query, key) for query in self.chunks_of(rank))
        ]

    def exchanges(self, distance: int) -> int:
        """Sends between ranks that are so many places apart: the largest number over all such pairs of ranks."""
        return max(len(self.needed_chunks(rank, (rank - distance) % self.ranks)) for rank in range(self.ranks))

    def tokens_sent(self, rank: int) -> int:
        """Tokens whose keys and values a rank sends in a forward pass, counted once per receiving rank."""
        others = (other for other in range(self.ranks) if other != rank)
        return sum(len(self.chunks[chunk]) for other in others for chunk in self.needed_chunks(other, rank))

    def tokens_received(self, rank: int) -> int:
        """Tokens whose keys and values a rank receives; in a backward pass it sends their gradients back."""
        others = (other for other in range(self.ranks) if other != rank)
        return sum(len(self.chunks[chunk]) for other in others for chunk in self.needed_chunks(rank, other))

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
        for query in self.chunks_of(rank):
            for i in self.chunks[query]:
                low = 0 if self.left is None else max(0, i - self.left)
                high = self.tokens if self.right is None else min(self.tokens, i + self.right + 1)
                total += max(0, high - low)
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
