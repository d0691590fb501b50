"""Keys and values on their way between ranks, and their gradients on the way back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .context_parallel import Ring

AHEAD = 2  # items whose keys and values are under way while one is computed with


@dataclass(frozen=True)
class Item:
    """Something to compute with: keys of a chunk that are here, or come from another rank, for some KV heads."""

    heads: slice  # of KV
    query_heads: slice
    take: int | None  # the chunk that this rank computes with
    source: int  # whose it is
    give: int | None  # the chunk that this rank sends meanwhile
    target: int  # to whom
    own: bool = False  # nothing travels


class Parcel(NamedTuple):
    """Keys (B, heads, tokens, D), values and marks (B, classes, tokens) of a chunk."""

    k: Tensor
    v: Tensor
    marks: Tensor | None

    def packed(self) -> Tensor:
        """All in one message."""
        return torch.cat([x.flatten() for x in self if x is not None])


class Mail:
    """Every item with its parcel, from here or from another rank (None: nothing to compute); the next are under way."""

    def __init__(self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, marks: Tensor | None = None) -> None:
        self.ring, self.k, self.v, self.marks = ring, k, v, marks
        self.items = ring.items(q, k)
        self.posted: dict[int, tuple[list[Any], Tensor | None, Tensor | None]] = {}

    def __iter__(self) -> Iterator[tuple[Item, Parcel | None]]:
        for n, item in enumerate(self.items):
            for later in range(n, min(n + 1 + AHEAD, len(self.items))):
                self._post(later)
            works, _, came = self.posted.pop(n)
            self.ring.ranks.wait(works, "the keys and values of other ranks")
            if came is not None:
                yield item, _opened(came, self._shapes(item))
            else:
                yield item, None if item.take is None else self._mine(item.take, item)

    def _post(self, n: int) -> None:
        if n in self.posted:
            return
        item, sent, came = self.items[n], None, None
        calls = []
        if item.give is not None:
            sent = self._mine(item.give, item).packed()
            calls.append(self.ring.call(dist.isend, sent, item.target, 2 * n))
        if item.take is not None and not item.own:
            came = self.k.new_empty(sum(map(math.prod, self._shapes(item))))
            calls.append(self.ring.call(dist.irecv, came, item.source, 2 * n))
        self.posted[n] = (self.ring.post(calls), sent, came)

    def _mine(self, chunk: int, item: Item) -> Parcel:
        where = self.ring.local(chunk)
        marks = None if self.marks is None else self.marks[:, :, where]
        return Parcel(self.k[:, item.heads, where], self.v[:, item.heads, where], marks)

    def _shapes(self, item: Item) -> list[tuple[int, ...]]:
        assert item.take is not None
        shapes = _shapes(self.k, self.v, item, len(self.ring.plan.chunks[item.take]))
        return shapes if self.marks is None else [*shapes, (len(self.k), self.marks.shape[1], shapes[0][2])]


class Returns:
    """Gradients of keys and values, on their way back to the rank that the keys and values came from."""

    def __init__(self, ring: Ring, dk: Tensor, dv: Tensor) -> None:
        self.ring, self.dk, self.dv = ring, dk, dv
        self.posted: list[tuple[Item, list[Any], Tensor | None, Tensor | None]] = []
        self.count = 0

    def take(self, item: Item, found: Parcel | None) -> None:
        """The gradients of an item's keys and values: added here, or sent, while those of the chunk given come."""
        n, self.count = self.count, self.count + 1
        if item.own:
            if found is not None and item.take is not None:
                self._add(item, item.take, found)
            return
        sent = came = None
        calls = []
        if found is not None:
            sent = found.packed()
            calls.append(self.ring.call(dist.isend, sent, item.source, 2 * n + 1))
        if item.give is not None:
            came = self.dk.new_empty(sum(map(math.prod, self._shapes(item))))
            calls.append(self.ring.call(dist.irecv, came, item.target, 2 * n + 1))
        self.posted.append((item, self.ring.post(calls), sent, came))
        if len(self.posted) > AHEAD:
            self._settle()

    def finish(self) -> None:
        """Wait for the last ones."""
        while self.posted:
            self._settle()

    def _settle(self) -> None:
        item, works, _, came = self.posted.pop(0)
        self.ring.ranks.wait(works, "gradients that other ranks return")
        if came is not None and item.give is not None:
            self._add(item, item.give, _opened(came, self._shapes(item)))

    def _add(self, item: Item, chunk: int, found: Parcel) -> None:
        where = self.ring.local(chunk)
        self.dk[:, item.heads, where] += found.k
        self.dv[:, item.heads, where] += found.v

    def _shapes(self, item: Item) -> list[tuple[int, ...]]:
        assert item.give is not None
        return _shapes(self.dk, self.dv, item, len(self.ring.plan.chunks[item.give]))


def _shapes(k: Tensor, v: Tensor, item: Item, tokens: int) -> list[tuple[int, ...]]:
    heads = item.heads.stop - item.heads.start
    return [(len(x), heads, tokens, x.shape[3]) for x in (k, v)]


def _opened(message: Tensor, shapes: list[tuple[int, ...]]) -> Parcel:
    found = [x.view(form) for x, form in zip(message.split([*map(math.prod, shapes)]), shapes, strict=True)]
    return Parcel(found[0], found[1], found[2] if len(found) > 2 else None)
