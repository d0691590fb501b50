"""Intercepts the calls between transformers' models and their attention functions.

While any model is watched, every lookup in transformers' registry returns a wrapper of the attention function; calls
of modules that are not watched go straight through, or to what answers them while heads stream. Mask functions are
wrapped too, and each mask's recipe is kept, since a mask alone does not say at which positions its queries are. The
wrappers are process-wide: they are installed with the first watcher and removed with the last.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.nn.streamed_keys import StreamingHeads
from ..hooks import compiled_as_before
from . import lazy_masks
from .call_reader import ModelCall
from .lazy_masks import LazyMask, MaskRecipe
from .sources import Function, Watched, Watcher

MASKS_BEFORE_PASS = 16  # masks made before a pass, as generate does, that are remembered


class Replacement(NamedTuple):
    """The function that answers the calls of a module instead of the model's attention function."""

    answer: Callable[[ModelCall, Function], tuple[Tensor, Any]]  # gets the call and the model's own eager function
    streams: StreamingHeads | None  # which of its heads stream
    arrive: Callable[[nn.Module], None]  # called with the module, also where a watcher answers the call


_lock = threading.RLock()
_watched = Watched()
_replacements: dict[nn.Module, Replacement] = {}
_uninstall: list[Callable[[], None]] = []  # what removes the wrappers


class MaskEntry(NamedTuple):
    """A mask that transformers made."""

    mask: Any  # a weak reference, or None where transformers found that no mask is needed
    recipe: MaskRecipe
    depth: int  # of the watched models that were running then


class PassMasks(threading.local):
    """The masks that were made for this thread's current passes."""

    def __init__(self) -> None:
        self.entries: list[MaskEntry] = []
        self.depth = 0  # of watched models that are running, one inside the other

    def begin(self) -> None:
        """A watched model begins to run."""
        self.depth += 1

    def end(self) -> None:
        """A watched model has run. Its masks, and those made for it before, do not apply to the next pass."""
        self.depth = max(0, self.depth - 1)
        self.entries = [entry for entry in self.entries if entry.depth <= self.depth] if self.depth else []

    def clear(self) -> None:
        self.depth = 0
        self.entries = []


pass_masks = PassMasks()


def install(modules: list[nn.Module], watcher: Watcher) -> None:
    """From now on the watcher sees the calls of these modules."""
    with _lock:
        if not _is_installed():
            _install()
        _watched.add(modules, watcher)


def remove(modules: list[nn.Module], watcher: Watcher) -> None:
    """The watcher no longer sees the calls of these modules."""
    with _lock:
        _watched.remove(modules, watcher)
        _uninstall_unused()


def replace_functions(replacements: Mapping[nn.Module, Replacement]) -> None:
    """Answer the calls of these modules with these functions from now on; watchers still see the calls."""
    with _lock:
        if not _is_installed():
            _install()
        _replacements.update(replacements)


def restore_functions(modules: Iterable[nn.Module]) -> None:
    """The calls of these modules are answered by the model's own attention function again."""
    with _lock:
        for module in modules:
            _replacements.pop(module, None)
        _uninstall_unused()


def is_replaced(module: nn.Module) -> bool:
    """Whether a module's calls are answered in place of the model's attention function."""
    return module in _replacements


def recipe_of(mask: Any) -> MaskRecipe | None:
    """How a mask was made, where it came from transformers' mask functions."""
    if isinstance(mask, LazyMask):
        return mask.recipe
    for entry in reversed(pass_masks.entries):
        if mask is not None and entry.mask is not None and entry.mask() is mask:
            return entry.recipe
    return None


def newest_recipe(queries: int, keys: int, *, has_mask: bool) -> MaskRecipe | None:
    """The newest recipe of this pass for these numbers of queries and keys, with a mask or found to need none."""
    for entry in reversed(pass_masks.entries):
        recipe = entry.recipe
        if (entry.mask is not None) == has_mask and recipe.queries == queries and recipe.keys == keys:
            return recipe
    return None


def first_query(queries: int) -> int | None:
    """The position of the first query, by the newest mask of this pass for this number of queries."""
    for entry in reversed(pass_masks.entries):
        if entry.recipe.queries == queries:
            return entry.recipe.first_query
    return None


def _is_installed() -> bool:
    return bool(_watched or _replacements)


def _uninstall_unused() -> None:
    """Remove the wrappers, where they were for the modules that have just been removed."""
    if not _is_installed():
        for uninstall in _uninstall:
            uninstall()
        _uninstall.clear()
        pass_masks.clear()


def _install() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    look_up = AttentionInterface.get_interface
    get_item = AttentionMaskInterface.__getitem__

    @functools.wraps(look_up)
    def get_interface(self: Any, implementation: str, default: Function) -> Function:
        function = look_up(self, implementation, default)
        return functools.partial(_call_watched, function, default, implementation)

    def getitem(self: Any, implementation: str) -> Any:
        make = get_item(self, implementation)
        return make if torch.compiler.is_compiling() else functools.partial(_make_mask, make)

    def uninstall() -> None:
        AttentionInterface.get_interface = look_up
        if "__getitem__" in AttentionMaskInterface.__dict__:
            del AttentionMaskInterface.__getitem__

    _uninstall.append(uninstall)  # before anything is changed: an interrupt may come in between
    AttentionInterface.get_interface = get_interface
    AttentionMaskInterface.__getitem__ = getitem


def _call_watched(
    function: Function,
    eager: Function,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Call a wrapped attention function, through the watchers of the module if there are any."""
    watchers, replacement = _watched.of(module), _replacements.get(module)
    if not watchers and replacement is None:
        attention_mask = attention_mask.recipe.whole() if isinstance(attention_mask, LazyMask) else attention_mask
        return function(module, query, key, value, attention_mask, *rest, **options)
    options = dict(zip(("dropout", "scaling", "is_causal"), rest, strict=False)) | options
    streams = None
    if replacement is not None:
        streams = replacement.streams
        replacement.arrive(module)
    call = ModelCall(module, query, key, value, attention_mask, options, implementation or "eager", streams)

    def answer(call: ModelCall) -> tuple[Tensor, Any]:
        if replacement is not None:
            return replacement.answer(call, eager)
        with compiled_as_before() if _is_compiled(function) else nullcontext():
            return function(call.module, call.query, call.key, call.value, call.mask, **call.options)

    for watcher in watchers:
        answer = functools.partial(_see, watcher, answer, eager, watcher is watchers[0])
    return answer(call)


def _is_compiled(function: Any) -> bool:
    """Whether an attention function is, or calls, compiled code; no hook of ours is in it."""
    return hasattr(function, "_torchdynamo_orig_callable") or "flex_attention" in getattr(function, "__name__", "")


def _see(watcher: Watcher, function: Function, eager: Function, innermost: bool, call: ModelCall) -> tuple[Tensor, Any]:
    return watcher.see(call, function, eager, innermost)


def _make_mask(make: Callable[..., Tensor | None], *args: Any, **arguments: Any) -> Tensor | None:
    """A mask of transformers, its recipe kept; a lazy one where it would be large and a watched model needs it."""
    if args or "q_length" not in arguments or "kv_length" not in arguments:  # not a call as transformers makes them
        return make(*args, **arguments)
    recipe = MaskRecipe.of(make, arguments)
    large = recipe.batch * recipe.queries * recipe.keys > lazy_masks.LARGE
    mask = _make_large_mask(make, recipe) if large and pass_masks.depth else make(**arguments)
    pass_masks.entries.append(MaskEntry(None if mask is None else weakref.ref(mask), recipe, pass_masks.depth))
    if not pass_masks.depth:
        pass_masks.entries = pass_masks.entries[-MASKS_BEFORE_PASS:]
    return mask


def _make_large_mask(make: Callable[..., Tensor | None], recipe: MaskRecipe) -> Tensor | None:
    from transformers.masking_utils import eager_mask, sdpa_mask

    dtype = {sdpa_mask: torch.bool, eager_mask: recipe.arguments.get("dtype", torch.float32)}.get(make)
    if dtype is None or recipe.needs_no_mask(sdpa=dtype == torch.bool):
        return make(**recipe.arguments)
    return LazyMask(recipe, dtype)
