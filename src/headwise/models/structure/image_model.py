"""The part of a model that reads an image by itself."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError
from .image_input import image_input
from .text_model import ENCODER_ONLY

TOWERS = ("vision_model", "vision_tower")  # attributes of models that read images and text
TOWER_ONLY = "the vision tower, which attends to patches alone"
MAIN_INPUT = "pixel_values"


def image_model(model: Any, *, name: str | None = None) -> tuple[Any, tuple[str, ...]]:
    """The part of a model that reads one image: its vision tower, its encoder, or the model.

    Args:
        model: one that reads images, or images and text.
        name: what the user calls the model; its class's name if there is none.

    Returns:
        The part, and notes for the user: `(TOWER_ONLY,)` or `(ENCODER_ONLY,)` where something is left out.

    Raises:
        UnsupportedError: for a model that takes no images.
    """
    if getattr(model, "main_input_name", None) == MAIN_INPUT:
        if getattr(model.config, "is_encoder_decoder", False):
            return model.get_encoder(), (ENCODER_ONLY,)
        return model, ()
    for holder in (model, getattr(model, "model", None)):
        for tower in (getattr(holder, attribute, None) for attribute in TOWERS):
            if getattr(tower, "main_input_name", None) == MAIN_INPUT:
                return tower, (TOWER_ONLY,)
    if not hasattr(model, "main_input_name") and image_input(model) is not None:  # timm's, and others like them
        return model, ()
    cls = type(model).__name__
    label = cls if name in (None, cls) else f"{name} ({cls})"
    main_input = getattr(model, "main_input_name", None)
    takes = f"takes {main_input}, not images" if main_input else "does not say that it takes one image, of which size"
    raise UnsupportedError(f"{label} {takes}; an image needs a vision model such as ViT, DINOv2, CLIP or SigLIP")
