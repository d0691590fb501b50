"""Fetching the rows of a parameter that a rank computes with from the ranks that store them, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import collective_operators
from .autograd_collectives import copy_to_ranks
from .ranks import Ranks
from .row_plan import RowPlan


@dataclass(frozen=True)
class RowExchange:
    """The rows of a parameter that one rank sends and receives."""

    ranks: Ranks
    local: bool  # every rank stores the rows that it needs
    replicated: bool  # every rank stores all rows
    chunk: range  # the rows that this rank stores
    needed: range  # those that it computes with
    own: range  # those that it stores and computes with
    sent: tuple[range, ...]  # to each rank in forward; their gradients come back
    received: tuple[range, ...]  # from each rank in forward

    @classmethod
    def of(cls, plan: RowPlan, ranks: Ranks) -> RowExchange:
        rank = ranks.rank
        sent, received = (
            tuple(rows.get(peer, range(0)) for peer in range(ranks.count))
            for rows in (plan.sent(rank), plan.received(rank))
        )
        return cls(
            ranks, plan.local, plan.replicated, plan.chunks[rank], plan.needed[rank], plan.own(rank), sent, received
        )


def fetch_rows(chunks: list[Tensor], exchange: RowExchange, dim: int = 0) -> list[Tensor]:
    """The rows that this rank needs of some parameters that are split alike, in one message to each rank.

    Args:
        chunks: what this rank stores of each parameter.
        exchange: of their rows.
        dim: along which they are split.
    """
    if exchange.local:
        return chunks
    if exchange.replicated:  # only the gradients travel
        start, count = exchange.needed.start, len(exchange.needed)
        return [copy_to_ranks(x, exchange.ranks).narrow(dim, start, count) for x in chunks]
    return list(_FetchRows.apply(exchange, dim, *chunks))


class _FetchRows(torch.autograd.Function):
    """Rows travel to the ranks that need them in forward, and their gradients back to be summed in backward."""

    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, dim: int, *chunks: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.dim = exchange, dim
        ctx.sizes = [x.shape[dim] for x in chunks]
        parts = [_narrow(chunks, dim, rows, exchange.chunk) for rows in exchange.sent]
        pieces = _send(exchange, parts, exchange.sent, exchange.received, dim, "the rows of weights")
        own_rank = exchange.ranks.rank
        pieces[own_rank] = _narrow(chunks, dim, exchange.own, exchange.chunk)  # ranks store rows in their order
        return tuple(torch.cat([piece[i] for piece in pieces], dim) for i in range(len(chunks)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, dim = ctx.exchange, ctx.dim
        parts = [_narrow(grads, dim, rows, exchange.needed) for rows in exchange.received]
        pieces = _send(exchange, parts, exchange.received, exchange.sent, dim, "a sum of gradients")
        pieces[exchange.ranks.rank] = _narrow(grads, dim, exchange.own, exchange.needed)
        totals = [x.new_zeros(_resized(x, dim, size)) for x, size in zip(grads, ctx.sizes, strict=True)]
        rows_of_pieces = list(exchange.sent)
        rows_of_pieces[exchange.ranks.rank] = exchange.own
        for rows, piece in zip(rows_of_pieces, pieces, strict=True):
            if rows:
                for total, part in zip(_narrow(totals, dim, rows, exchange.chunk), piece, strict=True):
                    total.add_(part)
        return None, None, *totals


def _send(
    exchange: RowExchange,
    parts: list[list[Tensor]],
    sent: tuple[range, ...],
    received: tuple[range, ...],
    dim: int,
    activity: str,
) -> list[list[Tensor]]:
    """Send parts of some tensors to every rank; the parts that each rank sends here."""
    numbers = [_resized(x, dim, 1).numel() for x in parts[0]]  # of one row of each tensor
    message = torch.cat([x.reshape(-1) for tensors in parts for x in tensors])
    sent_sizes, sizes = ([sum(numbers) * len(rows) for rows in ranges] for ranges in (sent, received))
    ranks = exchange.ranks
    if torch.compiler.is_compiling():
        replies = collective_operators.all_to_all(message, sent_sizes, sizes, ranks.key, activity)
    else:
        replies = ranks.all_to_all(message, sent_sizes, sizes, activity)
    pieces = []
    for rows, reply in zip(received, replies.split(sizes), strict=True):
        tensors = reply.split([count * len(rows) for count in numbers])
        pieces.append([x.view(_resized(like, dim, len(rows))) for x, like in zip(tensors, parts[0], strict=True)])
    return pieces


def _narrow(tensors: Any, dim: int, rows: range, whole: range) -> list[Tensor]:
    """Some rows of tensors that hold the rows `whole`."""
    return [x.narrow(dim, rows.start - whole.start if rows else 0, len(rows)) for x in tensors]


def _resized(x: Tensor, dim: int, count: int) -> torch.Size:
    """The shape of a tensor with this many rows."""
    return torch.Size(count if i == dim else size for i, size in enumerate(x.shape))
