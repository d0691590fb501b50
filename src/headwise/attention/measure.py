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

from .rows import Room, blocks, clean, finite, ground, holds_odd, inside, mix, parts, scores
from .sight import Sight
from .stats import SHARE, HeadStats

LOW = -1e4  # exp of it is 0 in every precision, and 0 times it is not NaN
STEPS = {"previous": -1, "next": 1, "self": 0}


@dataclass(frozen=True)
class Rows:
    """What is kept of every query's scores, each (B, H, Tq) or with columns behind."""

    most: Tensor  # the largest score
    keys: Tensor  # sum e
    spread: Tensor  # sum e (s - m)
    far: Tensor | None  # sum e |i - j|
    at: Tensor  # e at the first key, and at the previous, next and own position
    on: Tensor  # sum e over each class of keys
    lit: Tensor  # whether it may look anywhere

    @classmethod
    def empty(cls, like: Tensor, shape: tuple[int, int, int], spots: int, classes: int, cross: bool) -> Rows:
        """For (B, H, Tq) queries that have seen nothing yet."""
        return cls(
            like.new_full(shape, -torch.inf), like.new_zeros(shape), like.new_zeros(shape),
            None if cross else like.new_zeros(shape), like.new_zeros(*shape, spots), like.new_zeros(*shape, classes),
            like.new_zeros(shape, dtype=torch.bool),
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
    size = sight.size
    k, *rest = clean(sight, k) if v is None else clean(sight, k, v)
    v = rest[0] if rest else None
    odd = v is not None and holds_odd(v, sight)
    tame = sight.readable and sinks is None and finite(k)  # then no score is -inf but a hidden one
    kinds = torch.stack(list(classes.values()), -1).to(inside(q).dtype) if classes else None  # (B, Tk, classes)
    first = first_key(sight, queries)  # (B,)
    spots = 1 if cross else 1 + len(STEPS)

    kept = Rows.empty(inside(q[:0]), (size.batch, size.heads, size.queries), spots, len(classes), cross)
    # laid out so that joining the heads costs nothing
    out = None if v is None else q.new_zeros(size.batch, size.queries, size.heads, v.shape[-1]).transpose(1, 2)
    room = (Room(inside(q[:0])), Room(inside(q[:0]))) if sight.readable else (None, None)
    for rows, low, high in blocks(sight):
        if high <= low:
            continue
        stand = sight.positions(rows) - low  # (1 or B, 1, rows, 1)
        away = None if cross else (torch.arange(high - low, device=q.device) - stand).to(inside(q).dtype).abs_()
        spot = _spots(first - low, stand, cross)  # (B, 1, rows, spots)
        there, spot = (spot >= 0) & (spot < high - low), spot.clamp(0, high - low - 1)
        for batch, kv_heads, part in parts(sight):
            heads = slice(kv_heads.start * size.group, kv_heads.stop * size.group)
            here = (batch, heads, rows)
            s_part = None if sinks is None else sinks[heads]
            s, seen = scores(q[here], k[batch, kv_heads], part, rows, low, high, scale, softcap, room[0])
            plain = tame and seen is None
            most = s.amax(-1)
            top = most if plain else ground(most, s_part)
            e = torch.exp(s.sub_(top[..., None]), out=None if room[1] is None else room[1].take(*s.shape))
            if not plain:
                s.clamp_(min=LOW)
            keys = e.sum(-1)
            kept.most[here], kept.keys[here], kept.spread[here] = most, keys, s.mul_(e).sum(-1)
            if kept.far is not None and away is not None:
                kept.far[here] = torch.mul(e, away[batch if len(away) > 1 else slice(None)], out=s).sum(-1)
            kept.at[here] = e.gather(-1, spot[batch].expand(*e.shape[:3], spots)) * there[batch]
            if kinds is not None:
                kept.on[here] = torch.bmm(e.flatten(1, 2), kinds[batch, low:high]).view(*e.shape[:3], -1)
            kept.lit[here] = True if seen is None else seen.any(-1)
            if out is not None and v is not None:
                mixed = mix(e, v[batch, kv_heads, low:high], seen if odd else None)
                out[here] = (mixed / _total(keys, most, s_part)[..., None]).to(q.dtype)
    return out, _stats(kept, sinks, queries, list(classes))


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


def _stats(kept: Rows, sinks: Tensor | None, queries: Tensor | None, classes: list[str]) -> HeadStats:
    """Weights out of what was kept, and their sums over the queries that count."""
    total = _total(kept.keys, kept.most, sinks)
    per_query = {
        "entropy": kept.keys * total.log() - kept.spread,
        "confidence": torch.exp(kept.most - ground(kept.most, sinks)),
        **dict(zip(("first", *STEPS), kept.at.unbind(-1), strict=False)),
    }
    if kept.far is not None:
        per_query["distance"] = kept.far
    if sinks is not None:
        per_query["sink"] = _sunk(kept.most, sinks)
    per_query |= dict(zip((SHARE + name for name in classes), kept.on.unbind(-1), strict=True))
    real = kept.lit if queries is None else kept.lit & queries[:, None]
    sums = {name: torch.where(real, x / total, 0).sum(-1, dtype=torch.float64) for name, x in per_query.items()}
    return HeadStats(sums, real.sum(-1, dtype=torch.float64))


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
        if queries is not None:
            shown = shown & queries[:, :, None]
        there &= shown.any(1)
    elif queries is not None:
        there &= queries.any(1, keepdim=True)
    return (there.cumsum(-1) == 0).sum(-1)  # as many as come before it
