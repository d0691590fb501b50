"""Small vision models with random weights, under which heads differ, and an image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from .small_checkpoints import sharp

SIZES: dict[str, Any] = {
    "hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17,
    "image_size": 30, "patch_size": 6,
}  # fmt: skip
TEXT_SIZES: dict[str, Any] = {
    "hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17, "vocab_size": 53,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def vit(**changes: Any) -> Any:
    return sharp(transformers.ViTModel(transformers.ViTConfig(**SIZES | changes)))


def clip() -> Any:
    config = transformers.CLIPConfig(text_config=TEXT_SIZES, vision_config=SIZES, projection_dim=7)
    return sharp(transformers.CLIPModel(config))


def siglip() -> Any:
    return sharp(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIZES)))


def with_registers() -> Any:
    config = transformers.Dinov2WithRegistersConfig(**SIZES, num_register_tokens=2)
    return sharp(transformers.Dinov2WithRegistersModel(config))


def with_cross_attention() -> Any:
    """A ViT and a decoder whose text tokens attend to its patches."""
    decoder = transformers.TrOCRConfig(
        vocab_size=307, d_model=15, decoder_layers=1, decoder_attention_heads=5, decoder_ffn_dim=17,
        max_position_embeddings=41, is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    encoder = transformers.ViTModel(transformers.ViTConfig(**SIZES))
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=transformers.TrOCRForCausalLM(decoder))
    return sharp(model)


def in_one_sequence(image_token: int) -> Any:
    """Like LLaVA: a language model reads one token per patch among those of a text."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES),
        text_config=transformers.LlamaConfig(**TEXT_SIZES | {"hidden_size": 12, "vocab_size": 367}),
        image_token_id=image_token,
    )
    return sharp(transformers.LlavaForConditionalGeneration(config))


# name -> (model, its special tokens)
MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "vit": (vit, ("[CLS]",)),
    "deit": (lambda: sharp(transformers.DeiTModel(transformers.DeiTConfig(**SIZES))), ("[CLS]", "[DIST]")),
    "dinov2": (lambda: sharp(transformers.Dinov2Model(transformers.Dinov2Config(**SIZES))), ("[CLS]",)),
    "registers": (with_registers, ("[CLS]", "[REG 0]", "[REG 1]")),
    "clip": (clip, ("[CLS]",)),
    "siglip": (siglip, ()),
}


def image(width: int = 47, height: int = 31) -> Any:
    """Random colours."""
    colours = np.random.default_rng(5).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(colours)


def save_image(path: Path) -> Path:
    image().save(path)
    return path
