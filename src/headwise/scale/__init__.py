"""Beyond one process: heads, sequences and corpora over ranks. What it takes is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "HeadPlan": "plan",
    "Ranks": "ranks",
    "SequencePlan": "sequence",
    "atlas": "corpus",
    "clip_grad_norm_": "clip",
    "collected": "ring",
    "counted": "counted",
    "importance": "corpus",
    "load_split": "models",
    "load_state": "state",
    "mask_heads": "models",
    "placed": "ring",
    "plan": "plan",
    "positions": "ring",
    "recover": "train",
    "ring_attend": "ring",
    "ring_head_stats": "ring",
    "save_state": "state",
    "split_heads": "heads",
    "split_sequence": "context",
    "started": "ranks",
    "sum_gradients": "context",
    "watch": "models",
}

__all__ = [*_WHERE]  # strings, all of them

if TYPE_CHECKING:
    from .clip import clip_grad_norm_ as clip_grad_norm_
    from .context import split_sequence as split_sequence
    from .context import sum_gradients as sum_gradients
    from .corpus import atlas as atlas
    from .corpus import importance as importance
    from .counted import counted as counted
    from .heads import split_heads as split_heads
    from .models import load_split as load_split
    from .models import mask_heads as mask_heads
    from .models import watch as watch
    from .plan import HeadPlan as HeadPlan
    from .ranks import Ranks as Ranks
    from .ranks import started as started
    from .ring import collected as collected
    from .ring import placed as placed
    from .ring import positions as positions
    from .ring import ring_attend as ring_attend
    from .ring import ring_head_stats as ring_head_stats
    from .sequence import SequencePlan as SequencePlan
    from .state import load_state as load_state
    from .state import save_state as save_state
    from .train import recover as recover


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise.scale' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
