"""Exact statistics of every head, block by block of query rows.

With s the scores of a row, m their largest (or the sink's, if larger), e = exp(s - m), L = sum e (+ the sink's part):

    weight      a = e / L
    entropy     -sum a ln a = (sum e * ln L - sum e (s - m)) / L
    confidence  the largest e / L

so a block of scores is read a few times while it is in the cache, and is gone before the next one is made. What is
kept of it are a few sums a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..stats import SHARE, HeadStats
from ..validation import Sizes
from ..visibility import Sight, open_sizes
from .blockwise import Room, blocks, clean, finite, ground, holds_odd, inside, mix, parts, scores

LOW = -1e4  # exp of it is 0 in every precision, and 0 times it is not NaN
FEW = 64  # rows a KV head, below which its values are not worth copying
STEPS = {"previous": -1, "next": 1, "self": 0}


@dataclass(frozen=True)
class Rows:
    """What is kept of every query's scores, each (B, H, Tq) or with columns behind."""

    most: Tensor  # the largest score
    spread: Tensor  # sum e (s - m)
    far: Tensor  # sum e |i - j|
    at: Tensor  # e at the first key, and at the previous, next and own position
    on: Tensor  # sum e over all keys, and over each class of them
    lit: Tensor  # whether it may look anywhere

    @classmethod
    def empty(cls, like: Tensor, shape: tuple[int, ...], spots: int, classes: int) -> Rows:
        """For (B, H, Tq) queries that have seen nothing yet."""
        return cls(
            like.new_full(shape, -torch.inf), like.new_zeros(shape), like.new_zeros(shape),
            like.new_zeros(*shape, spots), like.new_zeros(*shape, 1 + classes), like.new_zeros(shape, dtype=torch.bool),
        )  # fmt: skip


def head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    queries: Tensor | None,
    classes: dict[str, Tensor],
    cross: bool,
) -> tuple[Tensor | None, HeadStats]:
    """The output (None without v) and the statistics. Works in place: not for gradients."""
    out, kept = rows_of(q, k, v, sight, scale, softcap, sinks, first_key(sight, queries), classes, cross)
    return out, stats_of(kept, sinks, queries, list(classes), cross)


def rows_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    first: Tensor,
    classes: dict[str, Tensor],
    cross: bool,
) -> tuple[Tensor | None, Rows]:
    """The output (None without v) and what is kept of every query. first (B,): the key whose weight is "first"."""
    size, dtype = sight.size, inside(q).dtype
    k, *rest = clean(sight, k) if v is None else clean(sight, k, v)
    odd = bool(rest) and holds_odd(rest[0], sight)
    # of few queries, reading the keys once more would cost more than it saves
    few = not open_sizes() and size.queries * size.group < FEW
    tame = sight.readable and sinks is None and not few and finite(k)  # then no score is -inf but a hidden one
    spots = 1 if cross else 1 + len(STEPS)
    # Columns of our own beside the values: a product that is computed anyway then sums e over whatever one likes.
    v = rest[0] if rest else None
    marks = _marks(size, classes, dtype, q.device)  # (B, 1, Tk, 3 + 1 + classes)
    wide = None if few or v is None else torch.cat([v.to(dtype), marks.expand(-1, size.kv_heads, -1, -1)], -1)
    width = size.value_dim
    columns = marks if wide is None else wide[..., width:]

    kept = Rows.empty(marks[:0], (size.batch, size.heads, size.queries), spots, len(classes))
    # laid out so that joining the heads costs nothing
    out = None if v is None else q.new_zeros(size.batch, size.queries, size.heads, width).transpose(1, 2)
    room = (Room(marks[:0]), Room(marks[:0])) if sight.readable else (None, None)
    for rows, low, high in blocks(sight):
        if high <= low:
            continue
        stand = sight.positions(rows) - low  # (1 or B, 1, rows, 1)
        spot = _spots(first - low, stand, cross)  # (B, 1, rows, spots)
        there, spot = (spot >= 0) & (spot < high - low), spot.clamp(0, high - low - 1)
        near = None if cross else Near.of(sight, rows, low, high, stand.to(dtype))
        if near is not None:
            near.mark(columns[:, :, low:high, :3])
        edges = sight.edges(rows, low, high) if tame else [(low, high)]
        for batch, kv_heads, part in parts(sight):
            heads = slice(kv_heads.start * size.group, kv_heads.stop * size.group)
            here = (batch, heads, rows)
            s_part = None if sinks is None else sinks[heads]
            s = scores(q[here], k[batch, kv_heads], part, rows, low, high, scale, softcap, room[0])
            most = s.amax(-1)
            top = most if tame and not edges else ground(most, s_part)
            e = torch.exp(s.sub_(top[..., None]), out=None if room[1] is None else room[1].take(*s.shape))
            for a, b in edges:
                s[..., a - low : b - low].clamp_(min=LOW)
            seen = part.allowed(rows, low, high) if odd else None
            if wide is not None:
                mixed, sums = mix(e, wide[batch, kv_heads, low:high], seen).split((width, columns.shape[-1]), -1)
            else:
                mixed = None if v is None else mix(e, v[batch, kv_heads, low:high], seen)
                sums = torch.bmm(e.flatten(1, 2), columns[batch, 0, low:high]).view(*e.shape[:3], columns.shape[-1])
            kept.most[here], kept.spread[here], kept.on[here] = most, s.mul_(e).sum(-1), sums[..., 3:]
            kept.at[here] = e.gather(-1, spot[batch].expand(*e.shape[:3], spots)) * there[batch]
            kept.lit[here] = part.lit(rows)
            if near is not None:
                kept.far[here] = near.distance(e, sums[..., :3], batch)
            if out is not None and mixed is not None:
                out[here] = (mixed / _total(sums[..., 3], most, s_part)[..., None]).to(q.dtype)
    return out, kept


def _marks(size: Sizes, classes: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(B, 1, Tk, 3 + 1 + classes): three columns for Near, one of ones, and the classes."""
    marks = torch.zeros(size.batch, 1, size.keys, 4 + len(classes), dtype=dtype, device=device)
    marks[..., 3] = 1
    for column, keys in enumerate(classes.values(), 4):
        marks[:, 0, :, column] = keys
    return marks


@dataclass(frozen=True)
class Near:
    """The keys among which a block's queries stand. To those on either side, distance is linear:

    to a key left of the zone it is (i - first) + (first - j), to one right of it (j - last) + (last - i),
    so three sums give it for all of them, and only the zone itself needs |i - j| written out.
    """

    keys: int
    first: int  # of the zone's keys
    stop: int
    stand: Tensor  # (1 or B, 1, rows): where the queries stand
    away: Tensor  # (1 or B, 1, rows, stop - first): |i - j| in the zone

    @classmethod
    def of(cls, sight: Sight, rows: slice, low: int, high: int, stand: Tensor) -> Near:
        keys = high - low
        if isinstance(sight.offset, Tensor) or open_sizes():  # they stand all over: all keys are near
            first, stop = 0, keys
        else:
            first, stop = (min(max(0, end + sight.offset - low), keys) for end in (rows.start, rows.stop))
        away = (torch.arange(first, stop, device=stand.device, dtype=stand.dtype) - stand).abs_()
        return cls(keys, first, stop, stand[..., 0], away)

    def mark(self, columns: Tensor) -> None:
        """Fill (B, Hkv, keys, 3): left of the zone, right of it, and how far from it."""
        j = torch.arange(self.keys, device=columns.device)
        left, right = (self.first - j).clamp_(min=0), (j - (self.stop - 1)).clamp_(min=0)
        columns.copy_(torch.stack([left > 0, right > 0, left + right], -1))

    def distance(self, e: Tensor, sums: Tensor, batch: slice) -> Tensor:
        """sum e |i - j|: (b, h, rows, keys) with the sums over those columns (b, h, rows, 3) -> (b, h, rows)."""
        stand, away = (x if len(x) == 1 else x[batch] for x in (self.stand, self.away))
        left, right, rest = sums.unbind(-1)
        far = (stand - self.first) * left + (self.stop - 1 - stand) * right + rest
        return far + (e[..., self.first : self.stop] * away).sum(-1)


def _spots(first: Tensor, stand: Tensor, cross: bool) -> Tensor:
    """The keys at which single weights are wanted, (B, 1, rows, spots): the first, and those around each query."""
    shape = (first.shape[0], 1, stand.shape[2], 1)
    steps = [] if cross else [(stand + step).expand(shape) for step in STEPS.values()]
    return torch.cat([first.view(-1, 1, 1, 1).expand(shape), *steps], -1)


def _total(keys: Tensor, most: Tensor, sinks: Tensor | None) -> Tensor:
    """L: the sum of e with the sink's part, (B, H, rows); 1 where there is nothing to look at."""
    if sinks is not None:
        keys = keys + _sunk(most, sinks)
    return torch.where(keys == 0, 1, keys)


def _sunk(most: Tensor, sinks: Tensor) -> Tensor:
    """The sink's part of L."""
    return torch.exp(sinks.to(most.dtype).view(1, -1, 1) - ground(most, sinks))


def stats_of(kept: Rows, sinks: Tensor | None, queries: Tensor | None, classes: list[str], cross: bool) -> HeadStats:
    """Weights out of what was kept, and their sums over the queries that count."""
    keys, *shares = kept.on.unbind(-1)
    total = _total(keys, kept.most, sinks)
    per_query = {
        "entropy": keys * total.log() - kept.spread,
        "confidence": torch.exp(kept.most - ground(kept.most, sinks)),
        **dict(zip(("first", *STEPS), kept.at.unbind(-1), strict=False)),
        **({} if cross else {"distance": kept.far}),
        **({} if sinks is None else {"sink": _sunk(kept.most, sinks)}),
        **{SHARE + name: share for name, share in zip(classes, shares, strict=True)},
    }
    real = kept.lit if queries is None else kept.lit & queries[:, None]
    exact = torch.float32 if total.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    sums = {name: torch.where(real, x / total, 0).sum(-1, dtype=exact) for name, x in per_query.items()}
    return HeadStats(sums, real.sum(-1, dtype=exact))


def of_weights(
    a: Tensor, offset: int, queries: Tensor | None, classes: dict[str, Tensor], cross: bool, sinks: bool
) -> HeadStats:
    """The same statistics from weights (B, H, Tq, Tk) that someone else computed. Query i stands at key i + offset."""
    a = a.detach().to(torch.float32 if a.device.type == "mps" else torch.float64)
    batch, heads, rows, keys = a.shape
    seen = a > 0
    real = seen.any(-1) if queries is None else seen.any(-1) & queries[:, None]
    exists = (seen & real[..., None]).any(2).any(1)  # (B, Tk)
    first = (exists.cumsum(-1) == 0).sum(-1).clamp(max=keys - 1)
    i, j = torch.arange(rows, device=a.device)[:, None] + offset, torch.arange(keys, device=a.device)
    per_query = {
        "entropy": -torch.special.xlogy(a, a).sum(-1),
        "confidence": a.amax(-1),
        "first": a.gather(-1, first.view(-1, 1, 1, 1).expand(batch, heads, rows, 1))[..., 0],
    }
    if not cross:
        per_query |= {name: (a * (j == i + step)).sum(-1) for name, step in STEPS.items()}
        per_query["distance"] = (a * (i - j).abs()).sum(-1)
    if sinks:
        per_query["sink"] = 1 - a.sum(-1)
    per_query |= {SHARE + name: (a * keys_in[:, None, None]).sum(-1) for name, keys_in in classes.items()}
    sums = {name: torch.where(real, x, 0).sum(-1) for name, x in per_query.items()}
    return HeadStats(sums, real.sum(-1, dtype=a.dtype))


def first_key(sight: Sight, queries: Tensor | None) -> Tensor:
    """(B,): the first key that exists for a sequence, that is within its length and shown by the mask to some query.

    A window does not make a key cease to exist. Past every key where there is none.
    """
    size = sight.size
    there = torch.ones(size.batch, size.keys, dtype=torch.bool, device=sight.device)
    end = sight.end.to(sight.device).view(-1, 1) if isinstance(sight.end, Tensor) else sight.end
    there &= torch.arange(size.keys, device=sight.device) < end
    if sight.mask is not None:
        shown = sight.mask if sight.mask.dtype == torch.bool else sight.mask != -torch.inf
        shown = shown.any(1)  # (B or 1, Tq or 1, Tk or 1)
        if queries is not None and shown.shape[1] > 1:
            shown = shown & queries[:, :, None]
        there &= shown.any(1)
    if queries is not None and (sight.mask is None or sight.mask.shape[2] == 1):
        there &= queries.any(1, keepdim=True)
    return (there.cumsum(-1) == 0).sum(-1)  # as many as come before it
