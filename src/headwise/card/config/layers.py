"""The heads of every layer of one config: under which keys they are, and how layers differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError
from ..types import Attention, Layer, Source
from . import keys as names
from . import layer_types
from .node import LARGEST, MOST_LAYERS, Node

Keys = tuple[str, ...]


@dataclass(eq=False, repr=False)
class Stack:
    """The numbers of one stack of layers, each with its source; the layers are made from them."""

    node: Node
    side: str = ""  # "encoder" or "decoder" of a flat config that has both
    causal: bool = False
    cross: bool = False  # every layer also attends to an encoder with a config of its own
    numbers: dict[str, int | None] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return self.numbers.get("blocks") or self.numbers["layers"] or 0

    def read(self, name: str, keys: Keys, *, least: int = 0, largest: int = LARGEST) -> int | None:
        number, source = self.node.number(*keys, least=least, largest=largest)
        return self.note(name, number, source)

    def note(self, name: str, number: int | None, source: Source | None) -> int | None:
        self.numbers[name] = number
        if source is not None:
            self.sources[name] = source
        return number

    def derive(self, name: str, number: int | None, rule: str) -> int | None:
        return self.note(name, number, Source("derived", rule))


def read_stack(node: Node, side: str = "", *, causal: bool = False, cross: bool = False) -> tuple[Stack, Attention]:
    """The numbers of a config's stack and each of its layers."""
    stack = Stack(node, side, causal, cross)
    layers, heads, ffn = names.SIDES.get(side, (names.LAYERS, (), ()))
    stack.read("width", names.OWN_WIDTH.get(node.model_type, names.WIDTH), least=1)
    stack.read("layers", layers, largest=MOST_LAYERS)
    stack.read("query_heads", heads + names.HEADS, least=1)
    _depth(stack)
    _kv_heads(stack)
    _head_dim(stack)
    stack.read("ffn", ffn + names.FFN)
    _ffn(stack)
    stack.read("vocab", names.VOCAB)
    stack.read("context", names.CONTEXT)
    if stack.read("experts", names.EXPERTS):
        stack.read("experts_per_token", names.EXPERTS_PER_TOKEN)
        stack.read("expert_ffn", names.EXPERT_FFN)
        stack.read("shared_experts", names.SHARED_EXPERTS)
    return stack, Attention(tuple(_layers(stack)))


def _depth(stack: Stack) -> None:
    """The number of blocks: the stages of a pyramid add up, LongCat has two attentions per layer."""
    node, numbers = stack.node, stack.numbers
    stages = node.sequence("depths") or node.sequence("block_sizes")
    if times := names.ATTENTIONS_PER_LAYER.get(node.model_type):
        stack.derive(
            "layers", min(times * (numbers["layers"] or 0), MOST_LAYERS), f"{times} attentions for each of num_layers"
        )
    elif numbers["layers"] is None and (words := node.sequence("layers_block_type") or node.sequence("layer_types")):
        stack.derive("layers", min(len(words), MOST_LAYERS), "the number of entries of the list of layer types")
    if stages and all(isinstance(n, int) and 0 <= n <= MOST_LAYERS for n in stages) and len(stages) < 100:
        total = min(sum(stages), MOST_LAYERS)
        if numbers["layers"] is None or node.sequence("block_sizes"):
            stack.derive("layers", total, "the sum over the stages")
        stack.derive("blocks", total, "the sum over the stages")


def _kv_heads(stack: Stack) -> None:
    node, query = stack.node, stack.numbers["query_heads"]
    if query is None:
        return
    nested = node.value("attn_config")
    if isinstance(nested, dict) and isinstance(nested.get("kv_n_heads"), int):
        stack.note("kv_heads", nested["kv_n_heads"], Source("read", node.place("attn_config.kv_n_heads")))
    elif node.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        _falcon(stack, query)
    elif node.used(("multi_query_group_num",)) and node.has("multi_query_group_num"):  # ChatGLM
        multi_query = node.flag("multi_query_attention")
        stack.read("kv_heads", ("multi_query_group_num",), least=1) if multi_query else _as_many_as_query(stack, query)
    elif node.used(("multi_query",)) and node.flag("multi_query"):
        stack.note("kv_heads", 1, Source("derived", "multi_query: one key/value head for all"))
    elif node.model_type == "gpt_bigcode":  # its number of KV heads is used only with multi_query
        _as_many_as_query(stack, query)
    elif stack.side == "decoder" and node.value("decoder_num_key_value_heads") is not None:
        stack.read("kv_heads", ("decoder_num_key_value_heads",), least=1)
    else:
        encoder = ("encoder_num_key_value_heads",) * (stack.side == "encoder")
        if stack.read("kv_heads", encoder + node.used(names.KV_HEADS), least=1) is None:
            _as_many_as_query(stack, query)
    if node.map.get("num_key_value_heads") in ("encoder_attention_heads", "num_attention_heads"):
        _as_many_as_query(stack, query)


def _as_many_as_query(stack: Stack, query: int) -> None:
    reason = _unused(stack.node, names.KV_HEADS) or ", since the config has no other number"
    stack.derive("kv_heads", query, f"as many as query heads{reason}")


def _unused(node: Node, keys: Keys) -> str:
    """That the type does not use a key which the file has, in words; "" where it has none of them."""
    unused = next((key for key in keys if node.has(key) and key not in node.used(keys)), None)
    return f"; {node.model_type} does not use {node.place(unused)}" if unused else ""


def _falcon(stack: Stack, query: int) -> None:
    """num_kv_heads is used only in the new architecture; multi_query means one KV head."""
    if stack.node.flag("new_decoder_architecture"):
        if stack.read("kv_heads", ("num_kv_heads", "n_head_kv"), least=1) is None:
            _as_many_as_query(stack, query)
    elif stack.node.flag("multi_query"):
        stack.derive("kv_heads", 1, "multi_query without new_decoder_architecture: one key/value head for all")
    else:
        _as_many_as_query(stack, query)


def _head_dim(stack: Stack) -> None:
    node, query, width = stack.node, stack.numbers["query_heads"], stack.numbers["width"]
    rope, nope = node.amount("qk_rope_head_dim"), node.amount("qk_nope_head_dim")
    stack.read("latent", node.used(("kv_lora_rank",)))
    if stack.numbers["latent"] and rope is not None and nope is not None:
        stack.derive("head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim (head_dim in the file is RoPE's)")
        stack.read("value_dim", ("v_head_dim",), least=1)
        stack.derive("kv_heads", query, "MLA: every head has its own keys and values, computed from one latent")
        stack.derive(
            "latent", stack.numbers["latent"] + rope, "kv_lora_rank + qk_rope_head_dim, cached per token and layer"
        )
        return
    stack.numbers["latent"] = None
    stack.sources.pop("latent", None)
    if stack.read("head_dim", node.used(names.HEAD_DIM), least=1) is None and query and width:
        wide = width * names.TIMES_WIDTH.get(node.model_type, 1)
        rule = f"width / query heads: {wide} / {query}{_unused(node, names.HEAD_DIM)}"
        stack.derive("head_dim", max(wide // query, 1), rule)
    stack.read("value_dim", node.used(("v_head_dim",)), least=1)


def _ffn(stack: Stack) -> None:
    node, width = stack.node, stack.numbers["width"]
    if stack.numbers["ffn"] is None and width:
        ratio = node.value("mlp_ratio", "expansion_ratio")
        if isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 < ratio < 1e6:
            stack.derive("ffn", int(width * ratio), f"mlp_ratio x width: {ratio} x {width}")
        elif "n_inner" in node.assumed or "ffn_hidden_size" in node.assumed or node.model_type in FOURFOLD:
            stack.derive("ffn", 4 * width, "4 x width, since the config has no other number")


FOURFOLD = ("falcon", "bloom", "gpt2", "gptj", "gpt_neo", "codegen", "gpt_bigcode", "RefinedWeb", "RefinedWebModel")


def _layers(stack: Stack) -> list[Layer]:
    depth, node = stack.depth, stack.node
    words = layer_types.layer_words(node, depth)
    window = _window(stack)
    if stack.numbers["query_heads"] is None or node.model_type in names.NO_ATTENTION:
        mixers = words or [node.model_type or "no attention"] * depth
        return [Layer(i, stack.numbers["width"] or 0, kind="none", mixer=word) for i, word in enumerate(mixers)]
    stages = _stages(stack, depth)
    first_shared = depth - (node.amount(*node.used(("num_kv_shared_layers",))) or 0)
    cross = _cross(stack, depth)
    layers = []
    for i in range(depth):
        base = _plain(stack, i, words[i] if words else None, window) | stages[i] | {"causal": stack.causal}
        layer = Layer(index=i, **base, shares=i >= first_shared > 0)
        if cross[i] != "instead":
            layers.append(layer)
        if cross[i]:
            cross_numbers = {k: v for k, v in base.items() if k not in ("kind", "window", "causal")} | _cross_heads(
                node
            )
            layers.append(Layer(index=i, **cross_numbers, role="cross"))
    return layers


def _plain(stack: Stack, i: int, word: str | None, window: int | None) -> dict[str, Any]:
    """The numbers of one layer: its own before those of its kind before those of the stack."""
    node, numbers = stack.node, stack.numbers
    kind = _kind(word, window, node)
    heads = {"query": numbers["query_heads"], "kv": numbers.get("kv_heads"), "dim": numbers.get("head_dim")}
    if kind == "linear":
        heads = _linear(node, heads)
    heads |= _by_kind(node, kind) | _by_layer(stack, i)
    dim = heads["dim"] or 1
    value_dim = numbers.get("value_dim") if kind != "linear" else heads.get("value_dim")
    if kind == "sliding" and (swa := node.amount("swa_v_head_dim")):
        value_dim = swa
    return {
        "width": numbers["width"] or (heads["query"] or 1) * dim,
        "query": heads["query"] or 1,
        "kv": heads["kv"] or 1,
        "dim": dim,
        "value_dim": value_dim or dim,
        "kind": kind,
        "window": window if kind in ("sliding", "chunked") else None,
        "latent": (numbers.get("latent") or 0) if kind not in ("linear", "none") else 0,
        "mixer": word if kind in ("none", "linear") and word else "",
    }


def _kind(word: str | None, window: int | None, node: Node) -> str:
    if word is None:
        slides = window is not None and node.value("use_sliding_window") is not False
        return "sliding" if slides else "full"
    kind = names.LAYER_KINDS.get(word.lower(), "full" if "attention" in word else "none")
    if kind == "linear" and not any(
        node.value(key) is not None for key in ("linear_num_value_heads", "linear_num_heads")
    ):
        return "linear" if node.model_type == "minimax" else "none"  # Mamba under the newer word
    return "full" if kind == "sliding" and window is None else kind


def _linear(node: Node, heads: dict[str, int | None]) -> dict[str, int | None]:
    """Delta nets count value heads (as queries here) and key heads."""
    value, key = node.amount("linear_num_value_heads", "linear_num_heads"), node.amount("linear_num_key_heads")
    if value is None:
        return heads
    dims = (
        node.amount("linear_key_head_dim", "linear_head_dim"),
        node.amount("linear_value_head_dim", "linear_head_dim"),
    )
    return {"query": value, "kv": key or value, "dim": dims[0], "value_dim": dims[1]}


# Keys of the heads of sliding layers, where they differ.
SLIDING: dict[str, Keys] = {
    "query": ("swa_num_attention_heads", "num_sliding_attention_heads"),
    "kv": ("swa_num_key_value_heads",),
    "dim": ("swa_head_dim",),
}
FULL: dict[str, Keys] = {"dim": ("global_head_dim",), "kv": ("num_global_key_value_heads",)}  # raw Gemma 4
BY_KIND: dict[str, dict[str, Keys]] = {"sliding": SLIDING, "full": FULL}
PER_LAYER = {
    "query": ("num_attention_heads_per_layer", "num_query_heads", "num_attention_heads"),
    "kv": ("num_key_value_heads_per_layer", "num_kv_heads", "num_key_value_heads"),
    "dim": ("head_dim",),
}


def _by_kind(node: Node, kind: str) -> dict[str, int | None]:
    table = BY_KIND.get(kind, {})
    numbers = {name: node.amount(*keys, least=1) for name, keys in table.items()}
    if kind == "full" and not node.flag("attention_k_eq_v"):
        numbers.pop("kv", None)  # raw Gemma 4 has the number, and uses it only with attention_k_eq_v
    if (
        kind == "full"
        and "per_layer_config" not in node.raw
        and node.model_type in GLOBAL_512
        and not numbers.get("dim")
    ):
        numbers["dim"] = 512
    return {name: number for name, number in numbers.items() if number is not None}


GLOBAL_512 = ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "embedding_gemma2_text")


def _by_layer(stack: Stack, i: int) -> dict[str, int | None]:
    """Lists with one entry per layer (OpenELM, Laguna), and Gemma 4's per_layer_config."""
    node, depth = stack.node, stack.depth
    numbers: dict[str, int | None] = {}
    for name, keys in PER_LAYER.items():
        for key in keys:
            values = node.raw.get(key)
            if isinstance(values, list) and len(values) == depth:
                source = Source("read", f"{node.place(key)}[{i}]")
                numbers[name] = node._whole(source, values[i], 1, LARGEST)
                break
    numbers |= _block(stack, i)
    table = node.raw.get("per_layer_config")
    row = next((table[k] for k in (f"{i:02d}", str(i)) if k in table), None) if isinstance(table, dict) else None
    if isinstance(row, dict):
        for name, key in (("query", "num_attention_heads"), ("kv", "num_key_value_heads"), ("dim", "head_dim")):
            if row.get(key) is not None:
                source = Source("read", f"{node.place('per_layer_config')}.{i}.{key}")
                numbers[name] = node._whole(source, row[key], 1, LARGEST)
    return numbers


def _block(stack: Stack, i: int) -> dict[str, int | None]:
    """Nemotron-NAS gives the size of a layer's groups instead of its KV heads."""
    blocks, query = stack.node.raw.get("block_configs"), stack.numbers["query_heads"]
    attention = blocks[i].get("attention") if isinstance(blocks, list) and _is_dict(blocks, i) else None
    group = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
    if not isinstance(group, int) or isinstance(group, bool) or group < 1 or not query:
        return {}
    return {"kv": max(query // group, 1)}


def _is_dict(blocks: list[Any], i: int) -> bool:
    return i < len(blocks) and isinstance(blocks[i], dict)


def _stages(stack: Stack, depth: int) -> list[dict[str, Any]]:
    """A pyramid's stages (Swin, SegFormer): heads and width change with the stage."""
    node, plain = stack.node, [dict[str, Any]() for _ in range(depth)]
    depths = node.sequence("depths")
    heads = next((got for key in ("num_heads", "num_attention_heads") if (got := node.sequence(key))), None)
    if not depths or not heads or len(heads) != len(depths):
        return plain
    widths = node.sequence("hidden_sizes") or node.sequence("embed_dims") or node.sequence("embed_dim")
    first = node.amount("embed_dim") or stack.numbers["width"] or 1
    first_layer = 0
    for stage, (count, number) in enumerate(zip(depths, heads, strict=True)):
        width = widths[stage] if widths and len(widths) == len(depths) else first * 2**stage
        if not (
            isinstance(width, int) and isinstance(number, int) and isinstance(count, int) and number > 0 and width > 0
        ):
            raise CheckpointError(f"{node.place('depths')} and its heads must be whole numbers, got stage {stage}")
        for i in range(first_layer, min(first_layer + count, depth)):
            dim = max(width // number, 1)
            plain[i] = {"width": width, "query": number, "kv": number, "dim": dim, "value_dim": dim}
        first_layer += count
    return plain


def _window(stack: Stack) -> int | None:
    """How many keys a query of a windowed layer may attend to, its own included."""
    node = stack.node
    if node.model_type.startswith("llama4") or node.has("attention_chunk_size"):
        return stack.read("window", ("attention_chunk_size",), least=1)
    if (patches := _image_window(node)) is not None:
        return stack.derive("window", patches, "a square window of the image, in patches")
    keys = [key for key in names.WINDOW if not (key == "window_size" and node.model_type not in TOKEN_WINDOWS)]
    got, source = node.find(*keys)
    if isinstance(got, bool) or got is None or isinstance(got, list) or got == 0 or got == -1:
        return None
    if node.value("use_sliding_window") is False and source is not None and source.detail.endswith("sliding_window"):
        return None
    return stack.note("window", node._whole(source, got, 1, LARGEST), source)


def _image_window(node: Node) -> int | None:
    """Windows over an image: Qwen-VL gives pixels, Swin and SAM patches along a side."""
    side, patch = node.value("window_size"), node.value("patch_size")
    pixels = node.value("fullatt_block_indexes") is not None
    squares = pixels or node.value("global_attn_indexes") is not None or node.sequence("depths") is not None
    if not squares or isinstance(side, bool) or not isinstance(side, int) or not 0 < side < 10**6:
        return None
    if pixels:
        side = side // patch if isinstance(patch, int) and 0 < patch <= side else side
    return side**2


TOKEN_WINDOWS = ("gpt_neo",)  # elsewhere window_size is patches of an image, or pixels


def _cross(stack: Stack, depth: int) -> list[str]:
    """Cross-attention per layer: "" (self-attention alone), "also" or "instead"."""
    layers = stack.node.value("cross_attention_layers")
    if isinstance(layers, list):
        numbers = layer_types.layer_numbers(layers)
        return ["instead" if i in numbers else "" for i in range(depth)]
    also = (
        stack.cross or stack.side == "decoder" or (stack.side != "encoder" and stack.node.flag("add_cross_attention"))
    )
    return ["also" if also else ""] * depth


def _cross_heads(node: Node) -> dict[str, int]:
    """Heads of cross-attention, where they differ from those of self-attention (Dia)."""
    query, kv = (node.amount(f"cross_num_{name}_heads", least=1) for name in ("attention", "key_value"))
    dim = node.amount("cross_head_dim", least=1)
    numbers = {"query": query, "kv": kv or query, "dim": dim, "value_dim": dim}
    return {name: number for name, number in numbers.items() if number}
