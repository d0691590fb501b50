"""register: headwise's attend as the attention of any transformers model, by attn_implementation="headwise"."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .masks import LazyMask, Recipe
from .reading import Given, read

NAME = "headwise"
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

    if torch.compiler.is_compiling():
        return sdpa_mask(**given)
    recipe = Recipe.of(sdpa_mask, given)
    if recipe.band() is None or recipe.queries == 1:
        return sdpa_mask(**given)
    if recipe.band() == (None, 0) and recipe.needs_no_mask(sdpa=True):
        return None
    # not None where nothing is hidden: to modules that do not say is_causal=False, that would mean causal
    return LazyMask(recipe, torch.bool)


@functools.lru_cache(maxsize=4096)
def depends_on_name(kind: Any) -> bool:
    """Whether a module's own code asks which implementation it runs under."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return any(mark in source for mark in BY_NAME)
