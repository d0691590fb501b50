"""A place between transformers' models and their attention functions.

While anything is watched, every lookup in transformers' registry answers with a function that knows what it stands
in for; calls of modules that nobody watches go straight through. Masks are noted on their way, since a mask alone
does not say where its queries stand. It is process-wide, so it is counted, and taken out with the last watcher.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..hooks import compiled_as_before
from ..structure.sites import in_backward
from . import lazy_masks
from .call_reader import Given
from .lazy_masks import LazyMask, Recipe

Function = Callable[..., tuple[Tensor, Any]]
KEPT = 16  # masks made before a pass, as generate does, that are remembered


class Watcher(Protocol):
    def see(self, given: Given, function: Function, eager: Function, inmost: bool) -> tuple[Tensor, Any]:
        """Answer a call with the output that function gives; unless inmost, function is another watcher's."""


_lock = threading.RLock()
_watchers: dict[int, list[Watcher]] = {}  # by id of the attention module
_installed: list[Callable[[], None]] = []  # what takes it out again


class Noted(NamedTuple):
    """A mask that was made."""

    mask: Any  # a weak reference, or None where transformers made no mask
    recipe: Recipe
    depth: int  # of the watched models that were running then


class _Thread(threading.local):
    def __init__(self) -> None:
        self.masks: list[Noted] = []
        self.depth = 0  # of watched models that are running

    def begin(self) -> None:
        self.depth += 1

    def end(self) -> None:
        """The masks of a pass that is over, and those made for it before, say nothing about the next one."""
        self.depth = max(0, self.depth - 1)
        self.masks = [noted for noted in self.masks if noted.depth <= self.depth] if self.depth else []

    def clear(self) -> None:
        self.depth = 0
        self.masks = []


here = _Thread()


def add(modules: list[nn.Module], watcher: Watcher) -> None:
    """From now on the watcher sees the calls of these modules."""
    with _lock:
        if not _watchers:
            _install()
        for module in modules:
            _watchers.setdefault(id(module), []).append(watcher)


def remove(modules: list[nn.Module], watcher: Watcher) -> None:
    with _lock:
        for module in modules:
            left = [w for w in _watchers.get(id(module), []) if w is not watcher]
            if left:
                _watchers[id(module)] = left
            else:
                _watchers.pop(id(module), None)
        if not _watchers:
            for uninstall in _installed:
                uninstall()
            _installed.clear()
            here.clear()


def recipe_of(mask: Any) -> Recipe | None:
    """How this very mask was made, where it came from transformers' mask functions."""
    if isinstance(mask, LazyMask):
        return mask.recipe
    for noted in reversed(here.masks):
        if mask is not None and noted.mask is not None and noted.mask() is mask:
            return noted.recipe
    return None


def newest(queries: int, keys: int, made: bool) -> Recipe | None:
    """The newest recipe of this pass for so many queries and keys, which made a mask or found that none is needed."""
    for noted in reversed(here.masks):
        recipe = noted.recipe
        if (noted.mask is not None) == made and recipe.queries == queries and recipe.keys == keys:
            return recipe
    return None


def first_query(queries: int) -> int | None:
    """Where in their sequences so many queries of this pass begin, if any mask was made for them."""
    for noted in reversed(here.masks):
        if noted.recipe.queries == queries:
            return noted.recipe.first_query
    return None


def _install() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    look_up = AttentionInterface.get_interface
    item = AttentionMaskInterface.__getitem__

    @functools.wraps(look_up)
    def get_interface(self: Any, implementation: str, default: Function) -> Function:
        function = look_up(self, implementation, default)
        return functools.partial(_call, function, default, implementation)

    def getitem(self: Any, implementation: str) -> Any:
        make = item(self, implementation)
        return make if torch.compiler.is_compiling() else functools.partial(_mask, make)

    def uninstall() -> None:
        AttentionInterface.get_interface = look_up
        if "__getitem__" in AttentionMaskInterface.__dict__:
            del AttentionMaskInterface.__getitem__

    _installed.append(uninstall)  # before anything is changed: an interrupt may come in between
    AttentionInterface.get_interface = get_interface
    AttentionMaskInterface.__getitem__ = getitem


def _call(
    function: Function,
    eager: Function,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Any]:
    watchers = _watchers.get(id(module), ())
    if not watchers or in_backward():
        attention_mask = attention_mask.recipe.whole() if isinstance(attention_mask, LazyMask) else attention_mask
        return function(module, query, key, value, attention_mask, *rest, **more)
    more = dict(zip(("dropout", "scaling", "is_causal"), rest, strict=False)) | more
    given = Given(module, query, key, value, attention_mask, more, implementation or "eager")

    def inner(given: Given) -> tuple[Tensor, Any]:
        around = compiled_as_before() if _is_compiled(function) else nullcontext()
        with around:
            return function(given.module, given.query, given.key, given.value, given.mask, **given.more)

    for watcher in watchers:
        inner = functools.partial(_seen, watcher, inner, eager, watcher is watchers[0])
    return inner(given)


def _is_compiled(function: Any) -> bool:
    """Whether an attention function is, or calls, what torch.compile made; no hook of ours is in it."""
    return hasattr(function, "_torchdynamo_orig_callable") or "flex_attention" in getattr(function, "__name__", "")


def _seen(watcher: Watcher, function: Function, eager: Function, inmost: bool, given: Given) -> tuple[Tensor, Any]:
    return watcher.see(given, function, eager, inmost)


def _mask(make: Callable[..., Tensor | None], *args: Any, **given: Any) -> Tensor | None:
    """A mask of transformers, noted; without storage where it would be large and a watched model asks for it."""
    if args or "q_length" not in given or "kv_length" not in given:  # not a call as transformers makes them
        return make(*args, **given)
    recipe = Recipe.of(make, given)
    large = recipe.batch * recipe.queries * recipe.keys > lazy_masks.LARGE
    mask = _large(make, recipe) if large and here.depth else make(**given)
    here.masks.append(Noted(None if mask is None else weakref.ref(mask), recipe, here.depth))
    if not here.depth:
        here.masks = here.masks[-KEPT:]
    return mask


def _large(make: Callable[..., Tensor | None], recipe: Recipe) -> Tensor | None:
    from transformers import masking_utils as known

    dtype = {known.sdpa_mask: torch.bool, known.eager_mask: recipe.given.get("dtype", torch.float32)}.get(make)
    if dtype is None or recipe.needs_no_mask(sdpa=dtype == torch.bool):
        return make(**recipe.given)
    return LazyMask(recipe, dtype)
