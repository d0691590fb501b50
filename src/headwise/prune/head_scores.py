"""HeadScores: how much each head matters, with intervals, rank correlation and a description of the objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import HeadwiseError
from ..resampling import bootstrap_counts, interval, spearman
from .attention_layers import AttentionLayer

RESAMPLES = 1000
Row = tuple[str, int, int, float, float, float]  # kind, layer, head, score, low, high


class HeadScores(dict[str, np.ndarray]):
    """{kind: (layers, heads)}, high for important heads; NaN where a layer has fewer heads.

    Attributes:
        low, high: the same tables for the ends of a 95 % bootstrap interval over the examples; equal to the scores
            where a score has no examples.
        layers: the attention layers that the rows stand for, in the model's order.
        name: of the score.
        unit: what the columns stand for: "head", "kv" (KV groups) or "layer" (one column).
        objective: a description of what the score measures.
        relative: whether the objective is a distance to the full model, which is never below 0.
        examples: per layer (examples, units), before the mean; one row where a score has no examples.
        count: the number of examples.

    Example:
        >>> scores = headwise.importance(model, batches, score="output")
        >>> truth = headwise.importance(model, batches, score="ablation")
        >>> truth.correlation(scores)           # how well "output" ranks the heads
        0.83
    """

    def __init__(
        self,
        layers: list[AttentionLayer],
        name: str,
        unit: str,
        objective: str,
        examples: list[np.ndarray],
        signed: bool,
        normalised: bool,
        relative: bool = False,
    ) -> None:
        self.layers, self.name, self.unit, self.objective = layers, name, unit, objective
        self.relative = relative
        self.examples = examples
        counts = {rows.shape[0] for rows in examples}
        self.count = counts.pop() if len(counts) == 1 else 0
        magnitudes = [np.abs(rows) if signed else rows for rows in examples]
        final = [_normalise(rows.mean(0), normalised) for rows in magnitudes]
        low, high = _bootstrap(magnitudes, normalised) if self.count > 1 else (final, final)
        super().__init__(_by_kind(layers, final))
        self.low, self.high = _by_kind(layers, low), _by_kind(layers, high)

    def layer_scores(self, key: tuple[str, int]) -> np.ndarray:
        """The scores of one layer, by (kind, layer)."""
        members = self._members(key[0])
        row = next(i for i, layer in enumerate(members) if layer.index == key[1])
        return self[key[0]][row, : len(members[row].units(self.unit))]

    def _members(self, kind: str) -> list[AttentionLayer]:
        return [layer for layer in self.layers if layer.kind == kind]

    def rows(self) -> Iterator[Row]:
        """Every head (or unit), in the model's order: kind, layer, head, score, low, high."""
        for kind, table in self.items():
            for row, layer in enumerate(self._members(kind)):
                for unit in range(len(layer.units(self.unit))):
                    score, low, high = (float(x[row, unit]) for x in (table, self.low[kind], self.high[kind]))
                    yield kind, layer.index, unit, score, low, high

    def correlation(self, other: Mapping[str, np.ndarray]) -> float:
        """Spearman's rank correlation with another score of the same heads, over all kinds together."""
        pairs = []
        for kind, table in self.items():
            if kind not in other or other[kind].shape != table.shape:
                raise HeadwiseError(f"these scores are of other heads: {kind} {table.shape} is not in both")
            pairs.append(np.stack([table.ravel(), np.asarray(other[kind]).ravel()]))
        columns = np.concatenate(pairs, 1)
        columns = columns[:, ~np.isnan(columns).any(0)]
        return spearman(columns[0], columns[1])

    def significant(self) -> int:
        """The number of heads whose interval excludes zero: for `ablation`, those whose removal changes the loss."""
        return sum(low > 0 or high < 0 for *_, low, high in self.rows()) if self.count > 1 else 0

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "layer", "head", "score", "low", "high")
        return {
            "score": self.name,
            "unit": self.unit,
            "objective": self.objective,
            "examples": self.count,
            "heads": [dict(zip(names, row, strict=True)) for row in self.rows()],
        }

    def __str__(self) -> str:
        unit = {"head": "head", "kv": "KV group", "layer": "layer"}[self.unit]
        lines = [f"{self.name}: importance of every {unit} ({self.objective}, {self.count} examples)"]
        for kind, table in self.items():
            for layer, row in zip(self._members(kind), table, strict=True):
                numbers = " ".join(f"{x:9.3g}" for x in row if not np.isnan(x))
                lines.append(f"{kind:>8} {layer.index:>3}  {numbers}")
        return "\n".join(lines)


def _normalise(row: np.ndarray, normalised: bool) -> np.ndarray:
    norm = np.sqrt((row**2).sum(-1, keepdims=True))
    return row / np.where(norm > 0, norm, 1) if normalised else row


def _bootstrap(magnitudes: list[np.ndarray], normalised: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each layer the ends of the interval of every unit, over resampled examples."""
    count = magnitudes[0].shape[0]
    shares = bootstrap_counts(count, RESAMPLES) / count  # (R, N)
    ends = [interval(_normalise(shares @ rows, normalised)) for rows in magnitudes]
    return [end[0] for end in ends], [end[1] for end in ends]


def _by_kind(layers: list[AttentionLayer], rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """{kind: (layers, units)}, padded with NaN where a layer has fewer units."""
    tables: dict[str, np.ndarray] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        members = [row for layer, row in zip(layers, rows, strict=True) if layer.kind == kind]
        table = np.full((len(members), max(map(len, members))), np.nan)
        for i, row in enumerate(members):
            table[i, : len(row)] = row
        tables[kind] = table
    return tables
