"""One batch through a model: the sums of every score, per text and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models.structure import sites
from ...models.text_inputs import device_of, run_on_tokens
from ...models.watching.call_reader import Reading
from ...models.watching.eager import EagerReading
from ...models.watching.layers import Layer
from ...models.watching.request import CallObserver
from ...models.watching.watcher import watch
from ...role_definitions import BOTH, CAUSAL, CROSS, Tokens, columns, pair_scores
from .corpus import Batch
from .pair_columns import PairColumns, pair_columns
from .sums import Key

WEIGHTS = 1 << 21  # of a layer that are in memory at once: about the size of a core's cache
CELLS = 1 << 26  # of pair columns that are held at once
TINY = 1e-37  # so that 0 ln 0 is 0


@dataclass
class BatchSums:
    """Sums of one layer for each text of a batch: B texts, S scores, H heads; the last head is uniform attention."""

    names: tuple[str, ...]  # (S,)
    way: str  # of attention
    top: np.ndarray  # (B, S, H + 1): the sums
    bottom: np.ndarray  # (B, S): the number of queries that each is a sum over


def text_body(model: Any) -> Any:
    """The part of a model that attends, without its output head, where its layers have the same names."""
    body = getattr(model, "base_model", model)
    if body is model:
        return model
    try:
        same_sites = [site.key for site in sites.attention_sites(body)] == [
            site.key for site in sites.attention_sites(model)
        ]
    except UnsupportedError:
        return model
    return body if same_sites else model


@dataclass
class Observer:
    """A watched model, and what is measured from each of its attention calls."""

    model: Any
    ways: dict[str, str] = field(default_factory=dict)  # kind -> way of attention, once a pass has shown it
    batch: Batch | None = None
    layers: dict[Key, BatchSums] = field(default_factory=dict)  # of the last batch
    output: Any = None  # of the model, for the last batch
    measure: CallObserver | None = None  # called with each attention call instead of measuring the scores on texts
    _columns: list[tuple[Any, Any, PairColumns]] = field(default_factory=list)  # of the layers before, for reuse

    @classmethod
    def of(cls, model: Any) -> Observer:
        """An observer of the part of a model that has attention."""
        return cls(text_body(model))

    @contextmanager
    def watching(self) -> Iterator[Observer]:
        """The model is in eval mode inside the context and is restored afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.inference_mode(), watch(self.model, stats=False, each=self._on_call):
                yield self
        finally:
            for module, training in modes:
                module.training = training

    def run(self, batch: Batch) -> dict[Key, BatchSums]:
        """The sums of every layer over a batch."""
        self.batch, self.layers, self._columns = batch.to(device_of(self.model)), {}, []
        self.output = forward(self.model, self.batch)
        self._columns = []
        return self.layers

    def tokens(self, kind: str) -> tuple[Tokens, Tokens]:
        """The tokens of the queries and of the keys of one kind of attention."""
        assert self.batch is not None
        source, target = self.batch.source, self.batch.target
        if target is None:
            return source, source
        if kind.endswith("cross"):
            return target, source
        return (target, target) if "decoder" in kind else (source, source)

    @property
    def target(self) -> Tokens | None:
        return None if self.batch is None else self.batch.target

    def _on_call(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        (self.measure or self._measure_texts)(layer, reading, real)

    def _measure_texts(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        query, key = self.tokens(layer.kind)
        keys = reading.keys
        if (reading.q.shape[2], keys) != (query.ids.shape[1], key.ids.shape[1]):
            raise UnsupportedError(
                f"{layer.kind} layer {layer.index} attends over {reading.q.shape[2]} x {keys} places, the text has "
                f"{query.ids.shape[1]} x {key.ids.shape[1]} tokens; its keys cannot be named"
            )
        way = self.way(layer, reading)
        total: tuple[Tensor, Tensor] | None = None
        for rows in self._blocks(reading, keys, len(pair_scores(way))):
            a = reading.weights(None if len(rows) == reading.q.shape[2] else list(rows), None)
            new = sums(a.float(), self._pair_columns(query, key, reading, a, rows, way))
            total = new if total is None else (total[0] + new[0], total[1] + new[1])
        assert total is not None
        top, bottom = (x.cpu().double().numpy() for x in total)  # not every device has float64
        self.layers[layer.key] = BatchSums(columns(way), way, top, bottom)

    def way(self, layer: Layer, reading: Reading | EagerReading) -> str:
        """The way of attention of a kind of layers, as its first call shows."""
        if layer.kind not in self.ways:
            if layer.kind.endswith("cross") or not reading.comparable:
                return self.ways.setdefault(layer.kind, CROSS)
            queries = reading.q.shape[2]
            visible_keys = visible(reading, range(queries), None)
            later = torch.ones_like(visible_keys[0]).triu(1)
            ahead = visible_keys & later
            self.ways[layer.kind] = BOTH if bool(ahead.any()) else CAUSAL
        return self.ways[layer.kind]

    def _blocks(self, reading: Reading | EagerReading, keys: int, width: int) -> Iterator[range]:
        """Ranges of queries whose weights and columns fit in memory at once; for usual texts, all of them."""
        batch, heads, queries = reading.q.shape[:3]
        size = max(1, min(WEIGHTS // (batch * heads * keys), CELLS // (batch * keys * width)))
        for first in range(0, queries, size):
            yield range(first, min(first + size, queries))

    def _pair_columns(
        self, query: Tokens, key: Tokens, reading: Reading | EagerReading, a: Tensor, rows: range, way: str
    ) -> PairColumns:
        """Layers with the same visible keys share their columns, as long as all of them can be held."""
        mask = reading.options["mask"] if isinstance(reading, Reading) else reading.call.mask
        mask_options = ("eager", None)
        if isinstance(reading, Reading):
            mask_options = (reading.options["causal"], reading.options["window"])
        key_of_columns = (id(query), id(key), mask_options, way, rows)
        for known_key, known_mask, cached in self._columns:
            if known_key == key_of_columns and _equal_masks(mask, known_mask):
                return cached
        if sum(cached.pairs.numel() for _, _, cached in self._columns) > CELLS:
            self._columns.clear()
        new = pair_columns(
            query, key, visible(reading, rows, a), query.real[:, rows.start : rows.stop], rows.start, way
        )
        self._columns.append((key_of_columns, mask, new))
        return new


def _equal_masks(a: Any, b: Any) -> bool:
    """Whether two masks are equal; layers often get a new one that is equal to the last."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    return a is b


def forward(model: Any, batch: Batch) -> Any:
    """Run a model on a batch, without keeping a cache."""
    inputs: dict[str, Any] = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
    if batch.target is not None:
        inputs |= {"decoder_input_ids": batch.target.ids, "decoder_attention_mask": batch.target.real.long()}
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    return run_on_tokens(model, inputs)


def visible(reading: Reading | EagerReading, rows: Sequence[int], a: Tensor | None) -> Tensor:
    """(B, rows, Tk) bool: the keys that each query may attend to, in any head."""
    selected = None if len(rows) == reading.q.shape[2] else list(rows)
    if isinstance(reading, EagerReading):
        return ((reading.weights(selected, None) if a is None else a) > 0).any(1)
    if _differs_by_head(reading):
        return ((reading.weights(selected, None) if a is None else a) > 0).any(1)
    mask = reading.options["mask"]
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(1, keepdim=True)
    options = dict(reading.options, mask=mask, softcap=None, sinks=None)
    options |= {name: None for name in ("slopes", "gates") if name in options}
    # scores of zero: equal weights on all visible keys
    q, k = (x.new_zeros(len(x), 1, x.shape[2], 1, dtype=torch.float32) for x in (reading.q, reading.k))
    return replace(reading, q=q, k=k, v=k, options=options).weights(selected, None)[:, 0] > 0


def _differs_by_head(reading: Reading) -> bool:
    """Whether heads have windows of their own."""
    window, keep_first = reading.options.get("window"), reading.options.get("keep_first", 0)
    pair = window is None or (len(window) == 2 and not isinstance(window[0], Sequence))
    return not pair or not isinstance(keep_first, int)


def sums(a: Tensor, columns: PairColumns) -> tuple[Tensor, Tensor]:
    """Weights (B, H, rows, Tk) -> the sums of every score (B, S, H + 1), and the queries that each is over (B, S)."""
    batch, heads, rows, keys = a.shape
    pairs = columns.pairs.flatten(2)  # (B, R, rows * Tk)
    shares = torch.bmm(a.reshape(batch, heads, rows * keys), pairs.transpose(1, 2))  # (B, H, R)
    largest, positions = a.max(-1)  # (B, H, rows)
    place = (torch.arange(rows, device=a.device) * keys + positions).view(batch, 1, -1).expand(-1, pairs.shape[1], -1)
    strongest = pairs.gather(2, place).view(batch, -1, heads, rows).sum(-1).transpose(1, 2)
    query_mask = columns.queries[:, None].to(a.dtype)
    entropy = -(a.clamp(min=TINY).log_().mul_(a).sum(-1) * query_mask).sum(-1)  # (B, H)
    confidence = (largest * query_mask).sum(-1)
    head_sums = torch.cat([shares, strongest, torch.stack([entropy, confidence, entropy], -1)], -1)  # (B, H, S)
    spread, peak, count = columns.equal_rows.unbind(-1)
    equal = torch.cat([columns.equal, columns.equal, torch.stack([spread, peak, spread], -1)], -1)  # (B, S)
    bottom = torch.cat([columns.counts, columns.counts, torch.stack([count, count, spread], -1)], -1)
    return torch.cat([head_sums, equal[:, None]], 1).transpose(1, 2), bottom
