"""Scores: how much each head matters, with what is needed to judge the number itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import HeadwiseError
from ..resampling import bootstrap_counts, interval, spearman

RESAMPLES = 1000
Row = tuple[str, int, int, float, float, float]  # kind, layer, head, score, low, high


@dataclass(frozen=True)
class Place:
    """One attention layer: where it is and how it is divided."""

    kind: str
    index: int
    query: int
    kv: int
    module: str
    shared: int = 0  # layers with the same number other than 0 are one module
    head_parameters: int = 0  # of a query head: its rows of W_Q and columns of W_O
    kv_parameters: int = 0  # of a KV head: its rows of W_K and W_V
    cache: int = 0  # numbers a token that a KV head leaves in the cache
    multiple: int = 1  # of which the number of heads must be; zeroed heads make up for it

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.index

    def units(self, unit: str) -> list[list[int]]:
        """The query heads that go together."""
        size = {"head": 1, "kv": self.query // self.kv, "layer": self.query}[unit]
        return [list(range(first, first + size)) for first in range(0, self.query, size)]


class Scores(dict[str, np.ndarray]):
    """{kind: (layers, heads)}, high for heads that matter; NaN where a layer has fewer heads.

    low and high, of the same form: a 95 % interval by bootstrap over examples, where a score has examples.
    With unit="kv" or "layer" the columns are KV groups, or one whole layer.
    """

    def __init__(
        self,
        places: list[Place],
        name: str,
        unit: str,
        objective: str,
        each: list[np.ndarray],
        signed: bool,
        norm: bool,
        relative: bool = False,
    ) -> None:
        """each: for every place (examples, units), one row where a score has no examples."""
        self.places, self.name, self.unit, self.objective = places, name, unit, objective
        self.relative = relative  # to the full model: a distance, which is never below 0
        self.examples = each
        counts = {rows.shape[0] for rows in each}
        self.count = counts.pop() if len(counts) == 1 else 0
        magnitudes = [np.abs(rows) if signed else rows for rows in each]
        final = [_normed(rows.mean(0), norm) for rows in magnitudes]
        low, high = _bootstrap(magnitudes, norm) if self.count > 1 else (final, final)
        super().__init__(_by_kind(places, final))
        self.low, self.high = _by_kind(places, low), _by_kind(places, high)

    def of(self, key: tuple[str, int]) -> np.ndarray:
        """The scores of one layer."""
        members = [place for place in self.places if place.kind == key[0]]
        row = next(i for i, place in enumerate(members) if place.index == key[1])
        return self[key[0]][row, : len(members[row].units(self.unit))]

    def rows(self) -> Iterator[Row]:
        """Every head (or unit), in the model's order."""
        for kind, table in self.items():
            members = [place for place in self.places if place.kind == kind]
            for i, place in enumerate(members):
                for unit in range(len(place.units(self.unit))):
                    yield (
                        kind, place.index, unit,
                        float(table[i, unit]), float(self.low[kind][i, unit]), float(self.high[kind][i, unit]),
                    )  # fmt: skip

    def correlation(self, other: Mapping[str, np.ndarray]) -> float:
        """Spearman's rank correlation with another score of the same heads."""
        pairs = []
        for kind, table in self.items():
            if kind not in other or other[kind].shape != table.shape:
                raise HeadwiseError(f"these scores are of other heads: {kind} {table.shape} is not in both")
            pairs.append(np.stack([table.ravel(), np.asarray(other[kind]).ravel()]))
        both = np.concatenate(pairs, 1)
        both = both[:, ~np.isnan(both).any(0)]
        return spearman(both[0], both[1])

    def significant(self) -> int:
        """How many heads' intervals do not touch zero: for `ablation`, those whose removal is seen."""
        return sum(low > 0 or high < 0 for *_, low, high in self.rows()) if self.count > 1 else 0

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "layer", "head", "score", "low", "high")
        return {
            "score": self.name, "unit": self.unit, "objective": self.objective, "examples": self.count,
            "heads": [dict(zip(names, row, strict=True)) for row in self.rows()],
        }  # fmt: skip

    def __str__(self) -> str:
        what = {"head": "head", "kv": "KV group", "layer": "layer"}[self.unit]
        lines = [f"{self.name}: importance of every {what} ({self.objective}, {self.count} examples)"]
        for kind, table in self.items():
            members = [place for place in self.places if place.kind == kind]
            for place, row in zip(members, table, strict=True):
                numbers = " ".join(f"{x:9.3g}" for x in row if not np.isnan(x))
                lines.append(f"{kind:>8} {place.index:>3}  {numbers}")
        return "\n".join(lines)


def _normed(row: np.ndarray, norm: bool) -> np.ndarray:
    size = np.sqrt((row**2).sum(-1, keepdims=True))
    return row / np.where(size > 0, size, 1) if norm else row


def _bootstrap(each: list[np.ndarray], norm: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each layer the ends of the interval of every unit, over resampled examples."""
    count = each[0].shape[0]
    shares = bootstrap_counts(count, RESAMPLES) / count  # (R, N)
    ends = [interval(_normed(shares @ rows, norm)) for rows in each]
    return [end[0] for end in ends], [end[1] for end in ends]


def _by_kind(places: list[Place], rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    tables: dict[str, np.ndarray] = {}
    for kind in dict.fromkeys(place.kind for place in places):
        members = [row for place, row in zip(places, rows, strict=True) if place.kind == kind]
        table = np.full((len(members), max(map(len, members))), np.nan)
        for i, row in enumerate(members):
            table[i, : len(row)] = row
        tables[kind] = table
    return tables
