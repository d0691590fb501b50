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
SMALL = 1 << 20  # multiply-adds of a decoding step, up to which our own way costs more than it saves
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
    if query.shape[2] == 1 and _small(module, query, key, attention_mask, more):
        plain: tuple[Tensor, None] = _sdpa()(module, query, key, value, attention_mask, dropout, **more)
        return plain
    _check_name(type(module))
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

    if given["q_length"] == 1 or torch.compiler.is_compiling():
        return sdpa_mask(**given)
    recipe = Recipe.of(sdpa_mask, given)
    if recipe.band() is None:
        return sdpa_mask(**given)
    if recipe.band() == (None, 0) and recipe.needs_no_mask(sdpa=True):
        return None
    # not None where nothing is hidden: to modules that do not say is_causal=False, that would mean causal
    return LazyMask(recipe, torch.bool)


def _small(module: nn.Module, query: Tensor, key: Tensor, mask: Any, more: dict[str, Any]) -> bool:
    """A decoding step on few keys, which transformers' own function does as well, with less around it."""
    if query.numel() * key.shape[2] > SMALL or type(mask) is LazyMask or more.get("output_attentions"):
        return False
    if more.get("softcap") is not None or more.get("s_aux") is not None:
        return False
    _check_name(type(module))
    return query.shape[1] == key.shape[1] or hasattr(module, "num_key_value_groups")


@functools.cache
def _sdpa() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _check_name(kind: Any) -> None:
    if depends_on_name(kind):
        raise UnsupportedError(
            f'{kind.__name__} hides keys only under attn_implementation="eager" or "sdpa"; use one of them'
        )


@functools.lru_cache(maxsize=4096)
def depends_on_name(kind: Any) -> bool:
    """Whether a module's own code asks which implementation it runs under."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return any(mark in source for mark in BY_NAME)
