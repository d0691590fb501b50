"""Which heads do the same: the Jensen-Shannon divergence between their rows of weights, clusters of it, and a map.

For two heads' rows p and q of the same query, JS = H((p + q) / 2) - (H(p) + H(q)) / 2: 0 where they look alike, ln 2
where they share nothing. Its mean over a sample of queries is kept; a row lives only while its query is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import HeadwiseError
from ...models.watching.call_reader import Reading
from ...models.watching.eager import EagerReading
from ...models.watching.layers import Layer
from .build import LENGTH, encoder_of, given
from .corpus import Batch, Corpus, read
from .observer import Observer

CELLS = 1 << 23  # numbers that are held at once
TEXTS, QUERIES = 256, 2  # a sample, and queries of each text in it
SAME = 0.1  # nats, below which two heads are called alike; ln 2 = 0.69 is the most there is


@dataclass(frozen=True, repr=False)
class HeadSimilarity:
    """How different the heads of one kind of attention are."""

    kind: str
    heads: list[tuple[int, int]]  # (layer, head)
    divergence: np.ndarray  # (N, N) in nats: the mean over queries
    queries: int

    def clusters(self, below: float = SAME) -> list[list[tuple[int, int]]]:
        """Heads that look alike: joined, the nearest first, while groups are on average nearer than `below`."""
        groups = [[i] for i in range(len(self.heads))]
        apart = self.divergence.copy()
        np.fill_diagonal(apart, np.inf)
        while len(groups) > 1:
            i, j = sorted(np.unravel_index(int(np.argmin(apart)), apart.shape))
            if not apart[i, j] < below:
                break
            a, b = len(groups[i]), len(groups[j])
            apart[i] = apart[:, i] = (a * apart[i] + b * apart[j]) / (a + b)
            apart[i, i] = np.inf
            apart = np.delete(np.delete(apart, j, 0), j, 1)
            groups[i] += groups.pop(j)
        found = [sorted(self.heads[i] for i in group) for group in groups]
        return sorted(found, key=lambda group: (-len(group), group))

    def map(self) -> np.ndarray:
        """(N, 2): classical scaling of the root of the divergence, which is a distance."""
        squared = self.divergence
        count = len(squared)
        centre = np.eye(count) - 1 / count
        values, vectors = np.linalg.eigh(-0.5 * centre @ squared @ centre)
        top = np.argsort(values)[::-1][:2]
        points = vectors[:, top] * np.sqrt(np.maximum(values[top], 0))
        turned = np.where(points[np.abs(points).argmax(0), range(points.shape[1])] < 0, -1, 1)  # or the sign is chance
        return np.pad(points * turned, ((0, 0), (0, max(0, 2 - points.shape[1]))))

    def redundancy(self) -> dict[int, float]:
        """For each layer how alike its heads are: 1 - mean divergence over ln 2; NaN for a layer of one head."""
        layers = np.array([layer for layer, _ in self.heads])
        found = {}
        for layer in dict.fromkeys(layers.tolist()):
            inside = self.divergence[np.ix_(layers == layer, layers == layer)]
            pairs = inside[np.triu_indices(len(inside), 1)]
            found[layer] = float(1 - pairs.mean() / np.log(2)) if len(pairs) else float("nan")
        return found

    def nearest(self, head: tuple[int, int], count: int = 5) -> list[tuple[tuple[int, int], float]]:
        """The heads most like one, with their divergence."""
        if head not in self.heads:
            raise HeadwiseError(f"there is no head {head!r} here; heads are (layer, head), such as {self.heads[0]}")
        row = self.divergence[self.heads.index(head)]
        order = [i for i in np.argsort(row) if self.heads[i] != head]
        return [(self.heads[i], float(row[i])) for i in order[:count]]

    def to_json(self) -> dict[str, Any]:
        points = self.map()
        return {
            "kind": self.kind, "queries": self.queries,
            "map": [
                {"kind": self.kind, "layer": layer, "head": head, "x": round(float(x), 4), "y": round(float(y), 4)}
                for (layer, head), (x, y) in zip(self.heads, points, strict=True)
            ],
            "clusters": [[f"{layer}.{head}" for layer, head in group] for group in self.clusters() if len(group) > 1],
            "redundancy": {str(layer): round(x, 4) for layer, x in self.redundancy().items() if not np.isnan(x)},
        }  # fmt: skip

    def __str__(self) -> str:
        groups = [group for group in self.clusters() if len(group) > 1]
        lines = [f"{len(self.heads)} {self.kind} heads on {self.queries} queries; those that look alike:"]
        lines += ["  " + ", ".join(f"{layer}.{head}" for layer, head in group) for group in groups]
        lines.append("how alike the heads of a layer are: "
                     + ", ".join(f"{layer} {x:.2f}" for layer, x in self.redundancy().items()))  # fmt: skip
        return "\n".join(lines)

    __repr__ = __str__


@dataclass
class DivergenceSums:
    """Sums of divergences, kind by kind, while batches go by."""

    generator: np.random.Generator
    per_text: int
    rows: list[int] = field(default_factory=list)
    held: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)  # kind -> layers' rows of this batch
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    heads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    count: int = 0

    def choose(self, batch: Batch) -> None:
        """The same places in all texts of a batch, so that they must fit the shortest."""
        sides = [batch.source.real] + ([] if batch.target is None else [batch.target.real])
        shortest = min(int(side.sum(1).min()) for side in sides)
        self.rows = sorted(self.generator.choice(shortest, min(self.per_text, shortest), replace=False).tolist())

    def take(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        self.held.setdefault(layer.kind, []).append((layer.index, reading.weights(self.rows, None).float()))

    def compare(self) -> None:
        """All heads of a batch with each other."""
        for kind, layers in self.held.items():
            layers.sort(key=lambda one: one[0])
            self.heads[kind] = [(index, head) for index, rows in layers for head in range(rows.shape[1])]
            every = torch.cat([rows for _, rows in layers], 1)  # (B, N, K, T)
            every = every.permute(0, 2, 1, 3).flatten(0, 1)  # (Q, N, T)
            found = _divergences(every).numpy()
            self.sums[kind] = self.sums.get(kind, 0) + found
        self.count += len(self.rows) * next(iter(self.held.values()))[0][1].shape[0] if self.held else 0
        self.held = {}


def _divergences(p: Tensor) -> Tensor:
    """(Q, N, T) rows -> (N, N) in float64: the sum over queries, by blocks of heads."""
    queries, heads, keys = p.shape
    own = -torch.xlogy(p, p).sum(-1).cpu().double()  # (Q, N); not every device has float64
    found = torch.zeros(heads, heads, dtype=torch.float64)
    step = max(1, CELLS // (queries * heads * keys))
    for first in range(0, heads, step):
        last = min(first + step, heads)
        half = (p[:, first:last, None] + p[:, None, first:]) / 2  # (Q, b, N - first, T)
        mixed = -torch.xlogy(half, half).sum(-1).cpu().double()
        block = (mixed - (own[:, first:last, None] + own[:, None, first:]) / 2).sum(0)
        found[first:last, first:] = block
        found[first:, first:last] = block.T
    return found.clamp_(min=0).fill_diagonal_(0)


def head_similarity(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    sample: int = TEXTS,
    queries: int = QUERIES,
    length: int = LENGTH,
    field: str = "text",
    seed: int = 0,
) -> dict[str, HeadSimilarity]:
    """How different all heads of a model are, for each kind of attention, on the first `sample` texts of a corpus."""
    _, model, tokenizer = given(model, tokenizer, None)
    observer = Observer.of(model)
    corpus = Corpus.of(read(texts, field, sample)[0], encoder_of(observer.model, tokenizer, length))
    compared = DivergenceSums(np.random.default_rng(seed), queries)
    observer.measure = compared.take
    with observer.watching():
        for _, _, batches in corpus.windows():
            for batch in batches:
                compared.choose(batch)
                observer.run(batch)
                compared.compare()
    return {
        kind: HeadSimilarity(kind, compared.heads[kind], total / max(compared.count, 1), compared.count)
        for kind, total in compared.sums.items()
    }
