"""Similarity of heads: the Jensen-Shannon divergence between their rows of weights, clusters of heads, and a map.

For two heads' rows p and q of the same query, JS = H((p + q) / 2) - (H(p) + H(q)) / 2: 0 where they are equal, ln 2
where they have no key in common. Only its mean over a sample of queries is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import HeadwiseError
from ...models.loading.resolve import resolve
from ...models.watching.call_reader import Reading
from ...models.watching.eager import EagerReading
from ...models.watching.layers import Layer
from .build import LENGTH, encoder_of
from .corpus import Batch, Corpus, read
from .observer import Observer

CELLS = 1 << 23  # numbers that are in memory at once
TEXTS, QUERIES = 256, 2  # the sample: texts, and queries per text
SIMILAR = 0.1  # nats, below which two heads are called similar; the maximum is ln 2 = 0.69


@dataclass(frozen=True, repr=False)
class HeadSimilarity:
    """The divergence between all heads of one kind of attention."""

    kind: str
    heads: list[tuple[int, int]]  # (layer, head)
    divergence: np.ndarray  # (N, N) in nats: the mean over queries
    queries: int

    def clusters(self, below: float = SIMILAR) -> list[list[tuple[int, int]]]:
        """Groups of similar heads: average-linkage clustering up to a divergence of `below`."""
        groups = [[i] for i in range(len(self.heads))]
        distance = self.divergence.copy()
        np.fill_diagonal(distance, np.inf)
        while len(groups) > 1:
            i, j = sorted(np.unravel_index(int(np.argmin(distance)), distance.shape))
            if not distance[i, j] < below:
                break
            a, b = len(groups[i]), len(groups[j])
            distance[i] = distance[:, i] = (a * distance[i] + b * distance[j]) / (a + b)
            distance[i, i] = np.inf
            distance = np.delete(np.delete(distance, j, 0), j, 1)
            groups[i] += groups.pop(j)
        clusters = [sorted(self.heads[i] for i in group) for group in groups]
        return sorted(clusters, key=lambda group: (-len(group), group))

    def map(self) -> np.ndarray:
        """(N, 2): classical multidimensional scaling of the root of the divergence, which is a metric."""
        squared = self.divergence
        count = len(squared)
        centre = np.eye(count) - 1 / count
        values, vectors = np.linalg.eigh(-0.5 * centre @ squared @ centre)
        top = np.argsort(values)[::-1][:2]
        points = vectors[:, top] * np.sqrt(np.maximum(values[top], 0))
        signs = np.where(
            points[np.abs(points).argmax(0), range(points.shape[1])] < 0, -1, 1
        )  # the eigenvectors' signs are arbitrary
        return np.pad(points * signs, ((0, 0), (0, max(0, 2 - points.shape[1]))))

    def redundancy(self) -> dict[int, float]:
        """Per layer, the similarity of its heads: 1 - mean divergence / ln 2; NaN for a layer of one head."""
        layers = np.array([layer for layer, _ in self.heads])
        redundancy = {}
        for layer in dict.fromkeys(layers.tolist()):
            inside = self.divergence[np.ix_(layers == layer, layers == layer)]
            pairs = inside[np.triu_indices(len(inside), 1)]
            redundancy[layer] = float(1 - pairs.mean() / np.log(2)) if len(pairs) else float("nan")
        return redundancy

    def nearest(self, head: tuple[int, int], count: int = 5) -> list[tuple[tuple[int, int], float]]:
        """The heads most similar to one, with their divergence."""
        if head not in self.heads:
            raise HeadwiseError(f"there is no head {head!r} here; heads are (layer, head), such as {self.heads[0]}")
        row = self.divergence[self.heads.index(head)]
        order = [i for i in np.argsort(row) if self.heads[i] != head]
        return [(self.heads[i], float(row[i])) for i in order[:count]]

    def to_json(self) -> dict[str, Any]:
        points = self.map()
        return {
            "kind": self.kind,
            "queries": self.queries,
            "map": [
                {"kind": self.kind, "layer": layer, "head": head, "x": round(float(x), 4), "y": round(float(y), 4)}
                for (layer, head), (x, y) in zip(self.heads, points, strict=True)
            ],
            "clusters": [[f"{layer}.{head}" for layer, head in group] for group in self.clusters() if len(group) > 1],
            "redundancy": {str(layer): round(x, 4) for layer, x in self.redundancy().items() if not np.isnan(x)},
        }

    def __str__(self) -> str:
        groups = [group for group in self.clusters() if len(group) > 1]
        lines = [f"{len(self.heads)} {self.kind} heads on {self.queries} queries; similar heads:"]
        lines += ["  " + ", ".join(f"{layer}.{head}" for layer, head in group) for group in groups]
        lines.append(
            "similarity of the heads within a layer: "
            + ", ".join(f"{layer} {x:.2f}" for layer, x in self.redundancy().items())
        )
        return "\n".join(lines)

    __repr__ = __str__


@dataclass
class DivergenceSums:
    """Sums of divergences per kind of attention, over batches."""

    generator: np.random.Generator
    per_text: int
    rows: list[int] = field(default_factory=list)
    batch_rows: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)  # kind -> (layer, its rows)
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    heads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    count: int = 0

    def choose(self, batch: Batch) -> None:
        """Choose queries at random: the same positions in all texts of a batch, so within the shortest."""
        sides = [batch.source.real] + ([] if batch.target is None else [batch.target.real])
        shortest = min(int(side.sum(1).min()) for side in sides)
        self.rows = sorted(self.generator.choice(shortest, min(self.per_text, shortest), replace=False).tolist())

    def take(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        self.batch_rows.setdefault(layer.kind, []).append((layer.index, reading.weights(self.rows, None).float()))

    def compare(self) -> None:
        """Add the divergences between all heads on the chosen queries of a batch."""
        for kind, layers in self.batch_rows.items():
            layers.sort(key=lambda layer: layer[0])
            self.heads[kind] = [(index, head) for index, rows in layers for head in range(rows.shape[1])]
            rows_of_all = torch.cat([rows for _, rows in layers], 1)  # (B, N, K, T)
            rows_of_all = rows_of_all.permute(0, 2, 1, 3).flatten(0, 1)  # (Q, N, T)
            self.sums[kind] = self.sums.get(kind, 0) + _divergences(rows_of_all).numpy()
        self.count += len(self.rows) * next(iter(self.batch_rows.values()))[0][1].shape[0] if self.batch_rows else 0
        self.batch_rows = {}


def _divergences(p: Tensor) -> Tensor:
    """Rows (Q, N, T) -> (N, N) in float64: the sum over queries, computed by blocks of heads."""
    queries, heads, keys = p.shape
    entropy = -torch.xlogy(p, p).sum(-1).cpu().double()  # (Q, N); not every device has float64
    total = torch.zeros(heads, heads, dtype=torch.float64)
    step = max(1, CELLS // (queries * heads * keys))
    for first in range(0, heads, step):
        last = min(first + step, heads)
        mixture = (p[:, first:last, None] + p[:, None, first:]) / 2  # (Q, b, N - first, T)
        mixture_entropy = -torch.xlogy(mixture, mixture).sum(-1).cpu().double()
        block = (mixture_entropy - (entropy[:, first:last, None] + entropy[:, None, first:]) / 2).sum(0)
        total[first:last, first:] = block
        total[first:, first:last] = block.T
    return total.clamp_(min=0).fill_diagonal_(0)


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
    """The divergence between all heads of a model, per kind of attention, on the first `sample` texts of a corpus.

    Args:
        model: a name as `headwise.load` takes it, or a transformers model with its tokenizer.
        texts: as `headwise.atlas` takes them.
        tokenizer: the tokenizer of a model that is passed as an object.
        sample: texts at most.
        queries: per text.
        length: tokens per text at most.
        field: where the text is in a line of .jsonl.
        seed: of the choice of queries.
    """
    _, model, tokenizer = resolve(model, tokenizer)
    observer = Observer.of(model)
    corpus = Corpus.of(read(texts, field, sample)[0], encoder_of(observer.model, tokenizer, length))
    sums = DivergenceSums(np.random.default_rng(seed), queries)
    observer.measure = sums.take
    with observer.watching():
        for _, _, batches in corpus.windows():
            for batch in batches:
                sums.choose(batch)
                observer.run(batch)
                sums.compare()
    return {
        kind: HeadSimilarity(kind, sums.heads[kind], total / max(sums.count, 1), sums.count)
        for kind, total in sums.sums.items()
    }
