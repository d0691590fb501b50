"""Gradients of which a rank has a part: their norm is that of the whole, summed over the ranks."""

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
    from .parallel_linear import Piece

MARKED = "headwise_marked"  # on a parameter: its own id, once its gradients are marked as parts


def owned(part: Tensor, piece: Piece) -> Tensor:
    """Of what a rank holds, what it alone counts: a KV head on several ranks is owned by the first."""
    return part.narrow(piece.dim, piece.owned.start - piece.held.start if piece.owned else 0, len(piece.owned))


def powers_of(tensors: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |x|^p in float64, or the largest |x|: what may be added, or compared, over ranks."""
    norms = [
        torch.linalg.vector_norm(x.detach().as_subclass(Tensor), norm_type, dtype=torch.float64).to(device)
        for x in tensors
        if x.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    each = torch.stack(norms)
    return each.amax() if math.isinf(norm_type) else each.pow(norm_type).sum()


def over_ranks(powers: Tensor, norm_type: float, ranks: Ranks) -> Tensor:
    ranks.sum(powers, "the norm of the gradients", op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return powers if math.isinf(norm_type) else powers.pow(1 / norm_type)


class PartOfGradient(Tensor):
    """The gradient of a part of a parameter. PyTorch's clip_grad_norm_ takes the norm of each gradient: here it gets
    that of the whole parameter, summed over ranks, so all of them clip alike."""

    piece: Piece
    ranks: Ranks

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.linalg.vector_norm and isinstance(args[0], PartOfGradient) and len(args) < 3 and not kwargs:
            return _whole_norm(args[0], *args[1:])
        if func is torch._foreach_norm:
            return _whole_norms(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _whole_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    return [
        _whole_norm(x, norm_type) if isinstance(x, PartOfGradient) else torch.linalg.vector_norm(x, norm_type)
        for x in tensors
    ]


def _whole_norm(x: PartOfGradient, norm_type: float = 2.0) -> Tensor:
    if x.piece.mixed:
        raise UnsupportedError(
            "some gradients of this split module are DTensors and some are not, whose norms PyTorch does not put "
            "together; use headwise.scale.clip_grad_norm_(module, max_norm)"
        )
    powers = powers_of([owned(x.as_subclass(Tensor), x.piece)], norm_type, x.ranks.device)
    return over_ranks(powers, norm_type, x.ranks).to(x.device, x.dtype)


def mark_gradients(parameter: Any, piece: Piece, ranks: Ranks) -> None:
    """Let every gradient of a parameter that is only a part, and no DTensor, say so to whoever takes its norm."""
    if piece.even or getattr(parameter, MARKED, None) == id(parameter) or not parameter.requires_grad:
        return

    def mark(x: Tensor) -> None:
        if type(x.grad) is Tensor:
            grad = x.grad.as_subclass(PartOfGradient)
            grad.piece, grad.ranks = piece, ranks
            x.grad = grad

    parameter.register_post_accumulate_grad_hook(mark)
    setattr(parameter, MARKED, id(parameter))  # a copy of it is another one, without the hook
