"""Which heads live on which rank (tensor parallel), as data: it prints, compares, and counts bytes. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import RankError, ShapeError
from ..heads import Heads
from .row_plan import RowPlan


@dataclass(frozen=True, slots=True)
class Share:
    """The heads of one attention layer on one rank.

    Its query heads and the KV heads they read are ranges. A KV head that the query heads of several ranks read is in
    the shares of all of them.
    """

    query: range
    kv: range
    slots: tuple[int, ...]  # the KV heads as attention uses them: each once, or repeated where a group was cut

    @property
    def idle(self) -> bool:
        """Whether this rank has no head. It then computes with one of zeros, so that it takes part in collectives."""
        return not self.query

    def local_heads(self, heads: Heads) -> Heads:
        """The layer's `Heads` as this rank computes it."""
        return Heads(heads.width, max(1, len(self.query)), max(1, len(self.slots)), heads.dim, heads.value_dim)

    def to_json(self) -> dict[str, Any]:
        return {"query": list(self.query), "kv": list(self.kv), "slots": list(self.slots)}


@dataclass(frozen=True)
class HeadPlan:
    """One attention layer over ranks, split by heads, which are independent up to W_O.

    Args:
        heads: of the whole layer.
        ranks: number of ranks; it need not divide the heads.
    """

    heads: Heads
    ranks: int

    def __post_init__(self) -> None:
        check_ranks(self.ranks)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """One per rank."""
        counts = self._query_counts()
        shares, first = [], 0
        for rank in range(self.ranks):
            query = range(first, first + counts[rank])
            first = query.stop
            shares.append(Share(query, self._kv_of(query), self._slots(query)))
        return tuple(shares)

    def _query_counts(self) -> list[int]:
        """Query heads per rank: whole groups, unless cutting groups gives the busiest rank fewer heads."""
        heads, largest = self.heads, -(-self.heads.query // self.ranks)
        if -(-heads.kv // self.ranks) * heads.group == largest:
            return [heads.group * n for n in split_evenly(heads.kv, self.ranks)]
        return split_evenly(heads.query, self.ranks)

    def _kv_of(self, query: range) -> range:
        """The KV heads that these query heads read."""
        if not query:
            start = -(-query.start // self.heads.group)
            return range(start, start)
        return range(query.start // self.heads.group, (query.stop - 1) // self.heads.group + 1)

    def _slots(self, query: range) -> tuple[int, ...]:
        """Attention needs groups of equal size, so a group that was cut becomes several smaller ones."""
        kv_heads = [head // self.heads.group for head in query]
        size = math.gcd(*(kv_heads.count(kv) for kv in set(kv_heads))) if kv_heads else 1
        return tuple(kv_heads[::size])

    @property
    def even(self) -> bool:
        """Whether every rank stores the rows of its own heads, so that no rows are sent."""
        return self.heads.query % self.ranks == 0 and self.heads.kv % self.ranks == 0

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """For each KV head, the ranks that compute it: several where their query heads share it."""
        readers: list[list[int]] = [[] for _ in range(self.heads.kv)]
        for rank, share in enumerate(self.shares):
            for kv in share.kv:
                readers[kv].append(rank)
        return tuple(map(tuple, readers))

    @cached_property
    def query_rows(self) -> RowPlan:
        """The rows of W_Q, and the columns of W_O."""
        return self._rows(self.heads.query, tuple(share.query for share in self.shares))

    @cached_property
    def kv_rows(self) -> RowPlan:
        """The rows of W_K and W_V."""
        return self._rows(self.heads.kv, tuple(share.kv for share in self.shares))

    def _rows(self, count: int, heads: tuple[range, ...]) -> RowPlan:
        dim = self.heads.dim
        return RowPlan(count * dim, tuple(range(x.start * dim, x.stop * dim) for x in heads))

    def bytes_sent(self, batch: int, tokens: int, size: int = 4, *, rank: int | None = None, bias: bool = True) -> int:
        """Bytes that a rank sends in a forward pass of self-attention: one all-reduce, after W_O, and the rows of
        weights that other ranks store their heads without.

        Args:
            batch, tokens: of the input.
            size: bytes per number.
            rank: the one that sends most by default.
            bias: whether W_Q, W_K and W_V have biases.
        """
        if rank is None:
            return max(self.bytes_sent(batch, tokens, size, rank=each, bias=bias) for each in range(self.ranks))
        weights = sum(rows.sent_count(rank) * sum(widths) for rows, widths in self._parameters(bias))
        return self._all_reduce(batch, tokens, size) + weights * size

    def bytes_sent_backward(
        self, rank: int, batch: int, tokens: int, size: int = 4, bias: bool = True, sinks: bool = False
    ) -> int:
        """Bytes that a rank sends in a backward pass: one all-reduce at the layer's input, the gradients of rows that
        it fetched, and all-reduces of parameters that every rank stores."""
        total = self._all_reduce(batch, tokens, size)
        for rows, widths in self._parameters(bias):
            total += rows.received_count(rank) * sum(widths) * size
            if rows.replicated:
                total += sum(all_reduce_bytes(rows.count * width * size, self.ranks) for width in widths)
        return total + (all_reduce_bytes(self.heads.query * size, self.ranks) if sinks else 0)

    def _all_reduce(self, batch: int, tokens: int, size: int) -> int:
        return all_reduce_bytes(batch * tokens * self.heads.width * size, self.ranks)

    def _parameters(self, bias: bool) -> list[tuple[RowPlan, list[int]]]:
        """W_Q, W_K, W_V and W_O: their rows, and the numbers in a row of each of their parameters."""
        width, bias_width = self.heads.width, [1] if bias else []
        projections = [(rows, [width, *bias_width]) for rows in (self.query_rows, self.kv_rows, self.kv_rows)]
        return [*projections, (self.query_rows, [width])]

    def to_json(self) -> dict[str, Any]:
        return {
            "heads": self.heads.to_json(),
            "ranks": self.ranks,
            "even": self.even,
            "shares": [share.to_json() for share in self.shares],
        }

    def __str__(self) -> str:
        heads = self.heads
        lines = [f"{heads.query} query and {heads.kv} key/value heads of {heads.dim} over {self.ranks} ranks"]
        for rank, share in enumerate(self.shares):
            if share.idle:
                lines.append(f"  rank {rank}: no head; it waits for the others")
                continue
            shared = [kv for kv in share.kv if len(self.copies[kv]) > 1]
            note = f"; KV {format_numbers(shared)} also elsewhere" if shared else ""
            lines.append(f"  rank {rank}: query {format_numbers(share.query)}, KV {format_numbers(share.kv)}{note}")
        return "\n".join(lines)


def plan(heads: Heads, ranks: int) -> HeadPlan:
    """Which query and KV heads of a layer live on which of this many ranks.

    Example:
        >>> print(headwise.scale.plan(headwise.Heads.split(768, 12), 5))
        12 query and 12 key/value heads of 64 over 5 ranks
          rank 0: query 0 to 2, KV 0 to 2
          ...
    """
    return HeadPlan(heads, ranks)


def rank_counts(layers: list[Heads]) -> list[int]:
    """The numbers of ranks that divide the query and KV heads of all these layers."""
    largest = min(heads.kv for heads in layers)
    return [n for n in range(1, largest + 1) if all(heads.kv % n == 0 and heads.query % n == 0 for heads in layers)]


def check_divides(name: str, layers: list[Heads], ranks: int) -> None:
    """Refuse a number of ranks that does not divide the heads, and name the numbers that do."""
    check_ranks(ranks)
    counts = rank_counts(layers)
    if ranks in counts:
        return
    layer = next(heads for heads in layers if heads.kv % ranks or heads.query % ranks)
    count_list = " and ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))
    raise RankError(
        f"{ranks} ranks do not divide the {layer.query} query and {layer.kv} key/value heads of {name}; "
        f"{count_list} {'do' if len(counts) > 1 else 'does'}"
    )


def split_evenly(count: int, ranks: int) -> list[int]:
    """How many of `count` things each rank gets; the first ranks get one more where they do not divide."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def even_ranges(count: int, ranks: int) -> list[range]:
    """`split_evenly` as consecutive ranges, one per rank."""
    ranges, first = [], 0
    for size in split_evenly(count, ranks):
        ranges.append(range(first, first + size))
        first += size
    return ranges


def check_ranks(ranks: Any) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ShapeError(f"ranks must be a whole number of at least 1, got {ranks!r}")


def format_numbers(numbers: range | list[int]) -> str:
    """ "3", "0 to 5" or "0, 4"."""
    numbers = list(numbers)
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def all_reduce_bytes(payload: int, ranks: int) -> int:
    """Bytes that one rank sends in an all-reduce of `payload` bytes by the ring algorithm."""
    return 2 * (ranks - 1) * payload // ranks


def all_gather_bytes(payload: int, ranks: int) -> int:
    """Bytes that one rank sends in an all-gather of `payload` bytes per rank."""
    return (ranks - 1) * payload
