"""Heads removed from a model: `removal` (`headwise.prune_heads`), `saving` (`headwise.save`) and loading again.

`reshape` cuts one layer, `shared_biases` lets layers with different heads share a position bias, `kept_heads` records
which original heads are left, `pruned_directory` is that record as a file.
A function with the name of its module: `kept_heads.kept_heads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .dummy_inputs import output_tensors as output_tensors
    from .kept_heads import pruned_layers as pruned_layers
    from .removal import check_plan as check_plan
    from .removal import prune_heads as prune_heads
    from .saving import SaveResult as SaveResult
    from .saving import save as save

_MODULES = {
    "SaveResult": "saving",
    "check_plan": "removal",
    "output_tensors": "dummy_inputs",
    "prune_heads": "removal",
    "pruned_layers": "kept_heads",
    "save": "saving",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
