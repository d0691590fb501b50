"""The bundled atlases of the bundled models: JSON files in `data/`."""

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
    """The bundled atlas of a model, by its name; None if there is none."""
    from .result import Atlas

    return Atlas.from_json(_read(model)) if model in NAMES else None


def known_roles(model: str) -> tuple[int, dict[tuple[int, int], list[str]]] | None:
    """The number of texts of a bundled atlas, and (layer, head) -> its roles; None where there is no atlas."""
    if model not in NAMES:
        return None
    data = _read(model)
    roles: dict[tuple[int, int], list[str]] = {}
    for role in data["roles"]:
        roles.setdefault((role["layer"], role["head"]), []).append(role["role"])
    return data["about"]["texts"], roles
