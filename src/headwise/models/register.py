"""register: headwise's attend as the attention of any transformers model, by attn_implementation="headwise"."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.functional import attend
from ..attention.torch_modes import is_recording
from ..errors import UnsupportedError
from .streaming.cached_attention import attend_cached
from .streaming.deferred_keys import DeferredKeys
from .structure.discovery import ModuleClass
from .watching.call_reader import ModelCall, read
from .watching.lazy_masks import LazyMask, MaskRecipe

NAME = "headwise"
# options with which a decoding step is more than plain attention
SPECIAL_OPTIONS = ("softcap", "s_aux", "position_bias", "cache", "output_attentions")
# in a module's source: it hides keys only under these names, and would attend to all keys under a new one
IMPLEMENTATION_CHECKS = ('_attn_implementation in ("eager", "sdpa")', '_attn_implementation == "sdpa"')


def register() -> None:
    """Make `attn_implementation="headwise"` known to transformers. Calling it again does nothing.

    Example:
        >>> headwise.register()
        >>> model = AutoModel.from_pretrained(path, attn_implementation="headwise")
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls.

    Args:
        module: the attention module.
        query: (B, H, Tq, D).
        key: (B, Hkv, Tk, D).
        value: (B, Hkv, Tk, Dv).
        attention_mask: bool, True where a query may attend, or floats that are added to the scores.
        dropout: probability.
        options: scaling, softcap, s_aux, position_bias, is_causal, output_attentions.

    Returns:
        The output (B, Tq, H, Dv), and the weights (B, H, Tq, Tk) with output_attentions=True, else None.
    """
    cls: ModuleClass = type(module)
    if depends_on_name(cls):
        raise UnsupportedError(
            f'{cls.__name__} hides keys only under attn_implementation="eager" or "sdpa"; use one of them'
        )
    if isinstance(key, DeferredKeys):
        recipe = attention_mask.recipe if isinstance(attention_mask, LazyMask) else None
        options["dropout"] = dropout
        return attend_cached(ModelCall(module, query, key, value, attention_mask, options, NAME), recipe)
    if query.shape[2] == 1 and _is_plain_step(attention_mask, key, options):
        out = attend(query, key, value, mask=attention_mask, scale=options.get("scaling"), dropout=dropout)
        return out.transpose(1, 2).contiguous(), None
    reading = read(
        ModelCall(module, query, key, value, attention_mask, options, NAME),
        attention_mask.recipe if isinstance(attention_mask, LazyMask) else None,
        None,
        cross=False,
    )
    out = reading.attend(dropout).transpose(1, 2).contiguous()
    return out, reading.weights(None, None) if options.get("output_attentions") else None


def mask(**arguments: Any) -> Tensor | None:
    """The mask function that transformers calls: a mask without storage where only a band and padding hide keys."""
    from transformers.masking_utils import sdpa_mask

    # while a graph is recorded, values that are read here would become constants
    if arguments["q_length"] == 1 or torch.compiler.is_compiling() or is_recording():
        return sdpa_mask(**arguments)
    recipe = MaskRecipe.of(sdpa_mask, arguments)
    if recipe.band() is None:
        return sdpa_mask(**arguments)
    if recipe.band() == (None, 0) and recipe.needs_no_mask(sdpa=True):
        return None
    # not None where nothing is hidden: modules that do not say is_causal=False take None for causal
    return LazyMask(recipe, torch.bool)


def _is_plain_step(mask: Any, key: Tensor, options: dict[str, Any]) -> bool:
    """Whether a decoding step is plain attention; a full reading would take as long as a step on a few keys."""
    for name in SPECIAL_OPTIONS:
        if options.get(name) is not None and options[name] is not False:
            return False
    return mask is None or (type(mask) is Tensor and mask.dim() == 4 and mask.shape[-1] == key.shape[2])


@functools.lru_cache(maxsize=4096)
def depends_on_name(cls: ModuleClass) -> bool:
    """Whether a module's own code checks which implementation it runs under."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return False
    return any(check in source for check in IMPLEMENTATION_CHECKS)
