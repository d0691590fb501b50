"""Tiny models of the families that are pruned, one row per family, and comparisons of their outputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

import headwise
from headwise.models.structure.heads import query_heads
from headwise.models.structure.sites import attention_sites

SIZES: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 60, "num_hidden_layers": 3, "intermediate_size": 37, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = SIZES | {"num_attention_heads": 5, "embedding_size": 60}
DECODER = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 2}
MHA = SIZES | {"num_attention_heads": 6}
WIDE = DECODER | {"head_dim": 14}  # heads x head_dim is not the width
BIAS = WIDE | {"attention_bias": True}
GPT = {"vocab_size": 89, "n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 64, "n_inner": 37}
EXPERTS = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4, "intermediate_size": 44,
    "moe_intermediate_size": 20,
}  # fmt: skip
MLA = MHA | EXPERTS | {
    "num_key_value_heads": 6, "q_lora_rank": 17, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 89, "d_model": 60, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 5,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 41, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 89, "d_model": 60, "d_kv": 7, "d_ff": 37, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 5,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
}  # fmt: skip
PIXELS = {
    "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 37, "image_size": 28,
    "patch_size": 7, "num_channels": 3,
}  # fmt: skip
BLOOM = {"vocab_size": 89, "hidden_size": 60, "n_layer": 3, "n_head": 5, "pad_token_id": 0}

# name -> (model_type, config)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", ENCODER),
    "roberta": ("roberta", ENCODER),
    "electra": ("electra", ENCODER),
    "albert": ("albert", ENCODER | {"inner_group_num": 1, "num_hidden_groups": 1}),
    "distilbert": ("distilbert", {"vocab_size": 89, "dim": 60, "n_layers": 3, "n_heads": 5, "hidden_dim": 37}),
    "modernbert": ("modernbert", ENCODER | {"local_attention": 6, "attention_bias": True}),
    "mpnet": ("mpnet", ENCODER),
    "deberta": ("deberta", ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": (
        "deberta-v2",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": False},
    ),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BIAS),
    "mistral": ("mistral", WIDE | {"sliding_window": 5}),
    "qwen2": ("qwen2", DECODER),
    "qwen3": ("qwen3", BIAS),
    "gemma2": ("gemma2", WIDE | {"sliding_window": 5, "attn_logit_softcapping": 3.0}),
    "granite": ("granite", DECODER),
    "starcoder2": ("starcoder2", DECODER | {"use_bias": True}),
    "stablelm": ("stablelm", DECODER),
    "cohere": ("cohere", DECODER),
    "phi": ("phi", DECODER | {"partial_rotary_factor": 0.4}),
    "phi3": ("phi3", DECODER),
    "opt": ("opt", MHA | {"ffn_dim": 37, "word_embed_proj_dim": 60}),
    "gpt2": ("gpt2", GPT),
    "gpt_bigcode": ("gpt_bigcode", GPT | {"multi_query": True}),
    "gpt_neox": ("gpt_neox", MHA | {"rotary_pct": 0.4}),
    "codegen": ("codegen", GPT | {"n_embd": 64, "n_head": 8, "n_ctx": 64, "rotary_dim": 4}),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "gpt_neo": (
        "gpt_neo",
        {"vocab_size": 89, "hidden_size": 60, "num_layers": 2, "num_heads": 5, "intermediate_size": 37,
         "attention_types": [[["global", "local"], 1]], "window_size": 5, "max_position_embeddings": 64},
    ),
    "bloom": ("bloom", BLOOM),
    "falcon-mqa": ("falcon", MHA | {"new_decoder_architecture": False, "multi_query": True, "bias": True}),
    "falcon-grouped": ("falcon", MHA | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": (
        "falcon", MHA | {"new_decoder_architecture": False, "multi_query": False, "alibi": True, "bias": True}
    ),
    "mpt": ("mpt", {"vocab_size": 89, "d_model": 60, "n_layers": 3, "n_heads": 5, "max_seq_len": 64}),
    "gpt_oss": ("gpt_oss", WIDE | EXPERTS | {"sliding_window": 5}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v32": ("deepseek_v32", MLA | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}),
}  # fmt: skip
TWO_STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", SEQ2SEQ),
    "marian": ("marian", SEQ2SEQ),
    "t5": ("t5", T5),
    "umt5": ("umt5", T5),
}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit", PIXELS),
    "clip_vision": ("clip_vision_model", PIXELS),
    "dinov2": ("dinov2", PIXELS),
    "swin": (
        "swin",
        {"image_size": 28, "patch_size": 7, "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": 2},
    ),
}
FAMILIES = ENCODERS | DECODERS | TWO_STACKS | VISION


def build(name: str, auto: Any = transformers.AutoModel, **changes: Any) -> Any:
    """A family's model in eval mode; every parameter is random and large enough that a mistake shows."""
    kind, config = FAMILIES.get(name) or (name, changes.pop("config"))
    torch.manual_seed(0)
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **config | changes)).eval()
    model.generation_config = getattr(model, "generation_config", None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 and "embed" not in path and "bias" not in path:
                parameter.copy_(noise * 1.7 / parameter.shape[-1] ** 0.5)
            elif "norm" not in path.lower() and "ln_" not in path:
                parameter.copy_(noise * 0.5)
    return model


def inputs(name: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name in VISION:
        return {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}
    ids = torch.randint(4, 80, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if name in TWO_STACKS:
        batch["decoder_input_ids"] = torch.randint(4, 80, (3, 7), generator=generator)
    return batch


def tensors(out: Any) -> list[Tensor]:
    """The floating-point tensors of an output, without caches."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    if hasattr(out, "items"):
        return [t for key, x in out.items() if key != "past_key_values" for t in tensors(x)]
    return [t for x in out for t in tensors(x)] if isinstance(out, (list, tuple)) else []


# How far a pruned model may be from the masked one, relative to the largest output. They compute the same sums in
# another order: float64 shows that; float32 is what the native kernel runs in, and depends on the processor.
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}


def to_dtype(dtype: torch.dtype, model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs in a floating-point type."""
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products exist in single and half precision only
    floats = {key: x.to(dtype) for key, x in batch.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return model.to(dtype), {**batch, **floats}


def error(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest output."""
    got, want = tensors(got), tensors(want)
    assert got and len(got) == len(want)
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(got, want, strict=True))


def parameter_count(model: Any) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def even_heads(model: Any) -> dict[Any, list[int]]:
    """Head 1 of every layer, as prune_heads takes it."""
    return {site.key: [1] for site in attention_sites(model)}


def uneven_heads(model: Any) -> dict[Any, list[int]]:
    """Other heads in every layer, and every third layer whole; a module that serves many layers loses the same."""
    heads: dict[Any, list[int]] = {}
    sites = attention_sites(model)
    for i, site in enumerate(sites):
        is_shared = sum(other.module is site.module for other in sites) > 1
        n, count = 0 if is_shared else i, query_heads(model, site)
        if n % 3 != 1:
            heads[site.key] = sorted({n % count, (2 * n + 1) % count})[: count - 1]
    return heads


def masked_output(model: Any, heads: Any, batch: Any, **options: Any) -> Any:
    """What a model gives with some heads masked."""
    with torch.no_grad(), headwise.mask_heads(model, heads, **options):
        return model(**batch)
