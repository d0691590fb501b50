"""Which tokens live on which rank, and which of them another needs, as data. No torch here.

A causal model's late tokens look at more than its early ones. So the sequence is cut into twice as many chunks as
there are ranks, and rank r takes the chunks r from the front and r from the back: all ranks then have as much to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .head_plan import check_ranks, named, spans


@dataclass(frozen=True)
class SequencePlan:
    """One sequence over ranks; `left` and `right` are how far a query may look, None for open."""

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
        return tuple(spans(self.tokens, 2 * self.ranks if self.zigzag else self.ranks))

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def positions(self, rank: int) -> list[int]:
        """The tokens of a rank, in its order."""
        return [i for chunk in self.held(rank) for i in self.chunks[chunk]]

    def count(self, rank: int) -> int:
        """How many tokens a rank has."""
        return sum(len(self.chunks[chunk]) for chunk in self.held(rank))

    def sees(self, query: int, key: int) -> bool:
        """Whether any token of a chunk may look at any of another."""
        a, b = self.chunks[query], self.chunks[key]
        if not a or not b:
            return False
        near = self.left is None or b.stop - 1 >= a.start - self.left
        return near and (self.right is None or b.start <= a.stop - 1 + self.right)

    def needed(self, rank: int, source: int) -> list[int]:
        """The chunks of `source` that some token of `rank` may look at."""
        return [key for key in self.held(source) if any(self.sees(query, key) for query in self.held(rank))]

    def steps(self, source: int) -> int:
        """Exchanges with the rank so many places behind, of all ranks the most: none where nobody needs anything."""
        return max(len(self.needed(rank, (rank - source) % self.ranks)) for rank in range(self.ranks))

    def sent(self, rank: int) -> int:
        """Tokens whose keys and values a rank sends in one forward pass, each as often as it is sent."""
        others = (other for other in range(self.ranks) if other != rank)
        return sum(len(self.chunks[chunk]) for other in others for chunk in self.needed(other, rank))

    def taken(self, rank: int) -> int:
        """Tokens whose keys and values a rank is sent; in a backward pass it returns as many gradients."""
        others = (other for other in range(self.ranks) if other != rank)
        return sum(len(self.chunks[chunk]) for other in others for chunk in self.needed(rank, other))

    def bytes_sent(self, rank: int, a_token: int) -> int:
        """Of a forward pass, where keys and values of a token take so many bytes, over all KV heads and sequences."""
        return self.sent(rank) * a_token

    def bytes_sent_backward(self, rank: int, a_token: int, a_gradient: int) -> int:
        """Keys and values once more, and the gradients of those that came."""
        return self.sent(rank) * a_token + self.taken(rank) * a_gradient

    def pairs(self, rank: int) -> int:
        """Pairs of a query and a key that a rank computes: what its time goes by."""
        total = 0
        for query in self.held(rank):
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
            "held": [list(self.held(rank)) for rank in ranks],
            "sent": [self.sent(rank) for rank in ranks],
        }

    def __str__(self) -> str:
        lines = [f"{self.tokens} tokens in {len(self.chunks)} chunks over {self.ranks} ranks"]
        for rank in range(self.ranks):
            tokens = " and ".join(named(self.chunks[c]) for c in self.held(rank))
            lines.append(f"  rank {rank}: tokens {tokens}; sends the keys and values of {self.sent(rank)}")
        return "\n".join(lines)
