"""What transformers assumes where a config.json says nothing: defaults.tsv, one row per model type.

The table is written by tools/config_defaults.py. Its first line names the version of transformers, which stands
nowhere else in the package; every other line is a model type, a tab and its defaults as JSON.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from . import keys

PATH = Path(__file__).with_name("defaults.tsv")

# The Transformer of 2017 has no config in transformers; sources/presets.py writes one.
OWN_TYPES: dict[str, dict[str, Any]] = {
    "transformer-2017": {"_base": "TransformerModel", "_generates": "TransformerForConditionalGeneration"}
}


@cache
def _text() -> str:
    return PATH.read_text(encoding="utf-8")


@cache
def version() -> str:
    """The library and version that the defaults were read from, such as "transformers 5.22.2"."""
    return _text().partition("\n")[0].removeprefix("# ")


def model_types() -> list[str]:
    """Every model type of the table."""
    return [line.partition("\t")[0] for line in _text().splitlines()[1:]]


def is_known(model_type: str) -> bool:
    """Whether transformers has this model type."""
    return bool(_row(model_type))


@cache
def defaults(model_type: str) -> dict[str, Any]:
    """The default config of a model type; empty for a type that transformers does not know."""
    if model_type in OWN_TYPES:
        return OWN_TYPES[model_type]
    row = _row(model_type)
    return json.loads(row) if row else {}


def _row(model_type: str) -> str:
    """The JSON of a row, found without splitting the whole table: a card needs one or two of 800 rows."""
    start = f"\n{keys.ALIASES.get(model_type, model_type)}\t"
    if "\n" in model_type or "\t" in model_type:  # a name that would match inside a row
        return ""
    return _text().partition(start)[2].partition("\n")[0]
