"""Effects: one number per head, from attribution or patching, with intervals over the prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, HeadwiseError
from ..files import write_atomically
from ..json_documents import (
    anything,
    count,
    finite,
    finite_or_none,
    in_words,
    items,
    load_document,
    mapping,
    string,
)
from ..resampling import bootstrap_counts, interval, spearman

FORMAT = 1  # of the saved file
RESAMPLES = 1000


class EffectLayer(NamedTuple):
    """One row of the tables: an attention layer and its number of heads (or KV heads)."""

    kind: str
    layer: int
    heads: int


class HeadEffect(NamedTuple):
    """The effect of one head."""

    kind: str
    layer: int
    head: int
    effect: float
    low: float
    high: float


@dataclass(frozen=True)
class EffectsAbout:
    """What effects are and how they were measured; saved with them."""

    name: str  # "direct effect", "patching", ...: what the map calls it
    method: str  # one sentence: how the numbers were obtained
    metric: str  # in words
    value: float  # the metric's mean over the prompts
    unit: str = "head"  # what the columns are: "head" (query heads) or "kv" (KV heads)
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # numbers and words by name, as JSON


class Effects(Mapping[str, np.ndarray]):
    """{kind: (layers, heads)}: the effect of every head; NaN where a layer has fewer heads or a head was left out.

    Attributes:
        interval: {kind: (2, layers, heads)}, the ends of a 95 % bootstrap interval over the prompts; NaN with fewer
            than two of them, or a metric that is one number for all.
        rest: {name: effect} of everything that is not a head: embeddings, feed-forward blocks, biases; for `attribute`,
            heads and rest add up to the metric.
        about: name, method, metric and its value, unit, notes.
        count: the number of prompts.

    Example:
        >>> effects = headwise.attribute(model, inputs, metric)
        >>> effects["self"].shape
        (30, 9)
        >>> effects.strongest(1)
        [HeadEffect(kind='self', layer=24, head=3, effect=2.1, low=1.7, high=2.6)]
    """

    def __init__(
        self,
        layers: Sequence[EffectLayer],
        examples: Sequence[np.ndarray],
        about: EffectsAbout,
        *,
        scale: np.ndarray | None = None,
        rest: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Effects from what was measured on every prompt.

        Args:
            layers: the rows of the tables.
            examples: per layer (prompts, heads); one row where the metric is one number for all prompts.
            about: what they are.
            scale: (prompts,), what the effects are a share of: an effect is the mean of its examples divided by the
                mean of these. None: the mean alone.
            rest: {name: (prompts,)} of what is not a head.
        """
        self.layers = [EffectLayer(*layer) for layer in layers]
        self.examples = [np.asarray(rows, dtype=float) for rows in examples]
        self.about = about
        self.count = len(self.examples[0]) if self.examples else 0
        self.scale = np.ones(self.count) if scale is None else np.asarray(scale, dtype=float)
        self.rest_examples = {name: np.asarray(rows, dtype=float) for name, rows in (rest or {}).items()}
        self._tables = _by_kind(self.layers, [rows.mean(0) / self.scale.mean() for rows in self.examples])
        self.interval = self._bootstrap()

    @property
    def rest(self) -> dict[str, float]:
        return {name: float(rows.mean() / self.scale.mean()) for name, rows in self.rest_examples.items()}

    @property
    def metric(self) -> str:
        """A description of what was measured."""
        return self.about.metric

    @property
    def name(self) -> str:
        return self.about.name

    def __getitem__(self, kind: str) -> np.ndarray:
        return self._tables[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def rows(self) -> Iterator[HeadEffect]:
        """Every head that was measured, in the model's order."""
        places = dict.fromkeys(self, -1)
        for kind, layer, heads in self.layers:
            places[kind] += 1
            row = places[kind]
            for head in range(heads):
                effect = float(self[kind][row, head])
                if not np.isnan(effect):
                    low, high = (float(x) for x in self.interval[kind][:, row, head])
                    yield HeadEffect(kind, layer, head, effect, low, high)

    def strongest(self, number: int = 10) -> list[HeadEffect]:
        """The heads of the largest absolute effect, the largest first."""
        return sorted(self.rows(), key=lambda row: -abs(row.effect))[:number]

    def correlation(self, other: Mapping[str, np.ndarray]) -> float:
        """Spearman's rank correlation with other effects or scores; heads missing in either are skipped."""
        pairs = []
        for kind, table in self.items():
            if kind not in other or np.shape(other[kind]) != table.shape:
                raise HeadwiseError(f"these effects are of other heads: {kind} {table.shape} is not in both")
            pairs.append(np.stack([table.ravel(), np.asarray(other[kind], dtype=float).ravel()]))
        columns = np.concatenate(pairs, 1)
        columns = columns[:, ~np.isnan(columns).any(0)]
        return spearman(columns[0], columns[1])

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per head."""
        try:
            import pandas
        except ImportError:
            raise HeadwiseError("DataFrames need pandas: pip install 'headwise[tables]', or use to_json") from None
        return pandas.DataFrame(list(self.rows()), columns=list(HeadEffect._fields))

    def to_json(self) -> dict[str, Any]:
        about = self.about
        return {
            "headwise": "effects",
            "format": FORMAT,
            "name": about.name,
            "method": about.method,
            "metric": about.metric,
            "value": about.value,
            "unit": about.unit,
            "notes": list(about.notes),
            "details": dict(about.details),
            "prompts": self.count,
            "layers": [layer._asdict() for layer in self.layers],
            "heads": [{name: _finite(x) for name, x in row._asdict().items()} for row in self.rows()],
            "rest": self.rest,
            "examples": [
                [[None if np.isnan(x) else x for x in row] for row in rows.tolist()] for rows in self.examples
            ],
            "scale": self.scale.tolist(),
            "rest_examples": {name: rows.tolist() for name, rows in self.rest_examples.items()},
        }

    @classmethod
    def from_json(cls, document: Any) -> Effects:
        """Effects from what `to_json` gave.

        Raises:
            CheckpointError: if the document is not valid.
        """
        try:
            return cls._read(document)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise CheckpointError(f"these are not effects that headwise wrote: {in_words(error)}") from None

    @classmethod
    def _read(cls, document: Any) -> Effects:
        if not isinstance(document, dict) or document.get("headwise") != "effects":
            raise ValueError('"headwise": "effects" is missing')
        if count(document["format"], "format") > FORMAT:
            raise ValueError(f"their format {document['format']} is newer than this headwise, which reads {FORMAT}")
        layers = [
            EffectLayer(string(row["kind"], "kind"), count(row["layer"], "layer"), count(row["heads"], "heads"))
            for row in items(document["layers"], "layers", anything)
        ]
        about = EffectsAbout(
            name=string(document["name"], "name"),
            method=string(document["method"], "method"),
            metric=string(document["metric"], "metric"),
            value=finite(document["value"], "value"),
            unit=string(document["unit"], "unit"),
            notes=tuple(items(document["notes"], "notes", string)),
            details=mapping(document["details"], "details", anything),
        )
        numbers = items(document["examples"], "examples", _table)
        scale = items(document["scale"], "scale", finite)
        rest = mapping(document["rest_examples"], "rest_examples", lambda x, path: items(x, path, finite))
        for (kind, layer, heads), rows in zip(layers, numbers, strict=True):
            if len(rows) != len(scale) or any(len(row) != heads for row in rows):
                raise ValueError(f"the examples of {kind} layer {layer} have another shape")
        if any(len(rows) != len(scale) for rows in rest.values()) or not scale:
            raise ValueError("the numbers of examples differ")
        arrays = [np.array(rows, dtype=float) for rows in numbers]
        return cls(
            layers, arrays, about, scale=np.array(scale), rest={name: np.array(rows) for name, rows in rest.items()}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, to a temporary file that is then moved into place."""
        with write_atomically(path, CheckpointError) as file:
            file.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Effects:
        """Read a file that `save` wrote."""
        return load_document(path, "table of effects", cls.from_json)

    def __str__(self) -> str:
        about = self.about
        lines = [f"{about.name}, {about.metric} = {about.value:.4g} ({_describe_count(self.count)}): {about.method}"]
        for row in self.strongest():
            ends = "" if np.isnan(row.low) else f"  [{row.low:.3g}, {row.high:.3g}]"
            noun = "KV head" if about.unit == "kv" else "head"
            lines.append(f"  {row.kind} layer {row.layer} {noun} {row.head}: {row.effect:+.3g}{ends}")
        lines += [f"  {name}: {effect:+.3g}" for name, effect in self.rest.items()]
        return "\n".join([*lines, *about.notes])

    def _bootstrap(self) -> dict[str, np.ndarray]:
        """{kind: (2, layers, heads)}."""
        if self.count < 2:
            missing = [np.full((2, layer.heads), np.nan) for layer in self.layers]
            return _by_kind(self.layers, missing)
        shares = bootstrap_counts(self.count, RESAMPLES) / self.count  # (resamples, prompts)
        scale = (shares @ self.scale)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = [interval(shares @ rows / scale) for rows in self.examples]
        return _by_kind(self.layers, ends)


def _table(value: Any, path: str) -> list[list[float]]:
    return items(value, path, lambda row, place: items(row, place, finite_or_none))


def _finite(value: Any) -> Any:
    """The value, or None for NaN, which is not JSON."""
    return None if isinstance(value, float) and np.isnan(value) else value


def _describe_count(number: int) -> str:
    return "1 prompt" if number == 1 else f"{number} prompts"


def _by_kind(layers: Sequence[EffectLayer], rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """{kind: (..., layers, heads)} from one (..., heads) per layer, padded with NaN."""
    tables: dict[str, np.ndarray] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        members = [row for layer, row in zip(layers, rows, strict=True) if layer.kind == kind]
        table = np.full((*members[0].shape[:-1], len(members), max(row.shape[-1] for row in members)), np.nan)
        for i, row in enumerate(members):
            table[..., i, : row.shape[-1]] = row
        tables[kind] = table
    return tables
