"""Validation of the arguments of attend, weights and head_stats, on shapes and plain numbers, for NumPy and PyTorch."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import MaskError, ShapeError
from .options import Band, KeepFirst, Window

FAR = 1 << 40  # further than any key, and sums of it fit 64 bits


@dataclass(frozen=True, slots=True)
class Sizes:
    """q (batch, heads, queries, dim), k (batch, kv_heads, keys, dim), v (batch, kv_heads, keys, value_dim)."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads that read one KV head: query head i reads KV head i // group."""
        return self.heads // self.kv_heads


def sizes(q: Any, k: Any, v: Any = None) -> Sizes:
    """The sizes of a call, or a ShapeError that names the ones that do not fit."""
    v = k if v is None else v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "shape"):
            raise ShapeError(f"{name} must be an array of four dimensions, got {type(x).__name__}")
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) == len(k_shape) == len(v_shape) == 4:
        (batch, heads, queries, dim), (_, kv_heads, keys, _), value_dim = q_shape, k_shape, v_shape[3]
        fits = k_shape == (batch, kv_heads, keys, dim) and v_shape[:3] == (batch, kv_heads, keys)
        if fits and dim and value_dim and heads and kv_heads and heads % kv_heads == 0:
            return Sizes(batch, heads, kv_heads, queries, keys, dim, value_dim)
    raise _size_error(q, k, v)


def _size_error(q: Any, k: Any, v: Any) -> ShapeError:
    """The error that names the sizes that do not fit."""
    for name, x, form in (("q", q, "(B, Hq, Tq, D)"), ("k", k, "(B, Hkv, Tk, D)"), ("v", v, "(B, Hkv, Tk, Dv)")):
        if len(x.shape) != 4:
            return ShapeError(f"{name} must be {form}, got {shown(x.shape)}")
    (batch, heads, _, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        got = f"{batch}, {k.shape[0]} and {v.shape[0]}"
        return ShapeError(f"q, k and v have batches of {got}; expand the smaller ones to the same size")
    if k.shape[3] != dim:
        return ShapeError(
            f"q has heads of width {dim} and k of width {k.shape[3]}; their dot product needs the same width"
        )
    if tuple(v.shape[1:3]) != (kv_heads, keys):
        return ShapeError(
            f"k has {kv_heads} heads x {keys} keys and v has {v.shape[1]} heads x {v.shape[2]}; each key needs a value"
        )
    if not (heads and kv_heads and dim and v.shape[3]):
        return ShapeError(f"heads and their width must be at least 1, got q {shown(q.shape)}, v {shown(v.shape)}")
    return ShapeError(
        f"{kv_heads} key/value heads do not divide {heads} query heads; each must serve as many as any other"
    )


def within_far(n: int) -> int:
    """n, or FAR where it is further: that makes no difference to any key, and sys.maxsize may mean "all"."""
    return max(-FAR, min(n, FAR))


def is_bool(x: Any) -> bool:
    """Whether x is True or False, Python's or an array's: a mark, and not the number that Python takes it for."""
    return isinstance(x, bool) or str(getattr(x, "dtype", "")).endswith("bool")


def shown(shape: Sequence[int]) -> str:
    """A shape as text: (2, 8, 10, 64)."""
    return "(" + ", ".join(str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"


def one_line(x: Any) -> str:
    """The repr of what a caller gave, without the line breaks of arrays."""
    return " ".join(repr(x).split())


class HeadWindow(NamedTuple):
    """The keys that one query head sees: a band around the query's own position, and the first keys of the sequence."""

    left: int | None = None  # keys before the query's position; None: open
    right: int | None = None
    keep_first: int = 0

    def numbers(self) -> tuple[int, int, int]:
        """The same in 64 bits, as kernels and operators take it; -1: open."""
        left, right = (-1 if side is None else min(side, FAR) for side in (self.left, self.right))
        return left, right, min(self.keep_first, FAR)


def head_windows(
    causal: bool, window: Window | None, keep_first: KeepFirst, heads: int
) -> HeadWindow | tuple[HeadWindow, ...]:
    """The window that all heads share, or one per query head where they differ. Causal is a right edge of 0."""
    if window is None and type(keep_first) is int and keep_first == 0:  # most calls
        return HeadWindow(*band(causal, None))
    pairs = window_pairs(window)
    if is_per_head(window):
        _check_one_per_head("window", pairs, heads, "pairs (left, right)")
    bands = [band(causal, pair) for pair in pairs] * (1 if is_per_head(window) else heads)
    windows = []
    for (left, right), count in zip(bands, _keep_first(keep_first, heads), strict=True):
        hides = left is not None or (right is not None and not causal)  # else there is nothing to keep
        windows.append(HeadWindow(left, right, count if hides else 0))
    return windows[0] if len(set(windows)) == 1 else tuple(windows)


def window_pairs(window: Any) -> Sequence[Any]:
    """The pairs of all query heads, not yet checked; a list of one where all share it."""
    return window if is_per_head(window) else [window]


def is_per_head(window: Any) -> bool:
    """Whether this is a sequence of pairs, and not one pair of numbers."""
    return isinstance(window, (tuple, list)) and any(isinstance(pair, (tuple, list)) for pair in window)


def _check_one_per_head(name: str, values: Any, heads: int, kind: str) -> None:
    if len(values) != heads:
        raise MaskError(f"{name} has {len(values)} {kind} and there are {heads} query heads; give one per head")


def _keep_first(keep_first: Any, heads: int) -> list[int]:
    """One number per query head."""
    if isinstance(keep_first, (tuple, list)):
        _check_one_per_head("keep_first", keep_first, heads, "numbers")
        counts = list(keep_first)
    else:
        counts = [keep_first] * heads
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise MaskError(
                f"keep_first must be a whole number of at least 0, or one per query head, got {one_line(keep_first)}"
            )
    return [within_far(count) for count in counts]


def band(causal: bool, window: Window | None) -> Band:
    """How many keys left and right of its own position a query sees; None is open. Causal is a right edge of 0."""
    left, right = (None, None) if window is None else _window(window)
    if type(causal).__name__.rstrip("_") != "bool":  # Python's, or NumPy's bool_
        raise MaskError(f"causal must be True or False, got {one_line(causal)}")
    if causal:
        right = 0
    return left, right


def _window(window: Any) -> Band:
    if is_per_head(window) and all(isinstance(pair, (tuple, list)) for pair in window):
        raise MaskError(f"one window for all heads is needed here, a pair (left, right), got {len(window)} of them")
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise MaskError(
            f"window must be a pair (left, right), None for open, or one pair per query head, got {one_line(window)}; "
            "(511, 0) is 512 keys"
        )
    for side, reach in zip(("left", "right"), window, strict=True):
        if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int) or reach < 0):
            raise MaskError(f"window's {side} side must be None or a whole number of at least 0, got {one_line(reach)}")
    left, right = (None if reach is None else within_far(reach) for reach in window)
    return left, right


def check_mask(shape: Sequence[int], size: Sizes) -> None:
    """Require a mask that broadcasts to (B, Hq, Tq, Tk)."""
    full = (size.batch, size.heads, size.queries, size.keys)
    pairs = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) > 4 or any(n != 1 and n != m for n, m in pairs):  # `in` does not compare the symbols of torch.compile
        hint = ""
        if tuple(shape) == (size.batch, size.keys):
            hint = "; for a padding mask give mask[:, None, None, :]"
        elif tuple(shape) == (size.batch, size.queries, size.keys):
            hint = "; for one mask per sequence give mask[:, None]"
        raise MaskError(f"mask {shown(shape)} does not broadcast to (B, Hq, Tq, Tk) = {shown(full)}{hint}")


def check_per_sequence(name: str, shape: Sequence[int], integral: bool, size: Sizes) -> None:
    """Require whole numbers, one per sequence, of starts, lengths and offset."""
    if tuple(shape) != (size.batch,) or not integral:
        kind = "whole numbers" if integral else "numbers that are not whole"
        raise MaskError(
            f"{name} must be {size.batch} whole numbers, one per sequence, got {kind} of shape {shown(shape)}"
        )


def check_key_counts(name: str, low: int, high: int, size: Sizes) -> None:
    """Require lengths or starts between 0 and the number of keys, given their minimum and maximum."""
    if low < 0 or high > size.keys:
        wrong = low if low < 0 else high
        raise MaskError(f"{name} must lie between 0 and the {size.keys} keys there are, got {wrong}")


def check_classes(classes: Mapping[str, Any], size: Sizes, is_bool: Any) -> None:
    """Require classes {name: (B, Tk) bool}, the keys that belong to each."""
    if not isinstance(classes, dict):
        raise MaskError(f"classes must be a dict from names to (B, Tk) True/False, got {type(classes).__name__}")
    for name, keys in classes.items():
        if not isinstance(name, str):
            raise MaskError(f"the names of classes must be strings, got {one_line(name)}")
        if tuple(keys.shape) != (size.batch, size.keys) or not is_bool(keys):
            want = shown((size.batch, size.keys))
            raise MaskError(
                f"class {name!r} must be True/False of shape (B, Tk) = {want}, got {keys.dtype} {shown(keys.shape)}"
            )


def check_queries(queries: Any, size: Sizes, is_bool: bool) -> None:
    """Require queries (B, Tq) bool, those that count in the statistics."""
    if tuple(queries.shape) != (size.batch, size.queries) or not is_bool:
        want = shown((size.batch, size.queries))
        raise MaskError(
            f"queries must be True/False of shape (B, Tq) = {want}, got {queries.dtype} {shown(queries.shape)}"
        )


def check_per_head(name: str, shape: Sequence[int], size: Sizes, *, batched: bool = False) -> None:
    """Require sinks (Hq,), or gates (Hq,) or (B, Hq)."""
    fits = tuple(shape) == (size.heads,) or (batched and tuple(shape) == (size.batch, size.heads))
    if not fits:
        also = f" or {shown((size.batch, size.heads))}" if batched else ""
        raise ShapeError(f"{name} must be one number per query head, shape ({size.heads},){also}, got {shown(shape)}")


def check_numbers(scale: float | None, softcap: float | None, dropout: float = 0.0) -> None:
    """Require a finite scale, a positive softcap and a dropout between 0 and 1."""
    if scale is not None and not _finite(scale):
        raise ShapeError(f"scale must be a finite number, got {one_line(scale)}")
    if softcap is not None and not (_finite(softcap) and softcap > 0):
        raise ShapeError(f"softcap must be a number above 0, or None for none, got {one_line(softcap)}")
    if not (_finite(dropout) and 0.0 <= dropout <= 1.0):
        raise ShapeError(f"dropout must lie between 0 and 1, got {one_line(dropout)}")


def _finite(x: Any) -> bool:
    """Whether x is a finite number, or such a NumPy or PyTorch scalar."""
    if isinstance(x, int | float):  # math.isfinite does not take the symbols of torch.compile(dynamic=True)
        return bool(abs(x) <= sys.float_info.max)
    try:
        return getattr(x, "ndim", None) == 0 and math.isfinite(x)
    except (OverflowError, TypeError, ValueError, RuntimeError):  # too large for a float, complex, or on "meta"
        return False


def as_index(x: Any) -> int | None:
    """An int, NumPy's and those in tensors among them; None for anything else, such as a bool."""
    if is_bool(x):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def pick(name: str, selection: Any, count: int) -> list[int]:
    """Row or head numbers from 0 as a list, from an int, a slice, any sequence of ints, or None for all."""
    if selection is None:
        return list(range(count))
    if isinstance(selection, slice):
        return list(range(count))[selection]
    items = list(selection) if isinstance(selection, Iterable) else [selection]
    if any(is_bool(item) for item in items):
        raise ShapeError(f"{name}s must be their numbers, got True or False for each; use .nonzero()[:, 0]")
    numbers = [number for number in map(as_index, items) if number is not None]
    if len(numbers) < len(items):
        raise ShapeError(f"{name}s must be whole numbers, got {one_line(selection)}")
    wrong = [n for n in numbers if not -count <= n < count]
    if wrong:
        existing = f"there are {count}, 0 to {count - 1}" if count else "there are none"
        raise ShapeError(f"{name} {wrong[0]} does not exist; {existing}")
    return [n % count for n in numbers]
