"""Rows of weights that layers fetched from other ranks, kept between calls without gradients, as in decoding.

Changes of parameters are detected from their contents, because foreach and fused optimizers and edits through `.data`
change a DTensor without incrementing `_version`. The ranks compare what they keep in the agreement before each call, so
that all of them fetch a layer's rows or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .row_exchange import RowExchange

WORD = 8  # bytes that are summed as one integer
WIDTH = 1024  # words per row of the table whose rows and columns are summed
CHANGED = -1  # in an agreement: a parameter has changed since its rows were fetched


class Kept(NamedTuple):
    """The rows that one layer keeps."""

    sums: Tensor  # of the stored parameters when the rows were fetched, see `content_sums`
    rows: list[Tensor]


class KeptRows:
    """The rows that the layers of one split module keep."""

    def __init__(self, module: nn.Module) -> None:
        self.layers: list[Any] = [part for part in module.modules() if _fetches(part)]
        self.places = {part: place for place, part in enumerate(self.layers)}
        self.kept: dict[int, Kept] = {}  # by the place in `layers`

    @property
    def possible(self) -> bool:
        """Whether rows may be kept in a call that begins now: not with gradients, nor where FSDP shards parameters."""
        if not self.layers or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        exchange: RowExchange = self.layers[0].rows
        return not exchange.ranks.simulated and all(
            x.device_mesh == exchange.ranks.mesh for part in self.layers for x in part.parameters(recurse=False)
        )

    def state(self) -> int:
        """A number that is the same on ranks that keep the rows of the same layers; CHANGED where they are stale."""
        if not self.kept:
            return 0
        current = torch.cat([content_sums(self.layers[place].stored()) for place in self.kept])
        if not torch.equal(current, torch.cat([kept.sums for kept in self.kept.values()])):
            return CHANGED
        return int.from_bytes(hashlib.sha256(repr(sorted(self.kept)).encode()).digest()[:6])

    def drop(self) -> None:
        """Free the memory."""
        self.kept.clear()

    def begin_call(self, states: list[int]) -> Token[KeptRows | None]:
        """Use what is kept in a call, where all ranks keep the same and nothing has changed on any of them."""
        if len(set(states)) > 1 or CHANGED in states:
            self.drop()
        return _current.set(self)


_current: ContextVar[KeptRows | None] = ContextVar("headwise_kept_rows", default=None)  # of the call under way


def end_call(token: Token[KeptRows | None]) -> None:
    _current.reset(token)


def _fetches(part: nn.Module) -> bool:
    """Whether a layer fetches rows from other ranks."""
    rows = getattr(part, "rows", None)
    return rows is not None and not rows.local and not rows.replicated


def rows_of(layer: Any, fetch: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The rows that a layer computes with: those that it kept, or else what `fetch` gives."""
    keeper = None if torch.compiler.is_compiling() else _current.get()
    place = None if keeper is None or torch.is_grad_enabled() else keeper.places.get(layer)
    if keeper is None or place is None:
        return fetch()
    if place not in keeper.kept:
        keeper.kept[place] = Kept(content_sums(layer.stored()), fetch())
    return keeper.kept[place].rows


def content_sums(tensors: list[Tensor]) -> Tensor:
    """Sums of the bits of some tensors as integers, over the rows and the columns of a table of them: (n,).

    Any change of one number changes two of them. Two passes over the tensors.
    """
    parts = []
    for x in tensors:
        flat = x.detach().contiguous().view(-1)
        if flat.storage_offset() * flat.element_size() % WORD:
            flat = flat.clone()
        whole = flat.numel() * flat.element_size() // WORD * WORD // flat.element_size()
        words = flat[:whole].view(torch.int64)
        table = words[: len(words) // WIDTH * WIDTH].view(-1, WIDTH)
        rest = flat[whole:].view(torch.uint8).long()  # fewer bytes than a word
        parts += [table.sum(0), table.sum(1), words[table.numel() :], rest]
    return torch.cat(parts)
