"""What is added up between two optimizer steps: statistics of every layer over all training passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.stats import HeadStats, join_queries
from ..models.watching import Layer
from ..models.watching.known_modules import SplitSequenceReading
from .alarms import LayerKey, Values
from .sampling import Samples, no_samples, sample
from .statistics import EXACT
from .training_log import LoggedLayer


@dataclass
class LayerTotals:
    """One layer: its statistics (1, H), its samples, and how often it was called."""

    layer: LoggedLayer
    stats: HeadStats
    samples: Samples
    calls: int = 1

    def __add__(self, other: LayerTotals) -> LayerTotals:
        return LayerTotals(
            self.layer,
            join_queries(self.stats, other.stats),
            self.samples + other.samples,
            self.calls + other.calls,
        )

    def values(self) -> Values:
        """One number per head and statistic."""
        rows = {name: self.stats[name] for name in EXACT if name in self.stats}
        if self.samples.queries > 0:
            rows["output"] = self.samples.outputs()
        if self.has_twins:
            rows["twin"] = self.samples.twins()[0]
        return {name: row.double().tolist() for name, row in rows.items()}

    @property
    def has_twins(self) -> bool:
        """Whether heads of the layer were compared."""
        return self.layer.heads > 1 and bool(self.samples.queries > 0)

    def twins(self) -> list[int]:
        """The most similar head of the layer, for every head."""
        return [int(head) for head in self.samples.twins()[1].tolist()]


class StepTotals:
    """Adds up the training passes of one optimizer step. `watch` calls it after every attention call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[LayerKey, LayerTotals] = {}
        self.absent: dict[tuple[str, str], str] = {}  # statistic and why it is not recorded -> the first such layer

    def __call__(self, layer: Layer, reading: Any, real: Tensor | None) -> None:
        """Take what one call added to a layer; what passes in evaluation mode added is dropped."""
        runs = [run.all for run in layer.runs]
        layer.runs.clear()  # else it would grow with every pass, and evaluation would be part of it
        if not self.model.training or not runs:
            return
        logged = LoggedLayer(layer.kind, layer.index, layer.name, layer.heads.query, layer.heads.kv)
        partition = layer.partition
        stats = _total(runs[-1]) if partition is None else partition.gather_stats(_total(runs[-1]))
        if isinstance(reading, SplitSequenceReading):
            samples = no_samples(layer.heads.query)
            for statistic in ("output", "twin"):
                self.absent.setdefault((statistic, "no rank has all keys of a split sequence"), layer.name)
        else:
            samples = sample(reading, real, partition)
        new = LayerTotals(logged, stats, samples)
        for statistic, reason in layer.absent.items():
            if statistic in EXACT:
                self.absent.setdefault((statistic, reason), layer.name)
        old = self.layers.get(layer.key)
        self.layers[layer.key] = new if old is None else old + new

    def take(self) -> dict[LayerKey, LayerTotals]:
        """The totals so far, which begin again from nothing."""
        layers, self.layers = self.layers, {}
        return layers


def _total(stats: HeadStats) -> HeadStats:
    """The recorded statistics of all sequences, (1, H), in double precision."""
    total = stats.total()
    sums = {name: _double(x) for name, x in total.sums.items() if name in EXACT}
    return HeadStats(sums, _double(total.count), {name: _double(x) for name, x in total.maxima.items()})


def _double(x: Any) -> Tensor:
    x = torch.as_tensor(x).detach()
    return x if x.device.type == "mps" else x.double()  # Apple's GPUs have no float64
