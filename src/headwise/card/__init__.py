"""Model cards: heads, parameters, cache and costs from a config or a file header, without torch or transformers.

`read` gives a `Card`, `diff` compares two, `design` lists head counts for a width. The sub-packages depend on each
other in one direction:

- `config/`: what a config.json says about towers, layers and heads, and the defaults of its model type; it imports
  neither of the others.
- `parameters/`: how many parameters each model type has; imports `config/`.
- `sources/`: the files and names that a card is read from; imports `config/`.

`reading` and `card` join them; `cost`, `explain`, `differences` and `designs` are computed from a finished card.
"""

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

# Imported on first use: a command that reads one card needs neither the comparison nor the design help.
_MODULES = {
    "Card": "card",
    "Diff": "differences",
    "Option": "designs",
    "design": "designs",
    "diff": "differences",
    "read": "reading",
}

__all__ = ["Card", "Diff", "Option", "design", "diff", "read"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headwise.card' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
