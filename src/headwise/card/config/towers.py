"""The towers of a config: itself, its encoder and decoder, and the configs nested in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..types import Attention, Part
from . import keys
from .encoder_length import encoder_length
from .layers import read_stack
from .node import Node

ENCODERS, DECODERS = ("encoder", "encoder_config"), ("decoder", "decoder_config")
NO_CROSS = ("musicgen_melody_decoder",)  # its encoder's output is prepended as tokens
GENERATE = ("CausalLM", "LMHead", "ForConditionalGeneration", "DoubleHeads")


def parts(root: Node) -> Iterator[tuple[Part, Node]]:
    """Every tower with the config it was read from; the outermost config comes first."""
    length = encoder_length(root)
    for part, node in _walk(root, "", generates(root)):
        yield (part if length is None else _with_encoder_length(part, length)), node


def _with_encoder_length(part: Part, length: int) -> Part:
    """The same tower with the number of keys that its cross-attention reads."""
    layers = (replace(layer, encoder_length=length) if layer.role == "cross" else layer for layer in part.layers)
    return replace(part, attention=Attention(tuple(layers)))


def generates(root: Node) -> bool:
    """Whether the model generates tokens, and so caches keys and values: by its class, else by its model type."""
    classes = root.raw.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return any(word in classes[0] for word in GENERATE) or (
            "_generates" in root.assumed and classes[0].endswith("Model")
        )
    return "_generates" in root.assumed or not root.assumed


def _walk(node: Node, name: str, generating: bool, cross: bool = False) -> Iterator[tuple[Part, Node]]:
    children = [(key, child) for key, child in _children(node)]
    nested = any(child.value(*keys.HEADS) is not None for _, child in children)
    if node.value(*keys.HEADS) is not None and not _is_text(node, children):
        own_cross = cross or (node.flag("is_encoder_decoder") and any(key in ENCODERS for key, _ in children))
        yield from _own_towers(node, name or ("main" if nested else "model"), generating, own_cross)
    elif not children:
        yield from _own_towers(node, name or "model", generating, cross)
    for key, child in children:
        name_part = key.removesuffix("_config")
        reads = _reads_encoder(node, key, child)
        yield from _walk(
            child, f"{name}.{name_part}" if name else name_part, generating and _may_generate(name_part, child), reads
        )


def _reads_encoder(node: Node, key: str, child: Node) -> bool:
    """Whether a tower attends to an encoder beside it, with a config of its own."""
    pair = node.flag("is_encoder_decoder") and key in DECODERS and child.model_type not in NO_CROSS
    return pair or (child.model_type == "blip_text_model" and child.flag("is_decoder"))


def _is_text(node: Node, children: list[tuple[str, Node]]) -> bool:
    """Whether the config's own heads are those of its text tower, as in old, flat files."""
    return any(child.path == node.path for _, child in children)


def _may_generate(name: str, child: Node) -> bool:
    side = any(word in name for word in ("vision", "audio", "image", "encoder", "qformer", "backbone", "patcher"))
    return not side or ("_generates" in child.assumed and "encoder" not in name)


def _children(node: Node) -> Iterator[tuple[str, Node]]:
    flat = {key: value for key, value in node.raw.items() if not isinstance(value, dict) and key != "model_type"}
    for key, child in node.children():
        assumed = node.assumed.get(key)
        own_heads = any(name in flat for name in keys.HEADS)
        if key == "text_config" and key not in node.raw and isinstance(assumed, dict) and own_heads:
            yield key, Node(flat, node.path, {"model_type": assumed["model_type"]})
        elif child.model_type or _any_heads(child.raw):
            yield key, child


def _any_heads(raw: dict[str, Any], depth: int = 4) -> bool:
    if any(raw.get(name) is not None for name in keys.HEADS):
        return True
    return depth > 0 and any(_any_heads(value, depth - 1) for value in raw.values() if isinstance(value, dict))


def _own_towers(node: Node, name: str, generating: bool, cross: bool) -> Iterator[tuple[Part, Node]]:
    for side in _sides(node):
        causal = side != "encoder" and (generating or node.flag("is_decoder"))
        tower, attention = read_stack(node, side, causal=causal, cross=cross)
        title = side if name == "model" and side else f"{name}.{side}" if side else name
        yield Part(title, node.path, node.model_type or "unknown", tower.numbers, attention, tower.sources), node


def _sides(node: Node) -> tuple[str, ...]:
    def has_layers(side: str) -> bool:
        return any(node.value(key) is not None for key in keys.SIDES[side][0][:3])

    two_sides = (has_layers("encoder") and has_layers("decoder")) or (
        node.flag("is_encoder_decoder") and has_layers("decoder")
    )
    return ("encoder", "decoder") if two_sides and node.value(*keys.HEADS) is not None else ("",)
