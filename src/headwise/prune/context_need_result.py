"""ContextNeed: what every KV head loses when it sees only the first and the most recent keys, window by window."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, HeadwiseError
from ..files import write_atomically
from ..json_documents import anything, brief, count, finite, finite_or_none, in_words, items, load_document, mapping
from ..plans import StreamLayer, read_stream_layer
from ..resampling import bootstrap_counts, interval

FORMAT = 1  # of the saved file
WITH_LOSSES = 2  # has changes of the loss, which versions that read only format 1 would drop silently
WITH_ESTIMATES = 3  # has changes of the loss by gradient, which older versions would take for measured ones
EXACT, GRADIENT = "exact", "gradient"  # how changes of the loss were found
RESAMPLES = 1000


class KVHeadNeed(NamedTuple):
    """What one KV head loses in one window."""

    kind: str
    layer: int
    kv_head: int
    window: int
    lost_weight: float
    change: float
    change_low: float
    change_high: float
    loss_change: float = np.nan  # NaN where it was not measured
    loss_low: float = np.nan
    loss_high: float = np.nan


class NeedTable(dict[str, np.ndarray]):
    """{kind: (layers, KV heads)} of one measure and window; NaN where a layer has fewer KV heads.

    Attributes:
        interval: {kind: (2, layers, KV heads)}, the ends of a 95 % bootstrap interval over the sequences; NaN with
            fewer than two of them.
    """

    def __init__(self, values: dict[str, np.ndarray], ends: dict[str, np.ndarray]) -> None:
        super().__init__(values)
        self.interval = ends

    def with_interval(self, kind: str, at: tuple[int, int]) -> tuple[float, float, float]:
        """The value of (layer, KV head) and the ends of its interval."""
        low, high = self.interval[kind][(slice(None), *at)]
        return float(self[kind][at]), float(low), float(high)


@dataclass(frozen=True)
class LayerSums:
    """Sums over the tokens that count of each of N sequences, of one layer with KV heads and W windows."""

    norm: np.ndarray  # (N,): norm of what all heads write through W_O
    lost: np.ndarray  # (N, W, KV heads): weight on the keys that the window hides, the mean over the query heads
    change: np.ndarray  # (N, W, KV heads): norm of the change of what the KV head's query heads write through W_O
    loss: np.ndarray | None = None  # (N, W, KV heads): change of the loss where the KV head streams; NaN: not measured


@dataclass(frozen=True)
class ContextNeed:
    """What every KV head loses in every window, measured by `headwise.context_need`.

    Results for the same model, windows and first keys can be added: `need + other` is the need over both corpora.

    Attributes:
        layers: the attention layers with a cache, in the model's order.
        windows: the windows that were measured.
        keep_first: the first keys of a sequence that stay visible.
        tokens: (N,), the number of counted tokens per sequence.
        sums: for each layer the sums over the tokens of each sequence.
        losses: (N,), the loss of each sequence with full attention; None if no change of the loss was measured.
        loss_method: "exact" if the model ran with each KV head streaming, "gradient" if the change of the loss is a
            first-order estimate.

    Example:
        >>> need = headwise.context_need(model, batches)
        >>> need.change[256]["self"].shape          # (layers, KV heads)
        (30, 3)
        >>> need.change[256].interval["self"].shape
        (2, 30, 3)
    """

    layers: tuple[StreamLayer, ...]
    windows: tuple[int, ...]
    keep_first: int
    tokens: np.ndarray
    sums: tuple[LayerSums, ...]
    losses: np.ndarray | None = None
    loss_method: str = EXACT

    @functools.cached_property
    def lost_weight(self) -> dict[int, NeedTable]:
        """{window: table}: the share of the weight on the keys that the window hides."""
        return self._tables(lambda sums: sums.lost, lambda sums: self.tokens, self._per_token)

    @functools.cached_property
    def change(self) -> dict[int, NeedTable]:
        """{window: table}: the change of the output through W_O, relative to the layer's whole attention output."""
        return self._tables(lambda sums: sums.change, lambda sums: sums.norm, self._per_token)

    @functools.cached_property
    def loss_change(self) -> dict[int, NeedTable]:
        """{window: table}: by how much the loss grows where one KV head streams, the mean over the sequences.

        NaN for KV heads that were not measured; {} if none was.
        """
        if self.losses is None:
            return {}
        ones = np.ones(len(self.tokens))
        return self._tables(_loss_of, lambda sums: ones, ones)

    def with_losses(self, losses: np.ndarray, changes: Sequence[np.ndarray], method: str) -> ContextNeed:
        """The same need with the losses (N,) and, per layer, their changes (N, W, KV heads)."""
        sums = tuple(replace(layer, loss=change) for layer, change in zip(self.sums, changes, strict=True))
        return replace(self, sums=sums, losses=losses, loss_method=method)

    @property
    def _per_token(self) -> np.ndarray:
        """(N,): weights by which every sequence counts the same, however many tokens it has."""
        return np.where(self.tokens > 0, 1 / np.maximum(self.tokens, 1), 0)

    def _tables(
        self,
        top: Callable[[LayerSums], np.ndarray],
        bottom: Callable[[LayerSums], np.ndarray],
        weights: np.ndarray,
    ) -> dict[int, NeedTable]:
        """Ratios of weighted sums over the sequences, top (N, W, KV heads) to bottom (N,)."""
        resampled = bootstrap_counts(len(self.tokens), RESAMPLES) * weights if len(self.tokens) > 1 else None
        once = weights[None]
        tables = {}
        for i, window in enumerate(self.windows):
            values = [_ratios(once, top(sums)[:, i], bottom(sums))[0] for sums in self.sums]
            ends = [
                np.full((2, layer.kv_heads), np.nan)
                if resampled is None
                else interval(_ratios(resampled, top(sums)[:, i], bottom(sums)))
                for layer, sums in zip(self.layers, self.sums, strict=True)
            ]
            tables[window] = NeedTable(self._by_kind(values), self._by_kind(ends))
        return tables

    def _by_kind(self, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """{kind: (..., layers, KV heads)} from one (..., KV heads) per layer."""
        tables = {}
        for kind in dict.fromkeys(layer.kind for layer in self.layers):
            members = [row for layer, row in zip(self.layers, rows, strict=True) if layer.kind == kind]
            width = max(row.shape[-1] for row in members)
            padded = [_pad(row, width) for row in members]
            tables[kind] = np.stack(padded, -2)
        return tables

    def rows(self) -> Iterator[KVHeadNeed]:
        """Every KV head in every window, in the model's order."""
        for window in self.windows:
            places = dict.fromkeys((layer.kind for layer in self.layers), -1)
            lost, change, loss = self.lost_weight[window], self.change[window], self.loss_change.get(window)
            for kind, index, _, kv_heads, *_ in self.layers:
                places[kind] += 1
                for head in range(kv_heads):
                    at = (places[kind], head)
                    numbers = [float(lost[kind][at]), *change.with_interval(kind, at)]
                    if loss is not None:
                        numbers += loss.with_interval(kind, at)
                    yield KVHeadNeed(kind, index, head, window, *numbers)

    def __add__(self, other: ContextNeed) -> ContextNeed:
        """The need over both corpora."""
        if not isinstance(other, ContextNeed):
            return NotImplemented
        return join_needs([self, other])

    def to_json(self) -> dict[str, Any]:
        """The need as plain JSON values; without changes of the loss, in the older format that has none."""
        document = {
            "headwise": "context need",
            "format": self._format,
            "windows": list(self.windows),
            "keep_first": self.keep_first,
            "tokens": self.tokens.tolist(),
            "layers": [layer._asdict() for layer in self.layers],
            "heads": [
                {
                    name: _finite(x)
                    for name, x in row._asdict().items()
                    if self.losses is not None or "loss_" not in name
                }
                for row in self.rows()
            ],
            "sums": [
                {"norm": sums.norm.tolist(), "lost": sums.lost.tolist(), "change": sums.change.tolist()}
                for sums in self.sums
            ],
        }
        if self.losses is not None:
            document["losses"] = self.losses.tolist()
            if self.loss_method != EXACT:
                document["loss_method"] = self.loss_method
            for row, sums in zip(document["sums"], self.sums, strict=True):
                row["loss"] = _nested(_loss_of(sums).tolist())
        return document

    @property
    def _format(self) -> int:
        if self.losses is None:
            return FORMAT
        return WITH_LOSSES if self.loss_method == EXACT else WITH_ESTIMATES

    @classmethod
    def from_json(cls, document: Any) -> ContextNeed:
        """Restore the result of `to_json`; raises a one-line CheckpointError if the document is not valid."""
        try:
            return cls._read(document)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"this is no context need that headwise wrote: {in_words(error)}") from None

    @classmethod
    def _read(cls, document: Any) -> ContextNeed:
        if not isinstance(document, dict) or document.get("headwise") != "context need":
            raise ValueError('"headwise": "context need" is missing')
        version = count(document["format"], "format")
        if version > WITH_ESTIMATES:
            raise ValueError(f"its format {version} is newer than this headwise, which reads {WITH_ESTIMATES}")
        method = document["loss_method"] if version == WITH_ESTIMATES else EXACT
        if method not in (EXACT, GRADIENT):
            raise ValueError(f"loss_method is {EXACT!r} or {GRADIENT!r}, got {brief(method)}")
        windows = tuple(items(document["windows"], "windows", count))
        tokens = np.array(items(document["tokens"], "tokens", count))
        layers = tuple(
            items(document["layers"], "layers", lambda row, path: read_stream_layer(mapping(row, path, anything), path))
        )
        rows = items(document["sums"], "sums", lambda row, path: mapping(row, path, anything))
        if not (windows and len(tokens) and layers) or len(rows) != len(layers):
            raise ValueError("windows, tokens or layers are missing")
        losses = _array(document["losses"], "losses", (len(tokens),)) if version >= WITH_LOSSES else None
        sums = []
        for i, (layer, row) in enumerate(zip(layers, rows, strict=True)):
            shape = (len(tokens), len(windows), layer.kv_heads)
            sums.append(
                LayerSums(
                    _array(row["norm"], f"sums[{i}].norm", shape[:1]),
                    _array(row["lost"], f"sums[{i}].lost", shape),
                    _array(row["change"], f"sums[{i}].change", shape),
                    None if losses is None else _array(row["loss"], f"sums[{i}].loss", shape, finite_or_none),
                )
            )
        return cls(layers, windows, count(document["keep_first"], "keep_first"), tokens, tuple(sums), losses, method)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, to a temporary file that is then moved into place."""
        with write_atomically(path, CheckpointError) as file:
            file.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ContextNeed:
        """Read a file that `save` wrote."""
        return load_document(path, "context need", cls.from_json)

    def __str__(self) -> str:
        texts = "1 sequence" if len(self.tokens) == 1 else f"{len(self.tokens)} sequences"
        lines = [f"context need over {int(self.tokens.sum())} tokens in {texts}, first {self.keep_first} keys visible"]
        for window in self.windows:
            lines.append(f"window {window}: change of the output through W_O (lost weight), per KV head")
            for kind, table in self.change[window].items():
                members = [layer for layer in self.layers if layer.kind == kind]
                for layer, change, lost in zip(members, table, self.lost_weight[window][kind], strict=True):
                    pairs = zip(change[: layer.kv_heads], lost[: layer.kv_heads], strict=True)
                    numbers = "  ".join(f"{x:.3f} ({y:.3f})" for x, y in pairs)
                    lines.append(f"{kind:>8} {layer.layer:>3}  {numbers}")
        return "\n".join(lines)


def join_needs(needs: Sequence[ContextNeed]) -> ContextNeed:
    """The sequences of several needs of the same model, windows and first keys, one after the other."""
    first = needs[0]
    for name in ("layers", "windows", "keep_first"):
        if any(getattr(need, name) != getattr(first, name) for need in needs):
            raise HeadwiseError(f"these needs cannot be added: their {name} differ")
    if len({need.losses is None for need in needs}) > 1:
        raise HeadwiseError("these needs cannot be added: changes of the loss were measured for some of them alone")
    if len({need.loss_method for need in needs}) > 1:
        raise HeadwiseError("these needs cannot be added: changes of the loss are estimates in some of them alone")
    sums = [
        LayerSums(
            np.concatenate([part.norm for part in parts]),
            np.concatenate([part.lost for part in parts]),
            np.concatenate([part.change for part in parts]),
            _concatenate([part.loss for part in parts]),
        )
        for parts in zip(*(need.sums for need in needs), strict=True)
    ]
    tokens, losses = np.concatenate([need.tokens for need in needs]), _concatenate([need.losses for need in needs])
    return ContextNeed(first.layers, first.windows, first.keep_first, tokens, tuple(sums), losses, first.loss_method)


def _loss_of(sums: LayerSums) -> np.ndarray:
    assert sums.loss is not None  # as there are losses
    return sums.loss


def _concatenate(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [x for x in arrays if x is not None]
    return np.concatenate(present) if present else None


def _ratios(counts: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """counts (R, N), top (N, KV heads), bottom (N,) -> (R, KV heads); 0 where nothing was written at all."""
    total = (counts @ bottom)[:, None]
    return (counts @ top) / np.where(total > 0, total, 1)


def _finite(value: Any) -> Any:
    """The value, or None for NaN, which is not JSON."""
    return None if isinstance(value, float) and np.isnan(value) else value


def _pad(row: np.ndarray, width: int) -> np.ndarray:
    padding = [(0, 0)] * (row.ndim - 1) + [(0, width - row.shape[-1])]
    return np.pad(row.astype(float), padding, constant_values=np.nan)


def _nested(value: Any) -> Any:
    """Nested lists with None for NaN."""
    return [_nested(item) for item in value] if isinstance(value, list) else _finite(value)


def _array(value: Any, path: str, shape: tuple[int, ...], number: Callable[[Any, str], float] = finite) -> Any:
    """Nested lists of numbers of that shape."""
    rows = items(value, path, number if len(shape) == 1 else functools.partial(_array, shape=shape[1:], number=number))
    if len(rows) != shape[0]:
        raise ValueError(f"{path} has {len(rows)} rows, and {shape[0]} are expected")
    return np.array(rows, dtype=float)
