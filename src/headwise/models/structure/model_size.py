"""The size of a model: its parameters, those of its heads, and its KV cache per token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...errors import UnsupportedError
from .attention_layers import attention_layers


@dataclass(frozen=True)
class Size:
    """The size of a model."""

    parameters: int
    of_heads: int  # parameters that removing every head would save
    cache: int  # bytes of the KV cache per token, cross-attention's per source token; 0 for models without a cache

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def size(model: Any) -> Size:
    """Parameters, those of heads, and KV-cache bytes of a model; a module that several layers share counts once.

    Of a model with a layer whose heads are not known, only the parameters are counted.
    """
    try:
        layers = list({layer.module: layer for layer in attention_layers(model)}.values())
    except UnsupportedError:  # the heads of a layer are not known, as in a pooling head without W_O
        layers = []
    of_heads = sum(layer.query * layer.head_parameters + layer.kv * layer.kv_parameters for layer in layers)
    generates = hasattr(model, "generate") and getattr(model, "can_generate", lambda: True)()
    cache_width = sum(layer.kv * layer.cache for layer in layers) if generates else 0
    number_bytes = next(model.parameters()).element_size()
    return Size(sum(p.numel() for p in model.parameters()), of_heads, number_bytes * cache_width)
