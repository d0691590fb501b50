"""The type of every layer: the lists and shorthands by which configs say that layers differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import keys
from .node import Node


def layer_words(node: Node, depth: int) -> list[str] | None:
    """The config's word for each layer; None where nothing says that layers differ.

    A list in the file comes first, then the shorthands of raw files, then the list that the type assumes.
    """
    for key in keys.LAYER_LISTS:
        if node.has(key) and (words := _words(node.raw[key])):
            return stretch(words, depth)
    if words := _blocks(node, depth):
        return words
    for key, rule in SHORTHANDS:
        if node.has(key) and (words := rule(node, depth)):
            return words
    for key in keys.LAYER_LISTS:
        if assumed := _words(node.assumed.get(key)):
            return stretch(assumed, depth)
    for key, rule in SHORTHANDS:
        if node.value(key) is not None and (words := rule(node, depth)):
            return words
    return None


def _blocks(node: Node, depth: int) -> list[str]:
    """Nemotron-NAS: a dict for each layer, whose attention may be nothing or a plain linear layer."""
    blocks = node.raw.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != depth:
        return []
    entries = [block.get("attention") if isinstance(block, dict) else None for block in blocks]
    plain = [attention if isinstance(attention, dict) else {} for attention in entries]
    without_attention = ("no_op", "replace_with_linear")
    return [next((word for word in without_attention if attention.get(word)), "full_attention") for attention in plain]


def layer_numbers(got: Any) -> set[int]:
    """The numbers of layers that a list names; a file may name millions."""
    return {i for i in got if isinstance(i, int)} if isinstance(got, list) else set()


def stretch(values: list[Any], depth: int) -> list[Any]:
    """A list repeated or cut to the number of layers."""
    return [values[i % len(values)] for i in range(depth)]


def _words(got: Any) -> list[str]:
    return got if isinstance(got, list) and got and all(isinstance(word, str) for word in got) else []


def _periodic(node: Node, depth: int, key: str, hit: str, miss: str, offset: int = -1) -> list[str]:
    """One layer in `key` is a hit: the last of each run, or the one at an offset."""
    step = node.amount(key, largest=depth + 10_000) or 0
    return [hit if step and i % step == offset % step else miss for i in range(depth)] if step else []


def _pattern(node: Node, depth: int) -> list[str]:
    pattern = node.value("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # EXAONE: "LLLG"
        return ["full_attention" if pattern[i % len(pattern)] == "G" else "sliding_attention" for i in range(depth)]
    return _periodic(node, depth, "sliding_window_pattern", "full_attention", "sliding_attention")


def _global_every(node: Node, depth: int) -> list[str]:
    """ModernBERT counts from the first layer, others from the last of each run."""
    offset = 0 if node.model_type.startswith("modernbert") else -1
    return _periodic(node, depth, "global_attn_every_n_layers", "global", "local", offset=offset)


def _neo(node: Node, depth: int) -> list[str]:
    """GPT-Neo: [[["global", "local"], 12]]."""
    got = node.value("attention_types")
    try:
        words = [word for kinds, times in got for _ in range(min(int(times), depth)) for word in kinds]
    except (TypeError, ValueError):
        return []
    return stretch(words, depth) if words else []


def _indices(key: str, hit: str, miss: str) -> Callable[[Node, int], list[str]]:
    def rule(node: Node, depth: int) -> list[str]:
        got = node.value(key)
        numbers = layer_numbers(got)
        return [hit if i in numbers else miss for i in range(depth)] if isinstance(got, list) else []

    return rule


def _letters(node: Node, depth: int) -> list[str]:
    """Nemotron-H: "M-M*-" with * for attention; an MLP or MoE counts as a layer there."""
    got = node.value("hybrid_override_pattern")
    return [letter.lower() for letter in got][:depth] if isinstance(got, str) else []


def _no_rope(node: Node, depth: int) -> list[str]:
    """Llama 4: layers with RoPE attend in chunks, the others (0 in the list) to everything."""
    got = node.value("no_rope_layers")
    if "attention_chunk_size" not in node.assumed or not isinstance(got, list) or not got:
        return []
    return ["chunked_attention" if rope else "full_attention" for rope in stretch(got, depth)]


def _latest(node: Node, depth: int) -> list[str]:
    """Qwen 2: with use_sliding_window, layers from max_window_layers on slide."""
    if not node.flag("use_sliding_window") or "layer_types" not in node.assumed:
        return []
    first = node.amount("max_window_layers", largest=10**9) or 0
    return ["sliding_attention" if i >= first else "full_attention" for i in range(depth)]


SHORTHANDS: tuple[tuple[str, Callable[[Node, int], list[str]]], ...] = (
    ("sliding_window_pattern", _pattern),
    (
        "_sliding_window_pattern",
        lambda n, d: _periodic(n, d, "_sliding_window_pattern", "full_attention", "sliding_attention"),
    ),
    ("global_attn_every_n_layers", _global_every),
    (
        "full_attention_interval",
        lambda n, d: _periodic(n, d, "full_attention_interval", "full_attention", "linear_attention"),
    ),
    (
        "attn_layer_period",
        lambda n, d: _periodic(
            n, d, "attn_layer_period", "attention", "mamba", offset=n.amount("attn_layer_offset") or 0
        ),
    ),
    ("attn_layer_indices", _indices("attn_layer_indices", "attention", "mamba")),
    ("full_attn_idxs", _indices("full_attn_idxs", "full_attention", "conv")),
    ("global_attn_indexes", _indices("global_attn_indexes", "global", "local")),
    ("fullatt_block_indexes", _indices("fullatt_block_indexes", "global", "local")),
    ("attention_types", _neo),
    ("hybrid_override_pattern", _letters),
    ("no_rope_layers", _no_rope),
    ("use_sliding_window", _latest),
)


def sparse_layers(node: Node, depth: int) -> list[bool]:
    """Which layers send tokens to experts, by the first of these that the config has."""
    words = _words(node.value("mlp_layer_types"))
    if node.has("mlp_layer_types") and words:
        return [word not in ("dense", "mlp") for word in stretch(words, depth)]
    moe_layers = node.value("moe_layers")
    if isinstance(moe_layers, list):
        numbers = layer_numbers(moe_layers)
        return [i in numbers for i in range(depth)]
    sparse = [True] * depth
    for rule in (_first_dense, _sparse_step, _interval, _period, _dense_list):
        sparse = [a and b for a, b in zip(sparse, rule(node, depth), strict=True)]
    if words and sparse == [True] * depth:  # the list that the type assumes, stretched at its end
        return [(words[i] if i < len(words) else words[-1]) not in ("dense", "mlp") for i in range(depth)]
    return sparse


def _first_dense(node: Node, depth: int) -> list[bool]:
    """DeepSeek: the first k layers are dense, then every moe_layer_freq-th is sparse (a list: one entry per layer)."""
    first = node.amount("first_k_dense_replace", "num_dense_layers", largest=10**9) or 0
    freq = node.value("moe_layer_freq")
    if isinstance(freq, list):
        return [bool(freq[i]) if i < len(freq) else True for i in range(depth)]
    step = freq if isinstance(freq, int) and freq > 0 else 1
    return [i >= first and i % step == 0 for i in range(depth)]


def _sparse_step(node: Node, depth: int) -> list[bool]:
    step = node.amount("decoder_sparse_step", "interleave_moe_layer_step", largest=10**9)
    if step is None:
        return [True] * depth
    return [step > 0 and (i + 1) % step == 0 for i in range(depth)]


def _interval(node: Node, depth: int) -> list[bool]:
    """ERNIE 4.5: from a first layer to a last, one in every interval."""
    start, end = node.amount("moe_layer_start_index", largest=10**9), node.value("moe_layer_end_index")
    if start is None:
        return [True] * depth
    last = end if isinstance(end, int) and end >= 0 else depth - 1
    step = node.amount("moe_layer_interval") or 1
    return [(i + 1) % step == 0 and start <= i <= last for i in range(depth)]


def _period(node: Node, depth: int) -> list[bool]:
    """Jamba: one layer in a period, at an offset."""
    step, offset = node.amount("expert_layer_period"), node.amount("expert_layer_offset") or 0
    return [i % step == offset for i in range(depth)] if step else [True] * depth


def _dense_list(node: Node, depth: int) -> list[bool]:
    dense = layer_numbers(node.value("mlp_only_layers"))
    return [i not in dense for i in range(depth)]
