"""Which heads live on which rank, as data: it prints, compares, and says what will be sent. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import RankError, ShapeError
from ..heads import Heads


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of one attention layer.

    Its query heads and the KV heads they read are ranges. A KV head that the query heads of several ranks read is held
    by all of them, and owned by the first: that one writes it to checkpoints.
    """

    query: range
    kv: range
    owned: range
    slots: tuple[int, ...]  # the KV heads as attention uses them here: each once, or again where a group was cut

    @property
    def idle(self) -> bool:
        """More ranks than query heads: this one computes with a head of zeros, so that all stay in step."""
        return not self.query

    def local(self, heads: Heads) -> Heads:
        """The layer as this rank computes it."""
        return Heads(heads.width, max(1, len(self.query)), max(1, len(self.slots)), heads.dim, heads.value_dim)

    def to_json(self) -> dict[str, Any]:
        return {"query": list(self.query), "kv": list(self.kv), "owned": list(self.owned), "slots": list(self.slots)}


@dataclass(frozen=True)
class HeadPlan:
    """One attention layer over ranks: heads are independent until W_O, so they are what one splits."""

    heads: Heads
    ranks: int

    def __post_init__(self) -> None:
        check_ranks(self.ranks)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """One a rank."""
        counts = self._counts()
        shares, first = [], 0
        for rank in range(self.ranks):
            query = range(first, first + counts[rank])
            first = query.stop
            kv = self._read(query)
            before = self._read(range(query.start)).stop
            shares.append(Share(query, kv, range(max(kv.start, before), kv.stop), self._slots(query)))
        return tuple(shares)

    def _counts(self) -> list[int]:
        """Query heads of each rank: whole groups where that loads no rank more than cutting groups would."""
        heads, most = self.heads, -(-self.heads.query // self.ranks)
        if -(-heads.kv // self.ranks) * heads.group == most:
            return [heads.group * n for n in parted(heads.kv, self.ranks)]
        return parted(heads.query, self.ranks)

    def _read(self, query: range) -> range:
        """The KV heads that these query heads read."""
        if not query:
            at = -(-query.start // self.heads.group)
            return range(at, at)
        return range(query.start // self.heads.group, (query.stop - 1) // self.heads.group + 1)

    def _slots(self, query: range) -> tuple[int, ...]:
        """Attention wants groups of one size, so a group that was cut is laid out as several smaller ones."""
        reads = [head // self.heads.group for head in query]
        size = math.gcd(*(reads.count(kv) for kv in set(reads))) if reads else 1
        return tuple(reads[::size])

    @property
    def even(self) -> bool:
        """Whether every rank holds as many query heads, and every KV head lives on one rank."""
        return self.heads.query % self.ranks == 0 and self.heads.kv % self.ranks == 0

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """For each KV head, the ranks that hold it: more than one where their query heads share it."""
        return tuple(
            tuple(rank for rank, share in enumerate(self.shares) if kv in share.kv) for kv in range(self.heads.kv)
        )

    def sent(self, batch: int, tokens: int, size: int = 4) -> int:
        """Bytes that a rank sends in a forward pass: one sum over the ranks, after W_O."""
        return all_reduced(batch * tokens * self.heads.width * size, self.ranks)

    def sent_backward(self, rank: int, batch: int, tokens: int, size: int = 4, bias: bool = True) -> int:
        """And in a backward pass: one sum at the layer's input, and one for each KV head that lives elsewhere too."""
        heads = self.heads
        numbers = [dim * heads.width for dim in (heads.dim, heads.value_dim)]
        numbers += [heads.dim, heads.value_dim] if bias else []
        shared = [len(self.copies[kv]) for kv in self.shares[rank].kv]
        copies = sum(all_reduced(count * size, ranks) for ranks in shared for count in numbers)
        return self.sent(batch, tokens, size) + copies

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
            also = f"; KV {named(shared)} also elsewhere" if shared else ""
            lines.append(f"  rank {rank}: query {named(share.query)}, KV {named(share.kv)}{also}")
        return "\n".join(lines)


def plan(heads: Heads, ranks: int) -> HeadPlan:
    """Which query and KV heads of a layer live on which of so many ranks."""
    return HeadPlan(heads, ranks)


def rank_counts(layers: list[Heads]) -> list[int]:
    """The numbers of ranks over which all these layers' query and KV heads divide."""
    most = min(heads.kv for heads in layers)
    return [n for n in range(1, most + 1) if all(heads.kv % n == 0 and heads.query % n == 0 for heads in layers)]


def check_divides(name: str, layers: list[Heads], ranks: int) -> None:
    """An error that says which numbers of ranks work, unless this one does."""
    check_ranks(ranks)
    work = rank_counts(layers)
    if ranks in work:
        return
    odd = next(heads for heads in layers if heads.kv % ranks or heads.query % ranks)
    counts = " and ".join(filter(None, [", ".join(map(str, work[:-1])), str(work[-1])]))
    raise RankError(
        f"{ranks} ranks do not divide the {odd.query} query and {odd.kv} key/value heads of {name}; "
        f"{counts} {'do' if len(work) > 1 else 'does'}"
    )


def parted(count: int, ranks: int) -> list[int]:
    """So many things over so many ranks, the first ranks one more where they do not divide."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def spans(count: int, ranks: int) -> list[range]:
    """The same as ranges, one after another."""
    found, first = [], 0
    for size in parted(count, ranks):
        found.append(range(first, first + size))
        first += size
    return found


def check_ranks(ranks: Any) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ShapeError(f"ranks must be a whole number of at least 1, got {ranks!r}")


def named(numbers: range | list[int]) -> str:
    """ "3", "0 to 5" or "0, 4"."""
    numbers = list(numbers)
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def all_reduced(payload: int, ranks: int) -> int:
    """Bytes that one rank sends so that all have the sum of `payload` bytes, by the ring algorithm."""
    return 2 * (ranks - 1) * payload // ranks


def all_gathered(payload: int, ranks: int) -> int:
    """Bytes that one rank sends so that all have the `payload` bytes of each."""
    return (ranks - 1) * payload
