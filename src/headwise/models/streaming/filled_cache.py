"""A cache with random keys and values, to measure memory and time with: only the number of keys matters there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ...attention.nn.streamed_keys import StreamedKeys
from ...plans import StreamLayer, StreamPlan
from .head_cache import HeadCache


def filled_cache(model: Any, plan: StreamPlan | None, layers: tuple[StreamLayer, ...], context: int) -> Any:
    """A cache as after this many tokens of one sequence.

    Args:
        model: it will run with the cache.
        plan: the KV heads that stream; None for a DynamicCache, in which none do.
        layers: those of the model.
        context: tokens.
    """
    cache = DynamicCache(config=model.config) if plan is None else HeadCache(plan)
    random, parameter = torch.Generator().manual_seed(0), next(model.parameters())
    for layer in layers:
        shape = (1, layer.kv_heads, context, layer.token_bytes // (2 * parameter.element_size()))
        keys, values = (torch.randn(shape, generator=random).to(parameter) for _ in range(2))
        cached = getattr(cache.layers[layer.layer], "cached", None) if plan is not None else None
        if isinstance(cached, StreamedKeys):  # it takes keys from the attention function alone
            if cached.whole:
                cached.full.append(keys[:, cached.whole], values[:, cached.whole])
            cached.ring.add(keys[:, cached.streaming], values[:, cached.streaming], cache.sequences)
        else:
            cache.update(keys, values, layer.layer)
    return cache
