"""The shapes of famous models by name: those of `headwise.shape`, and those that cards know."""

from __future__ import annotations

import difflib

from ...card.sources.presets import FAMOUS
from ...errors import UnsupportedError
from ...shapes import PRESETS, Shape
from .architectures import ARCHITECTURES

SAME_SHAPE = {"phi3": "mistral"}  # model types that differ in nothing but the layout of their checkpoints


def famous_shape(name: str) -> Shape:
    """The shape of a famous model, such as "bert-base" or "llama3-8b"; what our stacks have no part for is refused."""
    if name in PRESETS:
        return PRESETS[name].shape
    if name not in FAMOUS:
        alike = difflib.get_close_matches(name, FAMOUS, 3)
        known = f"did you mean {' or '.join(alike)}?" if alike else f"known are {', '.join(FAMOUS)}"
        raise UnsupportedError(f"no shape is called {name!r}; {known}")
    config = FAMOUS[name]
    model_type = config["model_type"]
    architecture = ARCHITECTURES.get(SAME_SHAPE.get(model_type, model_type))
    if architecture is None:
        raise UnsupportedError(
            f"{name} is of type {model_type}, which our stacks cannot build (they build {', '.join(ARCHITECTURES)}); "
            f"headwise.card.read({name!r}) gives its heads and counts"
        )
    return architecture.shape(config, ())
