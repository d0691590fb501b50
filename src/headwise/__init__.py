"""headwise: every attention head, in the open."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Loaded on first use (PEP 562), so that `import headwise` and the command line start without torch.
_LOCATIONS = {
    "Alibi": "attention.nn.positions",
    "Atlas": "roles.atlas.result",
    "CacheError": "errors",
    "CheckpointError": "errors",
    "Circuit": "circuits.circuit_result",
    "Composition": "circuits.composition",
    "ContextNeed": "prune.context_need_result",
    "Decoder": "attention.nn.stack",
    "Effects": "circuits.effects",
    "Encoder": "attention.nn.stack",
    "HeadCache": "models.streaming.head_cache",
    "HeadMatrices": "circuits.head_matrices",
    "HeadStats": "attention.stats",
    "Heads": "heads",
    "HeadwiseError": "errors",
    "KVCache": "attention.nn.kv_cache",
    "LogitDifference": "circuits.metric",
    "MaskError": "errors",
    "MemoryCache": "attention.nn.kv_cache",
    "MultiHeadAttention": "attention.nn.module",
    "Plan": "plans",
    "RankError": "errors",
    "Recorder": "recorder.recorder",
    "Relations": "roles.relations.result",
    "Rotary": "attention.nn.positions",
    "Shape": "shapes",
    "ShapeError": "errors",
    "SlidingCache": "attention.nn.kv_cache",
    "StaticCache": "attention.nn.kv_cache",
    "StreamPlan": "plans",
    "Transformer": "attention.nn.stack",
    "TransformerBlock": "attention.nn.stack",
    "UnsupportedError": "errors",
    "adapt": "models.structure.adapters",
    "atlas": "roles.atlas.build",
    "attend": "attention.functional",
    "attribute": "circuits.attribution",
    "card": "card",
    "circuit": "circuits.circuit",
    "circuits": "circuits",
    "composition": "circuits.composition",
    "context_need": "prune.context_need",
    "explain": "attention.functional",
    "group_kv_heads": "prune.grouping",
    "head_matrices": "circuits.head_matrices",
    "head_stats": "attention.functional",
    "importance": "prune.importance",
    "inspect": "inspection.run",
    "load": "models.loading.loader",
    "mask_heads": "models.intervene.masking",
    "patch": "circuits.patching",
    "plan": "prune.plan",
    "prune": "prune",
    "prune_heads": "models.surgery.removal",
    "recorder": "recorder",
    "reference": "attention.reference",
    "register": "models.register",
    "relations": "roles.relations.find",
    "replace_attention": "attention.nn.replacement",
    "restore_attention": "attention.nn.replacement",
    "save": "models.surgery.saving",
    "scale": "scale",
    "shape": "shapes",
    "stream_plan": "prune.stream_plan",
    "streaming": "models.streaming.context",
    "tokenizer": "models.loading.loader",
    "view": "ui.widget",
    "watch": "models.watching.watcher",
    "weights": "attention.functional",
}

_MODULES = ("card", "circuits", "prune", "recorder", "reference", "scale")  # public names that are modules themselves

__all__ = ["__version__", *_LOCATIONS]  # strings, all of them

if TYPE_CHECKING:
    from . import card as card
    from . import circuits as circuits
    from . import prune as prune
    from . import recorder as recorder
    from . import scale as scale
    from .attention import reference as reference
    from .attention.functional import attend as attend
    from .attention.functional import explain as explain
    from .attention.functional import head_stats as head_stats
    from .attention.functional import weights as weights
    from .attention.nn.kv_cache import KVCache as KVCache
    from .attention.nn.kv_cache import MemoryCache as MemoryCache
    from .attention.nn.kv_cache import SlidingCache as SlidingCache
    from .attention.nn.kv_cache import StaticCache as StaticCache
    from .attention.nn.module import MultiHeadAttention as MultiHeadAttention
    from .attention.nn.positions import Alibi as Alibi
    from .attention.nn.positions import Rotary as Rotary
    from .attention.nn.replacement import replace_attention as replace_attention
    from .attention.nn.replacement import restore_attention as restore_attention
    from .attention.nn.stack import Decoder as Decoder
    from .attention.nn.stack import Encoder as Encoder
    from .attention.nn.stack import Transformer as Transformer
    from .attention.nn.stack import TransformerBlock as TransformerBlock
    from .attention.stats import HeadStats as HeadStats
    from .circuits.attribution import attribute as attribute
    from .circuits.circuit import circuit as circuit
    from .circuits.circuit_result import Circuit as Circuit
    from .circuits.composition import Composition as Composition
    from .circuits.composition import composition as composition
    from .circuits.effects import Effects as Effects
    from .circuits.head_matrices import HeadMatrices as HeadMatrices
    from .circuits.head_matrices import head_matrices as head_matrices
    from .circuits.metric import LogitDifference as LogitDifference
    from .circuits.patching import patch as patch
    from .errors import CacheError as CacheError
    from .errors import CheckpointError as CheckpointError
    from .errors import HeadwiseError as HeadwiseError
    from .errors import MaskError as MaskError
    from .errors import RankError as RankError
    from .errors import ShapeError as ShapeError
    from .errors import UnsupportedError as UnsupportedError
    from .heads import Heads as Heads
    from .inspection.run import inspect as inspect
    from .models.intervene.masking import mask_heads as mask_heads
    from .models.loading.loader import load as load
    from .models.loading.loader import tokenizer as tokenizer
    from .models.register import register as register
    from .models.streaming.context import streaming as streaming
    from .models.streaming.head_cache import HeadCache as HeadCache
    from .models.structure.adapters import adapt as adapt
    from .models.surgery.removal import prune_heads as prune_heads
    from .models.surgery.saving import save as save
    from .models.watching.watcher import watch as watch
    from .plans import Plan as Plan
    from .plans import StreamPlan as StreamPlan
    from .prune.context_need import context_need as context_need
    from .prune.context_need_result import ContextNeed as ContextNeed
    from .prune.grouping import group_kv_heads as group_kv_heads
    from .prune.importance import importance as importance
    from .prune.plan import plan as plan
    from .prune.stream_plan import stream_plan as stream_plan
    from .recorder.recorder import Recorder as Recorder
    from .roles.atlas.build import atlas as atlas
    from .roles.atlas.result import Atlas as Atlas
    from .roles.relations.find import relations as relations
    from .roles.relations.result import Relations as Relations
    from .shapes import Shape as Shape
    from .shapes import shape as shape
    from .ui.widget import view as view


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    module = importlib.import_module(f".{_LOCATIONS[name]}", __name__)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
