"""Facts of the decoders, one row per model type. A row says only what differs from Llama."""

from __future__ import annotations

from .facts import Experts, Facts, Sizes, lin, ln

BIAS = "attention_bias"


def mla(s: Sizes) -> int:
    """DeepSeek's attention: queries with or without a latent, keys and values from one latent, RoPE's part apart."""
    rank, latent, rope, nope = s("q_lora_rank"), s("kv_lora_rank"), s("qk_rope_head_dim"), s("qk_nope_head_dim")
    bias = s(BIAS)
    queries = lin(s.w, rank, bias) + rank + rank * s.q if rank else s.w * s.q
    return queries + lin(s.w, latent + rope, bias) + latent + latent * s.h * (nope + s.dv) + lin(s.o, s.w, bias)


def delta_net(s: Sizes, gates: int = 2) -> int:
    """Gated delta net: q, k, v, z, the two gates per head, a convolution over q, k, v, a norm, the output."""
    keys, values = s.g * s.d, s.h * s.dv
    mixed = 2 * keys + values
    return s.w * (mixed + values + gates * s.h) + mixed * s("linear_conv_kernel_dim") + 2 * s.h + s.dv + values * s.w


def gated_query(s: Sizes) -> int:
    """Queries with a gate of the same size."""
    bias = s(BIAS)
    return lin(s.w, 2 * s.q, bias) + lin(s.w, s.k, bias) + lin(s.w, s.v, bias) + lin(s.o, s.w, bias)


def opt_embedding(s: Sizes) -> int:
    return s("word_embed_proj_dim") or s.w


def affine(s: Sizes) -> int:
    return int(s.node.value("layer_norm_elementwise_affine") is not False)


def falcon_norms(s: Sizes) -> int:
    """Two where attention and FFN follow one another, or in the new architecture unless it asks for one."""
    if s("new_decoder_architecture"):
        return s("num_ln_in_parallel_attn") or 2
    return 1 if s("parallel_attn") and s("num_ln_in_parallel_attn") != 2 else 2


DEEPSEEK = Experts(shared=lambda s: s.sh * s.fe)
MIXTRAL = Experts(always=True)
LLAMA = Facts(qkv_bias=BIAS, out_bias=BIAS, ffn_bias="mlp_bias")
QWEN3 = Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="head")
GEMMA2 = Facts(qkv_bias=BIAS, out_bias=BIAS, norms=4)
PLAIN = Facts(gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer", cross="same")
GPT2 = PLAIN.but(positions=lambda s: s("n_positions"), heads="gpt2")
COHERE = Facts(qkv_bias=BIAS, out_bias=BIAS, norms=1, qk_norm="heads", qk_if="use_qk_norm")
GLM4_MOE = Facts(qkv_bias=BIAS, qk_norm="head", qk_if="use_qk_norm", experts=DEEPSEEK)
QWEN3_NEXT = Facts(
    attention=gated_query,
    qk_norm="head",
    mixers={"linear": delta_net},
    experts=Experts(shared=lambda s: s("shared_expert_intermediate_size"), shared_gate=True),
)
GRANITE_MOE = Facts(qkv_bias=BIAS, out_bias=BIAS, experts=Experts(always=True, width=lambda s: s.f))

FACTS: dict[str, Facts] = {
    # Llama and those built like it
    "llama": LLAMA,
    "mistral": Facts(),
    "ministral": Facts(),
    "ministral3": Facts(),
    "arcee": LLAMA.but(gated=False),
    "cwm": Facts(ffn_bias="mlp_bias"),
    "helium": LLAMA.but(attention=lambda s: lin(s.w, s.q + 2 * s.k, s(BIAS)) + s.w * s.w),  # W_O is square there
    "smollm3": LLAMA,
    "granite": LLAMA,
    "seed_oss": Facts(qkv_bias=BIAS, out_bias="attention_out_bias", ffn_bias="mlp_bias"),
    "ernie4_5": Facts(qkv_bias="use_bias", out_bias="use_bias", ffn_bias="use_bias"),
    "hunyuan_v1_dense": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="head"),
    "apertus": Facts(qkv_bias=BIAS, out_bias=BIAS, gated=False, qk_norm="head", layer={"ffn": lambda s: 2}),
    "bitnet": Facts(qkv_bias=BIAS, out_bias=BIAS, layer={"norms": lambda s: s.w + s.f}),
    "exaone4": Facts(qk_norm="head"),
    "nanochat": Facts(qkv_bias=BIAS, out_bias=BIAS, gated=False, norm="bare"),
    "diffllama": Facts(qkv_bias=BIAS, out_bias=BIAS, layer={"attention": lambda s: 4 * s.d}),
    # Qwen
    "qwen2": Facts(qkv_bias=True),
    "qwen2_moe": Facts(
        qkv_bias="qkv_bias",
        experts=Experts(shared=lambda s: s("shared_expert_intermediate_size"), shared_gate=True),
    ),
    "qwen2_vl_text": Facts(qkv_bias=True),
    "qwen2_5_vl_text": Facts(qkv_bias=True),
    "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": QWEN3.but(experts=Experts()),
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3.but(experts=Experts()),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT.but(experts=None),
    "qwen3_5_moe_text": QWEN3_NEXT,
    # Gemma
    "gemma": Facts(qkv_bias=BIAS, out_bias=BIAS),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2.but(qk_norm="head"),
    "vaultgemma": Facts(qkv_bias=BIAS, out_bias=BIAS),
    # Cohere, GLM, Granite, OLMo
    "cohere": COHERE,
    "cohere2": COHERE.but(qk_norm=""),
    "glm": Facts(qkv_bias=BIAS),
    "glm4": Facts(qkv_bias=BIAS, norms=4),
    "glm4_moe": GLM4_MOE,
    "glm4v_moe_text": GLM4_MOE,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE.but(
        experts=Experts(always=True, width=lambda s: s.f, shared=lambda s: s("shared_intermediate_size"))
    ),
    "olmo": Facts(qkv_bias=BIAS, out_bias=BIAS, norm="bare"),
    "olmo2": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="all"),
    "olmo3": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="all"),
    "olmoe": Facts(
        qkv_bias=BIAS, out_bias=BIAS, experts=MIXTRAL,
        layer={"norms": lambda s: s.w + s.w // s.h * s.g},  # of q and k, whatever head_dim says
    ),
    "flex_olmo": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="all", experts=MIXTRAL),
    # Phi, StableLM, Nemotron, StarCoder2
    "phi": Facts(
        gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer", norms=1, head_bias=True,
        layer={"norms": lambda s: 2 * ln(s.d) * s("qk_layernorm")},
    ),
    "phi3": Facts(),
    "phimoe": Facts(qkv_bias=BIAS, out_bias=BIAS, norm="layer", head_bias="lm_head_bias", experts=MIXTRAL),
    "stablelm": Facts(
        qkv_bias="use_qkv_bias", norm="layer", norms=lambda s: 2 - s("use_parallel_residual"), qk_norm="heads",
        qk_if="qk_layernorm",
    ),
    "jais2": Facts(gated=False, qkv_bias=BIAS, out_bias=BIAS, ffn_bias="mlp_bias", norm="layer"),
    "nemotron": Facts(gated=False, qkv_bias=BIAS, out_bias=BIAS, ffn_bias="mlp_bias", norm="layer"),
    "starcoder2": Facts(gated=False, qkv_bias="use_bias", out_bias="use_bias", ffn_bias="use_bias", norm="layer"),
    "persimmon": Facts(
        gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer",
        layer={"norms": lambda s: 2 * ln(s.d) * s("qk_layernorm")},
    ),
    # experts in every layer, or in most
    "mixtral": Facts(experts=MIXTRAL),
    "minimax_m2": Facts(qk_norm="all", experts=MIXTRAL),
    "minimax": Facts(
        experts=MIXTRAL,
        mixers={"linear": lambda s: s.w * 3 * s.h * s.d + s.h * s.d + s.h * s.d * s.w + s.w * s.h * s.d},
    ),
    "gpt_oss": Facts(
        qkv_bias=BIAS, out_bias=BIAS, experts=Experts(always=True, bias=True, router_bias=True, width=lambda s: s.f),
        layer={"attention": lambda s: s.h},  # one sink per head, which no key of the config mentions
    ),
    "llama4_text": Facts(
        qkv_bias=BIAS, out_bias=BIAS, ffn_width=lambda s: s("intermediate_size_mlp"),
        experts=Experts(width=lambda s: s.f, shared=lambda s: s.f),
    ),
    "deepseek_v2": Facts(attention=mla, ffn_bias="mlp_bias", experts=DEEPSEEK),
    "deepseek_v3": Facts(attention=mla, experts=DEEPSEEK),
    "ernie4_5_moe": Facts(
        qkv_bias="use_bias", out_bias="use_bias", ffn_bias="use_bias", head_bias="use_bias",
        experts=Experts(shared=lambda s: s.sh * s.fe, extra=lambda s: s.e),
    ),
    "exaone_moe": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="head", experts=DEEPSEEK),
    "mellum": QWEN3.but(experts=Experts()),
    "minicpm3": Facts(attention=mla, ffn_bias="mlp_bias"),
    "mistral4": Facts(attention=mla, experts=DEEPSEEK),
    "dots1": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="head", experts=DEEPSEEK),
    "hunyuan_v1_moe": Facts(qkv_bias=BIAS, out_bias=BIAS, qk_norm="head", experts=Experts(always=True,
    width=lambda s: s.f, shared=lambda s: s.f)),
    "afmoe": Facts(
        qkv_bias=BIAS, out_bias=BIAS, norms=4, qk_norm="head", layer={"attention": lambda s: s.w * s.q},
        experts=Experts(shared=lambda s: s.sh * s.fe, extra=lambda s: s.e),
    ),
    # GPT and its time
    "gpt2": GPT2,
    "gpt-sw3": GPT2,
    "gpt_bigcode": GPT2.but(qkv_bias=True, heads="gpt2"),
    "gpt_neo": GPT2.but(qkv_bias=False, positions=lambda s: s("max_position_embeddings")),
    "gptj": Facts(gated=False, ffn_bias=True, norm="layer", norms=1, heads="gpt2", head_bias=True),
    "codegen": Facts(gated=False, ffn_bias=True, norm="layer", norms=1, head_bias=True),
    "gpt_neox": Facts(gated=False, qkv_bias=BIAS, out_bias=BIAS, ffn_bias=True, norm="layer"),
    "opt": PLAIN.but(
        qkv_bias="enable_bias", out_bias="enable_bias", ffn_bias="enable_bias", embedding_width=opt_embedding,
        final_norm=False, norms=lambda s: 2 * affine(s), heads="opt", once={
            "embeddings": lambda s: (s("max_position_embeddings") + 2) * s.w,
            "norms": lambda s: ln(s.w) * s("do_layer_norm_before") * (1 - s("_remove_final_layer_norm")) * affine(s),
            "other": lambda s: 2 * s.w * opt_embedding(s) if opt_embedding(s) != s.w else 0,
        },
    ),
    "bloom": PLAIN.but(embedding_norm=True, ffn_width=lambda s: 4 * s.w),
    "falcon": PLAIN.but(qkv_bias="bias", out_bias="bias", ffn_bias="bias", norms=falcon_norms, heads="gpt2"),
    "mpt": Facts(gated=False, attention=lambda s: 4 * s.w * s.w, ffn_width=lambda s: s("expansion_ratio") * s.w),
    "xglm": PLAIN,
    "biogpt": PLAIN.but(positions=lambda s: s("max_position_embeddings") + 2, cross=""),
    "openai-gpt": GPT2.but(final_norm=False, ffn_width=lambda s: 4 * s.w, cross=""),
}  # fmt: skip
