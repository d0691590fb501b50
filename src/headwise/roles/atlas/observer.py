"""One batch through a model: what every head did with every text of it, as sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models.structure import sites
from ...models.watching.call_reader import Reading
from ...models.watching.eager import EagerReading
from ...models.watching.layers import Layer
from ...models.watching.watcher import Each, watch
from ...resampling import poisson_counts
from ..json_documents import anything, count, items, mapping, string
from .corpus import Batch, Tokens
from .pair_marks import Marks, mark
from .roles import BOTH, CAUSAL, CROSS, columns, marks
from .sums import LARGEST_SUM, Key, Tally, are_counts

WEIGHTS = 1 << 21  # weights of a layer that are held at once: about what a core's cache holds
CELLS = 1 << 26  # of marks
TOGETHER = 512  # texts that are added up at once
TINY = 1e-37  # 0 ln 0 is 0


@dataclass
class Found:
    """What a layer's heads did with the texts of one batch. The last head is equal attention."""

    names: tuple[str, ...]
    way: str
    top: np.ndarray  # (B, S, H + 1)
    bottom: np.ndarray  # (B, S)


def body_of(model: Any) -> Any:
    """The part of a model that attends, without a head over the vocabulary, where its layers have the same names."""
    body = getattr(model, "base_model", model)
    if body is model:
        return model
    try:
        same = [site.key for site in sites.sites(body)] == [site.key for site in sites.sites(model)]
    except UnsupportedError:
        return model
    return body if same else model


@dataclass
class Observer:
    """A model under watch, and what is taken from each of its attention calls."""

    model: Any
    ways: dict[str, str] = field(default_factory=dict)  # kind -> way of attention, once a pass has shown it
    batch: Batch | None = None
    found: dict[Key, Found] = field(default_factory=dict)
    output: Any = None  # what the model gave for the batch
    take: Each | None = None  # instead of the roles on texts, what another probe takes from each call
    _marked: list[tuple[Any, Any, Marks]] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any) -> Observer:
        """Of the part of a model that attends."""
        return cls(body_of(model))

    @contextmanager
    def watching(self) -> Iterator[Observer]:
        """The model is in eval mode meanwhile, and as it was afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.inference_mode(), watch(self.model, stats=False, each=self._seen):
                yield self
        finally:
            for module, training in modes:
                module.training = training

    def run(self, batch: Batch) -> dict[Key, Found]:
        """What every layer did with a batch."""
        self.batch, self.found, self._marked = batch.to(self.model.device), {}, []
        self.output = forward(self.model, self.batch)
        self._marked = []
        return self.found

    def tokens(self, kind: str) -> tuple[Tokens, Tokens]:
        """What a kind of attention looks from, and at."""
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

    def _seen(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        (self.take or self._roles)(layer, reading, real)

    def _roles(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        query, key = self.tokens(layer.kind)
        keys = reading.k.shape[2] if isinstance(reading, Reading) else reading.given.key.shape[2]
        if (reading.q.shape[2], keys) != (query.ids.shape[1], key.ids.shape[1]):
            raise UnsupportedError(
                f"{layer.kind} layer {layer.index} attends over {reading.q.shape[2]} x {keys} places, the text has "
                f"{query.ids.shape[1]} x {key.ids.shape[1]} tokens; what it looks at has no name"
            )
        way = self.way(layer, reading)
        total: tuple[Tensor, Tensor] | None = None
        for rows in self._blocks(reading, keys, len(marks(way))):
            a = reading.weights(None if len(rows) == reading.q.shape[2] else list(rows), None)
            marked = self._marks(query, key, reading, a, rows, way)
            new = sums(a.float(), marked)
            total = new if total is None else (total[0] + new[0], total[1] + new[1])
        assert total is not None
        top, bottom = (x.cpu().double().numpy() for x in total)  # not every device has float64
        self.found[layer.key] = Found(columns(way), way, top, bottom)

    def way(self, layer: Layer, reading: Reading | EagerReading) -> str:
        """How a kind of layer attends, as its first call shows."""
        if layer.kind not in self.ways:
            if layer.kind.endswith("cross") or not reading.comparable:
                return self.ways.setdefault(layer.kind, CROSS)
            queries = reading.q.shape[2]
            shown = visible(reading, range(queries), None)
            ahead = shown & torch.ones(shown.shape[1:], dtype=torch.bool, device=shown.device).triu(1)
            self.ways[layer.kind] = BOTH if bool(ahead.any()) else CAUSAL
        return self.ways[layer.kind]

    def _blocks(self, reading: Reading | EagerReading, keys: int, width: int) -> Iterator[range]:
        """Rows of queries whose weights and marks are held at once; for usual texts, all of them."""
        batch, heads, queries = reading.q.shape[:3]
        size = max(1, min(WEIGHTS // (batch * heads * keys), CELLS // (batch * keys * width)))
        for first in range(0, queries, size):
            yield range(first, min(first + size, queries))

    def _marks(
        self, query: Tokens, key: Tokens, reading: Reading | EagerReading, a: Tensor, rows: range, way: str
    ) -> Marks:
        """Layers that see alike share their marks, as long as all of them can be held."""
        mask = reading.how["mask"] if isinstance(reading, Reading) else reading.given.mask
        how = (reading.how["causal"], reading.how["window"]) if isinstance(reading, Reading) else ("eager", None)
        at = (id(query), id(key), how, way, rows)
        for before, known, made in self._marked:
            if before == at and _same(mask, known):
                return made
        if sum(kept.pairs.numel() for _, _, kept in self._marked) > CELLS:
            self._marked.clear()
        made = mark(query, key, visible(reading, rows, a), query.real[:, rows.start : rows.stop], rows.start, way)
        self._marked.append((at, mask, made))
        return made


def _same(a: Any, b: Any) -> bool:
    """Whether two masks show the same; layers often get a new one that is like the last."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    return a is b


def forward(model: Any, batch: Batch) -> Any:
    """Run a model on a batch, without keeping a cache."""
    given = {"input_ids": batch.source.ids, "attention_mask": batch.source.real.long()}
    if batch.target is not None:
        given |= {"decoder_input_ids": batch.target.ids, "decoder_attention_mask": batch.target.real.long()}
    return model(**given, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))


def visible(reading: Reading | EagerReading, rows: range, a: Tensor | None) -> Tensor:
    """(B, rows, Tk): what each query may look at, in any head."""
    some = None if len(rows) == reading.q.shape[2] else list(rows)
    if isinstance(reading, EagerReading):
        return ((reading.weights(some, None) if a is None else a) > 0).any(1)
    mask = reading.how["mask"]
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(1, keepdim=True)
    how = dict(reading.how, mask=mask, softcap=None, sinks=None)
    # scores of zero: equal weights on whatever may be seen
    q, k = (x.new_zeros(len(x), 1, x.shape[2], 1, dtype=torch.float32) for x in (reading.q, reading.k))
    return replace(reading, q=q, k=k, v=k, how=how).weights(some, None)[:, 0] > 0


def sums(a: Tensor, marked: Marks) -> tuple[Tensor, Tensor]:
    """Weights (B, H, rows, Tk) -> what is summed for every number (B, S, H + 1), and how much it is a sum of (B, S)."""
    batch, heads, rows, keys = a.shape
    pairs = marked.pairs.flatten(2)  # (B, R, rows * Tk)
    shares = torch.bmm(a.reshape(batch, heads, rows * keys), pairs.transpose(1, 2))  # (B, H, R)
    most, at = a.max(-1)  # (B, H, rows)
    place = (torch.arange(rows, device=a.device) * keys + at).view(batch, 1, -1).expand(-1, pairs.shape[1], -1)
    strongest = pairs.gather(2, place).view(batch, -1, heads, rows).sum(-1).transpose(1, 2)
    counted = marked.queries[:, None].to(a.dtype)
    entropy = -(a.clamp(min=TINY).log_().mul_(a).sum(-1) * counted).sum(-1)  # (B, H)
    confidence = (most * counted).sum(-1)
    own = torch.cat([shares, strongest, torch.stack([entropy, confidence, entropy], -1)], -1)  # (B, H, S)
    spread, peak, count = marked.wide.unbind(-1)
    equal = torch.cat([marked.equal, marked.equal, torch.stack([spread, peak, spread], -1)], -1)  # (B, S)
    bottom = torch.cat([marked.counts, marked.counts, torch.stack([count, count, spread], -1)], -1)
    return torch.cat([own, equal[:, None]], 1).transpose(1, 2), bottom


class Waiting(NamedTuple):
    """What was found in one batch, until it is added up."""

    found: dict[Key, Found]
    identities: np.ndarray  # (B,) uint64
    tokens: int
    cut: int


class Adding:
    """Batches on their way into a tally: some together, since adding a few texts lasts as long as adding many.

    Which ones are added together changes the last bits of the sums; so what waits is part of a checkpoint, and a run
    that was interrupted ends with the same bits as one that was not.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.waiting: list[Waiting] = []

    def take(self, found: dict[Key, Found], batch: Batch) -> None:
        self.waiting.append(Waiting(found, batch.identities, batch.tokens, batch.cut))
        if sum(len(one.identities) for one in self.waiting) >= TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Add up what waits, all layers of it."""
        weights = [poisson_counts(one.identities, self.tally.replicates) for one in self.waiting]
        for key in dict.fromkeys(key for one in self.waiting for key in one.found):
            parts = []
            for waiting, drawn in zip(self.waiting, weights, strict=True):
                if key in waiting.found:
                    one = waiting.found[key]
                    parts.append((one.top, one.bottom, drawn))
                    sums = self.tally.open(key, one.way, one.names, one.top.shape[2] - 1)
            sums.add(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        for waiting in self.waiting:
            self.tally.count(waiting.identities, waiting.tokens, waiting.cut)
        self.waiting = []

    def facts(self) -> list[dict[str, Any]]:
        """What waits, but for its arrays, as JSON."""
        return [
            {
                "tokens": one.tokens,
                "cut": one.cut,
                "layers": [[*key, found.way, list(found.names)] for key, found in one.found.items()],
            }
            for one in self.waiting
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of what waits, flat."""
        made = {}
        for number, one in enumerate(self.waiting):
            made[f"{number}/identities"] = one.identities
            for (kind, layer), found in one.found.items():
                made[f"{number}/{kind}/{layer}/top"] = found.top
                made[f"{number}/{kind}/{layer}/bottom"] = found.bottom
        return made

    def restore(self, facts: Any, arrays: dict[str, np.ndarray]) -> None:
        """What `facts` and `arrays` gave waits again; a ValueError where they do not fit each other."""
        rest = dict(arrays)
        for number, one in enumerate(items(facts, "waiting", lambda x, what: mapping(x, what, anything))):
            identities = rest.pop(f"{number}/identities")
            if identities.dtype != np.uint64 or identities.ndim != 1:
                raise ValueError(f"identities of batch {number} are {identities.dtype} {identities.shape}")
            found: dict[Key, Found] = {}
            for kind, layer, way, names in items(one["layers"], "layers", anything):
                top, bottom = (rest.pop(f"{number}/{kind}/{layer}/{part}") for part in ("top", "bottom"))
                here = Found(tuple(items(names, "names", string)), string(way, "way"), top, bottom)
                heads = [x.top.shape[1] - 1 for key, x in self.tally.sums.items() if key == (kind, layer)]
                _check_waiting(here, len(identities), heads)
                found[string(kind, "kind"), count(layer, "layer")] = here
            self.waiting.append(Waiting(found, identities, count(one["tokens"], "tokens"), count(one["cut"], "cut")))
        if rest:
            raise ValueError(f"array {min(rest)!r} belongs to no batch")


def _check_waiting(found: Found, texts: int, heads: list[int]) -> None:
    """heads: how many the layer has, where earlier batches have shown it."""
    shape = (texts, len(found.names))
    top, bottom = found.top, found.bottom
    wrong = top.ndim != 3 or top.shape[:2] != shape or top.shape[2] < 2 or bottom.shape != shape
    if wrong or (heads and top.shape[2] - 1 != heads[0]) or {top.dtype, bottom.dtype} != {np.dtype(np.float64)}:
        raise ValueError(f"a batch has arrays {top.dtype} {top.shape} and {bottom.dtype} {bottom.shape}")
    if not all((np.abs(x) <= LARGEST_SUM).all() for x in (top, bottom)):
        raise ValueError("a batch has values that are not finite, or too large")
    if not are_counts(bottom):
        raise ValueError("a batch has counts that are negative, or next to nothing")
