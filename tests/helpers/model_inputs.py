"""Inputs of the tiny models: padded batches of tokens, pixels and audio, and which positions are tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from helpers.model_families import Family

BATCH, LENGTH, SOURCE = 3, 13, 11  # SOURCE: tokens of an encoder; LENGTH: of its decoder, or of a single stack


def inputs(family: Family, side: str | None = "right", seed: int = 0) -> dict[str, Tensor]:
    """The keyword arguments of a model's forward; side: of the padding, None for no padding."""
    generator = torch.Generator().manual_seed(seed + 7)
    return INPUTS[family.inputs](generator, side)


def padding(length: int, side: str | None, shortest: int = 4) -> Tensor:
    """(B, length) of ones and zeros: sequences of different lengths."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    for row, size in enumerate(
        range(length, shortest - 1, -(length - shortest) // (BATCH - 1))[:BATCH] if side else ()
    ):
        mask[row, size:] = 0
    return mask.flip(1) if side == "left" else mask


def _tokens(generator: torch.Generator, length: int, mask: Tensor) -> Tensor:
    return torch.randint(4, 90, (BATCH, length), generator=generator) * mask


def _text(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    mask = padding(LENGTH, side)
    batch = {"input_ids": _tokens(generator, LENGTH, mask)}
    return batch if side is None else batch | {"attention_mask": mask}


def _source(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    mask, target = padding(SOURCE, side, 3), padding(LENGTH, "right" if side else None)
    batch = {"input_ids": _tokens(generator, SOURCE, mask), "decoder_input_ids": _tokens(generator, LENGTH, target)}
    return batch if side is None else batch | {"attention_mask": mask, "decoder_attention_mask": target}


def _decoder(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    target = padding(LENGTH, side)
    batch = {"decoder_input_ids": _tokens(generator, LENGTH, target)}
    return batch if side is None else batch | {"decoder_attention_mask": target}


def _mel(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 17, 2 * SOURCE, generator=generator)} | _decoder(generator, side)


def _filterbank(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 4 * SOURCE, 17, generator=generator)} | _decoder(generator, side)


def _pixels(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 28, 28, generator=generator)}


def _frames(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 28, 28, generator=generator)}


def _wave(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    batch = {"input_values": torch.randn(BATCH, 260, generator=generator)}
    return batch if side is None else batch | {"attention_mask": padding(260, "right", 80)}


def _text_and_pixels(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    return _text(generator, side) | _pixels(generator, side)


def _image_tokens(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    text = _text(generator, side)
    images = torch.full((BATCH, 16), 95)
    batch = {"input_ids": torch.cat([images, text["input_ids"]], 1)} | _pixels(generator, side)
    if side is None:
        return batch
    return batch | {"attention_mask": torch.cat([torch.ones_like(images), text["attention_mask"]], 1)}


def _prefix(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    """Bidirectional attention within the image and the first tokens, causal attention after them."""
    batch = _image_tokens(generator, side)
    kinds = torch.zeros_like(batch["input_ids"])
    kinds[:, 19:] = 1
    return batch | {"token_type_ids": kinds}


def _grids(generator: torch.Generator, side: str | None) -> dict[str, Tensor]:
    """Images of different sizes, their patches concatenated: 16, 24 and 8 patches, 4 per token."""
    tokens, mask = torch.randint(4, 90, (BATCH, LENGTH), generator=generator), padding(LENGTH, side, shortest=6)
    tokens[:, 0] = 94
    for row, images in enumerate((4, 6, 2)):
        tokens[row, 1 : 1 + images] = 95
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "mm_token_type_ids": (tokens == 95).long(),
        "pixel_values": torch.randn(48, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6], [1, 2, 4]]),
    }


INPUTS = {
    "text": _text, "source": _source, "mel": _mel, "filterbank": _filterbank, "pixels": _pixels, "frames": _frames,
    "wave": _wave, "text and pixels": _text_and_pixels, "image tokens": _image_tokens,
    "prefix": _prefix, "grids": _grids,
}  # fmt: skip


def real_tokens(family: Family, batch: dict[str, Tensor], kind: str, model: Any) -> tuple[Tensor | None, Tensor | None]:
    """Which queries of a kind of attention are tokens (B, Tq), and which keys are (B, Tk); None for all."""
    mask, decoder_mask = batch.get("attention_mask"), batch.get("decoder_attention_mask")
    if family.inputs == "wave" and mask is not None:
        lengths = model._get_feat_extract_output_lengths(mask.sum(-1))
        mask = torch.arange(int(model._get_feat_extract_output_lengths(mask.shape[1]))) < lengths[:, None]
    elif family.inputs in ("mel", "filterbank"):
        mask = None
    if kind in ("vision_model", "vision_tower", "visual", "qformer") or (family.type == "blip-2" and kind == "cross"):
        return None, None
    return {"decoder": (decoder_mask, decoder_mask), "cross": (decoder_mask, mask)}.get(kind, (mask, mask))
