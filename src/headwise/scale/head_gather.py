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
        counts = [len(share.query) for share in plan.shares]
        local = range(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
        ctx.local, ctx.dim, ctx.slots = local, dim, x.shape[dim]
        shape = list(x.shape)
        shape[dim] = max(counts)
        padded = x.new_zeros(shape)
        padded.narrow(dim, 0, len(local)).copy_(x.narrow(dim, 0, len(local)))
        parts = ranks.all_gather(padded)
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local_grad = grad.narrow(ctx.dim, ctx.local.start, len(ctx.local))
        if not ctx.local:  # the head of zeros of an idle rank
            shape = list(grad.shape)
            shape[ctx.dim] = ctx.slots
            local_grad = grad.new_zeros(shape)
        return local_grad, None, None, None


def gather_heads(x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int = 1) -> Tensor:
    """A tensor of this rank's heads in dimension `dim` -> of all heads, in order, on every rank."""
    all_heads: Tensor = _GatherHeads.apply(x, plan, ranks, dim)
    return all_heads


def gather_stats(stats: HeadStats, plan: HeadPlan, ranks: Ranks) -> HeadStats:
    """Statistics of this rank's heads -> of all heads, on every rank."""
    tables = {**stats.sums, **stats.maxima, "count": stats.count}
    stacked = gather_heads(torch.stack(list(tables.values())), plan, ranks, dim=2)  # (statistics, B, heads)
    whole = dict(zip(tables, stacked.unbind(), strict=True))
    received = None if stats.received is None else gather_heads(stats.received, plan, ranks)
    sums, maxima = ({name: whole[name] for name in part} for part in (stats.sums, stats.maxima))
    return HeadStats(sums, whole["count"], maxima, received)
