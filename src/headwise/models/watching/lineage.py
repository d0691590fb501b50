"""Where the axes of a tensor come from: the function that made it, and the changes of its layout since.

A lineage can be replayed on a tensor of place numbers, which then says where each place of the result comes from. It is
cheap to keep, since it holds the arguments of layout functions and no tensors of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LONGEST = 200  # steps of a lineage; a longer one is dropped
RESHAPES = ("view", "reshape", "unflatten", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel")
LAYOUTS = frozenset(
    (
        *RESHAPES, "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "T", "mT", "t", "expand",
        "expand_as", "broadcast_to", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "getitem",
        "select", "narrow", "repeat", "repeat_interleave", "tile", "roll", "flip", "view_as_complex", "view_as_real",
    )
)  # fmt: skip
JOINS = frozenset(("cat", "concat", "concatenate", "stack"))


class ReplayError(Exception):
    """A lineage that cannot be replayed."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The tensor that a lineage begins with."""

    shape: tuple[int, ...]
    features: tuple[int, ...]  # axes that a projection made; the others number the sequences and their tokens
    call: Any = None  # the attention call whose output it is


@dataclass(frozen=True, eq=False)
class Lineage:
    """An origin, or one change of the layout of other lineages."""

    origin: Origin
    parents: tuple[Lineage | tuple[int, ...], ...] = ()  # a shape stands for a tensor of unknown origin
    replay: Callable[..., Tensor] | None = None
    signature: int = 0  # equal for lineages of the same functions
    depth: int = 0

    def places(self, start: Callable[[Origin], Tensor]) -> Tensor:
        """The lineage replayed on the numbers that start gives for an origin; -1 where the origin is not known.

        Raises:
            ReplayError: where the model's arguments do not fit such numbers, as indices on another device.
        """
        try:
            with torch._C.DisableTorchFunction():
                return self._replay(start)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ReplayError(str(error)) from error

    def _replay(self, start: Callable[[Origin], Tensor]) -> Tensor:
        if self.replay is None:
            return start(self.origin)
        parts = [
            parent._replay(start) if isinstance(parent, Lineage) else torch.full(parent, -1) for parent in self.parents
        ]
        return self.replay(*parts)


def origin_of(shape: tuple[int, ...], features: tuple[int, ...], call: Any = None) -> Lineage:
    """The lineage of a tensor that a projection or an attention call has just made."""
    features = tuple(axis % len(shape) for axis in features)
    return Lineage(Origin(shape, features, call), signature=hash(("origin", len(shape), features)))


def feature_places(origin: Origin) -> Tensor:
    """For each place of an origin the number of its feature."""
    return _places(origin.shape, origin.features)


def token_places(origin: Origin) -> Tensor:
    """For each place of an origin the number of its token, over all sequences."""
    return _places(origin.shape, tuple(axis for axis in range(len(origin.shape)) if axis not in origin.features))


def _places(shape: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    return torch.arange(math.prod(sizes)).view(sizes).expand(shape)


def change_layout(
    parent: Lineage, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[int | None], Lineage] | None:
    """The lineages of a layout function's results, by their number; None for one result. None where it is not known.

    Args:
        parent: the lineage of its first argument.
        name: the function's name, one of LAYOUTS.
        function: what the model called.
        args: its arguments, the tensor first.
        kwargs: its keyword arguments.
    """
    rest = args[1:]
    if parent.depth >= LONGEST or not args or any(isinstance(x, torch.dtype) for x in (*rest, *kwargs.values())):
        return None
    apply: Callable[[Tensor], Any]
    if name == "view_as_complex":
        apply = _drop_last_axis
    elif name == "view_as_real":
        apply = _add_last_axis
    elif name in ("view_as", "reshape_as", "expand_as"):
        shape = tuple((rest[0] if rest else kwargs["other"]).shape)
        method = torch.Tensor.expand if name == "expand_as" else torch.Tensor.reshape

        def apply(places: Tensor) -> Any:
            return method(places, shape)
    else:
        chosen: Callable[..., Any] = torch.Tensor.reshape if name == "view" else function  # places are not contiguous

        def apply(places: Tensor) -> Any:
            return chosen(places, *rest, **kwargs)

    def result(number: int | None) -> Lineage:
        replay = apply if number is None else lambda places: apply(places)[number]
        signature = hash((parent.signature, name, number))
        return Lineage(parent.origin, (parent,), replay, signature, parent.depth + 1)

    return result


def join(
    parents: list[Lineage | tuple[int, ...]], name: str, function: Callable[..., Any], options: dict[str, Any]
) -> Lineage | None:
    """The lineage of tensors put together; a shape stands for a tensor of unknown origin."""
    known = [parent for parent in parents if isinstance(parent, Lineage)]
    depth = 1 + max((parent.depth for parent in known), default=LONGEST)
    if depth > LONGEST:
        return None

    def replay(*places: Tensor) -> Tensor:
        joined: Tensor = function(list(places), **options)
        return joined

    parts = tuple(parent.signature if isinstance(parent, Lineage) else 0 for parent in parents)
    return Lineage(known[0].origin, tuple(parents), replay, hash((name, parts)), depth)


def _drop_last_axis(places: Tensor) -> Tensor:
    return places[..., 0]


def _add_last_axis(places: Tensor) -> Tensor:
    return places[..., None].expand(*places.shape, 2)
