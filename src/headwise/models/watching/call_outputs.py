"""The heads' outputs of an attention call, followed to the linear layer that reads them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head_axes import HeadAxes
from .lineage import Lineage, Origin, ReplayError


class Output(NamedTuple):
    """The record of a call that is kept with its output."""

    token: Any  # the receiver's own
    axes: HeadAxes
    width: int  # of one head
    order: tuple[int, ...]  # the output's axes as (*lead, Tq, Dv)

    def by_head(self, x: Tensor) -> Tensor:
        """The output, or another tensor of its shape, as (B, H, Tq, Dv)."""
        x = x.permute(self.order)
        return self.axes.by_head(x.reshape(*self.axes.lead, *x.shape[-2:]))


def _head_places(origin: Origin) -> Tensor:
    """For each place of a call's output the number of its head and of its place in that head, together."""
    axes, width, order = origin.call.axes, origin.call.width, origin.call.order
    shape = [origin.shape[axis] for axis in order]
    places = torch.arange(axes.head_count * width).view(1, axes.head_count, 1, width)
    by_lead = axes.undo(places.expand(axes.batch_size, axes.head_count, shape[-2], width))  # (*lead, Tq, Dv)
    return by_lead.reshape(shape).permute(*(order.index(axis) for axis in range(len(order))))


def lie_in_order(lineage: Lineage, width: int) -> bool:
    """Whether the heads' outputs lie head by head on the last axis, all of them and nothing else."""
    try:
        places = lineage.places(_head_places)
    except ReplayError:
        return False
    return places.shape[-1] == width and bool((places == torch.arange(width)).all())


def outputs_at(lineage: Lineage, x: Tensor) -> Tensor | None:
    """x, which has the places of a call's output in another layout, as (B, H, Tq, Dv)."""
    origin = lineage.origin
    count = math.prod(origin.shape)
    with torch._C.DisableTorchFunction():
        try:
            places = lineage.places(lambda _: torch.arange(count).view(origin.shape)).flatten()
        except ReplayError:
            return None
        if places.numel() != count or not torch.equal(places.sort().values, torch.arange(count)):
            return None
        outputs = torch.empty_like(x).flatten()
        outputs[places.to(x.device)] = x.detach().flatten()
        by_head: Tensor = origin.call.by_head(outputs.view(origin.shape))
        return by_head
