"""One attention call of a transformers model, translated into arguments of attend, weights and head_stats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention import functional
from ...attention.nn.streamed_keys import StreamingHeads
from ...attention.stats import HeadStats
from ...errors import UnsupportedError
from ..multihead import HIDDEN
from ..streaming.deferred_keys import DeferredKeys
from .head_windows import restrict_options
from .lazy_masks import LazyMask, MaskRecipe

ONE_PASS = 1 << 18  # scores per head from which one pass for output and statistics is worth its other rounding
ROWS = 256  # queries of a block, where a mask or weights are made block by block


class ModelCall(NamedTuple):
    """What a model passes to its attention function."""

    module: nn.Module
    query: Tensor  # (B, H, Tq, D)
    key: Tensor  # (B, Hkv, Tk, D)
    value: Tensor  # (B, Hkv, Tk, Dv)
    mask: Any
    options: dict[str, Any]  # dropout, scaling, is_causal, softcap, s_aux, position_bias, ...
    implementation: str
    streams: StreamingHeads | None = None  # which heads stream

    @property
    def dropout(self) -> float:
        return float(self.options.get("dropout") or 0.0)

    @property
    def causal(self) -> bool:
        """Whether no mask means a causal one, by sdpa's rule."""
        return self.causal_module and self.query.shape[2] > 1

    @property
    def causal_module(self) -> bool:
        """Whether the call, or else its module, says that it is causal."""
        option = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if option is None else option)


class Block(NamedTuple):
    """Some queries, and attend's options for them."""

    rows: slice
    options: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """An attention call as arguments of attend, weights and head_stats."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]  # attend's, mask and offset always among them; slopes of ALiBi
    comparable: bool  # whether positions of queries and keys are of one sequence
    recipe: MaskRecipe | None = None  # of a mask that is made block by block

    @property
    def absent(self) -> dict[str, str]:
        """Statistics that this reading does not give, and why."""
        return {}

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.k.shape[2]

    def blocks(self) -> Iterator[Block]:
        """All queries at once, or in blocks where the mask is made block by block."""
        queries = self.q.shape[2]
        if self.recipe is None:
            yield Block(slice(0, queries), self.options)
            return
        for first in range(0, queries, ROWS):
            last = min(first + ROWS, queries)
            mask = self.recipe.rows(first, last)[..., : self.keys]
            yield Block(slice(first, last), dict(self.options, mask=mask, offset=self.options["offset"] + first))

    def attend(self, dropout: float = 0.0) -> Tensor:
        """(B, H, Tq, Dv)."""
        outputs = [
            functional.attend_with_slopes(self.q[:, :, block.rows], self.k, self.v, dropout=dropout, **block.options)
            for block in self.blocks()
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def attend_rows(self, rows: list[int]) -> Tensor:
        """(B, H, rows, Dv): the output of a few queries alone."""
        outputs = []
        for i in rows:
            options = dict(self.options, offset=self.options["offset"] + i)
            if self.recipe is not None:
                options["mask"] = self.recipe.rows(i, i + 1)[..., : self.keys]
            elif options["mask"] is not None and options["mask"].shape[2] > 1:
                options["mask"] = options["mask"][:, :, i : i + 1]
            outputs.append(functional.attend_with_slopes(self.q[:, :, i : i + 1], self.k, self.v, **options))
        return torch.cat(outputs, 2)

    def weights(self, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        """(B, heads, rows, Tk)."""
        if self.recipe is None:
            return functional.weights_with_slopes(self.q, self.k, rows, heads, **self.options)
        by_row: dict[int, Tensor] = {}
        for block in self.blocks():
            block_rows = [i for i in range(block.rows.start, block.rows.stop) if rows is None or i in rows]
            if block_rows:
                in_block = [i - block.rows.start for i in block_rows]
                q = self.q[:, :, block.rows]
                weights = functional.weights_with_slopes(q, self.k, in_block, heads, **block.options)
                by_row.update(zip(block_rows, weights.unbind(2), strict=True))
        return torch.stack([by_row[i] for i in (sorted(by_row) if rows is None else rows)], 2)

    def in_one_pass(self) -> bool:
        """Whether output and statistics come from one pass over the scores, and there are enough scores to gain."""
        large = self.q.shape[2] * self.keys >= ONE_PASS
        return large and self.recipe is None and functional.is_one_pass(self.q, self.k, self.v, **self.options)

    def observe(
        self, real: Tensor | None, classes: dict[str, Tensor], dropout: float = 0.0
    ) -> tuple[Tensor, HeadStats]:
        """Output (B, H, Tq, Dv) and exact statistics of every head, together."""
        outputs, total = [], None
        for block in self.blocks():
            queries = None if real is None else real[:, block.rows]
            out, new = functional.head_stats_with_slopes(
                self.q[:, :, block.rows], self.k, self.v, queries=queries, classes=classes,
                cross=not self.comparable, dropout=dropout, **block.options,
            )  # fmt: skip
            outputs.append(out)
            total = new if total is None else total.continued(new)
        assert total is not None  # there is at least one block
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), total

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        """Exact statistics of every head, without the output."""
        total: HeadStats | None = None
        for block in self.blocks():
            queries = None if real is None else real[:, block.rows]
            q, cross = self.q[:, :, block.rows], not self.comparable
            new = functional.head_stats_without_values(
                q, self.k, queries=queries, classes=classes, cross=cross, **block.options
            )
            total = new if total is None else total.continued(new)
        assert total is not None  # there is at least one block
        return total

    def links(self, k: int) -> tuple[Tensor, Tensor]:
        """The k strongest keys of every query and their weights, (B, H, Tq, k) each; fewer if there are fewer keys."""
        tops = [
            functional.strongest_keys(self.q[:, :, block.rows], self.k, k, **block.options) for block in self.blocks()
        ]
        return torch.cat([top.keys for top in tops], 2), torch.cat([top.weights for top in tops], 2)


def read(call: ModelCall, recipe: MaskRecipe | None, similar: MaskRecipe | None, cross: bool) -> Reading:
    """Translate a model's call.

    Args:
        call: what the model passed to its attention function.
        recipe: how its mask was made, if it is known.
        similar: how a mask of the same size was made in this pass: it says at which positions the queries are.
        cross: whether it is cross-attention.
    """
    q, k, v = call.query, call.key, call.value
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise UnsupportedError(f"{type(call.module).__name__} attends on shapes {shapes}; 4 axes are expected")
    if isinstance(k, DeferredKeys):
        raise UnsupportedError(
            "heads cannot be watched through a HeadCache, whose streaming heads have fewer keys than the others; give "
            "past_key_values=DynamicCache(), or use_cache=False"
        )
    queries, keys = q.shape[2], k.shape[2]
    band: tuple[int | None, int | None] = (None, None)
    mask, by_block = None, None
    positions = recipe or similar
    offset = keys - queries if positions is None else positions.offset
    if call.mask is None and similar is not None and similar.kernel_hides:
        recipe = similar
    if recipe is not None and recipe.keys >= keys and recipe.band() is not None:
        band = recipe.band() or band
        visible_keys = recipe.keys_shown
        mask = None if visible_keys is None or bool(visible_keys.all()) else visible_keys[:, None, None, :keys]
    elif call.mask is None:
        if call.implementation != "eager" and call.causal:
            # sdpa counts from the first key; a static cache has room for keys that do not exist yet
            band, offset = (None, 0), 0
            k, v, keys = k[:, :, :queries], v[:, :, :queries], min(keys, queries)
    elif recipe is not None and (isinstance(call.mask, LazyMask) or not isinstance(call.mask, Tensor)):
        by_block = recipe
    else:
        mask = read_mask(call.mask, keys)
    bias = call.options.get("position_bias")
    if bias is not None:
        if by_block is not None:
            mask, by_block = by_block.rows(0, queries)[..., :keys], None
        mask = _add_bias(bias[..., :keys], mask)
    options = {
        "mask": mask,
        "causal": band[1] == 0,
        "window": None if band[0] is None and band[1] in (None, 0) else band,
        "offset": offset,
        "scale": call.options.get("scaling"),
        "softcap": call.options.get("softcap"),
        "sinks": call.options.get("s_aux"),
    }
    # without a known mask, keys may have been added before or after the queries, as by compressors
    known_positions = positions is not None or queries == keys
    if call.streams is not None:
        options = _with_windows(call, call.streams, options, by_block)
    return Reading(q, k, v, options, not cross and known_positions, by_block)


def _with_windows(
    call: ModelCall, streams: StreamingHeads, options: dict[str, Any], by_block: MaskRecipe | None
) -> dict[str, Any]:
    """attend's options with the windows of heads that stream; starts are always (B,), or absent where all are 0."""
    options = restrict_options(streams, options, call.query.shape[1])
    batch = call.query.shape[0]
    if by_block is not None:  # the first key that a block's mask shows need not be the first of the sequence
        padding = by_block.padding
        first = torch.zeros(1, dtype=torch.long) if padding is None else padding.long().argmax(1)
        options["starts"] = first.to(call.query.device)
    for name in ("starts", "lengths"):
        if options.get(name) is not None:
            options[name] = options[name].expand(batch)
    return options


def read_mask(mask: Any, keys: int) -> Tensor:
    """A model's mask as attend takes it: bool where it only hides keys, else floats with -inf for hidden keys."""
    if not isinstance(mask, Tensor):
        raise UnsupportedError(f"a mask of type {type(mask).__name__} is not known")
    if mask.dim() == 2:  # as flash attention takes it: the padding mask of the keys
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


def _add_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
