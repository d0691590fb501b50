"""All-gather of what each rank has of its own heads, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.stats import HeadStats
from .head_plan import HeadPlan
from .ranks import Ranks


class _GatherHeads(torch.autograd.Function):
    """All ranks compute the same loss from the gathered heads, so each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int) -> Tensor:
        ctx.arguments = plan, ranks, dim
        return _all_heads(x, plan, ranks, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own_heads(grad, *ctx.arguments), None, None, None


class _TakeHeads(torch.autograd.Function):
    """Each rank goes on with its own heads of a tensor that all have, and all get the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int) -> Tensor:
        ctx.arguments = plan, ranks, dim
        return _own_heads(x, plan, ranks, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_heads(grad, *ctx.arguments), None, None, None


def _all_heads(x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int) -> Tensor:
    counts = [len(share.query) for share in plan.shares]
    own = counts[ranks.rank]
    shape = list(x.shape)
    shape[dim] = max(counts)
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, own).copy_(x.narrow(dim, 0, own))
    parts = ranks.all_gather(padded)
    return torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True)], dim)


def _own_heads(x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int) -> Tensor:
    """A rank without heads gets one of zeros."""
    own = plan.shares[ranks.rank].query
    if own:
        return x.narrow(dim, own.start, len(own)).contiguous()
    shape = list(x.shape)
    shape[dim] = 1
    return x.new_zeros(shape)


def gather_heads(x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int = 1) -> Tensor:
    """A tensor of this rank's heads in dimension `dim` -> of all heads, in order, on every rank."""
    all_heads: Tensor = _GatherHeads.apply(x, plan, ranks, dim)
    return all_heads


def take_heads(x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int = 1) -> Tensor:
    """A tensor of all heads in dimension `dim`, the same on every rank -> of this rank's heads."""
    own_heads: Tensor = _TakeHeads.apply(x, plan, ranks, dim)
    return own_heads


def gather_stats(stats: HeadStats, plan: HeadPlan, ranks: Ranks) -> HeadStats:
    """Statistics of this rank's heads -> of all heads, on every rank."""
    tables = {**stats.sums, **stats.maxima, "count": stats.count}
    stacked = gather_heads(torch.stack(list(tables.values())), plan, ranks, dim=2)  # (statistics, B, heads)
    whole = dict(zip(tables, stacked.unbind(), strict=True))
    received = None if stats.received is None else gather_heads(stats.received, plan, ranks)
    sums, maxima = ({name: whole[name] for name in part} for part in (stats.sums, stats.maxima))
    return HeadStats(sums, whole["count"], maxima, received)
