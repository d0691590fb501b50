"""The number of keys of cross-attention, where a model fixes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from .node import Node

# Tokens in addition to the patches: the class token, DeiT's distillation token.
EXTRA_TOKENS = {"vit": 1, "deit": 2, "beit": 1, "data2vec-vision": 1, "blip_vision_model": 1, "mllama_vision_model": 1}
PYRAMIDS = ("swin", "donut-swin")


def encoder_length(root: Node) -> int | None:
    """The number of keys of cross-attention; None where it depends on the input, as with text and most audio."""
    find = FIXED.get(root.model_type)
    return find(root) if find else None


def _frames(root: Node) -> int | None:
    """Whisper pads or cuts all audio to 30 seconds."""
    return root.amount("max_source_positions")


def _image(root: Node) -> int | None:
    """One image of the size that the vision encoder's config names; Mllama pads it to all its tiles."""
    for key, child in root.children():
        if key in ("vision_config", "encoder"):
            return _tokens(child)
    return None


def _tokens(vision: Node) -> int | None:
    patch = vision.amount("patch_size", least=1)
    if patch is None or vision.value("image_size") is None:
        return None
    if vision.model_type in PYRAMIDS:
        halvings = len(vision.sequence("depths") or ()) - 1
        return math.prod(_stages(side, patch, halvings) for side in _sides(vision)) if halvings < 64 else None
    if vision.model_type not in EXTRA_TOKENS:
        return None
    patches = math.prod(side // patch for side in _sides(vision))
    return (patches + EXTRA_TOKENS[vision.model_type]) * (vision.amount("max_num_tiles") or 1)


def _stages(side: int, patch: int, halvings: int) -> int:
    """Patches along a side after the stages of a pyramid, each of which pads to an even number and halves it."""
    count = -(-side // patch)
    for _ in range(halvings):
        count = -(-count // 2)
    return count


def _sides(vision: Node) -> Iterator[int]:
    """Height and width in pixels: a config has one number for both, or two."""
    size = vision.value("image_size")
    sides = size if isinstance(size, list) and len(size) == 2 else [vision.amount("image_size")] * 2
    return (side if isinstance(side, int) and 0 < side < 10**6 else 0 for side in sides)


FIXED: dict[str, Callable[[Node], int | None]] = {
    "whisper": _frames,
    "mllama": _image,
    "blip": _image,
    "vision-encoder-decoder": _image,
}
