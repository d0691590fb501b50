"""Similar heads and small outputs, measured on a few queries of each attention call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.structure.partition import Partition

ROWS = 8  # queries of a call, evenly spaced
MAX_WEIGHTS = 1 << 22  # weights of a call that are looked at


@dataclass
class Samples:
    """Sums over sampled queries, which add up over calls and ranks."""

    products: Tensor  # (H, H) inner products of the heads' weights, less their mean over the visible keys
    squares: Tensor  # (H,) squared norms of the heads' outputs
    queries: Tensor  # () how many queries

    def __add__(self, other: Samples) -> Samples:
        return Samples(
            self.products + other.products, self.squares + other.squares, self.queries + other.queries.to(self.queries)
        )

    def outputs(self) -> Tensor:
        """(H,) root mean square norm of each head's output, as a share of the mean over the layer's heads."""
        norms = (self.squares / self.queries).sqrt()
        return norms / norms.mean()

    def twins(self) -> tuple[Tensor, Tensor]:
        """(H,) each: the largest correlation of a head's weights with another head's, and which head that is."""
        norms = self.products.diagonal().sqrt()
        correlations = (self.products / (norms[:, None] * norms)).nan_to_num(0.0, 0.0, 0.0)
        correlations.fill_diagonal_(-2.0)  # below any correlation
        largest, which = correlations.max(1)
        return largest.clamp(-1.0, 1.0), which


def no_samples(heads: int) -> Samples:
    """The samples of a layer whose weights are not read."""
    zeros = torch.zeros(heads + 1, heads, dtype=torch.float64)
    return Samples(zeros[1:], zeros[0], torch.zeros((), dtype=torch.float64))


def sample(reading: Any, real: Tensor | None, partition: Partition | None = None) -> Samples:
    """Measure some queries of an attention call.

    The first key that a query sees is left out of the comparison of weights: heads of many models put most of their
    weight there when they have nothing to do, and are otherwise different.

    Args:
        reading: the call, as `watch` hands it to its observer.
        real: (B, Tq) bool, which queries are tokens; None for all.
        partition: of a layer whose heads processes split; the samples are of all its heads.
    """
    batch, heads, queries, _ = reading.q.shape
    heads = heads if partition is None else partition.heads.query
    values = reading.v
    count = max(1, min(ROWS, queries, MAX_WEIGHTS // max(1, batch * heads * values.shape[2])))
    rows = [(i + 1) * queries // count - 1 for i in range(count)]
    with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
        weights = reading.weights(rows, None).float()  # (B, H, rows, Tk)
        weights = weights[..., : values.shape[2]]
        all_weights = weights if partition is None else partition.gather(weights)
        real_rows = (all_weights > 0).any(-1).any(1)  # (B, rows)
        if real is not None:
            real_rows &= real[:, rows]
        counted = real_rows[:, None, :, None]
        squares = _squared_norms(weights * counted, values.float())
        squares = squares if partition is None else partition.gather(squares, 0)
        return Samples(_products(all_weights * counted).double(), squares.double(), real_rows.sum().double())


def _products(weights: Tensor) -> Tensor:
    visible = (weights > 0).any(1, keepdim=True)  # (B, 1, rows, Tk)
    visible &= visible.cumsum(-1) > 1  # the first visible key is left out
    weights = weights * visible
    mean = weights.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    deviations = (weights - mean * visible).transpose(0, 1).flatten(1)  # (H, B * rows * Tk)
    return deviations @ deviations.T


def _squared_norms(weights: Tensor, values: Tensor) -> Tensor:
    group = weights.shape[1] // values.shape[1]  # query heads per KV head
    grouped = weights.unflatten(1, (values.shape[1], group)).flatten(2, 3)  # (B, Hkv, group * rows, Tk)
    outputs = (grouped @ values).unflatten(2, (group, -1)).flatten(1, 2)  # (B, H, rows, Dv)
    return outputs.square().sum((0, 2, 3))
