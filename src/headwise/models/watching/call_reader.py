"""One attention call of a transformers model, put into headwise's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention import functional
from ...attention.stats import HeadStats
from ...errors import UnsupportedError
from .lazy_masks import LazyMask, Recipe

ONE_PASS = 1 << 18  # scores a head, from which one pass for output and statistics is worth another rounding
ROWS = 256  # of a mask that is made piece by piece
HIDDEN = -1e4  # what older models add to hide a key: beside any other key, its weight is 0 in every precision
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class Given(NamedTuple):
    """What a model hands to its attention function."""

    module: nn.Module
    query: Tensor  # (B, H, Tq, D)
    key: Tensor  # (B, Hkv, Tk, D)
    value: Tensor  # (B, Hkv, Tk, Dv)
    mask: Any
    more: dict[str, Any]  # dropout, scaling, is_causal, softcap, s_aux, position_bias, ...
    implementation: str

    @property
    def dropout(self) -> float:
        return float(self.more.get("dropout") or 0.0)

    @property
    def causal(self) -> bool:
        """What a missing mask means: sdpa's rule."""
        said = self.more.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if said is None else said) and self.query.shape[2] > 1


class Block(NamedTuple):
    """Some rows of queries and what attend is told about them."""

    rows: slice
    how: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """The same call as arguments of attend, weights and head_stats."""

    q: Tensor
    k: Tensor
    v: Tensor
    how: dict[str, Any]  # mask, causal, window, offset, scale, softcap, sinks
    comparable: bool  # whether positions of queries and keys mean the same
    recipe: Recipe | None = None  # of a mask that is not made whole

    def blocks(self) -> Iterator[Block]:
        """All queries at once, or in pieces where the mask is made piece by piece."""
        queries = self.q.shape[2]
        if self.recipe is None:
            yield Block(slice(0, queries), self.how)
            return
        for first in range(0, queries, ROWS):
            last = min(first + ROWS, queries)
            mask = self.recipe.rows(first, last)[..., : self.k.shape[2]]
            yield Block(slice(first, last), dict(self.how, mask=mask, offset=self.how["offset"] + first))

    def attend(self, dropout: float = 0.0) -> Tensor:
        """(B, H, Tq, Dv)."""
        done = [
            functional.attend(self.q[:, :, b.rows], self.k, self.v, dropout=dropout, **b.how) for b in self.blocks()
        ]
        return done[0] if len(done) == 1 else torch.cat(done, 2)

    def attend_rows(self, rows: list[int]) -> Tensor:
        """(B, H, rows, Dv): the output of a few queries alone."""
        done = []
        for i in rows:
            how = dict(self.how, offset=self.how["offset"] + i)
            if self.recipe is not None:
                how["mask"] = self.recipe.rows(i, i + 1)[..., : self.k.shape[2]]
            elif how["mask"] is not None and how["mask"].shape[2] > 1:
                how["mask"] = how["mask"][:, :, i : i + 1]
            done.append(functional.attend(self.q[:, :, i : i + 1], self.k, self.v, **how))
        return torch.cat(done, 2)

    def weights(self, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        """(B, heads, rows, Tk)."""
        if self.recipe is None:
            return functional.weights(self.q, self.k, rows=rows, heads=heads, **self.how)
        done: dict[int, Tensor] = {}
        for block in self.blocks():
            wanted = [i for i in range(block.rows.start, block.rows.stop) if rows is None or i in rows]
            if wanted:
                inside = [i - block.rows.start for i in wanted]
                found = functional.weights(self.q[:, :, block.rows], self.k, rows=inside, heads=heads, **block.how)
                done.update(zip(wanted, found.unbind(2), strict=True))
        return torch.stack([done[i] for i in (sorted(done) if rows is None else rows)], 2)

    def in_one_pass(self) -> bool:
        """Whether output and statistics come from one pass over the scores, and there are enough to gain by it."""
        large = self.q.shape[2] * self.k.shape[2] >= ONE_PASS
        return large and self.recipe is None and functional.is_one_pass(self.q, self.k, self.v, **self.how)

    def observe(
        self, real: Tensor | None, classes: dict[str, Tensor], dropout: float = 0.0
    ) -> tuple[Tensor, HeadStats]:
        """attend and stats together: (B, H, Tq, Dv) and what the heads did."""
        outs, total = [], None
        for block in self.blocks():
            queries = None if real is None else real[:, block.rows]
            out, new = functional.head_stats(
                self.q[:, :, block.rows], self.k, self.v, queries=queries, classes=classes,
                cross=not self.comparable, dropout=dropout, **block.how,
            )  # fmt: skip
            outs.append(out)
            total = new if total is None else total.continued(new)
        assert total is not None  # there is at least one block
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2), total

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        """Exact statistics of every head, without the output."""
        total: HeadStats | None = None
        for block in self.blocks():
            queries = None if real is None else real[:, block.rows]
            new = functional.head_stats_without_values(
                self.q[:, :, block.rows],
                self.k,
                queries=queries,
                classes=classes,
                cross=not self.comparable,
                **block.how,
            )
            total = new if total is None else total.continued(new)
        assert total is not None  # there is at least one block
        return total

    def links(self, k: int) -> tuple[Tensor, Tensor]:
        """The k strongest keys of every query and their weights, (B, H, Tq, k) each; fewer keys: fewer links."""
        done = [functional.strongest_keys(self.q[:, :, block.rows], self.k, k, **block.how) for block in self.blocks()]
        return torch.cat([top.keys for top in done], 2), torch.cat([top.weights for top in done], 2)


def read(given: Given, recipe: Recipe | None, near: Recipe | None, cross: bool) -> Reading:
    """What the call means. recipe: how its mask was made; near: how one of its size was, for where queries stand."""
    q, k, v = given.query, given.key, given.value
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise UnsupportedError(f"{type(given.module).__name__} attends on shapes {shapes}; 4 axes are expected")
    queries, keys = q.shape[2], k.shape[2]
    band: tuple[int | None, int | None] = (None, None)
    mask, piecewise = None, None
    stands = recipe or near
    offset = keys - queries if stands is None else stands.offset
    if given.mask is None and near is not None and near.kernel_hides:
        recipe = near
    if recipe is not None and recipe.keys >= keys and recipe.band() is not None:
        band = recipe.band() or band
        shown = recipe.keys_shown
        mask = None if shown is None or bool(shown.all()) else shown[:, None, None, :keys]
    elif given.mask is None:
        if given.implementation != "eager" and given.causal:
            band, offset = (None, 0), 0  # counted from the first key on: what a cache holds past it is not there yet
            k, v, keys = k[:, :, :queries], v[:, :, :queries], min(keys, queries)
    elif recipe is not None and (isinstance(given.mask, LazyMask) or not isinstance(given.mask, Tensor)):
        piecewise = recipe
    else:
        mask = _mask(given.mask, keys)
    bias = given.more.get("position_bias")
    if bias is not None:
        if piecewise is not None:
            mask, piecewise = piecewise.rows(0, queries)[..., :keys], None
        mask = _with_bias(bias[..., :keys], mask)
    how = {
        "mask": mask,
        "causal": band[1] == 0,
        "window": None if band[0] is None and band[1] in (None, 0) else band,
        "offset": offset,
        "scale": given.more.get("scaling"),
        "softcap": given.more.get("softcap"),
        "sinks": given.more.get("s_aux"),
    }
    known = stands is not None or queries == keys  # else keys may have been put before or behind, as by compressors
    return Reading(q, k, v, how, not cross and known, piecewise)


def agrees(reading: Any, other: Any, real: Tensor | None, rows: list[int] | None = None) -> bool:
    """Whether a few rows are the same as those of a model's own output (B, Tq, H, Dv), or of another reading."""
    queries = reading.q.shape[2]
    rows = few_rows(queries) if rows is None else rows
    with torch.no_grad():
        other = by_head(other, reading)[:, :, rows] if isinstance(other, Tensor) else other.attend_rows(rows)
        values = reading.given.value if hasattr(reading, "given") else reading.v
        return same(reading.attend_rows(rows), other, values, None if real is None else real[:, rows])


def by_head(output: Tensor, reading: Any) -> Tensor:
    """A model's own output (B, Tq, H, Dv), in any shape, as (B, H, Tq, Dv)."""
    heads, queries = reading.q.shape[1:3]
    return output.detach().reshape(output.shape[0], queries, heads, -1).transpose(1, 2)


def same(ours: Tensor, other: Tensor, values: Tensor, real: Tensor | None) -> bool:
    """Whether outputs (B, H, rows, Dv) are the same but for rounding, in rows that are real (B, rows)."""
    if ours.numel() == 0:
        return True
    apart = (ours - other).float().abs()
    close = max(CLOSE.get(x.dtype, 1e-2) for x in (ours, other))
    if float(apart.amax()) <= close * max(float(ours.abs().amax()), 1e-6):  # False where there is a NaN
        return True
    limit = close * max(float(ours.abs().nan_to_num(0).amax()), 1e-6)
    blind = (ours == 0).all(-1, keepdim=True)  # with no visible key models give 0, NaN, or the mean of all values
    mean = values.float().mean(2, keepdim=True).repeat_interleave(ours.shape[1] // values.shape[1], 1)
    free = torch.where(other.isnan(), 0, torch.minimum(apart, (other - mean).float().abs()))
    apart = torch.where(blind, free, apart)
    apart = torch.where(ours.isnan() & other.isnan(), 0, apart)
    if real is not None:
        apart = apart * real[:, None, :, None]  # what padding looks at is nobody's concern
    return float(apart.amax()) <= limit


def few_rows(queries: int) -> list[int]:
    """Rows on which a reading of a new form is compared with the model's output."""
    return sorted({0, queries // 3, queries // 2, queries - 1})


def _mask(mask: Any, keys: int) -> Tensor:
    """A model's mask as attend takes it: hidden by False or -inf, and bool where it does no more than hide."""
    if not isinstance(mask, Tensor):
        raise UnsupportedError(f"a mask of type {type(mask).__name__} is not known")
    if mask.dim() == 2:  # as flash attention takes it: the padding of the keys
        return mask[:, None, None, -keys:].bool()
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask.bool()
    hidden = mask <= torch.finfo(mask.dtype).min / 2  # transformers writes the smallest number for -inf
    low = mask <= HIDDEN
    hidden |= low & ~low.all(-1, keepdim=True)
    if not bool((mask.masked_fill(hidden, 0) != 0).any()):
        return ~hidden
    return mask.masked_fill(hidden, -torch.inf)


def _with_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
