"""Beyond one process: heads, sequences and corpora over ranks. What it takes is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "HeadPlan": "head_plan",
    "Ranks": "ranks",
    "SequencePlan": "sequence_plan",
    "atlas": "data_parallel",
    "clip_grad_norm_": "clipping",
    "collected": "context_parallel",
    "counted": "traffic",
    "importance": "data_parallel",
    "load_split": "transformers_models",
    "load_state": "checkpoint",
    "mask_heads": "transformers_models",
    "placed": "context_parallel",
    "plan": "head_plan",
    "positions": "context_parallel",
    "recover": "train",
    "ring_attend": "context_parallel",
    "ring_head_stats": "context_parallel",
    "save_state": "checkpoint",
    "split_heads": "tensor_parallel",
    "split_sequence": "context_modules",
    "started": "ranks",
    "sum_gradients": "context_modules",
    "watch": "transformers_models",
}

__all__ = [*_WHERE]  # strings, all of them

if TYPE_CHECKING:
    from .checkpoint import load_state as load_state
    from .checkpoint import save_state as save_state
    from .clipping import clip_grad_norm_ as clip_grad_norm_
    from .context_modules import split_sequence as split_sequence
    from .context_modules import sum_gradients as sum_gradients
    from .context_parallel import collected as collected
    from .context_parallel import placed as placed
    from .context_parallel import positions as positions
    from .context_parallel import ring_attend as ring_attend
    from .context_parallel import ring_head_stats as ring_head_stats
    from .data_parallel import atlas as atlas
    from .data_parallel import importance as importance
    from .head_plan import HeadPlan as HeadPlan
    from .ranks import Ranks as Ranks
    from .ranks import started as started
    from .sequence_plan import SequencePlan as SequencePlan
    from .tensor_parallel import split_heads as split_heads
    from .traffic import counted as counted
    from .train import recover as recover
    from .transformers_models import load_split as load_split
    from .transformers_models import mask_heads as mask_heads
    from .transformers_models import watch as watch


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise.scale' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
