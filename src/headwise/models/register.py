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
from .watching.call_reader import Given, read
from .watching.lazy_masks import LazyMask, Recipe

NAME = "headwise"
UNUSUAL = ("softcap", "s_aux", "position_bias", "cache", "output_attentions")  # what makes a step more than attention
# Models that hide keys only under these names would look everywhere under a new one.
BY_NAME = ('_attn_implementation in ("eager", "sdpa")', '_attn_implementation == "sdpa"')


def register() -> None:
    """Make `attn_implementation="headwise"` known to transformers. Harmless to call again."""
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
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: (B, H, Tq, D) in, (B, Tq, H, Dv) out, and the weights if output_attentions asks."""
    kind: Any = type(module)
    if depends_on_name(kind):
        raise UnsupportedError(
            f'{kind.__name__} hides keys only under attn_implementation="eager" or "sdpa"; use one of them'
        )
    if query.shape[2] == 1 and _plain(attention_mask, key, more):
        out = attend(query, key, value, mask=attention_mask, scale=more.get("scaling"), dropout=dropout)
        return out.transpose(1, 2).contiguous(), None
    reading = read(
        Given(module, query, key, value, attention_mask, more, NAME),
        attention_mask.recipe if isinstance(attention_mask, LazyMask) else None,
        None,
        cross=False,
    )
    out = reading.attend(dropout).transpose(1, 2).contiguous()
    return out, reading.weights(None, None) if more.get("output_attentions") else None


def mask(**given: Any) -> Tensor | None:
    """transformers' mask without its T x T, where nothing else than a band and padding hides keys."""
    from transformers.masking_utils import sdpa_mask

    if (
        given["q_length"] == 1 or torch.compiler.is_compiling() or is_recording()
    ):  # what is read here would be written down
        return sdpa_mask(**given)
    recipe = Recipe.of(sdpa_mask, given)
    if recipe.band() is None:
        return sdpa_mask(**given)
    if recipe.band() == (None, 0) and recipe.needs_no_mask(sdpa=True):
        return None
    # not None where nothing is hidden: to modules that do not say is_causal=False, that would mean causal
    return LazyMask(recipe, torch.bool)


def _plain(mask: Any, key: Tensor, more: dict[str, Any]) -> bool:
    """Whether a decoding step is what it looks like: on a few keys, finding out more would last as long as the step."""
    for name in UNUSUAL:
        if more.get(name) is not None and more[name] is not False:
            return False
    return mask is None or (type(mask) is Tensor and mask.dim() == 4 and mask.shape[-1] == key.shape[2])


@functools.lru_cache(maxsize=4096)
def depends_on_name(kind: Any) -> bool:
    """Whether a module's own code asks which implementation it runs under."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return any(mark in source for mark in BY_NAME)
