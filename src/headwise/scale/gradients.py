"""Gradients of split parameters: their norm is that of the whole parameter, summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError
from .ranks import Ranks

if TYPE_CHECKING:
    from .parallel_linear import ParameterPart

MARK = "headwise_partial_gradients"  # attribute of a parameter: its own id, once its gradients are marked


def owned_part(local: Tensor, part: ParameterPart) -> Tensor:
    """Of a rank's tensor, the part that only this rank counts: a KV head on several ranks is owned by the first."""
    return local.narrow(part.dim, part.owned.start - part.local.start if part.owned else 0, len(part.owned))


def sum_of_powers(tensors: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |x|^p in float64, or the largest |x| for p = inf: what an all-reduce can combine."""
    norms = [
        torch.linalg.vector_norm(x.detach().as_subclass(Tensor), norm_type, dtype=torch.float64).to(device)
        for x in tensors
        if x.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.amax() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def norm_over_ranks(powers: Tensor, norm_type: float, ranks: Ranks) -> Tensor:
    """The norm from every rank's `sum_of_powers`, which is changed in place."""
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    ranks.all_reduce(powers, "the norm of the gradients", op=op)
    return powers if math.isinf(norm_type) else powers.pow(1 / norm_type)


class PartialGradient(Tensor):
    """The gradient of one rank's part of a parameter.

    PyTorch's clip_grad_norm_ takes the norm of each gradient. Here that is the norm of the whole parameter's gradient,
    summed over ranks, so that all of them clip by the same factor.
    """

    part: ParameterPart
    ranks: Ranks

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.linalg.vector_norm and isinstance(args[0], PartialGradient) and len(args) < 3 and not kwargs:
            return _whole_norm(args[0], *args[1:])
        if func is torch._foreach_norm:
            return _whole_norms(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _whole_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    return [
        _whole_norm(x, norm_type) if isinstance(x, PartialGradient) else torch.linalg.vector_norm(x, norm_type)
        for x in tensors
    ]


def _whole_norm(x: PartialGradient, norm_type: float = 2.0) -> Tensor:
    if x.part.mixed:
        raise UnsupportedError(
            "some gradients of this split module are DTensors and some are not, whose norms PyTorch does not put "
            "together; use headwise.scale.clip_grad_norm_(module, max_norm)"
        )
    powers = sum_of_powers([owned_part(x.as_subclass(Tensor), x.part)], norm_type, x.ranks.device)
    return norm_over_ranks(powers, norm_type, x.ranks).to(x.device, x.dtype)


def mark_partial_gradients(parameter: Any, part: ParameterPart, ranks: Ranks) -> None:
    """Make every gradient of a split parameter that is no DTensor a `PartialGradient`."""
    if part.even or getattr(parameter, MARK, None) == id(parameter) or not parameter.requires_grad:
        return

    def mark(x: Tensor) -> None:
        if type(x.grad) is Tensor:
            grad = x.grad.as_subclass(PartialGradient)
            grad.part, grad.ranks = part, ranks
            x.grad = grad

    parameter.register_post_accumulate_grad_hook(mark)
    setattr(parameter, MARK, id(parameter))  # a copy has the attribute but another id, and no hook
