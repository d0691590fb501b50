"""resolve: a model and its tokenizer, from a name or from objects that are already loaded."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ...errors import HeadwiseError
from .loader import image_processor, load, tokenizer
from .locate import DEFAULT


class NamedModel(NamedTuple):
    """A model, its tokenizer, and what to call it in tables and messages."""

    name: str
    model: Any
    tokenizer: Any


def resolve(model: Any = None, model_tokenizer: Any = None, name: str | None = None) -> NamedModel:
    """The model that a user named or passed, with its tokenizer.

    Args:
        model: a name or path as `load` takes it, None for the default model, or a loaded transformers model.
        model_tokenizer: its tokenizer; needed with a loaded model, otherwise loaded by the model's name.
        name: what to call the model; by default its name, or the class of a loaded model.

    Raises:
        HeadwiseError: for a loaded model without its tokenizer.

    Example:
        >>> name, model, tokenizer = resolve("minilm")
    """
    if model is None or isinstance(model, (str, os.PathLike)):
        place = DEFAULT if model is None else model
        model_tokenizer = model_tokenizer or tokenizer(place)  # before the model: a wrong name fails sooner
        return NamedModel(name or os.fspath(place), load(place), model_tokenizer)
    if model_tokenizer is None:
        raise HeadwiseError(
            "a model that is already loaded needs its tokenizer; give tokenizer=headwise.tokenizer(name) with it"
        )
    return NamedModel(name or type(model).__name__, model, model_tokenizer)


class NamedImageModel(NamedTuple):
    """A model that reads images, its image processor if it has one, and what to call it."""

    name: str
    model: Any
    processor: Any


def resolve_image_model(model: Any, processor: Any = None, name: str | None = None) -> NamedImageModel:
    """The vision model that a user named or passed, with its image processor.

    Args:
        model: a name or path as `load` takes it, or a loaded transformers model.
        processor: its image processor; by default the one beside a named model, None if there is none.
        name: what to call the model; by default its name, or the class of a loaded model.

    Raises:
        HeadwiseError: without a model: no bundled model reads images.
    """
    if model is None:
        raise HeadwiseError("an image needs a vision model, and the default model reads text; give model=")
    if isinstance(model, (str, os.PathLike)):
        return NamedImageModel(name or os.fspath(model), load(model), processor or image_processor(model))
    return NamedImageModel(name or type(model).__name__, model, processor)
