"""Windows of single heads: the query heads of a layer that see only the first and the most recent keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError


@dataclass(frozen=True)
class HeadWindows:
    """Which KV heads of a layer stream, and what they see."""

    kv_heads: int
    streaming: frozenset[int]  # KV heads
    window: int  # the most recent keys, the query's own among them
    keep_first: int  # the first keys of the sequence

    def restrict(self, options: dict[str, Any], heads: int) -> dict[str, Any]:
        """attend's options for a layer of so many query heads, with the windows of its streaming heads.

        Padding becomes `starts` and `lengths`, so that no mask is read. The first key of a sequence is the first that
        the layer's own mask shows to any query.
        """
        if options["window"] is not None:
            raise UnsupportedError("a layer with a sliding window of its own cannot stream; leave it out of the plan")
        group = heads // self.kv_heads
        is_streaming = [head // group in self.streaming for head in range(heads)]
        return {
            **options,
            **_first_keys(options["mask"]),
            "window": tuple((self.window - 1, None) if streams else (None, None) for streams in is_streaming),
            "keep_first": tuple(self.keep_first if streams else 0 for streams in is_streaming),
        }

    def visible(self, rows: slice, keys: int, heads: int, options: dict[str, Any]) -> Tensor:
        """(B or 1, H, rows, Tk) bool: what the windows show, whatever else hides; options: those of `restrict`."""
        starts = options.get("starts")
        start = torch.zeros(1, dtype=torch.long) if starts is None else starts.cpu()
        position = torch.arange(rows.start, rows.stop)[:, None] + options["offset"]
        key = torch.arange(keys)
        first = key - start.view(-1, 1, 1, 1) < self.keep_first
        seen = (key > position - self.window) | first  # (B or 1, 1, rows, Tk)
        group = heads // self.kv_heads
        whole = torch.tensor([head // group not in self.streaming for head in range(heads)])
        return seen | whole.view(1, -1, 1, 1)


class PaddingBounds(NamedTuple):
    """Where the tokens of every row of a batch begin and end."""

    starts: Tensor  # (B,)
    ends: Tensor  # (B,)
    whole: bool  # whether every key in between is a token


def padding_bounds(shown: Tensor) -> PaddingBounds:
    """The bounds of the tokens (B, Tk) bool; a row without any begins and ends at 0."""
    starts = shown.long().argmax(1)
    ends = starts + shown.sum(1)
    key = torch.arange(shown.shape[1], device=shown.device)
    between = (key >= starts[:, None]) & (key < ends[:, None])
    return PaddingBounds(starts, ends, bool((between == shown).all()))


def _first_keys(mask: Tensor | None) -> dict[str, Any]:
    """attend's options for a mask: where the sequences begin, and no mask where only padding is hidden."""
    if mask is None:
        return {}
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    bounds = padding_bounds(visible.any(1).any(1))  # (B or 1, Tk)
    if bounds.whole and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return {"mask": None, "starts": bounds.starts, "lengths": bounds.ends}
    return {"starts": bounds.starts}
