"""The part of a model that reads a text by itself."""

from __future__ import annotations

from typing import Any

from ...attention.nn.stack import Transformer
from ...errors import UnsupportedError

ENCODER_ONLY = "the encoder of an encoder-decoder model"


def text_model(model: Any, *, purpose: str, name: str | None = None) -> tuple[Any, tuple[str, ...]]:
    """The part of a model that reads one text by itself: the encoder of an encoder-decoder, else the model.

    Args:
        model: one that reads token ids.
        purpose: what needs a text model, for the error message: "inspect needs".
        name: what the user calls the model; its class's name if there is none.

    Returns:
        The part, and notes for the user: `(ENCODER_ONLY,)` where the decoder is left out.

    Raises:
        UnsupportedError: for a model that takes images or sound.
    """
    notes: tuple[str, ...] = ()
    if isinstance(model, Transformer):
        model, notes = model.encoder, (ENCODER_ONLY,)
    elif getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        model, notes = model.get_encoder(), (ENCODER_ONLY,)
    check_takes_text(model, purpose=purpose, name=name)
    return model, notes


def check_takes_text(model: Any, *, purpose: str, name: str | None = None) -> None:
    """Refuse a model whose main input is not token ids."""
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input != "input_ids":
        cls = type(model).__name__
        label = cls if name is None else f"{name} ({cls})"
        raise UnsupportedError(f"{label} takes {main_input}, not text; {purpose} a text model")
