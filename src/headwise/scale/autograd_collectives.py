"""Collectives with gradients, as tensor parallelism needs them: all-reduce in backward, or in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import collective_operators
from .ranks import Ranks
from .sequence_parallel import gather_tokens


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        activity = "a sum of gradients"
        if torch.compiler.is_compiling():
            return collective_operators.all_reduce(grad, ctx.ranks.key, activity), None
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may use its own again
        ctx.ranks.all_reduce(grad, activity)
        return grad, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        activity = "the sum of the ranks' outputs"
        if torch.compiler.is_compiling():
            return collective_operators.all_reduce(x, ranks.key, activity)
        total = x.contiguous()
        if total is x:
            ctx.mark_dirty(x)
        ranks.all_reduce(total, activity)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """x, which is the same on all ranks, for work that they split: its gradient is summed over them.

    Where each rank has some tokens of x, a DTensor, all of them are gathered.
    """
    if isinstance(x, DTensor):
        return gather_tokens(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    copy: Tensor = _CopyToRanks.apply(x, ranks)
    return copy


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of the ranks' x, in place. All ranks go on with the same value, so the gradient passes unchanged."""
    total: Tensor = _SumOverRanks.apply(x, ranks)
    return total
