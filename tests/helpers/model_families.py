"""Tiny models of many transformers families, one row per family, with random weights under which heads differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel

from helpers.model_inputs import SOURCE

VOCABULARY = 97

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 60, "num_hidden_layers": 4, "intermediate_size": 44,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = TEXT | {"num_attention_heads": 5, "embedding_size": 60}
DECODER = TEXT | {"num_attention_heads": 6, "num_key_value_heads": 2}
WIDE = DECODER | {"head_dim": 16}  # heads x head_dim is not the width
GPT = {"vocab_size": VOCABULARY, "n_embd": 60, "n_layer": 4, "n_head": 5, "n_positions": 64, "n_inner": 37}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
MLA = DECODER | MOE | {
    "num_key_value_heads": 6, "q_lora_rank": 17, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
SPARSE = MLA | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk_freq": 1}  # few keys per query
SHARED = {  # one attention block for many layers
    "num_hidden_layers": 6, "num_key_value_heads": 6, "attention_head_dim": 20, "attention_hidden_size": 120,
    "mamba_expand": 2, "mamba_d_state": 8,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "mamba_expand": 1, "mamba_d_conv": 4, "mamba_dt_rank": 4,
}  # fmt: skip
TWO_STACKS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 60, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 5,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 41, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 60, "d_kv": 7, "d_ff": 37, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 5,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
}  # fmt: skip
PIXELS: dict[str, Any] = {
    "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 37, "image_size": 28,
    "patch_size": 7, "num_channels": 3,
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 37, "vocab_size": 32,
    "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (5, 4), "num_feat_extract_layers": 2, "conv_bias": True,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0,
}  # fmt: skip
CLIP_TEXT = {**ENCODER, "projection_dim": 23, "eos_token_id": 96}


@dataclass(frozen=True)
class Family:
    """One architecture at its smallest."""

    type: str  # transformers' model_type
    config: dict[str, Any] = field(repr=False)
    inputs: str = "text"  # a row of INPUTS
    kinds: tuple[str, ...] = ("self",)
    note: str = ""  # tells two rows of one type apart
    layers: tuple[int, ...] | None = None  # the numbers of the layers that attend, where not all do

    @property
    def name(self) -> str:
        return f"{self.type}-{self.note}" if self.note else self.type


def _rows(config: dict[str, Any], *types: str, **options: Any) -> list[Family]:
    return [Family(name, config, **options) for name in types]


ENCODERS = [
    *_rows(ENCODER, "bert", "roberta", "electra", "camembert", "xlm-roberta", "xlm-roberta-xl", "data2vec-text"),
    *_rows(ENCODER, "ernie", "layoutlm", "splinter", "roberta-prelayernorm", "bert-generation", "markuplm"),
    Family("albert", ENCODER | {"inner_group_num": 1, "num_hidden_groups": 1}),
    Family("albert", ENCODER | {"inner_group_num": 2, "num_hidden_groups": 2}, note="groups"),
    Family("distilbert", {"vocab_size": VOCABULARY, "dim": 60, "n_layers": 4, "n_heads": 5, "hidden_dim": 37}),
    Family("modernbert", ENCODER | {"local_attention": 6, "global_attn_every_n_layers": 3}),
    Family("eurobert", WIDE),
    Family("esm", ENCODER | {"mask_token_id": 3, "position_embedding_type": "rotary"}),
    Family(
        "mobilebert",
        ENCODER | {"intra_bottleneck_size": 60, "true_hidden_size": 60, "normalization_type": "layer_norm"},
    ),
    Family("nomic_bert", ENCODER),
]
DECODERS = [
    *_rows(DECODER, "llama", "stablelm", "olmo", "olmo2", "granite", "starcoder2", "phi3", "cohere", "bitnet"),
    Family("helium", DECODER | {"head_dim": 10}),
    *_rows(
        WIDE, "qwen3", "gemma", "glm", "glm4", "ernie4_5", "arcee", "hunyuan_v1_dense", "smollm3", "seed_oss", "apertus"
    ),
    Family("mistral", WIDE | {"sliding_window": 5}),
    Family("qwen2", DECODER | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    Family("gemma2", WIDE | {"sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 3.0}),
    Family("gemma3_text", WIDE | {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 7}),
    Family("olmo3", DECODER | {"sliding_window": 5}),
    Family("cohere2", DECODER | {"sliding_window": 5, "sliding_window_pattern": 2}),
    Family("exaone4", DECODER | {"sliding_window": 5, "sliding_window_pattern": 2}),
    Family("phi", DECODER | {"partial_rotary_factor": 0.4}),
    Family("nemotron", DECODER | {"partial_rotary_factor": 0.4}),
    Family("modernbert-decoder", DECODER | {"local_attention": 6, "global_attn_every_n_layers": 3}),
    Family("diffllama", DECODER | {"num_attention_heads": 8, "hidden_size": 64}),
    Family("gpt2", GPT),
    Family("gpt_bigcode", GPT | {"multi_query": True}, note="mqa"),
    Family("gpt_bigcode", GPT | {"multi_query": False}, note="mha"),
    Family("gpt_neox", DECODER | {"rotary_pct": 0.4}),
    Family("opt", DECODER | {"ffn_dim": 37, "word_embed_proj_dim": 60}),
    Family("biogpt", DECODER),
    Family("gpt_oss", WIDE | MOE | {"sliding_window": 5}),
    Family("mixtral", WIDE | MOE | {"sliding_window": 5}),
    *_rows(WIDE | MOE, "qwen3_moe", "minimax_m2"),
    *_rows(DECODER | MOE | {"shared_expert_intermediate_size": 20}, "qwen2_moe", "olmoe", "granitemoe", "phimoe"),
    Family(
        "llama4_text",
        WIDE | MOE | {"attention_chunk_size": 5, "no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 37},
    ),
    *_rows(MLA, "deepseek_v3", "axk1", "glm4_moe_lite", "youtu", "mistral4"),
    *_rows(SPARSE, "deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "minimax_m3_vl_text", "mistral_large4_text"),
    Family("deepseek_v2", MLA | {"n_group": 1}),
    Family("minicpm3", MLA),
    Family("jamba", DECODER | MOE | MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1}, layers=(1, 3)),
    Family(
        "bamba",
        DECODER | MAMBA | {"attn_layer_indices": [0, 2], "mamba_expand": 2, "mamba_n_heads": 6, "mamba_d_head": 20},
        layers=(0, 2),
    ),
    Family("falcon_h1", WIDE | MAMBA),
    Family(
        "zamba",
        DECODER | MAMBA | SHARED | {"n_mamba_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 2},
        layers=(2, 5),
    ),
    Family(
        "zamba2",
        DECODER
        | SHARED
        | {"n_mamba_heads": 4, "mamba_headdim": 30, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1}
        | {"layers_block_type": ["mamba", "hybrid", "mamba"] * 2, "use_shared_attention_adapter": False},
        layers=(1, 4),
    ),
    Family(
        "granitemoehybrid",
        DECODER
        | MOE
        | MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "mamba_expand": 2,
            "mamba_n_heads": 6,
            "mamba_d_head": 20,
            "shared_intermediate_size": 20,
        },
        layers=(1, 3),
    ),
    Family("lfm2", DECODER | {"full_attn_idxs": [1, 3], "layer_types": ["conv", "full_attention"] * 2}, layers=(1, 3)),
    Family(
        "qwen3_next",
        WIDE
        | MOE
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 20,
        },
        layers=(1, 3),
    ),
]
SEQ2SEQ = [
    *_rows(
        TWO_STACKS,
        "bart",
        "mbart",
        "marian",
        "pegasus",
        "m2m_100",
        "blenderbot",
        "blenderbot-small",
        "plbart",
        inputs="source",
        kinds=("encoder", "decoder", "cross"),
    ),
    *_rows(T5, "t5", "mt5", "umt5", inputs="source", kinds=("encoder", "decoder", "cross")),
    Family(
        "whisper",
        TWO_STACKS | {"num_mel_bins": 17, "max_source_positions": SOURCE, "max_target_positions": 32},
        "mel",
        ("encoder", "decoder", "cross"),
    ),
    Family(
        "speech_to_text",
        TWO_STACKS
        | {"num_mel_bins": 17, "input_feat_per_channel": 17, "max_source_positions": 64, "max_target_positions": 32},
        "filterbank",
        ("encoder", "decoder", "cross"),
    ),
]
VISION = [
    *_rows(
        PIXELS,
        "vit",
        "deit",
        "dinov2",
        "dinov3_vit",
        "siglip_vision_model",
        "clip_vision_model",
        "ijepa",
        "beit",
        inputs="pixels",
    ),
    Family(
        "swin",
        {"image_size": 28, "patch_size": 7, "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": 2},
        "pixels",
    ),
    Family("videomae", PIXELS | {"num_frames": 4, "tubelet_size": 2}, "frames"),
]
SOUND = _rows(AUDIO, "wav2vec2", "hubert", "unispeech", inputs="wave")
LOOKING = {"image_token_id": 95, "vision_start_token_id": 94, "video_token_id": 93, "vision_end_token_id": 92}
TURNED = DECODER | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 2]}}
GRID = {"depth": 3, "num_heads": 5, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QFORMER = ENCODER | {"encoder_hidden_size": 60, "cross_attention_frequency": 2}
TOWERS = [
    Family(
        "clip", {"text_config": CLIP_TEXT, "vision_config": PIXELS, "projection_dim": 23},
        "text and pixels", ("text_model", "vision_model"),
    ),
    Family(
        "siglip", {"text_config": CLIP_TEXT | {"projection_size": 60}, "vision_config": PIXELS},
        "text and pixels", ("text_model", "vision_model"),
    ),
    Family(
        "llava",
        {
            "text_config": WIDE | {"model_type": "llama"},
            "vision_config": PIXELS | {"model_type": "clip_vision_model"},
            "image_token_index": 95,
        },
        "image tokens", ("vision_tower", "language_model"),
    ),
    Family(
        "paligemma",
        {
            "text_config": WIDE | {"model_type": "gemma"},
            "vision_config": PIXELS | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_index": 95, "projection_dim": 60,
        },
        "prefix", ("vision_tower", "language_model"),
    ),
    Family(
        "blip-2",
        {
            "vision_config": PIXELS, "qformer_config": QFORMER, "num_query_tokens": 16, "image_token_index": 95,
            "text_config": DECODER | {"model_type": "opt", "ffn_dim": 37, "word_embed_proj_dim": 60},
        },
        "image tokens", ("vision_model", "qformer", "cross", "language_model"),
    ),
    Family(
        "qwen2_vl",
        LOOKING | {"text_config": TURNED, "vision_config": GRID | {"embed_dim": 60, "hidden_size": 60, "mlp_ratio": 1}},
        "grids", ("visual", "language_model"),
    ),
    Family(
        "qwen2_5_vl",
        {
            "text_config": TURNED, **LOOKING,
            "vision_config": GRID | {
                "hidden_size": 60, "out_hidden_size": 60, "intermediate_size": 44, "fullatt_block_indexes": [1],
                "window_size": 16,
            },
        },
        "grids", ("visual", "language_model"),
    ),
]  # fmt: skip
# Off the registry: not to be watched. `note` is the class that says no.
OFF = [
    *_rows(
        ENCODER,
        "megatron-bert",
        "rembert",
        "mpnet",
        "roformer",
        "deberta-v2",
        "deberta",
        "ibert",
        "convbert",
        "nystromformer",
    ),
    Family("lilt", ENCODER),
    Family("bloom", {"vocab_size": VOCABULARY, "hidden_size": 60, "n_layer": 3, "n_head": 5, "pad_token_id": 0}),
    Family("falcon", ENCODER | {"new_decoder_architecture": False, "multi_query": True}),
    Family(
        "falcon",
        ENCODER | {"num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True},
        note="grouped",
    ),
    Family("gptj", GPT | {"rotary_dim": 4}),
    Family("codegen", GPT | {"n_head": 4, "rotary_dim": 4}),
    Family(
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 60,
            "num_layers": 2,
            "num_heads": 5,
            "intermediate_size": 37,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "max_position_embeddings": 64,
        },
    ),
    Family(
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 60, "n_layers": 3, "n_heads": 5, "max_seq_len": 64, "expansion_ratio": 2},
    ),
    Family(
        "xglm",
        {
            "vocab_size": VOCABULARY,
            "d_model": 60,
            "num_layers": 3,
            "attention_heads": 6,
            "ffn_dim": 37,
            "pad_token_id": 0,
        },
    ),
    Family("openai-gpt", GPT),
    Family(
        "xlm",
        {
            "vocab_size": VOCABULARY,
            "emb_dim": 60,
            "n_layers": 3,
            "n_heads": 5,
            "max_position_embeddings": 64,
            "n_langs": 1,
        },
    ),
    Family("mvp", TWO_STACKS, "source", ("encoder", "decoder", "cross")),
    Family(
        "fsmt",
        {
            "src_vocab_size": VOCABULARY,
            "tgt_vocab_size": VOCABULARY,
            "langs": ["a", "b"],
            "d_model": 60,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 5,
            "decoder_attention_heads": 5,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
        "source",
        ("encoder", "decoder", "cross"),
    ),
    Family(
        "led",
        TWO_STACKS
        | {"attention_window": [4, 4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        "source",
        ("encoder", "decoder", "cross"),
    ),
    Family("longformer", ENCODER | {"attention_window": [4, 4, 4, 4]}),
    Family("longt5", T5 | {"local_radius": 3}, "source", ("encoder", "decoder", "cross")),
    Family(
        "bigbird_pegasus",
        TWO_STACKS | {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        "source",
        ("encoder", "decoder", "cross"),
    ),
    Family(
        "pegasus_x",
        TWO_STACKS | {"block_size": 4, "num_global_tokens": 2, "stagger_local_blocks": False},
        "source",
        ("encoder", "decoder", "cross"),
    ),
    Family("xlnet", {"vocab_size": VOCABULARY, "d_model": 60, "n_layer": 3, "n_head": 5, "d_inner": 37}),
    Family("git", ENCODER | {"vision_config": PIXELS}),
    Family("wavlm", AUDIO | {"num_buckets": 8, "max_bucket_distance": 16}, "wave"),
]
FAMILIES = [*ENCODERS, *DECODERS, *SEQ2SEQ, *VISION, *SOUND, *TOWERS]
BY_NAME = {family.name: family for family in [*FAMILIES, *OFF]}

# One family per mechanism; the others are tested only in full runs.
CORE = {
    "bert", "albert", "albert-groups", "distilbert", "modernbert", "esm", "mobilebert", "markuplm", "llama", "mistral",
    "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode-mqa", "gpt_neox", "opt", "olmo3", "gpt_oss",
    "mixtral", "llama4_text", "deepseek_v3", "deepseek_v32", "hy_v4", "diffllama", "jamba", "zamba", "qwen3_next",
    "bart", "t5", "whisper", "vit", "swin", "wav2vec2", "clip", "llava", "paligemma", "blip-2",
    "qwen2_vl", "qwen2_5_vl",
}  # fmt: skip


def core_first(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; families outside of CORE are marked `full`."""
    return [name if name in CORE else pytest.param(name, marks=pytest.mark.full) for name in names]


# Operations between the attention function and W_O: W_O's input is not the heads' plain outputs.
BETWEEN = {
    "bitnet": "a norm", "qwen3_next": "a gate", "hy_v4": "a gate", "axk2": "a gate",
    "diffllama": "the difference of two heads",
}  # fmt: skip
SINKS = {"gpt_oss", "hy_v4"}


def build(family: Family, implementation: str = "sdpa", seed: int = 0, auto: Any = AutoModel) -> Any:
    """The family's model in eval mode with sharp random weights; eager attention where it does not support sdpa."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.type, **family.config)
    if implementation == "sdpa" and not MODEL_MAPPING[type(config)]._supports_sdpa:
        implementation = "eager"
    return sharpen(auto.from_config(config, attn_implementation=implementation).eval(), seed)


SHARP = re.compile(
    r"(^|[._])(q|k|qkv|query|key|q_proj|k_proj|qkv_proj|c_attn|query_key_value|Wqkv|q_lin|k_lin|in_proj"
    r"|q_a_proj|q_b_proj|kv_b_proj|query_proj|key_proj|q_norm|k_norm|query_layernorm|key_layernorm)(\.|$)"
)


def sharpen(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set random weights, larger for queries and keys, so that no head attends uniformly."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() > 2 or "mamba" in path:
                continue
            strong = 2.5 if SHARP.search(path) else 1.0
            if weight.dim() == 2:
                size = weight.shape[0 if type(module).__name__ == "Conv1D" else 1]
                size = 1 if isinstance(module, nn.Embedding) else size
                weight.copy_(torch.randn(weight.shape, generator=generator) * strong / size**0.5)
            elif strong > 1:
                weight.mul_(strong)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and isinstance(module, nn.Linear):
                bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    return model
