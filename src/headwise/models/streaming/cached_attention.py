"""The attention function for keys in a HeadCache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ..watching.call_reader import ModelCall
from ..watching.lazy_masks import MaskRecipe
from .deferred_keys import DeferredKeys
from .padding import sequence_starts

# options of attention functions for which the keys would have to be in one tensor, and in words what they are
REFUSED = {"position_bias": "a bias by position", "output_attentions": "attention weights (output_attentions=True)"}


def attend_cached(call: ModelCall, recipe: MaskRecipe | None) -> tuple[Tensor, None]:
    """Answer an attention call whose keys are in a HeadCache: the output (B, Tq, H, Dv), and no weights.

    recipe: how the call's mask was made, if it is known.
    """
    keys, values = call.key, call.value
    if not isinstance(keys, DeferredKeys) or not isinstance(values, DeferredKeys) or keys.cached is not values.cached:
        raise UnsupportedError(
            f"{type(call.module).__name__} attends to keys of a HeadCache with values from elsewhere"
        )
    for name, words in REFUSED.items():
        if call.options.get(name) is not None and call.options[name] is not False:
            raise UnsupportedError(f"a HeadCache does not give {words}; use a DynamicCache inside headwise.streaming")
    if call.dropout:
        raise UnsupportedError("a HeadCache is for inference, and this call has dropout; use model.eval()")
    cached, sequences = keys.cached, keys.sequences
    sequences.agree(call.mask, cached.length, lambda: sequence_starts(call, recipe, cached.length))
    options: dict[str, Any] = {"scale": call.options.get("scaling"), "softcap": call.options.get("softcap")}
    sinks = call.options.get("s_aux")
    return cached.attend(call.query, keys.added, values.added, sequences, sinks=sinks, **options), None
