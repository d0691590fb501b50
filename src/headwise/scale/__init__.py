"""Beyond one process: heads, sequences and corpora over ranks. What it takes is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "HeadPlan": "plan",
    "Ranks": "ranks",
    "load_state": "state",
    "plan": "plan",
    "save_state": "state",
    "split_heads": "heads",
    "started": "ranks",
}

__all__ = [*_WHERE]  # strings, all of them

if TYPE_CHECKING:
    from .heads import split_heads as split_heads
    from .plan import HeadPlan as HeadPlan
    from .ranks import Ranks as Ranks
    from .ranks import started as started
    from .state import load_state as load_state
    from .state import save_state as save_state


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise.scale' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
