"""Model cards: heads, parameters, cache and costs from a config or a header, without torch or transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .card import Card as Card
    from .designs import Option as Option
    from .designs import design as design
    from .differences import Diff as Diff
    from .differences import diff as diff
    from .reading import read as read

# Loaded when first asked for: a command that reads one card needs neither the comparison nor the design help.
_WHERE = {
    "Card": "card",
    "Diff": "differences",
    "Option": "designs",
    "design": "designs",
    "diff": "differences",
    "read": "reading",
}

__all__ = ["Card", "Diff", "Option", "design", "diff", "read"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise.card' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
