"""What windows hide in one attention call: lost weight and change of the output through W_O, for every KV head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention import functional
from ..errors import UnsupportedError
from ..models.structure.sites import Site
from ..models.watching.call_reader import ROWS, Block, Reading
from ..models.watching.eager import EagerReading
from .context_need_result import LayerSums


def check_reading(reading: Reading | EagerReading, site: Site) -> Reading:
    """The call, where it is causal self-attention on whole sequences that is read exactly."""
    if isinstance(reading, EagerReading):
        raise UnsupportedError(f"{site} attends by its own eager code alone, in which windows cannot be measured")
    if type(reading) is not Reading:
        raise UnsupportedError(f"{site} attends to packed sequences; give one sequence per row")
    offset, queries = reading.options["offset"], reading.q.shape[2]
    if not reading.comparable or queries != reading.keys or isinstance(offset, Tensor) or offset:
        raise UnsupportedError(
            f"{site} attends to {reading.keys} keys from {queries} queries; give whole sequences without a cache"
        )
    if not _is_causal(reading):
        raise UnsupportedError(f"{site} attends to later tokens: without causal attention there is nothing to stream")
    return reading


def _is_causal(reading: Reading) -> bool:
    """Whether no query sees a later key, by the call's options or by its mask."""
    window, mask = reading.options.get("window"), reading.options["mask"]
    if reading.options.get("causal") or reading.keys == 1 or (window is not None and window[1] == 0):
        return True
    if reading.recipe is None and (mask is None or mask.shape[2] == 1):
        return False
    for block in reading.blocks():
        visible = block.options["mask"]
        rows = slice(0, None) if reading.recipe is not None else block.rows
        visible = visible[:, :, rows] if visible.dtype == torch.bool else visible[:, :, rows] > -torch.inf
        later = torch.ones(visible.shape[-2:], dtype=torch.bool, device=visible.device).triu(block.rows.start + 1)
        if bool((visible & later).any()):
            return False
    return True


def own_window(reading: Reading) -> int | None:
    """How many keys before a query its layer shows to it; None: all, to the heads that do not stream already."""
    window = reading.options.get("window")
    return None if window is None or _is_per_head(window) else window[0]


def _is_per_head(window: Any) -> bool:
    return window is not None and any(isinstance(pair, (tuple, list)) for pair in window)


class CallMeasurement(NamedTuple):
    """The results of one attention call in windows."""

    tokens: np.ndarray  # (B,), those that count
    sums: LayerSums
    outputs: Tensor  # (B, T, heads * width), what the heads give to W_O; zero at padding
    differences: list[Tensor | None]  # per window: outputs with all keys minus those in the window; None: all zero


def measure_call(
    reading: Reading,
    real: Tensor | None,
    counted: Tensor | None,
    weight: Tensor,
    windows: Sequence[int],
    keep_first: int,
) -> CallMeasurement:
    """What one call loses in windows.

    Args:
        reading: the call.
        real, counted: (B, T) bool, the queries that are tokens, and those whose losses count; None for all.
        weight: W_O (width, heads * head width).
        windows, keep_first: numbers of keys that stay visible.
    """
    q, k, v = (
        x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (reading.q, reading.k, reading.v)
    )
    reading = Reading(q, k, v, reading.options, reading.comparable, reading.recipe)
    batch, queries, kv_heads = q.shape[0], q.shape[2], k.shape[1]
    is_token = torch.ones(batch, queries, dtype=torch.bool, device=q.device) if real is None else real.to(q.device)
    counts = is_token if counted is None else is_token & counted.to(q.device)
    starts = _starts(reading, real)
    outputs, lse = _attend(reading, starts)
    weight = weight.to(outputs.dtype)
    written = _join_heads(outputs) @ weight.T  # (B, T, width)
    norm = _sum_tokens(written.norm(dim=-1), counts)
    lost_sums, change_sums, differences = [], [], list[Tensor | None]()
    sliding, is_open = own_window(reading), ~_streaming_heads(reading)[:: q.shape[1] // kv_heads]
    for window in windows:
        past = is_token & _past_window(queries, starts, keep_first + window)
        losing = counts & past
        if (sliding is not None and window > sliding) or not bool(past.any()):
            lost_sums.append(np.zeros((batch, kv_heads)))
            change_sums.append(np.zeros((batch, kv_heads)))
            differences.append(None)
            continue
        window_outputs, window_lse = _attend(reading, starts, window, keep_first)
        lost = -torch.expm1(window_lse - lse).clamp(max=0)  # (B, H, T)
        lost = lost.unflatten(1, (kv_heads, -1)).mean(2)
        difference = _join_heads(outputs - window_outputs) * past[..., None]
        differences.append(difference)
        change = torch.stack(
            [
                (part @ columns.T).norm(dim=-1)
                for part, columns in zip(difference.chunk(kv_heads, -1), weight.chunk(kv_heads, -1), strict=True)
            ],
            1,
        )  # (B, KV heads, T)
        lost_sums.append(_sum_tokens(lost, losing[:, None]) * is_open)
        change_sums.append(_sum_tokens(change, losing[:, None]) * is_open)
    sums = LayerSums(norm, np.stack(lost_sums, 1), np.stack(change_sums, 1))
    return CallMeasurement(counts.sum(1).cpu().numpy(), sums, _join_heads(outputs) * is_token[..., None], differences)


def _starts(reading: Reading, real: Tensor | None) -> Tensor:
    """(B,): the first token of each sequence; by the mask, where padding is not known."""
    own, mask, batch = reading.options.get("starts"), reading.options["mask"], reading.q.shape[0]
    if isinstance(own, Tensor):
        return own
    if real is None and mask is not None:
        visible = mask if mask.dtype == torch.bool else mask > -torch.inf
        real = visible.any(1).any(1).expand(batch, -1)
    if real is None:
        return torch.zeros(batch, dtype=torch.long, device=reading.q.device)
    return real.to(reading.q.device).long().argmax(1)


def _past_window(queries: int, starts: Tensor, visible: int) -> Tensor:
    """(B, T) bool: the queries that have more keys up to their own than stay visible."""
    return torch.arange(queries, device=starts.device) - starts[:, None] >= visible


def _attend(reading: Reading, starts: Tensor, window: int | None = None, keep_first: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, T, Dv) and log-sum-exps (B, H, T), with all keys of the layer or in a window."""
    visibility = {"causal": True, "starts": starts, **_head_windows(reading, window, keep_first)}
    parts = [
        functional.attend_with_lse(reading.q[:, :, block.rows], reading.k, reading.v, **{**block.options, **visibility})
        for block in _blocks(reading)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _head_windows(reading: Reading, window: int | None, keep_first: int) -> dict[str, Any]:
    """attend's options for a window; heads that stream already keep their own."""
    pair = (None if window is None else window - 1, 0)
    streaming = _streaming_heads(reading)
    if not streaming.any():
        return {"window": None if window is None else pair, "keep_first": keep_first}
    own, first = reading.options["window"], reading.options.get("keep_first", 0)
    first = [first] * len(own) if isinstance(first, int) else first
    return {
        "window": [mine if streams else pair for mine, streams in zip(own, streaming, strict=True)],
        "keep_first": [mine if streams else keep_first for mine, streams in zip(first, streaming, strict=True)],
    }


def _streaming_heads(reading: Reading) -> np.ndarray:
    """(H,) bool: the query heads that have a window of their own."""
    if not _is_per_head(reading.options.get("window")):
        return np.zeros(reading.q.shape[1], dtype=bool)
    return np.array([left is not None for left, _ in reading.options["window"]])


def _blocks(reading: Reading) -> Iterator[Block]:
    """The call, with the layer's own window in the mask, block by block: keep_first must not reach beyond it."""
    left = own_window(reading)
    if left is None:
        yield from reading.blocks()
        return
    for first in range(0, reading.keys, ROWS):
        rows = slice(first, min(first + ROWS, reading.keys))
        query = torch.arange(rows.start, rows.stop, device=reading.q.device)[:, None]
        band = (torch.arange(reading.keys, device=reading.q.device) >= query - left)[None, None]
        mask = reading.options["mask"]
        if mask is not None:
            mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
            band = mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, -torch.inf)
        yield Block(rows, dict(reading.options, mask=band, offset=first))


def _join_heads(x: Tensor) -> Tensor:
    """(B, H, T, Dv) -> (B, T, H * Dv)."""
    return x.transpose(1, 2).flatten(2)


def _sum_tokens(values: Tensor, tokens: Tensor) -> np.ndarray:
    """The sum over the last axis, of tokens alone."""
    return torch.where(tokens, values, 0).sum(-1, dtype=torch.float64).cpu().numpy()
