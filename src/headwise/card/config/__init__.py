"""What a config.json says: `node` reads keys with their defaults, `towers` finds the stacks, `layers` their heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .defaults import model_types as model_types

_MODULES = {
    "model_types": "defaults",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
