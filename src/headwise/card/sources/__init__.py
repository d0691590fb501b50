"""What a card is read from: JSON files, safetensors and GGUF headers, pruned directories, famous names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .presets import FAMOUS as FAMOUS

_MODULES = {
    "FAMOUS": "presets",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
