"""How llama.cpp names and orders the tensors of the Llama family, both ways, and the keys of headwise in a GGUF file.

A file that headwise wrote has the config and the record of heads of its model as two strings. llama.cpp ignores them;
headwise.load builds the model from them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

CONFIG_KEY = "headwise.config"  # config.json
RECORD_KEY = "headwise.record"  # headwise.json
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> llama.cpp's

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE_NAMES, _IN_BLOCK_NAMES = ({name: key for key, name in names.items()} for names in (OUTSIDE, IN_BLOCK))
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
INTERLEAVED = ("llama", "deci")  # architectures that rotate neighbouring rows; transformers rotates halves


def copy_fields(reader: Any, writer: Any, prefixes: tuple[str, ...], without: tuple[str, ...] = ()) -> None:
    """Copy the metadata of a GGUF file whose keys begin with one of the prefixes."""
    import gguf

    for name, field in reader.fields.items():
        if name.startswith(prefixes) and name not in without:
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def gguf_name(name: str) -> str | None:
    """llama.cpp's name of a tensor in a state dict, or None."""
    path, _, suffix = name.rpartition(".")
    if path in _OUTSIDE_NAMES:
        return f"{_OUTSIDE_NAMES[path]}.{suffix}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    part = _IN_BLOCK_NAMES.get(match[2]) if match else None
    return None if match is None or part is None else f"blk.{match[1]}.{part}.{suffix}"


def state_name(name: str) -> str | None:
    """The name in a state dict of one of llama.cpp's tensors, or None."""
    path, _, suffix = name.rpartition(".")
    if path in OUTSIDE:
        return f"{OUTSIDE[path]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", path)
    part = IN_BLOCK.get(match[2]) if match else None
    return None if match is None or part is None else f"model.layers.{match[1]}.{part}.{suffix}"


def is_rotated(name: str) -> bool:
    """Whether a tensor of a state dict, a weight or a bias, has rows that RoPE rotates."""
    return any(f".{part}." in name for part in ROTATED)


def interleave(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """The rows of W_Q or W_K, whose halves RoPE rotates, as pairs of neighbours, head by head."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def separate(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """The inverse of `interleave`."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)
