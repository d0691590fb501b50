"""Exact statistics of every head, block by block of query rows, in PyTorch.

With s the scores of a row, m their maximum (or the sink, if larger), e = exp(s - m), L = sum e (+ the sink's part):

    weight      a = e / L
    entropy     -sum a ln a = (sum e * ln L - sum e (s - m)) / L
    confidence  the largest e / L
    lse         m + ln L

so a block of scores is read a few times while it is in the cache, and discarded before the next one is computed. Only
a few sums per row are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import AttentionCall, StatsRequest
from ..stats import SHARE, STEPS, HeadStats
from ..torch_modes import has_symbolic_sizes
from ..validation import Sizes
from ..visibility import Visibility, first_key
from .blockwise import (
    Scratch,
    adjust_scores,
    all_finite,
    has_hidden_nonfinite,
    hide,
    logits,
    parts,
    row_blocks,
    row_maximum,
    sum_values,
    upcast,
    zero_hidden_keys,
)
from .protocol import NO_EXTRA, ExtraOutputs, Outputs, apply_gates
from .row_sums import LOW, RowSums

NAME = "blockwise"
FEW = 64  # rows per KV head below which copying its values costs more than it saves


def why_not(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
    """Why this backend cannot compute a call, or None."""
    others = extra.lse or extra.strongest or extra.rows
    return "blockwise_stats gives the output and statistics alone" if others else None


def explain(call: AttentionCall) -> str:
    """Describe how this backend computes a call."""
    return "blocks of query rows in PyTorch"


def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> Outputs:
    """The output and the statistics. Works in place: not for gradients, and without dropout."""
    request = extra.stats or StatsRequest()
    received = _no_weight(call, request)
    out, sums = row_sums(q, k, v, call, first_key(call.visibility, request.queries), request, received)
    assert out is not None  # there are values
    return Outputs(apply_gates(out, call), stats_from_rows(sums, call.sinks, request, received))


def stats_without_values(q: Tensor, k: Tensor, call: AttentionCall, request: StatsRequest) -> HeadStats:
    """The statistics alone."""
    received = _no_weight(call, request)
    _, sums = row_sums(q, k, None, call, first_key(call.visibility, request.queries), request, received)
    return stats_from_rows(sums, call.sinks, request, received)


def _no_weight(call: AttentionCall, request: StatsRequest) -> Tensor | None:
    """(B, H, Tk) zeros, if the weight that keys receive is requested."""
    device, size = call.visibility.device, call.size
    shape = size.batch, size.heads, size.keys
    return torch.zeros(shape, dtype=_exact_dtype(device), device=device) if request.received else None


def _exact_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def row_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    call: AttentionCall,
    first: Tensor,
    request: StatsRequest,
    received: Tensor | None = None,
) -> tuple[Tensor | None, RowSums]:
    """The output (None without v) without gates, and the sums of every row.

    first (B,): the key of "first". received (B, H, Tk): the weight that keys receive is added to it.
    """
    visibility, size, dtype = call.visibility, call.size, upcast(q).dtype
    k, *rest = zero_hidden_keys(visibility, k) if v is None else zero_hidden_keys(visibility, k, v)
    nonfinite = bool(rest) and has_hidden_nonfinite(rest[0], visibility)
    # with few queries, reading the keys once more would cost more than it saves
    few = not has_symbolic_sizes() and size.queries * size.group < FEW
    # then only hidden scores are -inf
    finite = visibility.readable and call.sinks is None and not few and all_finite(k)
    single_keys = 1 if request.cross else 1 + len(STEPS)
    # Columns of our own beside the values: the product that gives the output then also sums e over any set of keys.
    v = rest[0] if rest else None
    columns = _columns(size, request, dtype, q.device)  # (B, 1, Tk, 3 + 1 + classes)
    like = columns[:0]
    wide = None if few or v is None else torch.cat([v.to(dtype), columns.expand(-1, size.kv_heads, -1, -1)], -1)
    width = size.value_dim
    columns = columns if wide is None else wide[..., width:]

    sums = RowSums.empty(like, (size.batch, size.heads, size.queries), len(request.classes))
    # laid out so that concatenating the heads needs no copy
    out = None if v is None else q.new_zeros(size.batch, size.queries, size.heads, width).transpose(1, 2)
    scratch = (Scratch(like), Scratch(like)) if visibility.readable else (None, None)
    for rows, low, high in row_blocks(visibility):
        if high <= low:
            continue
        positions = visibility.positions(rows) - low  # (1 or B, 1, rows, 1)
        single = _single_keys(first - low, positions, request.cross)  # (B, 1, rows, single_keys)
        exists, single = (single >= 0) & (single < high - low), single.clamp(0, high - low - 1)
        zone = None if request.cross else DistanceZone.of(visibility, rows, low, high, positions.to(dtype))
        if zone is not None:
            zone.fill(columns[:, :, low:high, :3])
        edges = visibility.edges(rows, low, high) if finite else [(low, high)]
        for part in parts(call):
            batch, kv_heads, heads = part.batch, part.kv_heads, part.heads
            here = (batch, heads, rows)
            s, large = logits(q[here], k[batch, kv_heads], part.call, low, high, scratch[0])
            if call.adjusts_scores:
                sums.largest_logit[here] = hide(s, part.call.visibility, rows, low, high).amax(-1)
            s = adjust_scores(s, large, part.call, rows, low, high)
            largest = s.amax(-1)
            if not call.adjusts_scores:
                sums.largest_logit[here] = largest
            maximum = largest if finite and not edges else row_maximum(largest, part.call.sinks)
            e = torch.exp(s.sub_(maximum[..., None]), out=None if scratch[1] is None else scratch[1].take(*s.shape))
            for start, stop in edges:
                s[..., start - low : stop - low].clamp_(min=LOW)
            visible = part.call.visibility.allowed(rows, low, high) if nonfinite else None
            if wide is not None:
                product = sum_values(e, wide[batch, kv_heads, low:high], visible)
                values, of_columns = product.split((width, columns.shape[-1]), -1)
            else:
                values = None if v is None else sum_values(e, v[batch, kv_heads, low:high], visible)
                of_columns = torch.bmm(e.flatten(1, 2), columns[batch, 0, low:high])
                of_columns = of_columns.view(*e.shape[:3], columns.shape[-1])
            sums.largest[here], sums.class_sums[here] = largest, of_columns[..., 3:]
            sums.weighted_scores[here] = s.mul_(e).sum(-1)
            single_weights = e.gather(-1, single[batch].expand(*e.shape[:3], single_keys)) * exists[batch]
            sums.single_keys[..., :single_keys][here] = single_weights
            sums.has_keys[here] = part.call.visibility.has_visible_keys(rows)
            if zone is not None:
                sums.distances[here] = zone.distances(e, of_columns[..., :3], batch)
            total = _denominator(of_columns[..., 3], largest, part.call.sinks)
            if out is not None and values is not None:
                out[here] = (values / total[..., None]).to(q.dtype)
            if received is not None:
                real = _real_queries(sums.has_keys[here].bool(), request, batch, rows)
                visible = part.call.visibility.allowed(rows, low, high)
                # a NaN reaches the keys that its row sees, and no others
                seen = real[..., None] if visible is None else visible & real[..., None]
                received[batch, heads, low:high] += torch.where(seen, e / total[..., None], 0).sum(-2)
    return out, sums


def _real_queries(has_keys: Tensor, request: StatsRequest, batch: slice, rows: slice) -> Tensor:
    """(b, h, rows): the queries that count and have a visible key."""
    return has_keys if request.queries is None else has_keys & request.queries[batch, None, rows]


def _columns(size: Sizes, request: StatsRequest, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(B, 1, Tk, 3 + 1 + classes): three columns for DistanceZone, one of ones, and the classes."""
    columns = torch.zeros(size.batch, 1, size.keys, 4 + len(request.classes), dtype=dtype, device=device)
    columns[..., 3] = 1
    for column, keys in enumerate(request.classes.values(), 4):
        columns[:, 0, :, column] = keys
    return columns


@dataclass(frozen=True)
class DistanceZone:
    """The keys among which a block's queries are. To keys on either side of the zone, distance is linear:

    to a key left of the zone it is (i - first) + (first - j), to one right of it (j - last) + (last - i),
    so three sums give it for all of them, and only the zone itself needs |i - j| for every pair.
    """

    keys: int
    first: int  # of the zone's keys
    stop: int
    positions: Tensor  # (1 or B, 1, rows), of the queries
    within: Tensor  # (1 or B, 1, rows, stop - first): |i - j| in the zone

    @classmethod
    def of(cls, visibility: Visibility, rows: slice, low: int, high: int, positions: Tensor) -> DistanceZone:
        """The zone of a block of queries at these positions (1 or B, 1, rows, 1), relative to key `low`."""
        keys = high - low
        if isinstance(visibility.offset, Tensor) or has_symbolic_sizes():  # the positions are unknown: all keys
            first, stop = 0, keys
        else:
            first, stop = (min(max(0, end + visibility.offset - low), keys) for end in (rows.start, rows.stop))
        within = (torch.arange(first, stop, device=positions.device, dtype=positions.dtype) - positions).abs_()
        return cls(keys, first, stop, positions[..., 0], within)

    def fill(self, columns: Tensor) -> None:
        """Fill (B, Hkv, keys, 3): left of the zone, right of it, and the distance from it."""
        j = torch.arange(self.keys, device=columns.device)
        left, right = (self.first - j).clamp_(min=0), (j - (self.stop - 1)).clamp_(min=0)
        columns.copy_(torch.stack([left > 0, right > 0, left + right], -1))

    def distances(self, e: Tensor, sums: Tensor, batch: slice) -> Tensor:
        """sum e |i - j|: (b, h, rows, keys) and the sums over those columns (b, h, rows, 3) -> (b, h, rows)."""
        shared = self.positions.shape[0] == 1  # and not len(), which would fix a graph to its batch
        positions, within = (x if shared else x[batch] for x in (self.positions, self.within))
        left, right, rest = sums.unbind(-1)
        outside = (positions - self.first) * left + (self.stop - 1 - positions) * right + rest
        return outside + (e[..., self.first : self.stop] * within).sum(-1)


def _single_keys(first: Tensor, positions: Tensor, cross: bool) -> Tensor:
    """The keys whose own weight is a statistic, (B, 1, rows, count): the first, and those around each query."""
    shape = (first.shape[0], 1, positions.shape[2], 1)
    steps = [] if cross else [(positions + step).expand(shape) for step in STEPS.values()]
    return torch.cat([first.view(-1, 1, 1, 1).expand(shape), *steps], -1)


def _denominator(keys: Tensor, largest: Tensor, sinks: Tensor | None) -> Tensor:
    """L: the sum of e with the sink's part, (B, H, rows); 1 for a query with no visible keys."""
    if sinks is not None:
        keys = keys + _sink_part(largest, sinks)
    return torch.where(keys == 0, 1, keys)


def _sink_part(largest: Tensor, sinks: Tensor) -> Tensor:
    """The sink's part of L."""
    return torch.exp(sinks.to(largest.dtype).view(1, -1, 1) - row_maximum(largest, sinks))


def stats_from_rows(
    sums: RowSums, sinks: Tensor | None, request: StatsRequest, received: Tensor | None = None
) -> HeadStats:
    """The statistics of every row, summed over the queries that count."""
    keys, *shares = sums.class_sums.unbind(-1)
    total = _denominator(keys, sums.largest, sinks)
    names = ("first",) if request.cross else ("first", *STEPS)
    per_query = {
        "entropy": keys * total.log() - sums.weighted_scores,
        "confidence": torch.exp(sums.largest - row_maximum(sums.largest, sinks)),
        **dict(zip(names, sums.single_keys.unbind(-1), strict=False)),
        **({} if request.cross else {"distance": sums.distances}),
        **({} if sinks is None else {"sink": _sink_part(sums.largest, sinks)}),
        **{SHARE + name: share for name, share in zip(request.classes, shares, strict=True)},
    }
    real = _real_queries(sums.has_keys.bool(), request, slice(None), slice(None))
    exact = _exact_dtype(total.device)
    row_lse = row_maximum(sums.largest, sinks) + total.log()
    if sinks is None:  # where all scores are -inf, total is 1 in place of 0
        row_lse = torch.where(keys == 0, -torch.inf, row_lse)
    rows = {**{name: x / total for name, x in per_query.items()}, "lse": row_lse}
    summed = {name: torch.where(real, x, 0).sum(-1, dtype=exact) for name, x in rows.items()}
    logit = torch.where(real, sums.largest_logit, -torch.inf).to(exact)
    largest = logit.amax(-1) if logit.shape[-1] else logit.sum(-1) - torch.inf
    return HeadStats(summed, real.sum(-1, dtype=exact), {"max_logit": largest}, received)
