"""headwise: every attention head, in the open."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded when first asked for (PEP 562), so that `import headwise` and the command line start without torch.
_WHERE = {
    "Alibi": "attention.positions",
    "Atlas": "roles.atlas",
    "CacheError": "errors",
    "CheckpointError": "errors",
    "Decoder": "attention.stack",
    "Encoder": "attention.stack",
    "HeadStats": "attention.stats",
    "Heads": "heads",
    "HeadwiseError": "errors",
    "KVCache": "attention.cache",
    "MaskError": "errors",
    "MemoryCache": "attention.cache",
    "MultiHeadAttention": "attention.module",
    "Plan": "prune.plan",
    "RankError": "errors",
    "Relations": "roles.found",
    "Rotary": "attention.positions",
    "Shape": "shapes",
    "ShapeError": "errors",
    "SlidingCache": "attention.cache",
    "StaticCache": "attention.cache",
    "Transformer": "attention.stack",
    "TransformerBlock": "attention.stack",
    "UnsupportedError": "errors",
    "atlas": "roles.survey",
    "attend": "attention.core",
    "card": "card",
    "explain": "attention.core",
    "head_stats": "attention.core",
    "importance": "prune.importance",
    "inspect": "models.inspection",
    "load": "models.load",
    "mask_heads": "models.masking",
    "plan": "prune.plan",
    "prune_heads": "models.surgery",
    "reference": "attention.reference",
    "register": "models.implementation",
    "relations": "roles.relations",
    "save": "models.saving",
    "scale": "scale",
    "shape": "shapes",
    "tokenizer": "models.load",
    "view": "ui.widget",
    "watch": "models.watch",
    "weights": "attention.core",
}

_MODULES = ("card", "reference", "scale")  # public names that are modules themselves

__all__ = ["__version__", *_WHERE]  # strings, all of them

if TYPE_CHECKING:
    from . import card as card
    from . import scale as scale
    from .attention import reference as reference
    from .attention.cache import KVCache as KVCache
    from .attention.cache import MemoryCache as MemoryCache
    from .attention.cache import SlidingCache as SlidingCache
    from .attention.cache import StaticCache as StaticCache
    from .attention.core import attend as attend
    from .attention.core import explain as explain
    from .attention.core import head_stats as head_stats
    from .attention.core import weights as weights
    from .attention.module import MultiHeadAttention as MultiHeadAttention
    from .attention.positions import Alibi as Alibi
    from .attention.positions import Rotary as Rotary
    from .attention.stack import Decoder as Decoder
    from .attention.stack import Encoder as Encoder
    from .attention.stack import Transformer as Transformer
    from .attention.stack import TransformerBlock as TransformerBlock
    from .attention.stats import HeadStats as HeadStats
    from .errors import CacheError as CacheError
    from .errors import CheckpointError as CheckpointError
    from .errors import HeadwiseError as HeadwiseError
    from .errors import MaskError as MaskError
    from .errors import RankError as RankError
    from .errors import ShapeError as ShapeError
    from .errors import UnsupportedError as UnsupportedError
    from .heads import Heads as Heads
    from .models.implementation import register as register
    from .models.inspection import inspect as inspect
    from .models.load import load as load
    from .models.load import tokenizer as tokenizer
    from .models.masking import mask_heads as mask_heads
    from .models.saving import save as save
    from .models.surgery import prune_heads as prune_heads
    from .models.watch import watch as watch
    from .prune.importance import importance as importance
    from .prune.plan import Plan as Plan
    from .prune.plan import plan as plan
    from .roles.atlas import Atlas as Atlas
    from .roles.found import Relations as Relations
    from .roles.relations import relations as relations
    from .roles.survey import atlas as atlas
    from .shapes import Shape as Shape
    from .shapes import shape as shape
    from .ui.widget import view as view


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    module = importlib.import_module(f".{_WHERE[name]}", __name__)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
