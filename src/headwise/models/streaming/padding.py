"""Where the sequences of a batch begin, from the mask of an attention call, because a HeadCache receives no mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.nn.streamed_keys import left_padding
from ...errors import UnsupportedError
from ..watching.call_reader import ModelCall, read_mask
from ..watching.lazy_masks import MaskRecipe


def sequence_starts(call: ModelCall, recipe: MaskRecipe | None, cached: int) -> Tensor | None:
    """(B,): how many padding tokens each sequence has before its first real one; None where there is no padding.

    Args:
        call: queries that follow the cached tokens; its keys have the number of all tokens.
        recipe: how its mask was made, if it is known.
        cached: tokens in the cache.

    Raises:
        UnsupportedError: if anything but causality and padding on the left hides keys.
    """
    name = type(call.module).__name__
    if call.options.get("cu_seq_lens_q") is not None or (recipe is not None and recipe.sequence_numbers is not None):
        raise UnsupportedError(f"{name} attends to packed sequences; a HeadCache takes one sequence per row")
    if recipe is not None:
        shown = _shown_by_recipe(recipe, name, cached)
    elif call.mask is not None:
        shown = _shown_by_mask(call, name)
    else:
        if call.query.shape[2] > 1 and (cached or call.implementation == "eager" or not call.causal):
            raise UnsupportedError(f"{name} was given no mask that says which of {call.key.shape[2]} keys are earlier")
        shown = None
    if shown is None:
        return None
    shown = shown[:, : call.key.shape[2]].expand(call.query.shape[0], -1)
    return left_padding(shown).to(call.query.device)


def _shown_by_recipe(recipe: MaskRecipe, name: str, cached: int) -> Tensor | None:
    """(B, Tk) bool: which keys are tokens."""
    if recipe.band() != (None, 0):
        raise UnsupportedError(
            f"{name} hides keys by another rule than causality and padding, which a HeadCache does not know; use "
            'cache_implementation="dynamic" inside headwise.streaming'
        )
    if recipe.first_query != cached:
        raise UnsupportedError(
            f"{name} runs at position {recipe.first_query} and its HeadCache holds {cached} tokens; give it the tokens "
            "that follow, or .reset() it"
        )
    return recipe.keys_shown


def _shown_by_mask(call: ModelCall, name: str) -> Tensor:
    """(B or 1, Tk) bool: which keys are tokens, by the mask's last row; the other rows must be causal."""
    mask = read_mask(call.mask, call.key.shape[2])
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != call.key.shape[2]:
        raise UnsupportedError(
            f"{name} has a mask of {mask.dtype} and shape {tuple(mask.shape)} that does more than hide keys; its heads "
            "cannot stream in a cache"
        )
    queries, keys = call.query.shape[2], mask.shape[3]
    shown = mask[:, 0, -1]
    if mask.shape[2] > 1:
        position = torch.arange(keys - queries, keys, device=mask.device)
        expected = shown[:, None] & (torch.arange(keys, device=mask.device) <= position[:, None])
        is_token = shown[:, keys - queries :, None]  # rows of padding are nobody's business
        if bool(((mask[:, 0] != expected) & is_token).any()):
            raise UnsupportedError(f"{name} has a mask that is not causal; its heads cannot stream in a cache")
    return shown
