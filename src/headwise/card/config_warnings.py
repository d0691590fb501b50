"""Warnings about a config: head sizes that run slowly, numbers that do not fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .config.defaults import is_known, version
from .config.node import Node
from .types import Layer, Part

SMALL_HEAD, ALIGNED = 32, 8
MANY_HEADS, WIDE_HEAD = 128, 512


def warnings(parts: Iterable[Part], root: Node) -> list[str]:
    """One sentence per warning, without repetitions."""
    messages = []
    if not root.model_type:
        messages.append("the config names no model_type; keys were read by their usual names")
    elif not is_known(root.model_type) and not root.model_type.startswith(("gguf:", "transformer-2017")):
        messages.append(f"model type {root.model_type} is not one of {version()}; keys were read by their usual names")
    for part in parts:
        for words in _part(part):
            text = f"{part.name}: {words}" if part.name not in ("model", "") else words
            if text not in messages:
                messages.append(text)
    return messages


def _part(part: Part) -> Iterator[str]:
    for layer in part.layers:
        if layer.sharing != "none":
            yield from _layer(layer)
            if layer.dim == part.numbers.get("head_dim") and layer.query == part.numbers.get("query_heads"):
                yield from _width(part, layer)


def _layer(layer: Layer) -> Iterator[str]:
    if layer.dim < SMALL_HEAD:
        yield f"d_k is {layer.dim}; under {SMALL_HEAD} a head has little room, and kernels run below their speed"
    if layer.dim % ALIGNED:
        yield f"d_k is {layer.dim}, no multiple of {ALIGNED}; fast kernels pad it or refuse it"
    if layer.dim > WIDE_HEAD:
        yield f"d_k is {layer.dim}; most fast kernels stop at 256"
    if layer.query % layer.kv:
        yield f"{layer.kv} key/value heads do not divide {layer.query} query heads; no group size fits"
    if layer.query > MANY_HEADS:
        yield f"{layer.query} query heads is extreme; {MANY_HEADS} is the most that large models use"
    if layer.query == 1 and layer.width >= 256:
        yield f"one query head for a width of {layer.width}: a single attention pattern per layer"


def _width(part: Part, layer: Layer) -> Iterator[str]:
    source = part.sources.get("head_dim")
    if source and source.detail.startswith("width / query heads") and layer.width % layer.query:
        yield (
            f"{layer.query} heads do not divide the width {layer.width}; d_k was rounded down to {layer.dim}, "
            f"and {layer.width - layer.query * layer.dim} of the width goes to no head"
        )
