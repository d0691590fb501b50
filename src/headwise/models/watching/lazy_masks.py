"""transformers' masks without their T x T: what a mask was made from, and the mask itself only when asked for.

A mask function is called once a pass with the padding, the offsets of queries and keys and a rule (causal, window,
chunks, ...). `Recipe` keeps that; `LazyMask` is a tensor without storage that stands for the mask until someone needs
its values. The common rules are read back as a band around the diagonal, everything else gives rows on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 24  # elements; a smaller mask is simply made


@dataclass(frozen=True)
class Recipe:
    """One call of a mask function."""

    make: Callable[..., Tensor | None]  # transformers' own function for the model's implementation
    given: dict[str, Any]  # its keyword arguments

    @classmethod
    def of(cls, make: Callable[..., Tensor | None], given: dict[str, Any]) -> Recipe:
        """A cache of fixed size hands out the counter that it goes on counting with, so offsets are read at once."""
        offsets = {name: int(given[name]) for name in ("q_offset", "kv_offset") if given.get(name) is not None}
        return cls(make, given | offsets)

    @property
    def queries(self) -> int:
        return int(self.given["q_length"])

    @property
    def keys(self) -> int:
        return int(self.given["kv_length"])

    @property
    def batch(self) -> int:
        return int(self.given["batch_size"])

    @property
    def first_query(self) -> int:
        """The position of query 0 in the whole sequence."""
        return int(self.given.get("q_offset", 0))

    @property
    def first_key(self) -> int:
        """The position of key 0 in the whole sequence: a sliding cache has dropped those before."""
        return int(self.given.get("kv_offset", 0))

    @property
    def offset(self) -> int:
        """At which key query 0 stands: caches of fixed size and sliding ones have their own first key."""
        return self.first_query - self.first_key

    @property
    def padding(self) -> Tensor | None:
        """(B, positions) bool: True where there is a token."""
        mask = self.given.get("attention_mask")
        return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    @property
    def keys_shown(self) -> Tensor | None:
        """(B, Tk): the padding of these keys."""
        if self.padding is None:
            return None
        shown = self.padding[:, self.first_key : self.first_key + self.keys]
        return torch.nn.functional.pad(shown, (0, self.keys - shown.shape[1]))

    def first_token(self, keys: int) -> Tensor:
        """(B or 1, Tk), True at a sequence's first token, whatever a window, a chunk or a cache has left of it."""
        first = torch.zeros(1, dtype=torch.long) if self.padding is None else self.padding.long().argmax(1)
        return torch.arange(keys, device=first.device) + self.first_key == first[:, None]

    def queries_real(self, queries: int) -> Tensor | None:
        """(B, Tq): which queries are tokens and not padding."""
        if self.padding is None or self.first_query + queries > self.padding.shape[1]:
            return None
        return self.padding[:, self.first_query : self.first_query + queries]

    @property
    def sequence_numbers(self) -> Tensor | None:
        """(B, T): which sequence each token belongs to, where several are packed in a row."""
        return _packed(self.given.get("mask_function"))

    def rows(self, first: int, last: int) -> Tensor:
        """(B, 1, rows, Tk) bool: where queries first to last - 1 may look."""
        from transformers.masking_utils import sdpa_mask

        given = dict(self.given, q_length=last - first, q_offset=self.given.get("q_offset", 0) + first)
        given.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        made = sdpa_mask(**given)
        assert made is not None  # nothing may be skipped
        return made

    def whole(self) -> Tensor:
        """The mask as the model would have had it."""
        given = dict(self.given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        made = self.make(**given)
        assert made is not None
        return made

    @property
    def kernel_hides(self) -> bool:
        """Whether no mask means that the function itself hides what the rule says, as flash attention does."""
        from transformers.masking_utils import eager_mask, sdpa_mask

        return self.make not in (eager_mask, sdpa_mask)

    def needs_no_mask(self, sdpa: bool) -> bool:
        """Whether transformers itself makes no mask: nothing is hidden, or just what sdpa's own causal form hides."""
        given, band = self.given, self.band()
        if self.padding is not None and not bool(self.padding.all()):
            return False
        if band == (None, None):
            return bool(given.get("allow_is_bidirectional_skip", False))
        plain = sdpa and band == (None, 0) and self.queries == self.keys
        return plain and bool(given.get("allow_is_causal_skip", True))

    def band(self) -> tuple[int | None, int | None] | None:
        """(left, right) where the rule is a band and padding, None where it is anything else."""
        return _band(self.given.get("mask_function"))


def _band(rule: Any) -> tuple[int | None, int | None] | None:
    """A rule of transformers as (left, right), each None for open. Rules are told by the functions that made them."""
    from transformers import masking_utils as known

    if rule is known.causal_mask_function:
        return None, 0
    if rule is known.bidirectional_mask_function:
        return None, None
    made_by = getattr(rule, "__qualname__", "").partition(".<locals>")[0]
    if getattr(rule, "__module__", None) != known.__name__ or rule.__closure__ is None:
        return None
    held = dict(zip(rule.__code__.co_freevars, (cell.cell_contents for cell in rule.__closure__), strict=True))
    if made_by == "and_masks":
        bands = [_band(part) for part in held["mask_functions"]]
        if any(band is None for band in bands):
            return None
        lefts = [band[0] for band in bands if band is not None and band[0] is not None]
        rights = [band[1] for band in bands if band is not None and band[1] is not None]
        return min(lefts, default=None), min(rights, default=None)
    if made_by == "sliding_window_overlay":
        return int(held["sliding_window"]) - 1, None
    if made_by == "sliding_window_bidirectional_overlay":
        return int(held["sliding_window"]), int(held["sliding_window"])
    return None


def _packed(rule: Any) -> Tensor | None:
    """The sequences that a rule of transformers keeps apart."""
    from transformers import masking_utils as known

    made_by = getattr(rule, "__qualname__", "").partition(".<locals>")[0]
    if getattr(rule, "__module__", None) != known.__name__ or rule.__closure__ is None:
        return None
    held = dict(zip(rule.__code__.co_freevars, (cell.cell_contents for cell in rule.__closure__), strict=True))
    if made_by == "packed_sequence_mask_function":
        numbers: Tensor = held["packed_sequence_mask"]
        return numbers
    parts = [_packed(part) for part in held["mask_functions"]] if made_by == "and_masks" else []
    return next((part for part in parts if part is not None), None)


class LazyMask(Tensor):
    """A mask that takes no memory. Whoever computes with it gets the real one; headwise reads `recipe` instead."""

    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe, dtype: torch.dtype) -> LazyMask:
        size = (recipe.batch, 1, recipe.queries, recipe.keys)
        device = torch.device(recipe.given.get("device", "cpu"))
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        mask.recipe = recipe
        return mask

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _SAME and isinstance(args[0], LazyMask):
            return LazyMask(args[0].recipe, args[0].dtype)
        if func is torch.ops.aten.slice.Tensor and isinstance(args[0], LazyMask):
            cut = args[0]._sliced(*args[1:], **kwargs)
            if cut is not None:
                return cut
        return func(*_made(args), **_made(kwargs))

    def _sliced(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> LazyMask | None:
        """The same with only the first keys, or all of everything; None for any other slice."""
        size = self.shape[dim]
        stop = size if end is None else min(end, size)
        if start not in (None, 0) or step != 1 or stop < 0:
            return None
        if stop == size:
            return LazyMask(self.recipe, self.dtype)
        if dim not in (3, -1):
            return None
        return LazyMask(replace(self.recipe, given=dict(self.recipe.given, kv_length=stop)), self.dtype)


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.contiguous.default)


def _made(x: Any) -> Any:
    """Arguments with every lazy mask made."""
    if isinstance(x, LazyMask):
        return x.recipe.whole()
    if isinstance(x, (tuple, list)):
        return type(x)(_made(y) for y in x)
    return {name: _made(y) for name, y in x.items()} if isinstance(x, dict) else x
