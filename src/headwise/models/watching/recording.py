"""The requested records of a watched model's heads, call by call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...attention.stats import SHARE, HeadStats
from ...errors import HeadwiseError, UnsupportedError
from ...heads import Heads
from ..structure.heads import w_o
from ..structure.partition import head_partition
from ..structure.selection import HeadChoice
from ..structure.sites import Site
from .call_reader import Reading
from .eager import EagerReading
from .layers import HeadRows, Layer, Links
from .packing import PackedReading
from .pass_state import CallContext
from .request import Request

FIRST = "\0first"  # our own class of keys, the sequence's first token; no name of a user's begins so


class Recording:
    """The layers of a model that were called, with all that was recorded of them."""

    def __init__(self, model: nn.Module, request: Request) -> None:
        self.model, self.request = model, request
        self.layers: dict[Site, Layer] = {}
        self._missing_rows = request.rows or []  # rows that no call had yet
        self._longest_call = 0  # queries, of the calls whose rows were kept

    def add_call(self, context: CallContext, reading: Reading | EagerReading, stats: HeadStats | None = None) -> None:
        """Record one attention call; stats: its statistics, where they are known already."""
        request, site = self.request, context.site
        layer = self.layers.get(site) or self._new_layer(site, reading)
        if request.stats:
            if stats is None:
                layer.absent |= reading.absent
                stats = reading.stats(context.real, self.key_classes(context, reading))
            _name_first(stats)
            if isinstance(reading, PackedReading):
                layer.add_packed(stats, [sequence.offset > 0 for sequence in reading.sequences])
            else:
                layer.add(stats, context.decoding)
        heads = request.weights.heads(site)
        if heads is not None:
            rows = self._rows(reading)
            layer.all_rows.append(rows)
            local_heads = heads if layer.partition is None else True  # numbers are those of the whole layer
            layer.all_weights.append(self._weights(reading, local_heads, rows, context.keys))
        if request.links:
            layer.requested_links = request.links
            layer.all_links.append(Links(*reading.links(request.links)))
        if request.observer is not None:
            request.observer(layer, reading, context.real)

    def relabel(self, sites: list[Site]) -> None:
        """Give the layers the names of these sites: more layers are known than before the model ran."""
        by_turn = {(site.module, site.turn): site for site in sites}
        kinds: dict[str, str] = {}
        layers: dict[Site, Layer] = {}
        for old, layer in self.layers.items():
            site = by_turn.get((old.module, old.turn), old)
            layer.kind, layer.index, layer.name = site.kind, site.index, site.name
            kinds[old.kind], layers[site] = site.kind, layer
        self.layers = layers
        classes = {kinds.get(kind, kind): members for kind, members in self.request.classes.items()}
        self.request = replace(self.request, classes=classes)

    def add_outputs(self, site: Site, x: Tensor) -> None:
        """Record W_O's input (B, T, heads * width): the heads' outputs after the model's own gates and norms."""
        heads, layer = self.request.outputs.heads(site), self.layers.get(site)
        if heads is None or layer is None:
            return
        x = x.detach()
        x = x[None] if x.dim() == 2 else x
        outputs = x.flatten(1, -2).unflatten(-1, (layer.heads.query, -1)).transpose(1, 2)  # (B, H, T, width)
        self.add_head_outputs(site, outputs)

    def add_head_outputs(self, site: Site, outputs: Tensor) -> None:
        """Record the heads' outputs (B, H, T, width), where they are requested."""
        heads, layer = self.request.outputs.heads(site), self.layers.get(site)
        if heads is not None and layer is not None:
            layer.all_outputs.append(outputs if heads is True else HeadRows(outputs[:, heads], heads, None))

    def set_width(self, site: Site, linear: nn.Module) -> None:
        """The linear layer that reads a layer's heads is known now: its width is the layer's."""
        layer = self.layers.get(site)
        if layer is not None:
            layer.heads = replace(layer.heads, width=_output_width(linear))

    def key_classes(self, context: CallContext, reading: Reading | EagerReading) -> dict[str, Tensor]:
        """The classes of keys of one call, (B, Tk) each: the user's, and where needed the sequences' first tokens."""
        positions, first_key = context.positions, context.first_key
        classes = {}
        for name, members in self.request.classes.get(context.site.kind, {}).items():
            # a cache may have dropped the first keys, and hold some that the user's class does not know yet
            part = torch.as_tensor(members, device=reading.q.device)[:, first_key : first_key + reading.keys]
            classes[name] = torch.nn.functional.pad(part, (0, reading.keys - part.shape[1]))
        if isinstance(reading, PackedReading):
            classes[FIRST] = reading.first_keys()
        elif positions is not None and (first_key or isinstance(reading, EagerReading) or reading.recipe is not None):
            # the keys that this call's queries see do not tell which token is the first
            first = positions.first_token(reading.keys).to(reading.q.device)
            classes[FIRST] = first.expand(reading.q.shape[0], -1)
        elif context.first_token is not None:
            classes[FIRST] = context.first_token
        return classes

    def check_rows(self) -> None:
        """Refuse rows that no call had, once the model has run."""
        if self._longest_call and self._missing_rows:
            raise HeadwiseError(
                f"rows {', '.join(map(str, self._missing_rows))} were not in any call: the longest had "
                f"{self._longest_call} queries; rows are from {-self._longest_call} to {self._longest_call - 1}"
            )

    def _rows(self, reading: Reading | EagerReading) -> list[int] | None:
        """Which of a call's queries keep their weights; None for all."""
        queries, rows = reading.q.shape[2], self.request.rows
        if rows is None:
            return None
        self._longest_call = max(self._longest_call, queries)
        self._missing_rows = [i for i in self._missing_rows if not -queries <= i < queries]
        return [i % queries for i in rows if -queries <= i < queries]

    def _weights(
        self, reading: Reading | EagerReading, heads: HeadChoice, rows: list[int] | None, keys: int
    ) -> Tensor | HeadRows:
        """(B, heads, rows, Tk), padded with zeros to the keys of the call: a static cache has more than exist yet."""
        if rows == []:  # a decoding step has none of the chosen rows
            batch, count = reading.q.shape[0], reading.q.shape[1] if heads is True else len(heads)
            weights = reading.q.new_zeros(batch, count, 0, keys)
        else:
            weights = reading.weights(rows, None if heads is True else heads)
            weights = torch.nn.functional.pad(weights, (0, keys - weights.shape[-1]))
        return weights if heads is True else HeadRows(weights, heads, rows)

    def _new_layer(self, site: Site, reading: Reading | EagerReading) -> Layer:
        query, kv = reading.q.shape[1], reading.k.shape[1]
        try:
            width = _output_width(w_o(self.model, site)[1])
        except UnsupportedError:
            width = query * reading.v.shape[3]
        partition = head_partition(self.model, site)
        if partition is not None and partition.is_whole(query):
            partition = None
        if partition is not None:
            query, kv = partition.heads.query, partition.heads.kv
        heads = Heads(width, query, kv, reading.q.shape[3], reading.v.shape[3])
        layer = self.layers[site] = Layer(site.kind, site.index, site.name, heads, site.source, partition=partition)
        return layer


def _name_first(stats: HeadStats) -> None:
    """The share of our own class of first tokens, where it was measured, is the statistic `first`."""
    if SHARE + FIRST in stats:
        stats.sums["first"] = stats.sums.pop(SHARE + FIRST)


def _output_width(linear: nn.Module) -> int:
    width = getattr(linear, "out_features", 0) or getattr(linear, "nf", 0)
    return int(width or linear.get_parameter("weight").shape[0])
