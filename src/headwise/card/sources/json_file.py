"""A JSON file that must contain an object, such as config.json; the error names what it contains instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import CheckpointError

LARGEST_JSON = 64 * 2**20


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object."""
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise CheckpointError(
            f"{path.name} has {size:,} bytes; a config has at most {LARGEST_JSON:,}. Is it a config.json?"
        )
    text = path.read_bytes()
    if not text.strip():
        raise CheckpointError(f"{path.name} is empty; expected a JSON object, as a config.json is")
    try:
        plain = json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{path.name} nests too deep to be a config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON: {str(error)[:100]}; expected a config.json") from None
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path.name} holds a JSON {_json_type(plain)}; expected an object, as a config.json is")
    return plain


def _json_type(plain: Any) -> str:
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(plain), "null")
