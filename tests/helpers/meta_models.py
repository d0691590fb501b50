"""The truth that counts are held against: transformers' own classes, built without memory on the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

transformers.logging.set_verbosity_error()

# Small sizes that differ from each other, under every name that configs use; a type takes those it knows.
SMALL: dict[str, Any] = {
    "hidden_size": 48, "n_embd": 48, "d_model": 48, "dim": 48, "num_attention_heads": 6, "n_head": 6, "n_heads": 6,
    "num_heads": 6,
    "attention_heads": 6, "num_key_value_heads": 3, "num_kv_heads": 3, "head_dim": 10, "d_kv": 10,
    "attention_head_dim": 8,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "num_decoder_layers": 3, "encoder_layers": 3,
    "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 4, "intermediate_size": 37,
    "ffn_dim": 37,
    "d_ff": 37, "n_inner": 35, "hidden_dim": 43, "encoder_ffn_dim": 37, "decoder_ffn_dim": 39,
    "intermediate_size_mlp": 41,
    "vocab_size": 71, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 14, "n_positions": 29,
    "max_position_embeddings": 29, "max_source_positions": 23, "max_target_positions": 27, "type_vocab_size": 3,
    "embedding_size": 22, "word_embed_proj_dim": 20, "num_local_experts": 5, "num_experts": 8, "n_routed_experts": 8,
    "moe_num_experts": 5, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 23, "shared_intermediate_size": 31, "n_group": 2, "topk_group": 1,
    "sliding_window": 7,
    "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 11,
    "q_lora_rank": 13, "kv_lora_rank": 17, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 9,
    "image_size": 28,
    "patch_size": 7, "num_register_tokens": 3, "num_mel_bins": 9,
}  # fmt: skip
SMALL_VISION = {
    "hidden_size": 54,
    "num_attention_heads": 3,
    "num_heads": 3,
    "embed_dim": 36,
    "depth": 2,
    "out_hidden_size": 48,
}
# What a type needs beside, to be built at these sizes at all.
EXTRA_SIZES: dict[str, dict[str, Any]] = {
    "diffllama": {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 6},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 8, "moe_intermediate_size": 19, "first_k_dense_replace": 1,
    "head_dim": 10},
    "gemma3n_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 2, "head_dim": 8, "laurel_rank": 5,
    "altup_num_inputs": 3,
                     "intermediate_size": 37, "layer_types": None, "activation_sparsity_pattern": None},
    "gemma4_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 12, "num_experts": 4, "top_k_experts": 2,
                    "moe_intermediate_size": 19},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 6, "num_experts": 8, "first_k_dense_replace": 1},
    "lfm2": {"full_attn_idxs": [1, 3], "conv_L_cache": 3, "layer_types": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "intermediate_size": 35},
    "qwen2_vl_vision": {"hidden_size": 48},
}  # fmt: skip
# Booleans that change no shape, or that no checkpoint of the type has.
IGNORED = {"use_cache", "return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder", "is_decoder"}


def classes(model_type: str) -> list[str]:
    """The model classes that transformers' auto classes know for a type."""
    class_names: set[str] = set()
    for name in dir(modeling_auto):
        table = getattr(modeling_auto, name)
        if name.endswith("_MAPPING_NAMES") and "MODEL" in name and model_type in table:
            entry = table[model_type]
            class_names |= {entry} if isinstance(entry, str) else set(entry)
    return sorted(name for name in class_names if hasattr(transformers, name))


def small(model_type: str) -> dict[str, Any]:
    """A small config of a type, its towers small as well."""
    config = CONFIG_MAPPING[model_type]()
    plain = config.to_dict()
    sizes = {key: value for key, value in SMALL.items() if key in plain and not isinstance(plain[key], list | dict)}
    for key, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig) and value.model_type in CONFIG_MAPPING:
            sizes[key] = small(value.model_type) | {"model_type": value.model_type}
            if key == "vision_config":
                vision_keys = value.to_dict()
                sizes[key] |= {name: size for name, size in SMALL_VISION.items() if name in vision_keys}
                sizes[key] |= EXTRA_SIZES.get(value.model_type, {})
    if isinstance(plain.get("pad_token_id"), int) and plain["pad_token_id"] > 20:
        sizes["pad_token_id"] = 0
    return sizes | EXTRA_SIZES.get(model_type, {})


def variants(model_type: str) -> Iterator[dict[str, Any]]:
    """The small config, one with each boolean turned over, one with other head and layer counts, and the default."""
    base = small(model_type)
    plain = CONFIG_MAPPING[model_type]().to_dict()
    yield base
    for key, value in plain.items():
        if isinstance(value, bool) and key not in IGNORED:
            yield base | {key: not value}
    yield base | {key: 2 * base[key] for key in ("num_attention_heads", "n_head", "num_heads") if key in base}
    yield base | {
        key: base[key] + 2 for key in ("num_hidden_layers", "n_layer", "vocab_size", "intermediate_size") if key in base
    }
    yield {}


def build_on_meta(model_type: str, name: str, sizes: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
    """A class's config as a file would have it, and its number of parameters; None where it cannot be built so."""
    try:
        config = CONFIG_MAPPING[model_type](**sizes)
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
    except Exception:  # heads that do not fit, sizes that the class refuses: there is no truth to compare with
        return None
    return json.loads(config.to_json_string(use_diff=False)), sum(p.numel() for p in model.parameters())
