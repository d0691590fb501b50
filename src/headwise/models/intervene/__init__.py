"""Heads changed while a model runs: `masking` (`headwise.mask_heads`), `head_outputs` (a function before W_O) and
`attention_calls` (a function that answers attention calls).

Functions with the names of their modules: `head_outputs.head_outputs`, `attention_calls.attention_calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .changes import HeadChange as HeadChange
    from .changes import head_changes as head_changes
    from .head_outputs import mean_head_outputs as mean_head_outputs
    from .masking import MaskedHeads as MaskedHeads
    from .masking import mask_heads as mask_heads

_MODULES = {
    "HeadChange": "changes",
    "MaskedHeads": "masking",
    "head_changes": "changes",
    "mask_heads": "masking",
    "mean_head_outputs": "head_outputs",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
