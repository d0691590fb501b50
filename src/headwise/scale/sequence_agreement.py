"""What ranks compare before a call of a module over a split sequence: all of its arguments but this rank's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.validation import shown
from .agreement import describe_arguments, floating_tensors
from .ranks import Ranks


def describe_call(module: nn.Module, args: list[Any], options: dict[str, Any], tokens: int, zigzag: bool) -> str:
    """What must be equal on all ranks in a call of a module; tensors of this rank's tokens without the token axis."""
    parts = [
        describe_arguments([_shared(x, tokens) for x in args]),
        f"zigzag {zigzag}",
        describe_arguments({name: _shared(x, tokens) for name, x in options.items() if name != "positions"}),
        describe_mode(module, options),
    ]
    return ", ".join(filter(None, parts))


def _shared(x: Any, tokens: int) -> Any:
    """An argument, as text without its tokens where it has this rank's."""
    return f"{x.dtype} {x.shape[0]} {shown(x.shape[2:])}" if _is_local(x, tokens) else x


def describe_mode(module: nn.Module, options: Mapping[str, Any]) -> str:
    """What a call depends on besides its arguments."""
    parts = [f"{'without' if options.get('positions') is None else 'with'} positions"]
    parts.append("training" if module.training else "not training")
    if torch.is_grad_enabled():
        parts.append("with gradient")
    return ", ".join(parts)


def agree_on_tensors(
    ranks: Ranks, activity: str, text: str, x: Tensor, tensors: dict[str, Tensor], zigzag: bool
) -> list[int]:
    """Agree about a call of a module that was compiled.

    Args:
        text: of what a compiler knows of the call.
        x: the input, (B, tokens here, ...).
        tensors: the other arguments that are tensors.

    Returns:
        The tokens on each rank.
    """
    tokens = x.shape[1] if x.dim() > 1 else 0

    def describe() -> str:
        shared = {name: _shared(y, tokens) for name, y in tensors.items()}
        return ", ".join([describe_arguments([_shared(x, tokens), shared]), f"zigzag {zigzag}", text])

    return ranks.agree(activity, describe, values=shared_values(tensors, tokens), number=tokens)


def shared_values(options: Mapping[str, Any], tokens: int) -> dict[str, Tensor]:
    """The floating-point options that must be the same on all ranks."""
    local = {name for name, x in options.items() if name == "positions" or _is_local(x, tokens)}
    return floating_tensors({name: x for name, x in options.items() if name not in local})


def _is_local(x: Any, tokens: int) -> bool:
    """Whether an argument has this rank's tokens along its second dimension."""
    return isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == tokens
