"""Small GGUF files with random weights and a tokenizer, written as llama.cpp's own converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = ["<unk>", "<s>", "</s>", "\u0120", "\u010a", *LETTERS, *(f"\u0120{letter}" for letter in "abcdefghi")]
MERGES = [f"\u0120 {letter}" for letter in "abcdefghi"]
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 64,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def build_model(model_type: str = "llama", **changes: Any) -> Any:
    """A language model whose parameters are all random and large enough that a mistake shows."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() > 1 else 0.1)
    return model


def write_gguf(path: Path, model: Any) -> Path:
    """A model of the types llama, qwen2 or qwen3 in float32, without any code of headwise."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("a small model")
    writer.add_license("mit")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = permute(data, config.head_dim)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """As LlamaModel.permute of llama.cpp's converter, which counts heads."""
    heads = rows.shape[0] // head_dim
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape))
