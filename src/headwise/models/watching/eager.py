"""The exact way round: a model's own eager function, on blocks of query rows, gives the weights that it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.stats import HeadStats, stats_from_weights
from ...errors import UnsupportedError
from .call_reader import ROWS, Given
from .lazy_masks import LazyMask, Recipe


@dataclass(frozen=True)
class EagerReading:
    """What `Reading` answers, from weights that the model's own code computes."""

    given: Given
    eager: Callable[..., tuple[Tensor, Any]]
    offset: int
    comparable: bool
    recipe: Recipe | None = None  # of the mask

    def exact(self) -> EagerReading:
        """The same in 32 bits: eager functions round their scores, which 16 bits do not bear."""
        given = self.given
        if given.query.dtype not in (torch.float16, torch.bfloat16):
            return self
        wide = given._replace(query=given.query.float(), key=given.key.float(), value=given.value.float())
        return replace(self, given=wide)

    @property
    def q(self) -> Tensor:
        return self.given.query

    def _block(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The output (B, rows, H, Dv) and the weights (B, H, rows, Tk) of some queries."""
        given = self.given
        more = dict(given.more, dropout=0.0)
        if more.get("position_bias") is not None and more["position_bias"].shape[-2] > 1:
            more["position_bias"] = more["position_bias"][..., rows, :]
        out, weights = self.eager(
            given.module, given.query[:, :, rows], given.key, given.value, self._mask(rows), **more
        )
        if not isinstance(weights, Tensor) or weights.dim() != 4:
            raise UnsupportedError(f"{type(given.module).__name__}'s eager attention gives no weights")
        return out, weights

    def _mask(self, rows: slice) -> Tensor | None:
        """The mask of some rows as eager functions take it: added to the scores."""
        given, keys = self.given, self.given.key.shape[2]
        if self.recipe is not None and (isinstance(given.mask, LazyMask) or not isinstance(given.mask, Tensor)):
            mask = self.recipe.rows(rows.start, rows.stop)
        elif given.mask is not None:
            mask = given.mask if given.mask.shape[2] == 1 else given.mask[:, :, rows]
            if given.implementation == "eager":
                return mask  # whatever it is, that is what the model adds
        elif given.implementation != "eager" and given.causal:
            i = torch.arange(rows.start, rows.stop, device=given.query.device)[:, None]
            mask = (torch.arange(keys, device=given.query.device) <= i)[None, None]
        else:
            return None
        if mask.dtype != torch.bool:
            return mask
        low = torch.finfo(given.query.dtype).min
        return torch.zeros((), dtype=given.query.dtype, device=mask.device).where(mask, low)

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
        wanted = list(range(self.q.shape[2])) if rows is None else rows
        found = torch.cat([self._block(slice(i, i + 1))[1] for i in wanted], 2)
        return found if heads is None else found[:, heads]

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        total: HeadStats | None = None
        with torch.no_grad():
            for rows in self._blocks():
                new = stats_from_weights(
                    self._block(rows)[1],
                    offset=self.offset + rows.start,
                    queries=None if real is None else real[:, rows],
                    classes=classes,
                    cross=not self.comparable,
                    sinks=self.given.more.get("s_aux") is not None,
                )
                total = new if total is None else total.continued(new)
        assert total is not None
        return total

    def links(self, k: int) -> tuple[Tensor, Tensor]:
        tops = [self._block(rows)[1] for rows in self._blocks()]
        found = [weights.topk(min(k, weights.shape[-1]), -1) for weights in tops]
        return torch.cat([top.indices for top in found], 2), torch.cat([top.values for top in found], 2)
