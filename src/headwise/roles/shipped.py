"""The atlases that come along, of the embedded models: JSON beside the code, read when asked for."""

from __future__ import annotations

import functools
import json
from importlib.resources import files

from .atlas import Atlas

NAMES = ("minilm", "smollm2")


@functools.cache
def shipped(model: str) -> Atlas | None:
    """The atlas of an embedded model, by its name; None for any other."""
    if model not in NAMES:
        return None
    return Atlas.from_json(json.loads((files(__package__) / "data" / f"{model}.json").read_text(encoding="utf-8")))
