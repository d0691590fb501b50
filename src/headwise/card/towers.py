"""The towers of a config: itself, its encoder and decoder, and the configs nested in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import names
from .layers import stack
from .nodes import Node
from .values import Part

GENERATE = ("CausalLM", "LMHead", "ForConditionalGeneration", "DoubleHeads")


def parts(root: Node) -> Iterator[tuple[Part, Node]]:
    """Every tower, its own numbers first, each with the config it was read from."""
    yield from _walk(root, "", generates(root))


def generates(root: Node) -> bool:
    """Whether it writes token after token, so that it keeps keys and values; by its class, else by its model type."""
    classes = root.raw.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return any(word in classes[0] for word in GENERATE) or (
            "_generates" in root.assumed and classes[0].endswith("Model")
        )
    return "_generates" in root.assumed or not root.assumed


def _walk(node: Node, name: str, writes: bool) -> Iterator[tuple[Part, Node]]:
    children = [(key, child) for key, child in _children(node)]
    nested = any(child.value(*names.HEADS) is not None for _, child in children)
    if node.value(*names.HEADS) is not None and not _is_text(node, children):
        yield from _own(node, name or ("main" if nested else "model"), writes)
    elif not children:
        yield from _own(node, name or "model", writes)
    for key, child in children:
        own = key.removesuffix("_config")
        yield from _walk(child, f"{name}.{own}" if name else own, writes and _writes(own, child))


def _is_text(node: Node, children: list[tuple[str, Node]]) -> bool:
    """Whether the config's own heads are those of its text part, as flat files of old have it."""
    return any(child.path == node.path for _, child in children)


def _writes(name: str, child: Node) -> bool:
    side = any(word in name for word in ("vision", "audio", "image", "encoder", "qformer", "backbone", "patcher"))
    return not side or ("_generates" in child.assumed and "encoder" not in name)


def _children(node: Node) -> Iterator[tuple[str, Node]]:
    flat = {key: value for key, value in node.raw.items() if not isinstance(value, dict) and key != "model_type"}
    for key, child in node.children():
        assumed = node.assumed.get(key)
        own_heads = any(name in flat for name in names.HEADS)
        if key == "text_config" and key not in node.raw and isinstance(assumed, dict) and own_heads:
            yield key, Node(flat, node.path, {"model_type": assumed["model_type"]})
        elif child.model_type or _any_heads(child.raw):
            yield key, child


def _any_heads(raw: dict[str, Any], depth: int = 4) -> bool:
    if any(raw.get(name) is not None for name in names.HEADS):
        return True
    return depth > 0 and any(_any_heads(value, depth - 1) for value in raw.values() if isinstance(value, dict))


def _own(node: Node, name: str, writes: bool) -> Iterator[tuple[Part, Node]]:
    for side in _sides(node):
        causal = side != "encoder" and (writes or node.flag("is_decoder"))
        own, attention = stack(node, side, causal=causal)
        title = side if name == "model" and side else f"{name}.{side}" if side else name
        yield Part(title, node.path, node.model_type or "unknown", own.numbers, attention, own.sources), node


def _sides(node: Node) -> tuple[str, ...]:
    def given(side: str) -> bool:
        return any(node.value(key) is not None for key in names.SIDES[side][0][:3])

    both = (given("encoder") and given("decoder")) or (node.flag("is_encoder_decoder") and given("decoder"))
    return ("encoder", "decoder") if both and node.value(*names.HEADS) is not None else ("",)
