"""Facts of the towers that see or hear, and of the models that join towers: one row per model type."""

from __future__ import annotations

from typing import Any

from .facts import Facts, Sizes, Term, lin, ln


def side(s: Sizes, key: str, default: int = 1) -> tuple[int, int]:
    """A size of an image or a patch, given as one number or as two."""
    got = s.node.value(key)
    if isinstance(got, list) and len(got) == 2 and all(isinstance(n, int) and n > 0 for n in got):
        return got[0], got[1]
    number = s(key) or default
    return number, number


def patches(s: Sizes) -> int:
    (high, wide), (a, b) = side(s, "image_size"), side(s, "patch_size")
    return (high // a) * (wide // b)


def pixels(s: Sizes) -> int:
    """Numbers in one patch."""
    a, b = side(s, "patch_size")
    return a * b * (s("num_channels", "in_channels", "in_chans") or 3)


def seen(tokens: int, bias: bool = True) -> dict[str, Term]:
    """Embeddings of a ViT: the patches' projection, `tokens` learned tokens, a position for each and every patch."""
    return {"embeddings": lambda s: lin(pixels(s), s.w, bias) + tokens * s.w + (patches(s) + tokens) * s.w}


VIT = Facts(
    gated=False, qkv_bias="qkv_bias", out_bias=True, ffn_bias=True, norm="layer", heads="vit",
    embedding_width=lambda s: 0,
    once=seen(1),
)  # fmt: skip
DINO = VIT.but(
    heads="dino",
    layer={"other": lambda s: 2 * s.w},
    ffn=lambda s: dino_ffn(s),
    once={"embeddings": lambda s: lin(pixels(s), s.w) + (2 + s("use_mask_token")) * s.w + patches(s) * s.w},
)
CLIP = Facts(gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer", heads="tower")
CLIP_VISION = CLIP.but(
    embedding_width=lambda s: 0,
    heads="clip_vision",
    once={"embeddings": lambda s: pixels(s) * s.w + (patches(s) + 2) * s.w, "norms": lambda s: ln(s.w)},
)
SIGLIP_VISION = CLIP.but(
    embedding_width=lambda s: 0,
    heads="siglip_vision",
    once={"embeddings": lambda s: lin(pixels(s), s.w) + patches(s) * s.w},
)


def dino_ffn(s: Sizes) -> int:
    """Plain, or SwiGLU of two thirds the width rounded up to eights."""
    if not s("use_swiglu_ffn"):
        return lin(s.w, s.f) + lin(s.f, s.w)
    inner = (int(s.f * 2 / 3) + 7) // 8 * 8
    return lin(s.w, 2 * inner) + lin(inner, s.w)


def merger(s: Sizes, bias_norm: int, out: int) -> int:
    """Qwen-VL's: four patches become one token of the text's width."""
    wide = s.w * s("spatial_merge_size") ** 2
    return bias_norm * s.w + lin(wide, wide) + lin(wide, out)


def film(s: Sizes) -> int:
    """Numbers in one patch of a few frames."""
    return pixels(s) * (s("temporal_patch_size") or 1)


def qwen3_mergers(s: Sizes) -> int:
    """The last merger norms before it joins patches, those of deepstack after."""
    wide, out = s.w * s("spatial_merge_size") ** 2, s("out_hidden_size")
    indexes = s.node.value("deepstack_visual_indexes")
    deep = len(indexes) if isinstance(indexes, list) else 0
    return ln(s.w) + lin(wide, wide) + lin(wide, out) + deep * (ln(wide) + lin(wide, wide) + lin(wide, out))


def qwen2_ffn(s: Sizes) -> int:
    inner = int(s.w * (s.node.value("mlp_ratio") or 4))
    return lin(s.w, inner) + lin(inner, s.w)


NO_WORDS: dict[str, Any] = {"embedding_width": lambda s: 0, "heads": "tower", "square": True}
QWEN2_VISION = CLIP.but(
    **NO_WORDS,
    final_norm=False,
    ffn=qwen2_ffn,
    once={"embeddings": lambda s: film(s) * s.w, "other": lambda s: merger(s, 2, s("hidden_size"))},
)
QWEN3_VISION = CLIP.but(
    **NO_WORDS,
    final_norm=False,
    once={
        "embeddings": lambda s: lin(film(s), s.w) + s("num_position_embeddings") * s.w,
        "other": qwen3_mergers,
    },
)

TOWERS: dict[str, Facts] = {
    "vit": VIT,
    "deit": VIT.but(heads="deit", once=seen(2)),
    "vit_msn": VIT.but(heads="vit_bare"),
    "ijepa": VIT.but(heads="vit_bare", once={"embeddings": lambda s: lin(pixels(s), s.w) + patches(s) * s.w}),
    "dinov2": DINO,
    "dinov2_with_registers": DINO.but(
        once={"embeddings": lambda s: lin(pixels(s), s.w) + (3 + s("num_register_tokens") + patches(s)) * s.w}
    ),
    "dinov3_vit": VIT.but(
        qkv_bias="query_bias", attention=lambda s: dinov3_attention(s), gated="use_gated_mlp", ffn_bias="mlp_bias",
        layer={"other": lambda s: 2 * s.w}, heads="dino",
        once={"embeddings": lambda s: lin(pixels(s), s.w) + (2 + s("num_register_tokens")) * s.w},
    ),
    "clip_vision_model": CLIP_VISION,
    "clip_text_model": CLIP.but(positions=lambda s: s("max_position_embeddings"), heads="clip_text"),
    "siglip_vision_model": SIGLIP_VISION,
    "siglip_text_model": CLIP.but(positions=lambda s: s("max_position_embeddings"), heads="siglip_text"),
    "siglip2_text_model": CLIP.but(positions=lambda s: s("max_position_embeddings"), heads="siglip_text"),
    "siglip2_vision_model": SIGLIP_VISION.but(
        once={"embeddings": lambda s: lin(pixels(s), s.w) + s("num_patches") * s.w}
    ),
    "pixtral": Facts(**NO_WORDS, final_norm=False, once={"embeddings": lambda s: pixels(s) * s.w,
    "norms": lambda s: s.w}),
    "qwen2_vl_vision": QWEN2_VISION,
    "qwen2_5_vl_vision": Facts(
        **NO_WORDS, qkv_bias=True, out_bias=True, ffn_bias=True, final_norm=False,
        once={"embeddings": lambda s: film(s) * s.w, "other": lambda s: merger(s, 1, s("out_hidden_size"))},
    ),
    "qwen3_vl_vision": QWEN3_VISION,
    "qwen3_vl_moe_vision": QWEN3_VISION,
    "qwen3_5_vision": QWEN3_VISION,
    "qwen3_5_moe_vision": QWEN3_VISION,
    "idefics3_vision": SIGLIP_VISION.but(heads="tower"),
    "smolvlm_vision": SIGLIP_VISION.but(heads="tower"),
}  # fmt: skip


def dinov3_attention(s: Sizes) -> int:
    query, key, value, out = (s(f"{name}_bias") for name in ("query", "key", "value", "proj"))
    return lin(s.w, s.w, query) + lin(s.w, s.w, key) + lin(s.w, s.w, value) + lin(s.w, s.w, out)


def text_w(s: Sizes) -> int:
    return s.below["text"].w


def layers_seen(s: Sizes) -> int:
    """How many of the vision tower's layers the projector reads side by side."""
    got = s.node.value("vision_feature_layer")
    return len(got) if isinstance(got, list) and got else 1


def two_layers(s: Sizes) -> int:
    """LLaVA's projector."""
    bias = s.node.value("multimodal_projector_bias") is not False
    return lin(s.below["vision"].w * layers_seen(s), text_w(s), bias) + lin(text_w(s), text_w(s), bias)


def pixtral_merge(s: Sizes) -> int:
    seen_w, bias = s.below["vision"].w, s("multimodal_projector_bias")
    merge_weights = seen_w * (s("spatial_merge_size") or 2) ** 2 * seen_w
    return seen_w + merge_weights + lin(seen_w * layers_seen(s), text_w(s), bias) + lin(text_w(s), text_w(s), bias)


def connector(s: Sizes) -> int:
    return s.below["vision"].w * (s("scale_factor") or 2) ** 2 * text_w(s)


VISION_AND_TEXT = {"vision_config": "Model", "text_config": "Model"}
LLAVA = Facts(towers=VISION_AND_TEXT, heads="joint", once={"other": two_layers})
QWEN_VL = Facts(towers=VISION_AND_TEXT, heads="joint")
DUAL = Facts(towers=VISION_AND_TEXT, heads="dual")

JOINT: dict[str, Facts] = {
    "llava": LLAVA,
    "vipllava": LLAVA.but(
        once={
            "other": lambda s: (
                ln(s.below["vision"].w * 5) + lin(5 * s.below["vision"].w, text_w(s)) + lin(text_w(s), text_w(s))
            )
        }
    ),
    "llava_next": LLAVA.but(once={"other": lambda s: two_layers(s) + text_w(s)}),
    "llava_next_video": LLAVA.but(once={"other": lambda s: two_layers(s) + text_w(s)}),
    "llava_onevision": LLAVA.but(once={"other": lambda s: two_layers(s) + text_w(s)}),
    "paligemma": LLAVA.but(once={"other": lambda s: lin(s.below["vision"].w, s("projection_dim"))}),
    "gemma3": LLAVA.but(once={"other": lambda s: s.below["vision"].w * (text_w(s) + 1)}),
    "deepseek_vl": LLAVA,
    "mistral3": LLAVA.but(once={"other": pixtral_merge}),
    "idefics3": LLAVA.but(once={"other": connector}),
    "smolvlm": LLAVA.but(once={"other": connector}),
    "qwen2_vl": QWEN_VL,
    "qwen2_5_vl": QWEN_VL,
    "qwen3_vl": QWEN_VL,
    "qwen3_vl_moe": QWEN_VL,
    "qwen3_5": QWEN_VL,
    "qwen3_5_moe": QWEN_VL,
    "clip": DUAL.but(
        once={"other": lambda s: 1 + s("projection_dim") * (s.below["vision"].w + s.below["text"].w)},
        towers=VISION_AND_TEXT,
    ),
    "siglip": DUAL.but(once={"other": lambda s: 2}),
    "siglip2": DUAL.but(once={"other": lambda s: 2}),
}

FACTS: dict[str, Facts] = {**TOWERS, **JOINT}
