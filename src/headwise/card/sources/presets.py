"""Well-known models, as the configs they were published with; no file and no network needed."""

from __future__ import annotations

from typing import Any

from ...shapes import PRESETS, Shape


def _llama(
    width: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, context: int, **changes: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab,
        "max_position_embeddings": context, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    } | changes  # fmt: skip


def _llama3(
    width: int, layers: int, heads: int, ffn: int, factor: float | None = None, **changes: Any
) -> dict[str, Any]:
    """Llama 3, and from 3.1 on with slower rotary frequencies for a context of 131,072 tokens."""
    context = 8192 if factor is None else 131_072
    scaling = {"rope_scaling": {**_LLAMA3_SCALING, "factor": factor}} if factor is not None else {}
    return _llama(width, layers, heads, 8, ffn, 128_256, context, rope_theta=500_000.0, **scaling, **changes)


_LLAMA3_SCALING = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def _variant(model_type: str, name: str, base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return base | {"model_type": model_type, "architectures": [name]} | changes


def _gpt2(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": shape.width, "n_layer": shape.layers,
        "n_head": shape.heads.query, "n_positions": shape.max_length, "vocab_size": shape.vocab, "n_inner": shape.ffn,
    }  # fmt: skip


def _bert(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads.query, "intermediate_size": shape.ffn, "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length, "type_vocab_size": shape.token_types,
    }  # fmt: skip


def _transformer(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "transformer-2017", "architectures": ["TransformerForConditionalGeneration"],
        "is_encoder_decoder": True, "d_model": shape.width,
        "encoder_layers": shape.layers, "decoder_layers": shape.decoder_layers,
        "encoder_attention_heads": shape.heads.query,
        "decoder_attention_heads": shape.heads.query, "encoder_ffn_dim": shape.ffn, "decoder_ffn_dim": shape.ffn,
        "vocab_size": shape.vocab, "tie_word_embeddings": True,
    }  # fmt: skip


def _llama2(shape: Shape) -> dict[str, Any]:
    heads = shape.heads
    return _llama(shape.width, shape.layers, heads.query, heads.kv, shape.ffn, shape.vocab, shape.max_length or 4096)


_MAKERS = {"transformer": _transformer, "bert": _bert, "gpt2": _gpt2, "gpt3": _gpt2, "llama2": _llama2}

_MISTRAL = _variant(
    "mistral", "MistralForCausalLM", _llama(4096, 32, 32, 8, 14_336, 32_000, 32_768, sliding_window=4096)
)
_QWEN = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}
_QWEN2 = _variant("qwen2", "Qwen2ForCausalLM", _llama(3584, 28, 28, 4, 18_944, 152_064, 131_072), **_QWEN)
_QWEN3 = _variant("qwen3", "Qwen3ForCausalLM", _llama(4096, 36, 32, 8, 12_288, 151_936, 40_960, head_dim=128), **_QWEN)
_DEEPSEEK_V3 = _variant(
    "deepseek_v3", "DeepseekV3ForCausalLM", _llama(7168, 61, 128, 128, 18_432, 129_280, 163_840),
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256,
    num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, rms_norm_eps=1e-6,
)  # fmt: skip

FAMOUS: dict[str, dict[str, Any]] = {
    **{name: _MAKERS[name.split("-")[0]](preset.shape) for name, preset in PRESETS.items()},
    "llama3-8b": _llama3(4096, 32, 32, 14_336),
    "llama3-70b": _llama3(8192, 80, 64, 28_672),
    "llama3.1-8b": _llama3(4096, 32, 32, 14_336, 8.0),
    "llama3.1-70b": _llama3(8192, 80, 64, 28_672, 8.0),
    "llama3.1-405b": _llama3(16_384, 126, 128, 53_248, 8.0),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, 32.0, head_dim=128, tie_word_embeddings=True),
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49_152, 8192, tie_word_embeddings=True, rope_theta=100_000.0),
    "mistral-7b": _MISTRAL,
    "mixtral-8x7b": _variant(
        "mixtral", "MixtralForCausalLM", _MISTRAL, sliding_window=None, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-0.5b": _QWEN2 | {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN2,
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN3,
    "qwen3-30b-a3b": _variant(
        "qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3, hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1,
    ),
    "gemma-7b": _variant(
        "gemma", "GemmaForCausalLM", _llama(3072, 28, 16, 16, 24_576, 256_000, 8192), head_dim=256,
        tie_word_embeddings=True, rms_norm_eps=1e-6
    ),
    "gemma2-9b": _variant(
        "gemma2", "Gemma2ForCausalLM", _llama(3584, 42, 16, 8, 14_336, 256_000, 8192), head_dim=256,
        tie_word_embeddings=True, sliding_window=4096, rms_norm_eps=1e-6,
    ),
    "gemma3-1b": _variant(
        "gemma3_text", "Gemma3ForCausalLM", _llama(1152, 26, 4, 1, 6912, 262_144, 32_768), head_dim=256,
        tie_word_embeddings=True, sliding_window=512, rms_norm_eps=1e-6,
    ),
    "phi3-mini": _variant("phi3", "Phi3ForCausalLM", _llama(3072, 32, 32, 32, 8192, 32_064, 4096), sliding_window=2047),
    "gpt-oss-20b": _variant(
        "gpt_oss", "GptOssForCausalLM", _llama(2880, 24, 64, 8, 2880, 201_088, 131_072), head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, attention_bias=True,
    ),
    "gpt-oss-120b": _variant(
        "gpt_oss", "GptOssForCausalLM", _llama(2880, 36, 64, 8, 2880, 201_088, 131_072), head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4, sliding_window=128, attention_bias=True,
    ),
    "deepseek-v2-lite": _variant(
        "deepseek_v2", "DeepseekV2ForCausalLM", _DEEPSEEK_V3, hidden_size=2048, num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16, intermediate_size=10_944, vocab_size=102_400, q_lora_rank=None, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "t5-small": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 512, "d_kv": 64, "d_ff": 2048,
        "num_heads": 8, "num_layers": 6, "num_decoder_layers": 6, "vocab_size": 32_128, "is_encoder_decoder": True,
    },
    "t5-base": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_kv": 64, "d_ff": 3072,
        "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12, "vocab_size": 32_128, "is_encoder_decoder": True,
    },
    "vit-base": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_labels": 1000,
    },
}  # fmt: skip
