"""attend's options for a layer in which some heads stream, and the same as a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention.nn.streamed_keys import StreamingHeads, padding_bounds
from ...errors import UnsupportedError


def restrict_options(streams: StreamingHeads, options: dict[str, Any], heads: int) -> dict[str, Any]:
    """attend's options for a layer of this many query heads, with the windows of those that stream.

    Padding becomes `starts` and `lengths`, so that no mask is read. The first key of a sequence is the first that the
    layer's own mask shows to any query.
    """
    if options["window"] is not None:
        raise UnsupportedError("a layer with a sliding window of its own cannot stream; leave it out of the plan")
    return {**options, **_first_keys(options["mask"]), **streams.windows(heads)}


def visible_keys(streams: StreamingHeads, options: dict[str, Any], rows: slice, keys: int, heads: int) -> Tensor:
    """(B or 1, H, rows, Tk) bool: what the windows show, whatever else hides; options: of `restrict_options`."""
    starts = options.get("starts")
    start = torch.zeros(1, dtype=torch.long) if starts is None else starts.cpu()
    position = torch.arange(rows.start, rows.stop)[:, None] + options["offset"]
    key = torch.arange(keys)
    first = key - start.view(-1, 1, 1, 1) < streams.keep_first
    seen = (key > position - streams.window) | first  # (B or 1, 1, rows, Tk)
    return seen | ~torch.tensor(streams.of_queries(heads)).view(1, -1, 1, 1)


def _first_keys(mask: Tensor | None) -> dict[str, Any]:
    """attend's options for a mask: where the sequences begin, and no mask where only padding is hidden."""
    if mask is None:
        return {}
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    bounds = padding_bounds(visible.any(1).any(1))  # (B or 1, Tk)
    if bounds.whole and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return {"mask": None, "starts": bounds.starts, "lengths": bounds.ends}
    return {"starts": bounds.starts}
