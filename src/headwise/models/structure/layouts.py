"""Tables of names: which linear layers hold W_Q, W_K and W_V in which order, and which parameters have heads."""

from __future__ import annotations

from collections.abc import Callable

Block = tuple[str, int]  # the rows of one head: its role ("q", "k", "v") and its number
Layout = Callable[[int, int], list[Block]]  # (query heads, KV heads) -> the order of a linear layer's rows


def _grouped_blocks(query: int, kv: int) -> list[Block]:
    """Each group's queries, then its key and its value: NeoX and BLOOM with one head per group, Falcon with more."""
    size = query // kv
    return [
        block
        for group in range(kv)
        for block in [*(("q", group * size + i) for i in range(size)), ("k", group), ("v", group)]
    ]


SLICES = 4  # CodeGen's rows are in four slices, once for four devices


def _sliced_blocks(query: int, kv: int) -> list[Block]:
    """Each slice's queries, then its values, then its keys: CodeGen's order."""
    size = query // SLICES
    return [(role, first + i) for first in range(0, query, size) for role in "qvk" for i in range(size)]


LAYOUTS: dict[str, Layout] = {
    "q": lambda query, kv: [("q", i) for i in range(query)],
    "k": lambda query, kv: [("k", i) for i in range(kv)],
    "v": lambda query, kv: [("v", i) for i in range(kv)],
    "kv": lambda query, kv: [(role, i) for role in "kv" for i in range(kv)],
    "qkv": lambda query, kv: [("q", i) for i in range(query)] + [(role, i) for role in "kv" for i in range(kv)],
    "grouped": _grouped_blocks,
    "sliced": _sliced_blocks,
}
# Names of linear layers, inside the attention module, by the layout of their rows.
LAYER_NAMES = {
    "q": ("q_proj", "query", "q", "q_lin", "query_proj", "q_b_proj", "q_attn", "to_q", "linear_q", "Wq", "wq",
          "q_linear", "project_q", "query_global", "pos_query_proj", "pos_q_proj", "pos_key_proj", "pos_proj",
          "linear_pos", "w2e_query", "e2w_query", "e2e_query", "q_gate_proj", "W_Q", "W_q", "w_q"),
    "k": ("k_proj", "key", "k", "k_lin", "key_proj", "to_k", "linear_k", "Wk", "wk", "k_linear", "project_k",
          "key_global", "W_K", "W_k", "w_k"),
    "v": ("v_proj", "value", "v", "v_lin", "value_proj", "to_v", "linear_v", "Wv", "wv", "v_linear", "project_v",
          "value_global", "W_V", "W_v", "w_v"),
    "mla": ("kv_b_proj",),
    "kv": ("to_kv",),
    "qkv": ("qkv_proj", "qkv", "Wqkv", "c_attn", "W_pack"),
    "grouped": ("query_key_value", "in_proj"),
}  # fmt: skip
# Where a name has another layout in one architecture, None where its heads cannot be cut out:
# (part of the class's full name, name of the layer, layout).
EXCEPTIONS = (
    ("GPTBigCode", "c_attn", "grouped"),
    ("codegen.", "qkv_proj", "sliced"),
    ("HYV4", "gate_proj", "q"),
    ("step3p7.", "g_proj", "q"),  # a gate per head, or per entry of its output
    ("laguna.", "g_proj", "q"),
    ("timm.", "gate", "q"),  # one number per entry of the heads' outputs
    ("DiffLlama", "q_proj", None),  # a head's output is the difference of two heads' outputs
    ("MiniMaxLightning", "qkv_proj", None),
    # their code derives the width of a head, or of all heads, from the width of the model
    ("blip", "qkv", None),
    ("fsmt.", "q_proj", None),
    ("Longformer", "query", None),
    ("LEDEncoderSelf", "query", None),
    ("LongT5Local", "q", None),
    ("LongT5TransientGlobal", "q", None),
    ("PegasusXGlobalLocal", "q_proj", None),
)
# Parameters with entries per head: the dimension that counts heads, and whether query, key or value heads.
PER_HEAD = {
    "sinks": (0, "q"),
    "relative_attention_bias.weight": (1, "q"),
    "relative_position_bias_table": (1, "q"),
    "relative_position_bias.relative_position_bias_table": (1, "q"),
    "logit_scale": (0, "q"),
    "continuous_position_bias_mlp.2.weight": (0, "q"),
    "gru_rel_pos_const": (1, "q"),
    "pos_bias_u": (0, "q"),
    "pos_bias_v": (0, "q"),
    "q_norm.weight": (0, "q"),
    "k_norm.weight": (0, "k"),
    "q_bias": (0, "q"),
    "v_bias": (0, "v"),
    "softmax_scaling.scale": (0, "q"),
    "softmax_scaling.bias": (0, "q"),
}
# Other parts of attention modules: the same for all heads.
SAME_FOR_ALL_HEADS = (
    "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "distance_embedding", "gru_rel_pos_linear",
    "continuous_position_bias_mlp.0", "rotary_emb", "inner_attn", "emb_rel_k", "emb_rel_v", "rel_pos_h", "rel_pos_w",
    "LayerNorm",  # ALBERT's, after W_O
    "indexer",  # DeepSeek's sparse attention: its own heads choose the keys for all heads
)  # fmt: skip
