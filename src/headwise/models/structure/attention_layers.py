"""The attention layers of a model, with their head counts and what each head costs in parameters and KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...attention.nn.stack import Transformer
from ...errors import UnsupportedError
from .heads import input_width
from .layouts import LAYOUTS
from .linear_layers import output_width
from .projections import Projections, layer_shape, projections
from .sites import Site, attention_sites

UNITS = ("head", "kv", "layer")  # what is scored and removed as one: a query head, a KV group, a whole layer


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: where it is, how many heads it has and what they cost."""

    kind: str
    index: int
    query: int  # query heads
    kv: int  # KV heads
    module: str  # path of the attention module; layers that share a module share its parameters
    head_parameters: int = 0  # per query head: its rows of W_Q and its columns of W_O
    kv_parameters: int = 0  # per KV head: its rows of W_K and W_V
    cache: int = 0  # numbers per token that a KV head leaves in the KV cache
    multiple: int = 1  # the number of KV heads must be a multiple of this; zeroed heads fill up

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.index

    def units(self, unit: str) -> list[list[int]]:
        """The query heads of each unit."""
        size = {"head": 1, "kv": self.query // self.kv, "layer": self.query}[unit]
        return [list(range(first, first + size)) for first in range(0, self.query, size)]


def attention_layers(
    model: nn.Module, find: Callable[[nn.Module, Site], Projections] = projections
) -> list[AttentionLayer]:
    """Every attention layer of a model, in its order.

    find: how projections are found; `find_projections` counts KV heads also where none can be cut out.
    """
    caching = _caching_modules(model)
    return [_attention_layer(model, site, id(site.module) in caching, find) for site in attention_sites(model)]


def _caching_modules(model: Any) -> set[int]:
    """Ids of the modules whose keys and values are cached while a model generates: those of its decoder.

    An encoder and a vision tower read everything at once. A model that does not generate counts as a decoder.
    """
    part: Any = model.decoder if isinstance(model, Transformer) else model
    generates = getattr(model, "can_generate", lambda: False)()
    while generates or getattr(getattr(part, "config", None), "is_encoder_decoder", False):
        inner = part.get_decoder() if hasattr(part, "get_decoder") else None
        if inner is None or inner is part:
            break
        part, generates = inner, True
    # some layers of Gemma 3n read the keys and values of an earlier layer
    return {id(module) for module in part.modules() if not getattr(module, "is_kv_shared_layer", False)}


def _attention_layer(
    model: nn.Module, site: Site, caching: bool, find: Callable[[nn.Module, Site], Projections]
) -> AttentionLayer:
    try:
        layer = find(model, site)
    except UnsupportedError:  # its heads can be scored and zeroed all the same
        return AttentionLayer(*layer_shape(model, site), site.name)
    head_parameters = kv_parameters = cache = 0
    for part in layer.parts:
        blocks = part.layout(layer.query, layer.kv)
        block_parameters = sum(p.numel() for p in part.linear.parameters()) // len(blocks)
        query_blocks = sum(role == "q" for role, _ in blocks)
        kv_blocks = len(blocks) - query_blocks
        head_parameters += block_parameters * query_blocks // layer.query
        kv_parameters += block_parameters * kv_blocks // layer.kv
        cache += output_width(part.linear) // len(blocks) * kv_blocks // layer.kv
    if isinstance(site.module, nn.MultiheadAttention):  # its projections are no layers, and it has no cache
        for name, (_, role) in layer.per_head.items():
            blocks = LAYOUTS[role](layer.query, layer.kv)
            block_parameters = site.module.get_parameter(name).numel() // len(blocks)
            query_blocks = sum(role == "q" for role, _ in blocks)
            head_parameters += block_parameters * query_blocks // layer.query
            kv_parameters += block_parameters * (len(blocks) - query_blocks) // layer.kv
    head_parameters += (input_width(layer.out) or 0) * output_width(layer.out) // layer.query
    return AttentionLayer(
        site.kind,
        site.index,
        layer.query,
        layer.kv,
        site.name,
        head_parameters,
        kv_parameters,
        cache if caching else 0,
        layer.multiple,
    )
