"""Visibility: which queries may attend to which keys, from mask, causal, window, starts, lengths and offset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .torch_modes import has_symbolic_sizes, is_readable
from .validation import FAR, HeadWindow, Sizes

ROWS_PER_STEP = 256  # rows of a mask that are evaluated together


@dataclass(frozen=True)
class Visibility:
    """Which queries may attend to which keys in one call.

    Query i is at key position i + offset. It may attend to key j if start <= j < end, the mask allows it, and either
    i + offset - left <= j <= i + offset + right or j is one of the keep_first keys from keep_start on (with causal:
    that are not past the query). offset, start, keep_start and end are ints where all sequences share them and their
    values can be read, else (B,) tensors.

    Where query heads differ, `windows` has the window of each, and left, right and keep_first are the widest.
    """

    size: Sizes
    device: torch.device
    mask: Tensor | None  # 4-D, bool (True: may attend) or float (added to the scores, -inf hides)
    left: int | None  # None: open
    right: int | None
    keep_first: int
    windows: tuple[HeadWindow, ...] | None
    causal: bool
    offset: int | Tensor
    start: int | Tensor
    keep_start: int | Tensor
    end: int | Tensor
    slopes: Tensor | None  # (Hq,) ALiBi: a bias of -slope * distance on the scores
    readable: bool  # whether values of the tensors may be read at no cost
    aligned: bool = False  # the offset is the default Tk - Tq, also in a graph that runs on other sizes

    @property
    def uniform(self) -> bool:
        """Whether offset, start and end are plain numbers, shared by all sequences: blocks of keys can be skipped."""
        return not any(isinstance(x, Tensor) for x in (self.offset, self.start, self.end))

    @property
    def banded(self) -> bool:
        """Whether there is a window or a causal edge."""
        return self.left is not None or self.right is not None or self.windows is not None

    @property
    def is_one_band(self) -> bool:
        """Whether each query of each head sees the same band of keys around its position, and no others."""
        return self.windows is None and not self.keep_first

    @property
    def hides(self) -> bool:
        """Whether a key may be visible to one query and hidden from another."""
        return self.mask is not None or self.banded or not self.uniform

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The range of keys (start, stop) outside of which queries first to last - 1 see nothing."""
        if isinstance(self.offset, Tensor) or isinstance(self.start, Tensor) or isinstance(self.end, Tensor):
            return 0, self.size.keys
        low = self.start if self.left is None else max(self.start, first + self.offset - self.left)
        high = self.end if self.right is None else min(self.end, last + self.offset + self.right)
        ranges = [(low, high)]
        if self.keep_first:
            kept_end = min(self.end, last + self.offset) if self.causal else self.end
            if isinstance(self.keep_start, Tensor):
                ranges.append((self.start, kept_end))
            else:
                kept_end = min(kept_end, self.keep_start + self.keep_first)
                ranges.append((max(self.start, self.keep_start), kept_end))
        ranges = [(a, b) for a, b in ranges if a < b]
        return (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else (0, 0)

    def positions(self, rows: slice | Tensor) -> Tensor:
        """The key positions of these queries: (1 or B, 1, rows, 1)."""
        i = torch.arange(rows.start, rows.stop, device=self.device) if isinstance(rows, slice) else rows
        if isinstance(self.offset, Tensor):
            return i[:, None] + self.offset.to(self.device).view(-1, 1, 1, 1)
        return (i[:, None] + self.offset)[None, None]

    def allowed(self, rows: slice | Tensor, low: int, high: int) -> Tensor | None:
        """True where these queries may attend to keys low to high - 1, broadcastable to (B, H, rows, keys).

        None means everywhere. A float mask hides where it is -inf.
        """
        parts = []
        if self.banded and not self._inside_band(rows, low, high):
            parts.append(self._in_window(self.positions(rows), torch.arange(low, high, device=self.device)))
        if isinstance(self.start, Tensor) or self.start > low:
            parts.append(
                torch.arange(low, high, device=self.device)[None, None, None] >= self._per_sequence(self.start)
            )
        if isinstance(self.end, Tensor) or self.end < high:
            parts.append(torch.arange(low, high, device=self.device)[None, None, None] < self._per_sequence(self.end))
        if self.mask is not None:
            mask = self._mask_block(self.mask, rows, low, high)
            parts.append(mask if mask.dtype == torch.bool else mask != -torch.inf)
        if not parts:
            return None
        visible = parts[0]
        for part in parts[1:]:
            visible = visible & part
        return visible

    def _in_window(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether keys j (keys,) are in the windows of queries at positions i (B or 1, 1, rows, 1); by head."""
        left, right = self._left_and_right()
        inside = torch.ones_like(j, dtype=torch.bool)[None, None, None]
        if left is not None:
            inside = inside & (j >= i - left)
        if right is not None:
            inside = inside & (j <= i + right)
        return inside | self._in_kept(i, j) if self.keep_first else inside

    def _in_kept(self, i: int | Tensor, j: Tensor) -> Tensor:
        """Whether keys j are among the first keys, which queries at positions i see regardless of their window."""
        first = self._per_sequence(self.keep_start)
        kept = (j >= first) & (j < first + self._kept_count())
        return kept & (j <= i) if self.causal else kept

    def _left_and_right(self) -> tuple[int | Tensor | None, int | Tensor | None]:
        """left and right: a number for all heads, None for open, or (1, H, 1, 1)."""
        if self.windows is None:
            return self.left, self.right
        return self._per_head([w.left for w in self.windows]), self._per_head([w.right for w in self.windows])

    def _kept_count(self) -> int | Tensor:
        """keep_first: a number for all heads, or (1, H, 1, 1)."""
        return self.keep_first if self.windows is None else self._per_head([w.keep_first for w in self.windows])

    def _per_head(self, numbers: list[int] | list[int | None]) -> Tensor:
        """(1, H, 1, 1); None for open becomes a number larger than any distance."""
        return torch.tensor([FAR if n is None else min(n, FAR) for n in numbers], device=self.device).view(1, -1, 1, 1)

    def _per_sequence(self, x: int | Tensor) -> int | Tensor:
        """A number for all sequences, or (B, 1, 1, 1)."""
        return x.to(self.device).view(-1, 1, 1, 1) if isinstance(x, Tensor) else x

    def edges(self, rows: slice | Tensor, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges (start, stop) within keys low to high - 1 where anything is hidden from any of these queries.

        Of a band these are its two edges only: most of a block of rows needs no mask.
        """
        one_band = self.mask is None and self.is_one_band and not has_symbolic_sizes()
        start, end, offset = self.start, self.end, self.offset
        if isinstance(start, Tensor) or isinstance(end, Tensor) or isinstance(offset, Tensor):
            return [(low, high)]
        if not one_band or isinstance(rows, Tensor):
            padded = start != 0 or end != self.size.keys
            return [(low, high)] if self.hides or padded else []
        first, last = rows.start + offset, rows.stop - 1 + offset
        edges = [(low, min(high, start))]
        if self.left is not None:
            edges.append((low, min(high, last - self.left)))
        if self.right is not None or end < high:
            stop = end if self.right is None else min(end, first + self.right + 1)
            edges.append((max(low, stop), high))
        return [(a, b) for a, b in edges if a < b]

    def has_visible_keys(self, rows: slice) -> Tensor:
        """Which of these queries have a visible key, broadcastable to (B, H, rows)."""
        if self.mask is not None:
            visible = self.allowed(rows, 0, self.size.keys)
            assert visible is not None  # there is a mask
            return visible.any(-1) & (self.size.keys > 0)
        i = self.positions(rows)  # (1 or B, 1, rows, 1)
        start, end = (torch.zeros_like(i) + self._per_sequence(x) for x in (self.start, self.end))
        left, right = self._left_and_right()
        low = start if left is None else torch.maximum(start, i - left)
        high = end if right is None else torch.minimum(end, i + right + 1)
        visible = low < high
        if self.keep_first:
            first = torch.zeros_like(i) + self._per_sequence(self.keep_start)
            kept_end = torch.minimum(end, first + self._kept_count())
            kept_end = torch.minimum(kept_end, i + 1) if self.causal else kept_end
            visible = visible | (torch.maximum(start, first) < kept_end)
        return visible[..., 0]

    def bias(self, rows: slice | Tensor, low: int, high: int) -> Tensor | None:
        """The bias that is added to the scores of this block, broadcastable to (B, H, rows, keys), or None."""
        total = None
        if self.mask is not None and self.mask.dtype != torch.bool:
            total = self._mask_block(self.mask, rows, low, high)
        if self.slopes is not None:
            distance = (torch.arange(low, high, device=self.device) - self.positions(rows)).abs()
            alibi = -self.slopes.view(1, -1, 1, 1) * distance
            total = alibi if total is None else total + alibi
        return total

    def visible_keys(self, whole: bool = False) -> Tensor | None:
        """(B or 1, Hkv or 1, Tk): the keys that are visible to at least one query.

        None means all of them, or (unless `whole`) all within the spans of blocks.
        """
        if self.mask is None:
            spans = self.uniform and self.is_one_band and not whole and not has_symbolic_sizes()
            return None if spans or not self._may_hide_keys_from_all() else self._by_kv_head(self._keys_in_reach())
        if self.mask.shape[2] == 1:  # by head: one head of a group may reach a key that the mask shows to another
            shown = self.mask if self.mask.dtype == torch.bool else self.mask != -torch.inf
            return self._by_kv_head(shown[:, :, 0] & self._keys_in_reach())
        if not self.banded or has_symbolic_sizes() or self.size.queries <= ROWS_PER_STEP:
            return self._shown_to_any_query(self.allowed(slice(0, self.size.queries), 0, self.size.keys))
        visible = torch.zeros(1, 1, self.size.keys, dtype=torch.bool, device=self.device)
        for first in range(0, self.size.queries, ROWS_PER_STEP):  # a band's mask for all rows at once would be T x T
            rows = slice(first, min(first + ROWS_PER_STEP, self.size.queries))
            visible = visible | self._shown_to_any_query(self.allowed(rows, 0, self.size.keys))
        return visible

    def _keys_in_reach(self) -> Tensor:
        """(B or 1, H or 1, Tk), without the mask: from the first query's left edge to the last one's right edge."""
        j = torch.arange(self.size.keys, device=self.device).view(1, 1, 1, -1)
        offset, start, end = (self._per_sequence(x) for x in (self.offset, self.start, self.end))
        left, right = self._left_and_right()
        visible = torch.ones_like(j, dtype=torch.bool)
        if left is not None:
            visible = visible & (j >= offset - left)
        if right is not None:
            visible = visible & (j < self.size.queries + offset + right)
        if self.keep_first:
            visible = visible | self._in_kept(self.size.queries - 1 + offset, j)
        visible = visible & (j >= start) & (j < end) & (self.size.queries > 0)
        return visible[:, :, 0]

    def _shown_to_any_query(self, mask: Tensor | None) -> Tensor:
        """(B, H, rows, Tk) -> (B, Hkv or 1, Tk): the keys a mask shows to any query that reads the KV head."""
        assert mask is not None
        return self._by_kv_head((mask if mask.dtype == torch.bool else mask != -torch.inf).any(2))

    def _by_kv_head(self, by_head: Tensor) -> Tensor:
        """(B, H or 1, Tk) -> (B, Hkv or 1, Tk): what any query head that reads the KV head sees."""
        if by_head.shape[1] > 1:
            by_head = by_head.unflatten(1, (self.size.kv_heads, self.size.group)).any(2)
        return by_head

    def sequence(self, b: int) -> Visibility:
        """The visibility of one sequence of the batch."""
        return replace(
            self,
            size=replace(self.size, batch=1),
            mask=self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[b : b + 1],
            offset=int(self.offset[b]) if isinstance(self.offset, Tensor) else self.offset,
            start=int(self.start[b]) if isinstance(self.start, Tensor) else self.start,
            keep_start=int(self.keep_start[b]) if isinstance(self.keep_start, Tensor) else self.keep_start,
            end=int(self.end[b]) if isinstance(self.end, Tensor) else self.end,
        )

    def part(self, batch: slice, kv_heads: slice) -> Visibility:
        """The visibility of some sequences and some KV heads with the query heads that read them."""
        group = self.size.group
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[0] == 1 else mask[batch]
            mask = mask if mask.shape[1] == 1 else mask[:, heads]
        count = kv_heads.stop - kv_heads.start
        return replace(
            self,
            size=replace(self.size, batch=batch.stop - batch.start, heads=count * group, kv_heads=count),
            mask=mask,
            **({} if self.windows is None else widest(self.windows[heads])),
            offset=self.offset[batch] if isinstance(self.offset, Tensor) else self.offset,
            start=self.start[batch] if isinstance(self.start, Tensor) else self.start,
            keep_start=self.keep_start[batch] if isinstance(self.keep_start, Tensor) else self.keep_start,
            end=self.end[batch] if isinstance(self.end, Tensor) else self.end,
            slopes=None if self.slopes is None else self.slopes[heads],
        )

    def with_copied_positions(self) -> Visibility:
        """The same with offset, start, keep_start and end of its own."""
        copies = (
            x.clone() if isinstance(x, Tensor) else x for x in (self.offset, self.start, self.keep_start, self.end)
        )
        offset, start, keep_start, end = copies
        return replace(self, offset=offset, start=start, keep_start=keep_start, end=end)

    def without_padding(self) -> Visibility:
        """A right-padding mask replaced by lengths: PyTorch's kernels can skip keys that do not exist."""
        has_lengths = isinstance(self.end, Tensor) or self.end != self.size.keys
        if self.mask is None or has_lengths or not _is_right_padding(self.mask, self.size):
            return self
        return replace(self, mask=None, end=shared_number(self.mask.sum(-1).flatten().expand(self.size.batch)))

    def _may_hide_keys_from_all(self) -> bool:
        """Whether keys may lie outside every query's band or length. Blocks skip them; a single call cannot."""
        if not self.uniform or self.left is not None or not self.is_one_band:
            return True
        return (self.offset, self.start, self.end) != (self.size.keys - self.size.queries, 0, self.size.keys)

    def select_heads(self, heads: list[int]) -> Visibility:
        """The visibility of these query heads, each with its own KV head."""
        return replace(
            self,
            size=replace(self.size, heads=len(heads), kv_heads=len(heads)),
            mask=self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, heads],
            **({} if self.windows is None else widest(tuple(self.windows[h] for h in heads))),
            slopes=None if self.slopes is None else self.slopes[heads],
        )

    def _inside_band(self, rows: slice | Tensor, low: int, high: int) -> bool:
        """Whether the band hides nothing in this block, as far as plain numbers tell."""
        if isinstance(self.offset, Tensor) or not isinstance(rows, slice) or has_symbolic_sizes():
            return False
        if self.windows is not None:
            return False
        fits_left = self.left is None or low >= rows.stop - 1 + self.offset - self.left
        fits_right = self.right is None or high - 1 <= rows.start + self.offset + self.right
        return fits_left and fits_right

    def _mask_block(self, mask: Tensor, rows: slice | Tensor, low: int, high: int) -> Tensor:
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        return mask if mask.shape[3] == 1 else mask[..., low:high]


def widest(windows: HeadWindow | tuple[HeadWindow, ...]) -> dict[str, Any]:
    """The fields of Visibility for the window that all heads share, or for one per query head."""
    if not isinstance(windows, HeadWindow) and len(set(windows)) <= 1:
        windows = windows[0] if windows else HeadWindow()
    if isinstance(windows, HeadWindow):
        return {**windows._asdict(), "windows": None}
    return {
        "left": _widest_side([w.left for w in windows]),
        "right": _widest_side([w.right for w in windows]),
        "keep_first": max(w.keep_first for w in windows),
        "windows": windows,
    }


def _widest_side(sides: list[int | None]) -> int | None:
    """The largest of these numbers of keys; None is open."""
    return None if None in sides else max(n for n in sides if n is not None)


def first_key(visibility: Visibility, queries: Tensor | None = None) -> Tensor:
    """(B,): the first existing key of a sequence, one that the mask shows to some of these queries (all for None).

    A window does not affect whether a key exists. Tk if no key exists.
    """
    size, mask = visibility.size, visibility.mask
    exists = torch.ones(size.batch, size.keys, dtype=torch.bool, device=visibility.device)
    start, end = (
        x.to(visibility.device).view(-1, 1) if isinstance(x, Tensor) else x for x in (visibility.start, visibility.end)
    )
    j = torch.arange(size.keys, device=visibility.device)
    exists = exists & (j >= start) & (j < end)
    if mask is not None:
        shown = (mask if mask.dtype == torch.bool else mask != -torch.inf).any(1)  # (B or 1, Tq or 1, Tk or 1)
        if queries is not None and shown.shape[1] > 1:
            shown = shown & queries[:, :, None]
        exists = exists & shown.any(1)
    if queries is not None and (mask is None or mask.shape[2] == 1):
        exists = exists & queries.any(1, keepdim=True)
    return (exists.cumsum(-1) == 0).sum(-1)  # the number of keys before it


def _is_right_padding(mask: Tensor, size: Sizes) -> bool:
    """Whether a mask is equivalent to lengths: all queries of a sequence see its first n keys."""
    if mask.dtype != torch.bool or tuple(mask.shape[1:]) != (1, 1, size.keys) or not is_readable(mask):
        return False
    return bool((mask[..., 1:] <= mask[..., :-1]).all())


def shared_number(x: Tensor) -> int | Tensor:
    """The number that all sequences share, if it can be read; else the tensor (B,)."""
    if not is_readable(x):
        return x
    if not x.numel():
        return 0
    low, high = (int(n) for n in x.aminmax())
    return low if low == high else x
