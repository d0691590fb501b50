"""A small model of any transformers model type, and inputs derived from the parameters of its forward."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from helpers.model_families import sharpen

TYPES = list(MODEL_MAPPING_NAMES)
BATCH, LENGTH = 3, 13
LARGEST = 30_000_000  # parameters of a model that still counts as small

# The value of every size, by the names that configs have for it.
SIZES: list[tuple[float, str]] = [
    (48, "hidden_size d_model dim n_embd embed_dim embedding_size word_embed_proj_dim out_hidden_size"),
    (48, "encoder_hidden_size cross_attention_hidden_size decoder_hidden_size"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
    (2, "num_encoder_layers depth encoder_n_layers num_key_value_heads num_experts_per_tok index_n_heads"),
    (2, "linear_num_key_heads attn_layer_period num_global_key_value_heads eos_token_id"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"),
    (4, "num_experts num_local_experts n_routed_experts index_topk linear_num_value_heads mamba_n_heads rotary_dim"),
    (12, "head_dim d_kv v_head_dim kv_channels attention_head_dim global_head_dim"),
    (32, "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim image_size mlp_dim"),
    (32, "moe_intermediate_size shared_expert_intermediate_size"),
    (99, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (64, "max_position_embeddings n_positions max_source_positions max_target_positions"),
    (8, "patch_size qk_nope_head_dim qk_rope_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state"),
    (8, "hidden_size_per_layer_input"),
    (16, "q_lora_rank kv_lora_rank num_mel_bins index_head_dim"),
    (1, "n_group topk_group num_hidden_groups first_k_dense_replace attn_layer_offset n_shared_experts bos_token_id"),
    (0, "pad_token_id layerdrop encoder_layerdrop decoder_layerdrop"),
    (5, "sliding_window"),
    (24, "projection_dim mamba_d_head"),
]
SMALL = {name: size for size, names in SIZES for name in names.split()}
# Sizes that fit one architecture break another, so several variants are tried: (names to leave, other sizes).
VARIANTS: list[tuple[set[str], dict[str, int]]] = [
    (set(), {}),
    ({"head_dim"}, {"num_key_value_heads": 4}),  # latent heads
    ({"head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}, {"num_key_value_heads": 4}),
    ({"num_mel_bins", "patch_size", "image_size"}, {}),
    ({"head_dim", "rotary_dim", "num_heads", "n_group", "topk_group"}, {}),
]


def small_models(model_type: str) -> Iterator[Any]:
    """Class and config of a model type with small sizes, in several variants; (None, error) for those that fail."""
    for keep, other in VARIANTS:
        try:
            config = _shrink(AutoConfig.for_model(model_type), {**SMALL, **other}, keep)
            cls = MODEL_MAPPING[type(config)]
            cls = cls[0] if isinstance(cls, tuple) else cls
            with torch.device("meta"):
                model = cls._from_config(copy.deepcopy(config))
            if sum(p.numel() for p in model.parameters()) <= LARGEST:
                yield cls, config
        except Exception as why:  # configs raise any kind of error
            yield None, f"{type(why).__name__}: {str(why)[:120]}"


def build(cls: Any, config: Any, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    return sharpen(cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval())


def _shrink(config: Any, sizes: dict[str, Any], keep: set[str]) -> Any:
    for name, value in [*vars(config).items(), *((name, None) for name in getattr(config, "attribute_map", {}))]:
        value = getattr(config, name, None) if value is None else value
        if isinstance(value, PreTrainedConfig):
            _shrink(value, sizes, keep)
        elif name in sizes and name not in keep and isinstance(value, (int, float)) and not isinstance(value, bool):
            _set_if_possible(config, name, sizes[name])
    layers = getattr(config, "num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"):
        value = getattr(config, name, None)
        if isinstance(value, list) and value and len(value) != layers:
            kinds = list(dict.fromkeys(value))
            _set_if_possible(config, name, (kinds * layers)[:layers])
    return config


def _set_if_possible(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, ValueError, TypeError):  # derived values cannot be set
        setattr(config, name, value)


def possible_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs for the parameters of a model's forward, in several shapes."""
    generator = torch.Generator().manual_seed(3)
    parameters = list(inspect.signature(model.forward).parameters)
    config = model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def tokens(length: int) -> Tensor:
        return torch.randint(4, 90, (BATCH, length), generator=generator)

    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else 32
    candidates = (getattr(config, name, None) for name in ("num_mel_bins", "feature_size", "input_feat_per_channel"))
    mels = next((mels for mels in candidates if mels), 16)
    forms: dict[str, list[Tensor]] = {
        "input_ids": [tokens(LENGTH)],
        "decoder_input_ids": [tokens(7)],
        "pixel_values": [noise(BATCH, 3, size, size), noise(BATCH, 8, 3, size, size)],
        "pixel_values_videos": [noise(BATCH, 8, 3, size, size)],
        "input_values": [noise(BATCH, 400), noise(BATCH, 1, 400), noise(BATCH, 64, mels)],
        "input_features": [noise(BATCH, 64, mels), noise(BATCH, mels, 128), noise(BATCH, mels, 2 * mels)],
        "inputs_embeds": [],
        "hidden_states": [],
    }
    forms_by_name = {name: forms[name] for name in parameters if forms.get(name)}
    for variant in range(max((len(x) for x in forms_by_name.values()), default=0)):
        yield {name: options[min(variant, len(options) - 1)] for name, options in forms_by_name.items()}
    if "input_ids" in forms_by_name:
        yield {name: x[0] for name, x in forms_by_name.items() if name.endswith("input_ids")}
        yield {"input_ids": forms_by_name["input_ids"][0]}
    yield from _grids(model, parameters, noise)


def _grids(model: Any, parameters: list[str], noise: Any) -> Iterator[dict[str, Tensor]]:
    """Images of several sizes, their patches concatenated."""
    if "grid_thw" not in parameters:
        return
    config = model.config
    patch, frames = getattr(config, "patch_size", 8), getattr(config, "temporal_patch_size", 1)
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    for name in ("hidden_states", "pixel_values"):
        if name in parameters:
            yield {name: noise(48, channels * frames * patch * patch), "grid_thw": grid}
