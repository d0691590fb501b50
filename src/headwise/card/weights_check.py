"""Weights by their names and shapes: how many parameters they have, and where they contradict a config."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .parameters.table import facts_of
from .sources.safetensors import Tensor, Tensors
from .types import Counts, Layer, Part, Source

# The first pattern that matches a tensor's name gives its group.
GROUPS = (
    ("norms", re.compile(r"norm|(^|\.)ln_|layrnorm|\bln\d?\b|LayerNorm")),
    ("embeddings", re.compile(r"embed|embd|wte|wpe|token_types|cls_token|position|shared\.weight")),
    (
        "attention",
        re.compile(r"attn|attention|self_att|q_proj|k_proj|v_proj|o_proj|SelfAttention|EncDecAttention|Wqkv|ssm|mamba"),
    ),
    ("ffn", re.compile(r"mlp|ffn|feed_forward|intermediate|expert|moe|fc1|fc2|DenseReluDense|\.output\.dense|router")),
)
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|blk)\.(\d+)\.")
# A layer's projections -> endings of the names of their tensors. Rows are outputs, except in Conv1D (GPT-2).
PROJECTIONS = {
    "query": (
        "q_proj.weight",
        "attention.self.query.weight",
        "attn_q.weight",
        "q_lin.weight",
        "SelfAttention.q.weight",
    ),
    "key": ("k_proj.weight", "attention.self.key.weight", "attn_k.weight", "k_lin.weight", "SelfAttention.k.weight"),
    "value": (
        "v_proj.weight",
        "attention.self.value.weight",
        "attn_v.weight",
        "v_lin.weight",
        "SelfAttention.v.weight",
    ),
    "fused": ("qkv_proj.weight", "query_key_value.weight", "Wqkv.weight", "attn_qkv.weight"),
}
GATES = ("gate_proj.weight", "gate_up_proj.weight", "gate_up_proj", "w1.weight", "ffn_gate.weight", "wi_0.weight")
UPS = (
    "up_proj.weight",
    "fc1.weight",
    "c_fc.weight",
    "dense_h_to_4h.weight",
    "intermediate.dense.weight",
    "fc_in.weight",
    "ffn_up.weight",
)
WORDS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "token_embd.weight",
    "shared.weight",
    "embed_in.weight",
)
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


NO_NUMBERS = ("I64", "BOOL")  # position_ids and masks in old checkpoints: not parameters


def group(name: str) -> str:
    if any(name == head or name.endswith("." + head) for head in HEADS) and not LAYER.search(name):
        return "other"
    return next((group_name for group_name, pattern in GROUPS if pattern.search(name)), "other")


def counts(tensors: Tensors) -> Counts:
    """The parameters in the file, grouped by their names."""
    sums: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in NO_NUMBERS:
            continue
        sums[group(name)] = sums.get(group(name), 0) + tensor.size
    return Counts(**sums)


def by_layer(tensors: Tensors) -> dict[int | None, Tensors]:
    """The tensors of each layer, and under None those of no layer."""
    layers: dict[int | None, Tensors] = {}
    for name, tensor in tensors.items():
        match = LAYER.search(name)
        layers.setdefault(int(match[1]) if match else None, {})[name] = tensor
    return layers


def _first(tensors: Tensors, endings: tuple[str, ...]) -> tuple[str, Tensor] | None:
    for name, tensor in tensors.items():
        if name.endswith(endings) and len(tensor.shape) == 2 and "encoder_attn" not in name and "vision" not in name:
            return name, tensor
    return None


def contradictions(part: Part, tied: bool, tensors: Tensors) -> Iterator[str]:
    """Where the weights contradict the config, one sentence each."""
    yield from _layers(part, tensors)
    layers = by_layer(tensors)
    for layer in {layer.index: layer for layer in part.layers if layer.role == "self"}.values():
        problems = list(_projections(layer, layers.get(layer.index, {})))
        if problems:
            yield from problems
            break  # the other layers would say the same
    yield from _words(part, tied, layers.get(None, {}))
    yield from _gate(part, layers.get(0, {}))


def _layers(part: Part, tensors: Tensors) -> Iterator[str]:
    numbers = [int(match[1]) for name in tensors if "vision" not in name and (match := LAYER.search(name))]
    if numbers and part.model_type != "albert" and part.depth not in (max(numbers) + 1, 0):
        yield f"the config says {part.depth} layers, the weights have {max(numbers) + 1}"


def _projections(layer: Layer, tensors: Tensors) -> Iterator[str]:
    if layer.latent or layer.sharing == "none":
        return
    sizes = {"query": (layer.query, layer.dim), "key": (layer.kv, layer.dim), "value": (layer.kv, layer.value_dim)}
    fused = _first(tensors, PROJECTIONS["fused"])
    if fused:
        rows, expected = fused[1].shape[0], sum(heads * dim for heads, dim in sizes.values())
        if rows != expected:
            sizes_in_words = f"{layer.query} query and {layer.kv} key/value heads of {layer.dim}"
            yield f"{fused[0]} has {rows} rows; {sizes_in_words} make {expected}"
        return
    for name, (heads, dim) in sizes.items():
        projection = _first(tensors, PROJECTIONS[name])
        if projection is None:
            continue
        title, rows, expected = projection[0], projection[1].shape[0], heads * dim
        if rows != expected:
            fits = f"; {rows // heads} per head would fit" if rows % heads == 0 else ""
            yield f"{title} has {rows} rows; {heads} heads with head_dim {dim} make {expected}{fits}"


def _words(part: Part, tied: bool, tensors: Tensors) -> Iterator[str]:
    embeddings, head = _first(tensors, WORDS), _first(tensors, HEADS)
    vocab = part.numbers.get("vocab")
    if embeddings and vocab and embeddings[1].shape[0] != vocab:
        yield f"{embeddings[0]} has {embeddings[1].shape[0]:,} rows; the config says a vocabulary of {vocab:,}"
    writes = any(layer.causal for layer in part.layers)
    if writes and embeddings and head and tied:
        yield f"the config ties the output layer to the embeddings, and the weights have {head[0]} of their own"
    if writes and embeddings and not head and not tied:
        yield "the config says the output layer is not tied to the embeddings, and the weights have none of their own"


def _gate(part: Part, tensors: Tensors) -> Iterator[str]:
    facts = facts_of(part.model_type)
    if facts is None or not isinstance(facts.gated, bool) or facts.ffn is not None:
        return
    gate, up = _first(tensors, GATES), _first(tensors, UPS)
    if facts.gated and up and not gate:
        yield f"{part.model_type} has a gated feed-forward part, and the weights have {up[0]} without a gate"
    if not facts.gated and gate:
        yield f"{part.model_type} has no gate in its feed-forward part, and the weights have {gate[0]}"
    inner = part.numbers.get("ffn")
    if (
        up
        and inner
        and up[0].endswith(("up_proj.weight", "fc1.weight"))
        and up[1].shape[0] != inner
        and not part.numbers.get("experts")
    ):
        yield f"{up[0]} has {up[1].shape[0]} rows; the config says a feed-forward width of {inner}"


def sizes(tensors: Tensors) -> tuple[dict[str, int | None], dict[str, Source]]:
    """What shapes alone say: layers, width, vocabulary, and query rows per key row."""
    numbers: dict[str, int | None] = {}
    sources: dict[str, Source] = {}

    def note(name: str, number: int, rule: str) -> None:
        numbers[name], sources[name] = number, Source("derived", rule)

    layer_numbers = [int(match[1]) for name in tensors if (match := LAYER.search(name))]
    if layer_numbers:
        note("layers", max(layer_numbers) + 1, "1 + the highest layer number in the names of the weights")
    if words := _first(tensors, WORDS):
        note("vocab", words[1].shape[0], f"rows of {words[0]}")
        note("width", words[1].shape[1], f"columns of {words[0]}")
    first = by_layer(tensors).get(0, {})
    query, key = _first(first, PROJECTIONS["query"]), _first(first, PROJECTIONS["key"])
    if query and key and key[1].shape[0] and query[1].shape[0] % key[1].shape[0] == 0:
        note("group", query[1].shape[0] // key[1].shape[0], f"rows of {query[0]} / rows of {key[0]}")
    return numbers, sources
