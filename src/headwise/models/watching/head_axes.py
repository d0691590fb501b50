"""Which leading axes of a tensor number the sequences and which the heads, and the tensor as (B, H, T, D)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .lineage import Lineage, ReplayError, feature_places, token_places


@dataclass(frozen=True)
class HeadAxes:
    """The leading axes of queries (*lead, T, D), told apart."""

    lead: tuple[int, ...]  # sizes of the leading axes
    sizes: tuple[int, ...]  # the same, an axis of sequences and heads together taken as two
    batch: tuple[int, ...]  # those of sizes that number the sequences
    heads: tuple[int, ...]  # those that number the heads

    @property
    def plain(self) -> bool:
        """Whether the axes are (B, H) already."""
        return self.lead == self.sizes and (self.batch, self.heads) == ((0,), (1,))

    @property
    def batch_size(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.batch)

    @property
    def head_count(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.heads)

    def by_head(self, x: Tensor) -> Tensor:
        """x (*lead, rows, columns) as (B, H, rows, columns); H is 1 where all heads have the same."""
        x = x[(None,) * (len(self.lead) + 2 - x.dim())]
        if self.plain:
            return x.expand(self.lead[0], *x.shape[1:])
        if self.lead != self.sizes:
            x = x.expand(*self.lead, -1, -1).reshape(*self.sizes, *x.shape[-2:])
        shared = all(x.shape[axis] == 1 for axis in self.heads)  # by all heads
        sizes = [1 if shared and axis in self.heads else size for axis, size in enumerate(self.sizes)]
        x = x.expand(*sizes, -1, -1).permute(*self.batch, *self.heads, -2, -1)
        return x.reshape(self.batch_size, 1 if shared else self.head_count, *x.shape[-2:])

    def undo(self, x: Tensor) -> Tensor:
        """x (B, H, rows, columns) as (*lead, rows, columns)."""
        order = (*self.batch, *self.heads)
        x = x.reshape(*(self.sizes[axis] for axis in order), *x.shape[-2:])
        back = [order.index(axis) for axis in range(len(order))]
        return x.permute(*back, -2, -1).reshape(*self.lead, *x.shape[-2:])


def assume_axes(lead: tuple[int, ...]) -> HeadAxes | None:
    """(B, H), as PyTorch's own function takes it, where nothing is known of the queries."""
    return HeadAxes(lead, lead, (0,), (1,)) if len(lead) == 2 else None


def read_axes(lineage: Lineage, lead: tuple[int, ...], rows: int, columns: int) -> HeadAxes | str:
    """The leading axes of queries (*lead, rows, columns), by their places' origin, or why they cannot be told apart."""
    try:
        features, tokens = (
            lineage.places(start).reshape(*lead, rows, columns)[..., 0] for start in (feature_places, token_places)
        )
    except ReplayError as error:
        return f"how its axes {(*lead, rows, columns)} came about cannot be followed ({error})"
    if _varies(features, -1):
        return f"the rows of its axes {(*lead, rows, columns)} are features and not tokens"
    features, tokens = features[..., 0], tokens[..., 0]
    mixed = f"sequences and heads are mixed in its axes {(*lead, rows, columns)}"
    sizes: list[int] = []
    batch: list[int] = []
    heads: list[int] = []
    for axis, size in enumerate(lead):
        by_feature, by_token = (_varies(places, axis) for places in (features, tokens))
        number = len(sizes)
        if by_feature and by_token:
            split = _split(features.movedim(axis, -1), tokens.movedim(axis, -1))
            if split is None:
                return mixed
            outer, inner, heads_inside = split
            sizes += [outer, inner]
            batch.append(number if heads_inside else number + 1)
            heads.append(number + 1 if heads_inside else number)
            continue
        sizes.append(size)
        if by_feature or (size == 1 and axis > 0 and not heads):
            heads.append(number)
        elif by_token or size == 1 or axis == 0:
            batch.append(number)
        else:
            return mixed
    return _with_both(HeadAxes(lead, tuple(sizes), tuple(batch), tuple(heads)))


def _with_both(axes: HeadAxes) -> HeadAxes:
    """The axes, with one of size 1 for one head, or for one sequence, where there is no axis for it."""
    sizes, batch, heads = axes.sizes, axes.batch, axes.heads
    if not batch:
        sizes, batch = (*sizes, 1), (len(sizes),)
    if not heads:
        sizes, heads = (*sizes, 1), (len(sizes),)
    return HeadAxes(axes.lead, sizes, batch, heads)


def _varies(places: Tensor, axis: int) -> bool:
    return bool((places != places.narrow(axis, 0, 1)).any())


def _split(features: Tensor, tokens: Tensor) -> tuple[int, int, bool] | None:
    """How the last axis numbers sequences and heads: outer size, inner size, and whether heads are the inner ones."""
    features, tokens = (x.reshape(-1, x.shape[-1]) for x in (features, tokens))
    size, count = features.shape[1], int(torch.unique(features[0]).numel())
    if size % count:
        return None
    for outer, inner, heads_inside in ((size // count, count, True), (count, size // count, False)):
        by_feature, by_token = (x.reshape(-1, outer, inner) for x in (features, tokens))
        same_features = by_feature[:, :1] if heads_inside else by_feature[:, :, :1]
        same_tokens = by_token[:, :, :1] if heads_inside else by_token[:, :1]
        if bool((by_feature == same_features).all()) and bool((by_token == same_tokens).all()):
            return outer, inner, heads_inside
    return None
