"""Totals of all ranks: sums by all-reduce, maxima by the maximum."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.stats import HeadStats
from ..errors import RankError
from ..scale.ranks import Ranks
from .alarms import LayerKey
from .sampling import Samples
from .totals import LayerTotals
from .training_log import LoggedLayer

ACTIVITY = "the statistics of a training step"


class Layout(NamedTuple):
    """The fields that the totals of one layer have."""

    layer: LoggedLayer
    sums: tuple[str, ...]
    maxima: tuple[str, ...]


def reduce_totals(
    totals: dict[LayerKey, LayerTotals], ranks: Ranks, counted: bool = True
) -> dict[LayerKey, LayerTotals]:
    """The totals of all ranks, the same on every rank and on the CPU. All ranks must call this.

    A rank on which a layer was not called adds nothing to it; a statistic that a rank with the layer does not have is
    dropped. counted: False on a rank whose totals another one has too.
    """
    layouts = _common_layouts([_layout(total) for total in totals.values()], ranks)
    if not layouts:
        return {}
    parts = [_pack(layout, totals.get(layout.layer.key) if counted else None) for layout in layouts]
    sums, maxima = (torch.cat(part).to(ranks.device) for part in zip(*parts, strict=True))
    has_nan = maxima.isnan().to(maxima)  # whether a maximum over ranks keeps NaN depends on the transport
    largest = torch.cat([maxima.nan_to_num(0.0, torch.inf, -torch.inf), has_nan])
    ranks.all_reduce(sums, ACTIVITY)
    ranks.all_reduce(largest, ACTIVITY, op=dist.ReduceOp.MAX)
    values, has_nan = largest.cpu().chunk(2)
    all_sums = iter(sums.cpu().split([len(part) for part, _ in parts]))
    all_maxima = iter(torch.where(has_nan > 0, torch.nan, values).split([len(part) for _, part in parts]))
    return {layout.layer.key: _unpack(layout, next(all_sums), next(all_maxima)) for layout in layouts}


def _layout(totals: LayerTotals) -> Layout:
    return Layout(totals.layer, tuple(totals.stats.sums), tuple(totals.stats.maxima))


def _common_layouts(own: list[Layout], ranks: Ranks) -> list[Layout]:
    """The layouts that all ranks use: their own where they are the same, else those of all ranks common."""
    if ranks.count == 1:
        return own
    digest = int.from_bytes(hashlib.sha256(repr(own).encode()).digest()[:7], "big")
    digests = ranks.all_gather(torch.tensor([digest], device=ranks.device))
    if len({int(x) for x in digests}) == 1:
        return own
    by_rank: list[list[Layout] | None] = [None] * ranks.count
    with ranks.transport_errors(ACTIVITY):
        dist.all_gather_object(by_rank, own, group=ranks.group)
    common: dict[LayerKey, Layout] = {}
    for layouts in by_rank:
        for layout in layouts or []:
            common[layout.layer.key] = _join(common.get(layout.layer.key, layout), layout)
    return [common[key] for key in sorted(common)]


def _join(a: Layout, b: Layout) -> Layout:
    if a.layer.heads != b.layer.heads:
        raise RankError(
            f"{a.layer.kind} layer {a.layer.index} has {a.layer.heads} heads on one rank and {b.layer.heads} on "
            "another; give a mesh= of ranks that have the same heads, such as those of data parallelism"
        )
    sums = tuple(name for name in a.sums if name in b.sums)
    return Layout(a.layer, sums, tuple(name for name in a.maxima if name in b.maxima))


def _pack(layout: Layout, totals: LayerTotals | None) -> tuple[Tensor, Tensor]:
    """The sums and the maxima of a layer, one vector each."""
    heads = layout.layer.heads
    if totals is None:
        size = heads * (len(layout.sums) + 1) + heads * heads + heads + 2
        return torch.zeros(size, dtype=torch.float64), torch.full(
            (heads * len(layout.maxima),), -torch.inf, dtype=torch.float64
        )
    stats, samples = totals.stats, totals.samples
    calls = torch.tensor([totals.calls])
    sums = [*(stats.sums[name] for name in layout.sums), stats.count, samples.products, samples.squares]
    sums += [samples.queries, calls]
    maxima = [stats.maxima[name] for name in layout.maxima]
    empty = torch.zeros(0, dtype=torch.float64)
    vectors = [torch.cat([empty, *(x.detach().cpu().double().flatten() for x in part)]) for part in (sums, maxima)]
    return vectors[0], vectors[1]


def _unpack(layout: Layout, sums: Tensor, maxima: Tensor) -> LayerTotals:
    heads = layout.layer.heads
    names = (*layout.sums, "count")
    columns, products, squares, queries, calls = sums.split([heads * len(names), heads * heads, heads, 1, 1])
    by_name = {name: row[None] for name, row in zip(names, columns.view(-1, heads), strict=True)}
    count = by_name.pop("count")
    largest = {name: row[None] for name, row in zip(layout.maxima, maxima.view(-1, heads), strict=True)}
    samples = Samples(products.view(heads, heads), squares, queries[0])
    return LayerTotals(layout.layer, HeadStats(by_name, count, largest), samples, int(calls))
