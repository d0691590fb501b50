"""The statistics of full attention weights in PyTorch: each block of weights is read once, and used while in the cache.

`stats.stats_from_weights` is the definition, in NumPy; this is the same in float64, several times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .stats import SHARE, STEPS, HeadStats

BLOCK = 1 << 18  # weights of a block: 2 MiB in float64, and as much for a scratch tensor
Place = tuple[slice, slice, slice]  # sequences, heads and queries of a block


def stats_from_tensor(
    weights: Tensor,
    *,
    offset: int | Tensor = 0,
    queries: Tensor | None = None,
    classes: Mapping[str, Tensor] | None = None,
    cross: bool = False,
    sinks: bool = False,
    visible: Tensor | None = None,
    first: Tensor | None = None,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
    received: bool = False,
) -> HeadStats:
    """The statistics of weights (B, H, Tq, Tk). Arguments as `stats_from_weights`."""
    weights = weights.detach()
    if first is None:
        first = _first_key(weights if visible is None else visible, queries)
    rows = _RowTables.of(weights, dict(classes or {}), sinks)
    keys = _KeysOfInterest.of(weights, first, offset, cross, rows.dtype)
    largest_logit = None if logits is None else logits.detach()
    if largest_logit is not None and largest_logit.dim() == 4:
        rows.largest_logit = largest_logit.new_full(weights.shape[:3], -torch.inf)
    for place, a, scratch in _blocks(weights, rows.dtype):
        rows.fill(place, a, scratch, keys)
        if rows.largest_logit is not None and largest_logit is not None:
            shown = a != 0 if visible is None else visible[place]
            rows.largest_logit[place] = largest_logit[place].masked_fill(~shown, -torch.inf).amax(-1)
    real = rows.confidence != 0 if visible is None else visible.any(-1)  # (B, H, Tq)
    if queries is not None:
        real = real & queries[:, None]
    per_query = rows.per_query(sinks, cross, lse)
    sums = {name: torch.where(real, x, 0.0).sum(-1) for name, x in per_query.items()}
    maxima = {}
    if largest_logit is not None:
        rows_logit = largest_logit if rows.largest_logit is None else rows.largest_logit
        seen = torch.where(real, rows_logit.to(rows.dtype), -torch.inf)
        maxima["max_logit"] = seen.amax(-1) if seen.shape[-1] else seen.sum(-1) - torch.inf
    share = torch.where(real[..., None], weights.to(rows.dtype), 0.0).sum(2) if received else None
    return HeadStats(sums, real.sum(-1, dtype=rows.dtype), maxima, share)


@dataclass
class _RowTables:
    """One number per query, (B, H, Tq) or with columns behind."""

    entropy: Tensor
    confidence: Tensor
    distance: Tensor
    single_keys: Tensor  # (..., 1 or 4): the weight of the first key, and of the previous, next and own one
    class_sums: Tensor  # (..., 1 + classes): the weight of all keys, and of each class
    class_columns: Tensor | None  # (B, Tk, 1 + classes); None where no statistic needs those sums
    class_names: list[str]
    largest_logit: Tensor | None = None

    @classmethod
    def of(cls, weights: Tensor, classes: dict[str, Tensor], sinks: bool) -> _RowTables:
        """Zeros for the queries of these weights."""
        exact = torch.float32 if weights.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        batch, keys = weights.shape[0], weights.shape[3]
        entropy, confidence, distance = weights.new_zeros((3, *weights.shape[:3]), dtype=exact).unbind()
        columns = weights.new_ones((batch, keys, 1 + len(classes)), dtype=exact)
        for column, members in enumerate(classes.values(), 1):
            columns[..., column] = members
        return cls(
            entropy,
            confidence,
            distance,
            weights.new_zeros((*weights.shape[:3], 1 + len(STEPS)), dtype=exact),
            weights.new_zeros((*weights.shape[:3], 1 + len(classes)), dtype=exact),
            columns if sinks or classes else None,
            list(classes),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all sums."""
        return self.entropy.dtype

    def fill(self, place: Place, a: Tensor, scratch: Tensor, keys: _KeysOfInterest) -> None:
        """Take the weights a (b, h, rows, Tk) of one block."""
        batch, _, rows = place
        self.confidence[place] = a.amax(-1)
        # a weight of 0 has 0 * log(tiny) = 0
        torch.clamp(a, min=torch.finfo(a.dtype).tiny, out=scratch)
        self.entropy[place] = scratch.log_().mul_(a).sum(-1).neg_()
        if keys.comparable:
            self.distance[place] = torch.mul(a, keys.distances(place), out=scratch).sum(-1)
        index, exists = keys.index[batch, :, rows], keys.exists[batch, :, rows]
        width = index.shape[-1]
        self.single_keys[place][..., :width] = a.gather(-1, index.expand(*a.shape[:3], width)) * exists
        if self.class_columns is not None:
            self.class_sums[place] = torch.bmm(a.flatten(1, 2), self.class_columns[batch]).view(*a.shape[:3], -1)

    def per_query(self, sinks: bool, cross: bool, lse: Tensor | None) -> dict[str, Tensor]:
        """The statistics of every query, by name."""
        first, *steps = self.single_keys.unbind(-1)
        whole, *shares = self.class_sums.unbind(-1)
        return {
            "entropy": self.entropy,
            "confidence": self.confidence,
            "first": first,
            **({} if cross else {"distance": self.distance, **dict(zip(STEPS, steps, strict=True))}),
            **({"sink": 1 - whole} if sinks else {}),
            **({} if lse is None else {"lse": lse.detach().to(self.dtype)}),
            **{SHARE + name: share for name, share in zip(self.class_names, shares, strict=True)},
        }


@dataclass
class _KeysOfInterest:
    """The keys whose own weight is a statistic, and where queries and keys are."""

    index: Tensor  # (B, 1, Tq, 1 or 4): the first key, and those around each query; 0 if there is none
    exists: Tensor
    positions: Tensor  # (1 or B, 1, Tq, 1) of the queries, in the precision of sums
    comparable: bool  # whether queries and keys are of one sequence
    keys: Tensor  # (Tk,) their positions
    newest: tuple[tuple[int, int], Tensor] | None = None  # the table of distances of the newest block

    @classmethod
    def of(
        cls, weights: Tensor, first: Tensor, offset: int | Tensor, cross: bool, dtype: torch.dtype
    ) -> _KeysOfInterest:
        """For weights (B, H, Tq, Tk) whose first key is marked in first (B, Tk)."""
        batch, _, rows, keys = weights.shape
        start = offset if isinstance(offset, int) else offset.reshape(-1, 1, 1, 1)
        positions = torch.arange(rows, device=weights.device).view(1, 1, -1, 1) + start
        first_key = torch.where(first.any(-1), first.int().argmax(-1), -1) if keys else first.new_full((batch,), -1)
        columns = [first_key.view(-1, 1, 1, 1), *([] if cross else [positions + step for step in STEPS.values()])]
        index = torch.cat([column.expand(batch, 1, rows, 1) for column in columns], -1)
        exists = (index >= 0) & (index < keys)
        numbers = torch.arange(keys, device=weights.device, dtype=dtype)
        return cls(torch.where(exists, index, 0), exists, positions.to(dtype), not cross, numbers)

    def distances(self, place: Place) -> Tensor:
        """(1 or b, 1, rows, Tk): how far the keys are from the queries of a block."""
        batch, _, rows = place
        batch = slice(0, 1) if len(self.positions) == 1 else batch
        if self.newest is None or self.newest[0] != (batch.start, rows.start):
            self.newest = (batch.start, rows.start), (self.keys - self.positions[batch, :, rows]).abs_()
        return self.newest[1]


def _blocks(weights: Tensor, dtype: torch.dtype) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """Parts of the weights that fit the block size, in the precision of sums, each with a scratch tensor of its shape.

    The tensors are valid until the next part.
    """
    batch, heads, rows, keys = weights.shape
    if not weights.numel():
        return
    row_count = min(rows, max(1, BLOCK // keys))
    head_count = min(heads, max(1, BLOCK // (row_count * keys))) if row_count == rows else 1
    batch_count = min(batch, max(1, BLOCK // (heads * rows * keys))) if head_count == heads else 1
    size = batch_count * head_count * row_count * keys
    copies, scratches = weights.new_empty((2, size), dtype=dtype).unbind()
    for i in range(0, rows, row_count):  # the outer loop: all heads share a block's table of distances
        for b in range(0, batch, batch_count):
            for h in range(0, heads, head_count):
                place = slice(b, b + batch_count), slice(h, h + head_count), slice(i, i + row_count)
                part = weights[place]
                copy, scratch = (x[: part.numel()].view(part.shape) for x in (copies, scratches))
                yield place, copy.copy_(part), scratch


def _first_key(weights: Tensor, queries: Tensor | None) -> Tensor:
    """(B, Tk) bool: the first key that a query which counts attends to; weights may be bool."""
    first = torch.zeros(weights.shape[0], weights.shape[3], dtype=torch.bool, device=weights.device)
    if not weights.numel():
        return first
    column = weights[..., 0] != 0  # (B, H, Tq)
    if queries is not None:
        column = column & queries[:, None]
    if bool(column.flatten(1).any(-1).all()):  # in all sequences it is key 0: no need to look at the others
        first[:, 0] = True
        return first
    seen = weights != 0
    exists = (seen if queries is None else seen & queries[:, None, :, None]).any(2).any(1)
    return exists & (exists.cumsum(-1) == 1)
