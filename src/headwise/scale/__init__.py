"""A model over several processes (ranks): tensor parallel, context parallel and data parallel.

Public names are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .checkpoint import load_state as load_state
    from .checkpoint import save_state as save_state
    from .clipping import clip_grad_norm_ as clip_grad_norm_
    from .context_modules import split_sequence as split_sequence
    from .context_modules import sum_gradients as sum_gradients
    from .context_parallel import ContextParallelOptions as ContextParallelOptions
    from .context_parallel import context_parallel_attend as context_parallel_attend
    from .context_parallel import context_parallel_head_stats as context_parallel_head_stats
    from .cost_model import Cost as Cost
    from .cost_model import costs as costs
    from .cost_model import crossings as crossings
    from .data_parallel import atlas as atlas
    from .data_parallel import context_need as context_need
    from .data_parallel import importance as importance
    from .head_plan import HeadPlan as HeadPlan
    from .head_plan import plan as plan
    from .process_group import init_ranks as init_ranks
    from .ranks import Ranks as Ranks
    from .sequence_plan import SequencePlan as SequencePlan
    from .sequence_shards import gather_sequence as gather_sequence
    from .sequence_shards import local_positions as local_positions
    from .sequence_shards import shard_sequence as shard_sequence
    from .simulation import SimulatedRank as SimulatedRank
    from .simulation import simulate as simulate
    from .tensor_parallel import split_heads as split_heads
    from .traffic import Traffic as Traffic
    from .traffic import count_traffic as count_traffic
    from .train import recover as recover
    from .train import training_group as training_group
    from .transformers_models import load_split as load_split
    from .transformers_models import mask_heads as mask_heads
    from .transformers_models import watch as watch

_MODULES = {
    "ContextParallelOptions": "context_parallel",
    "Cost": "cost_model",
    "HeadPlan": "head_plan",
    "Ranks": "ranks",
    "SequencePlan": "sequence_plan",
    "SimulatedRank": "simulation",
    "Traffic": "traffic",
    "atlas": "data_parallel",
    "clip_grad_norm_": "clipping",
    "context_need": "data_parallel",
    "context_parallel_attend": "context_parallel",
    "context_parallel_head_stats": "context_parallel",
    "costs": "cost_model",
    "count_traffic": "traffic",
    "crossings": "cost_model",
    "gather_sequence": "sequence_shards",
    "importance": "data_parallel",
    "init_ranks": "process_group",
    "load_split": "transformers_models",
    "load_state": "checkpoint",
    "local_positions": "sequence_shards",
    "mask_heads": "transformers_models",
    "plan": "head_plan",
    "recover": "train",
    "save_state": "checkpoint",
    "shard_sequence": "sequence_shards",
    "simulate": "simulation",
    "split_heads": "tensor_parallel",
    "split_sequence": "context_modules",
    "sum_gradients": "context_modules",
    "training_group": "train",
    "watch": "transformers_models",
}

_RENAMED = {
    "RingOptions": "ContextParallelOptions",
    "ring_attend": "context_parallel_attend",
    "ring_head_stats": "context_parallel_head_stats",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES, _RENAMED)
