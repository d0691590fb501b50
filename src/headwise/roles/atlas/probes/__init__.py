"""Probes: what decoder heads do on inputs made for one question each, such as a needle in a long text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....lazy import lazy_names

if TYPE_CHECKING:
    from .needles import NeedlePrompt as NeedlePrompt
    from .needles import needle_prompts as needle_prompts

_MODULES = {
    "NeedlePrompt": "needles",
    "needle_prompts": "needles",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
