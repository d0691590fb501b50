"""transformers' masks without their T x T values: what a mask is made from, and the mask itself only on demand.

A mask function is called once per pass with the padding, the offsets of queries and keys and a rule (causal, window,
chunks, ...). `MaskRecipe` keeps these arguments; `LazyMask` is a tensor without storage that stands for the mask until
its values are needed. The common rules are read back as a band around the diagonal; any other gives rows on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 24  # elements; a smaller mask is made at once
# operations that give a lazy mask back unchanged
COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.contiguous.default)
NO_SKIPS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


@dataclass(frozen=True)
class MaskRecipe:
    """One call of a mask function."""

    make: Callable[..., Tensor | None]  # transformers' own function for the model's implementation
    arguments: dict[str, Any]  # its keyword arguments

    @classmethod
    def of(cls, make: Callable[..., Tensor | None], arguments: dict[str, Any]) -> MaskRecipe:
        """The recipe of a call. `StaticCache` passes a live counter tensor as offset: its value is read now."""
        offsets = {name: int(arguments[name]) for name in ("q_offset", "kv_offset") if arguments.get(name) is not None}
        return cls(make, arguments | offsets)

    @property
    def queries(self) -> int:
        return int(self.arguments["q_length"])

    @property
    def keys(self) -> int:
        return int(self.arguments["kv_length"])

    @property
    def batch(self) -> int:
        return int(self.arguments["batch_size"])

    @property
    def first_query(self) -> int:
        """The position of query 0 in the whole sequence."""
        return int(self.arguments.get("q_offset", 0))

    @property
    def first_key(self) -> int:
        """The position of key 0 in the whole sequence: a sliding cache has dropped the keys before it."""
        return int(self.arguments.get("kv_offset", 0))

    @property
    def offset(self) -> int:
        """Which of the keys is at the position of query 0."""
        return self.first_query - self.first_key

    @property
    def padding(self) -> Tensor | None:
        """(B, positions) bool: True where there is a token."""
        mask = self.arguments.get("attention_mask")
        return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    @property
    def keys_shown(self) -> Tensor | None:
        """(B, Tk) bool: which of these keys are tokens."""
        if self.padding is None:
            return None
        key_padding = self.padding[:, self.first_key : self.first_key + self.keys]
        return torch.nn.functional.pad(key_padding, (0, self.keys - key_padding.shape[1]))

    def first_token(self, keys: int) -> Tensor:
        """(B or 1, Tk) bool: a sequence's first token, also where a window, a chunk or a cache hides it."""
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
        return _sequence_numbers(self.arguments.get("mask_function"))

    def rows(self, first: int, last: int) -> Tensor:
        """(B, 1, rows, Tk) bool: the keys that queries first to last - 1 may attend to."""
        from transformers.masking_utils import sdpa_mask

        arguments = dict(self.arguments, q_length=last - first, q_offset=self.first_query + first)
        mask = sdpa_mask(**arguments | NO_SKIPS)
        assert mask is not None
        return mask

    def whole(self) -> Tensor:
        """The mask that the model would have had."""
        mask = self.make(**self.arguments | NO_SKIPS)
        assert mask is not None
        return mask

    @property
    def kernel_hides(self) -> bool:
        """Whether the attention function applies the rule itself where there is no mask, as flash attention does."""
        from transformers.masking_utils import eager_mask, sdpa_mask

        return self.make not in (eager_mask, sdpa_mask)

    def needs_no_mask(self, sdpa: bool) -> bool:
        """Whether transformers itself makes no mask: nothing is hidden, or only what sdpa's is_causal=True hides."""
        band = self.band()
        if self.padding is not None and not bool(self.padding.all()):
            return False
        if band == (None, None):
            return bool(self.arguments.get("allow_is_bidirectional_skip", False))
        causal = sdpa and band == (None, 0) and self.queries == self.keys
        return causal and bool(self.arguments.get("allow_is_causal_skip", True))

    def band(self) -> tuple[int | None, int | None] | None:
        """(left, right) where the rule is a band and padding, None for any other rule."""
        return _band(self.arguments.get("mask_function"))


def _band(rule: Any) -> tuple[int | None, int | None] | None:
    """A rule of transformers as (left, right), each None for open."""
    from transformers import masking_utils

    if rule is masking_utils.causal_mask_function:
        return None, 0
    if rule is masking_utils.bidirectional_mask_function:
        return None, None
    maker, values = _closure(rule)
    if maker == "and_masks":
        bands = [_band(part) for part in values["mask_functions"]]
        if any(band is None for band in bands):
            return None
        lefts = [band[0] for band in bands if band is not None and band[0] is not None]
        rights = [band[1] for band in bands if band is not None and band[1] is not None]
        return min(lefts, default=None), min(rights, default=None)
    if maker == "sliding_window_overlay":
        return int(values["sliding_window"]) - 1, None
    if maker == "sliding_window_bidirectional_overlay":
        return int(values["sliding_window"]), int(values["sliding_window"])
    return None


def _sequence_numbers(rule: Any) -> Tensor | None:
    """(B, T): the number of each token's sequence, where a rule of transformers separates packed sequences."""
    maker, values = _closure(rule)
    if maker == "packed_sequence_mask_function":
        numbers: Tensor = values["packed_sequence_mask"]
        return numbers
    parts = [_sequence_numbers(part) for part in values["mask_functions"]] if maker == "and_masks" else []
    return next((part for part in parts if part is not None), None)


def _closure(rule: Any) -> tuple[str, dict[str, Any]]:
    """The function of transformers' masking_utils that made a rule, and the values it closes over; "" for others."""
    from transformers import masking_utils

    if getattr(rule, "__module__", None) != masking_utils.__name__ or getattr(rule, "__closure__", None) is None:
        return "", {}
    values = (cell.cell_contents for cell in rule.__closure__)
    return rule.__qualname__.partition(".<locals>")[0], dict(zip(rule.__code__.co_freevars, values, strict=True))


class LazyMask(Tensor):
    """A mask without storage. An operation on it makes the real mask; headwise reads `recipe` instead."""

    recipe: MaskRecipe

    @staticmethod
    def __new__(cls, recipe: MaskRecipe, dtype: torch.dtype) -> LazyMask:
        size = (recipe.batch, 1, recipe.queries, recipe.keys)
        device = torch.device(recipe.arguments.get("device", "cpu"))
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        mask.recipe = recipe
        return mask

    def __init__(self, recipe: MaskRecipe, dtype: torch.dtype) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in COPIES and isinstance(args[0], LazyMask):
            return LazyMask(args[0].recipe, args[0].dtype)
        if func is torch.ops.aten.slice.Tensor and isinstance(args[0], LazyMask):
            part = args[0]._slice(*args[1:], **kwargs)
            if part is not None:
                return part
        return func(*_materialize(args), **_materialize(kwargs))

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> LazyMask | None:
        """A lazy mask of the first keys, or of everything; None for any other slice."""
        size = self.shape[dim]
        stop = size if end is None else min(end, size)
        if start not in (None, 0) or step != 1 or stop < 0:
            return None
        if stop == size:
            return LazyMask(self.recipe, self.dtype)
        if dim not in (3, -1):
            return None
        return LazyMask(replace(self.recipe, arguments=dict(self.recipe.arguments, kv_length=stop)), self.dtype)


def _materialize(x: Any) -> Any:
    """Arguments with every lazy mask replaced by the real one."""
    if isinstance(x, LazyMask):
        return x.recipe.whole()
    if isinstance(x, (tuple, list)):
        return type(x)(_materialize(y) for y in x)
    return {name: _materialize(y) for name, y in x.items()} if isinstance(x, dict) else x
