"""The atlases that come along, of the embedded models: JSON beside the code, read when asked for."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import Atlas

NAMES = ("minilm", "smollm2")


@functools.cache
def _read(model: str) -> Any:
    return json.loads((files(__package__) / "data" / f"{model}.json").read_text(encoding="utf-8"))


def bundled_atlas(model: str) -> Atlas | None:
    """The atlas of an embedded model, by its name; None for any other."""
    from .result import Atlas

    return Atlas.from_json(_read(model)) if model in NAMES else None


def known_roles(model: str) -> tuple[int, dict[tuple[int, int], list[str]]] | None:
    """How many texts an embedded model's atlas was measured on, and the roles of every head that has any."""
    if model not in NAMES:
        return None
    data = _read(model)
    found: dict[tuple[int, int], list[str]] = {}
    for role in data["roles"]:
        found.setdefault((role["layer"], role["head"]), []).append(role["role"])
    return data["about"]["texts"], found
