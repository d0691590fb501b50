"""The keys under which configs have their numbers, most common first. A difference between families is a row."""

from __future__ import annotations

HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "num_encoder_attention_heads", "encoder_num_attention_heads", "decoder_attention_heads",
    "decoder_num_attention_heads",
    "num_self_attention_heads", "num_query_heads", "num_attention_heads_per_stage", "resampler_n_heads",
)  # fmt: skip
KV_HEADS = (
    "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups", "n_kv_heads",
    "num_query_groups", "kv_n_heads",
)  # fmt: skip
HEAD_DIM = (
    "head_dim",
    "d_kv",
    "kv_channels",
    "attention_head_dim",
    "d_head",
    "dim_head",
    "attention_head_size",
    "head_size",
)
WIDTH = (
    "hidden_size", "d_model", "n_embd", "n_embed", "embed_dim", "dim", "emb_dim", "model_dim", "hidden_dim",
    "hidden_sizes",
    "embed_dims", "encoder_hidden_size", "decoder_hidden_size", "d_latents", "channels",
)  # fmt: skip
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "num_transformer_layers", "encoder_layers",
    "num_encoder_layers", "encoder_num_hidden_layers", "decoder_layers", "num_decoder_layers", "depth", "num_blocks",
    "num_encoder_blocks", "resampler_depth",
)  # fmt: skip
FFN = (
    "intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "dff",
    "d_inner", "mlp_dim", "dim_ff", "feed_forward_dim",
)  # fmt: skip
VOCAB = ("vocab_size", "n_words", "n_token", "padded_vocab_size", "tgt_vocab_size")
CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
)
EXPERTS = (
    "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", "num_routed_experts", "num_moe_experts",
)  # fmt: skip
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "num_selected_experts",
    "top_k_experts",
)  # fmt: skip
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
EXPERT_FFN = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
WINDOW = ("sliding_window", "attention_window_size", "sliding_window_size", "local_attention", "window_size")

# A flat config with two stacks: (layers, heads, FFN) of each. The plain names serve where the own ones are missing.
SIDES = {
    "encoder": (
        ("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
        ("encoder_attention_heads", "num_encoder_attention_heads", "encoder_num_attention_heads"),
        ("encoder_ffn_dim", "encoder_intermediate_size", "d_ff"),
    ),
    "decoder": (
        ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
        ("decoder_attention_heads", "num_decoder_attention_heads", "decoder_num_attention_heads"),
        ("decoder_ffn_dim", "decoder_intermediate_size", "d_ff"),
    ),
}

# A config's word for a layer -> its kind here. A word that is not in the table is shown as it is.
LAYER_KINDS = {
    "full_attention": "full", "attention": "full", "global": "full", "global_attention": "full", "full": "full",
    "indexed_attention": "full", "hybrid": "full", "lsh": "full", "cross_attention": "full", "transformer": "full",
    "compressed_sparse_attention": "full", "heavily_compressed_attention": "full", "a": "full", "*": "full",
    "sliding_attention": "sliding", "local": "sliding", "local_attention": "sliding", "hybrid_sliding": "sliding",
    "window_attention": "sliding", "reference_sliding_attention": "sliding", "sliding_window": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear", "lightning": "linear", "gated_delta_net": "linear", "kda": "linear",
    "mamba": "none", "mamba2": "none", "m": "none", "conv": "none", "recurrent": "none", "moe": "none", "mlp": "none",
    "rwkv": "none", "no_op": "none", "replace_with_linear": "none", "ssm": "none", "-": "none", "e": "none",
}  # fmt: skip
LAYER_LISTS = ("layer_types", "layers_block_type", "attention_layers", "block_types", "attn_layers")

# Nested dicts that are no towers.
NO_TOWER = frozenset({
    "quantization_config", "compression_config", "rope_scaling", "rope_parameters", "per_layer_config", "id2label",
    "label2id",
    "task_specific_params", "attn_config", "ffn_config", "generation_config", "auto_map", "attention_types",
    "text_config_dict", "vision_config_dict", "audio_config_dict", "prompt_encoder_config",
})  # fmt: skip

# Names that say "heads" and mean a state or something else: these types have no attention.
NO_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "hyena", "rwkv7"})

# Model types of the hub that equal another type, to the last parameter.
ALIASES = {"kimi_k2": "deepseek_v3", "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "chinese_clip_text": "bert"}

# Layers that hold more than one attention each: LongCat-Flash has two.
ATTENTIONS_PER_LAYER = {"longcat_flash": 2}

# Where a usual name means something else: there hidden_size is the width that leaves the tower.
OWN_WIDTH = {"qwen2_vl_vision": ("embed_dim",)}

# Attention over a concatenation: heads divide this multiple of the width.
TIMES_WIDTH = {"zamba": 2, "zamba2": 2}
