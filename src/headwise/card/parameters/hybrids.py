"""Facts of the types whose layers differ from each other, or hold more than attention and a feed-forward part."""

from __future__ import annotations

from .decoders import BIAS, DEEPSEEK, GEMMA2, mla
from .facts import Facts, Sizes, lin, ln
from .vision import LLAVA, NO_WORDS, VIT, patches, pixels, text_w


def kept_kv(s: Sizes) -> int:
    """1 for a layer with keys and values of its own, 0 for one that reads an earlier layer's."""
    return int(not (s.layer and s.layer.shares))


def gemma4_attention(s: Sizes) -> int:
    """Shared layers have queries alone; with attention_k_eq_v, full layers have no W_V. With the gains of q and k."""
    bias = s(BIAS)
    values = 0 if s("attention_k_eq_v") and s.layer and s.layer.kind == "full" else lin(s.w, s.v, bias)
    return lin(s.w, s.q, bias) + lin(s.o, s.w, bias) + s.d + kept_kv(s) * (lin(s.w, s.k, bias) + values + s.d)


def shared_attention(s: Sizes) -> int:
    bias = s(BIAS)
    kv_parameters = lin(s.w, s.k, bias) + lin(s.w, s.v, bias) + s.d
    return lin(s.w, s.q, bias) + lin(s.o, s.w, bias) + s.d + kept_kv(s) * kv_parameters


def own_ffn(s: Sizes) -> int:
    """Gemma 3n may name a width for each layer."""
    widths = s.node.value("intermediate_size")
    inner = widths[s.index] if isinstance(widths, list) and s.index < len(widths) else s.f
    return 3 * s.w * inner


def per_layer(s: Sizes) -> int:
    """The way in and out of a layer for its own embedding of the token."""
    return 2 * s.w * s("hidden_size_per_layer_input")


def per_layer_once(s: Sizes) -> int:
    inner = s("hidden_size_per_layer_input")
    return s("vocab_size_per_layer_input") * s.L * inner + s.w * s.L * inner + inner if inner else 0


def altup(s: Sizes) -> int:
    """Gemma 3n: several streams, predicted and corrected in every layer; and the low-rank LAuReL beside."""
    streams, rank = s("altup_num_inputs"), s("laurel_rank")
    return s.w * (2 + streams) + streams**2 + streams**3 + 2 * s.w * rank + s.w


def kda(s: Sizes) -> int:
    """Kimi's delta attention: convolutions over q, k, v; a low-rank gate to forget and one for the output."""
    wide = s.h * s.d
    gates = s.w * s.d + s.d * wide
    return (
        s.w * 3 * wide
        + 3 * wide * s("linear_conv_kernel_dim", "short_conv_kernel_size")
        + 2 * gates
        + wide
        + s.h
        + s.w * s.h
        + s.d
        + wide * s.w
    )


def indexed(s: Sizes) -> int:
    """DeepSeek V3.2: a small scorer beside MLA chooses the tokens."""
    heads, dim = s("index_n_heads"), s("index_head_dim")
    return mla(s) + s("q_lora_rank") * heads * dim + s.w * dim + ln(dim) + s.w * heads


def short_conv(s: Sizes) -> int:
    """LFM2's convolution: three gates in, one out, a short depthwise kernel."""
    bias = s("conv_bias")
    return lin(s.w, 3 * s.w, bias) + lin(s.w, s.w, bias) + s.w * s("conv_L_cache") + s.w * bias


def lfm2_width(s: Sizes) -> int:
    inner = s.f
    if s("block_auto_adjust_ff_dim"):
        inner = int(2 * inner / 3)
        times = s.node.value("block_ffn_dim_multiplier")
        if isinstance(times, int | float):
            inner = int(times * inner)
            step = s("block_multiple_of") or 1
            inner = step * ((inner + step - 1) // step)
    return inner


GEMMA4 = GEMMA2.but(
    attention=gemma4_attention,
    ffn_width=lambda s: s.f * (2 if s("use_double_wide_mlp") and not kept_kv(s) else 1),
    layer={
        "embeddings": per_layer,
        "norms": lambda s: s.w * (s("hidden_size_per_layer_input") > 0) + 3 * s.w * s("enable_moe_block"),
        "ffn": lambda s: (s.e * (3 * s.w * s.fe + s.w + 1) + s.w) * s("enable_moe_block"),
        "idle": lambda s: (s.e - s("top_k_experts")) * 3 * s.w * s.fe * s("enable_moe_block"),
    },
    once={"embeddings": per_layer_once},
)
GEMMA4_VISION = Facts(
    **NO_WORDS, norms=4, qk_norm="head", final_norm=False,
    once={"embeddings": lambda s: pixels(s) * s.w + 2 * s("position_embedding_size") * s.w},
).but(square=False)  # fmt: skip

FACTS: dict[str, Facts] = {
    "gemma3n_text": GEMMA2.but(
        attention=shared_attention, ffn=own_ffn,
        layer={"embeddings": per_layer, "norms": lambda s: s.w, "other": altup},
        once={"embeddings": per_layer_once, "other": lambda s: 2 * (s("altup_num_inputs") - 1) * s.w * s.w},
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gemma4_vision": GEMMA4_VISION,
    "gemma4": Facts(
        towers={"text_config": "Model", "vision_config": "Model?", "audio_config": "Model?"}, heads="joint",
        once={"other": lambda s: s.below["vision"].w * text_w(s) if "vision" in s.below else 0},
    ),
    "kimi_linear": Facts(attention=mla, mixers={"linear": kda}, experts=DEEPSEEK, ties=False),
    "lfm2": Facts(qk_norm="head", mixers={"conv": short_conv}, ffn_width=lfm2_width),
    "deepseek_v32": Facts(attention=indexed, experts=DEEPSEEK),
    "glm_moe_dsa": Facts(attention=indexed, experts=DEEPSEEK),
    "glm4_moe_lite": Facts(attention=mla, experts=DEEPSEEK),
    "llama4_vision_model": Facts(
        gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer", final_norm=False, heads="tower",
        embedding_width=lambda s: 0, square=True,
        once={
            "embeddings": lambda s: pixels(s) * s.w + (patches(s) + 2) * s.w, "norms": lambda s: 2 * ln(s.w),
            "other": lambda s: s.f * s("projector_input_dim") + s("projector_input_dim") * s("projector_output_dim"),
        },
    ),
    "llama4": LLAVA.but(heads="joint_by_text",
    once={"other": lambda s: s.below["vision"]("vision_output_dim") * text_w(s)}),
    "internvl_vision": VIT.but(
        heads="tower", qkv_bias=BIAS, final_norm="!use_mean_pooling", layer={"other": lambda s: 2 * s.w,
        "norms": lambda s: 2 * s.w * s("use_qk_norm")},
        once={"embeddings": lambda s: lin(pixels(s), s.w) + (1 + s("use_mask_token")) * s.w
              + (patches(s) + 1) * s.w * int(s.node.value("use_absolute_position_embeddings") is not False)},
    ),
    "internvl": LLAVA.but(once={"other": lambda s: intern_join(s)}),
}  # fmt: skip


def intern_join(s: Sizes) -> int:
    ratio = s.node.value("downsample_ratio")
    times = round(1 / ratio) ** 2 if isinstance(ratio, int | float) and ratio > 0 else 4
    wide = s.below["vision"].w * times
    return ln(wide) + lin(wide, text_w(s)) + lin(text_w(s), text_w(s))
