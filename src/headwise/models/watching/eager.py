"""An exact but slow reading: the model's own eager function computes the weights, in blocks of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.stats import HeadStats, stats_from_weights
from ...errors import UnsupportedError
from .call_reader import ROWS, ModelCall
from .head_windows import visible_keys
from .lazy_masks import LazyMask, MaskRecipe


@dataclass(frozen=True)
class EagerReading:
    """The methods of `Reading`, from weights that the model's own code computes."""

    call: ModelCall
    eager: Callable[..., tuple[Tensor, Any]]
    offset: int
    comparable: bool
    recipe: MaskRecipe | None = None  # of the mask
    window_options: dict[str, Any] = field(default_factory=dict)  # attend's for the same call, where heads stream

    def exact(self) -> EagerReading:
        """The same in float32: eager functions round their scores, which is too coarse in 16 bits."""
        call = self.call
        if call.query.dtype not in (torch.float16, torch.bfloat16):
            return self
        wide = call._replace(query=call.query.float(), key=call.key.float(), value=call.value.float())
        return replace(self, call=wide)

    @property
    def q(self) -> Tensor:
        return self.call.query

    @property
    def k(self) -> Tensor:
        return self.call.key

    @property
    def v(self) -> Tensor:
        return self.call.value

    @property
    def absent(self) -> dict[str, str]:
        """Statistics that this reading does not give, and why."""
        return dict.fromkeys(("max_logit", "lse"), "its attention function gives weights and no scores")

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.call.key.shape[2]

    def block_weights(self, rows: slice) -> Tensor:
        """(B, H, rows, Tk): the weights of consecutive queries, from one call of the eager function."""
        return self._block(rows)[1]

    def _block(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The output (B, rows, H, Dv) and the weights (B, H, rows, Tk) of some queries."""
        call = self.call
        options = dict(call.options, dropout=0.0)
        if options.get("position_bias") is not None and options["position_bias"].shape[-2] > 1:
            options["position_bias"] = options["position_bias"][..., rows, :]
        query, mask = call.query[:, :, rows], self._mask(rows)
        output, weights = self.eager(call.module, query, call.key, call.value, mask, **options)
        if not isinstance(weights, Tensor) or weights.dim() != 4:
            raise UnsupportedError(f"{type(call.module).__name__}'s eager attention gives no weights")
        return output, weights

    def _mask(self, rows: slice) -> Tensor | None:
        """The mask of some rows as eager functions take it: added to the scores."""
        call, mask = self.call, self._own_mask(rows)
        if call.streams is None:
            return mask
        visible = visible_keys(call.streams, self.window_options, rows, self.keys, call.query.shape[1]).to(
            call.query.device
        )
        shown = torch.zeros((), dtype=call.query.dtype, device=call.query.device) if mask is None else mask
        return torch.where(visible, shown, torch.finfo(call.query.dtype).min)

    def _own_mask(self, rows: slice) -> Tensor | None:
        """The model's own mask of some rows."""
        call = self.call
        if self.recipe is not None and (isinstance(call.mask, LazyMask) or not isinstance(call.mask, Tensor)):
            mask = self.recipe.rows(rows.start, rows.stop)
        elif call.mask is not None:
            mask = call.mask if call.mask.shape[2] == 1 else call.mask[:, :, rows]
            if call.implementation == "eager":
                return mask  # whatever it is, the model adds it
        elif call.implementation != "eager" and call.causal:
            i = torch.arange(rows.start, rows.stop, device=call.query.device)[:, None]
            mask = (torch.arange(self.keys, device=call.query.device) <= i)[None, None]
        else:
            return None
        if mask.dtype != torch.bool:
            return mask
        low = torch.finfo(call.query.dtype).min
        return torch.zeros((), dtype=call.query.dtype, device=mask.device).where(mask, low)

    def _blocks(self) -> list[slice]:
        queries = self.q.shape[2]
        return [slice(first, min(first + ROWS, queries)) for first in range(0, queries, ROWS)]

    def attend(self, dropout: float = 0.0) -> Tensor:
        if dropout:
            raise UnsupportedError("dropout on a mask of this size has no exact counterpart; use model.eval()")
        return torch.cat([self._block(rows)[0] for rows in self._blocks()], 1).transpose(1, 2)

    def attend_rows(self, rows: list[int]) -> Tensor:
        return torch.cat([self._block(slice(i, i + 1))[0] for i in rows], 1).transpose(1, 2)

    def weights(self, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        numbers = list(range(self.q.shape[2])) if rows is None else rows
        weights = torch.cat([self._block(slice(i, i + 1))[1] for i in numbers], 2)
        return weights if heads is None else weights[:, heads]

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        total: HeadStats | None = None
        with torch.no_grad():
            for rows in self._blocks():
                new = stats_from_weights(
                    self.block_weights(rows),
                    offset=self.offset + rows.start,
                    queries=None if real is None else real[:, rows],
                    classes=classes,
                    cross=not self.comparable,
                    sinks=self.call.options.get("s_aux") is not None,
                )
                total = new if total is None else total.continued(new)
        assert total is not None  # there is at least one block
        return total

    def links(self, k: int) -> tuple[Tensor, Tensor]:
        blocks = [self.block_weights(rows) for rows in self._blocks()]
        tops = [weights.topk(min(k, weights.shape[-1]), -1) for weights in blocks]
        return torch.cat([top.indices for top in tops], 2), torch.cat([top.values for top in tops], 2)
