"""The facts of a model type, found in the tables of its family. A new model type is one row in one of them."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ..config import keys
from .facts import Facts

# Modules of this package, each with its rows under the name FACTS. They are searched in this order and imported when
# they are reached: most cards are of decoders.
FAMILIES = ("decoders", "encoders", "hybrids", "vision")


def _rows(family: str) -> dict[str, Facts]:
    rows: dict[str, Facts] = import_module(f".{family}", __package__).FACTS
    return rows


@cache
def facts_of(model_type: str) -> Facts | None:
    """The facts of a model type; None where no family has a row for it."""
    name = keys.ALIASES.get(model_type, model_type)
    return next((rows[name] for rows in map(_rows, FAMILIES) if name in rows), None)


def model_types() -> list[str]:
    """Every model type whose parameters are counted."""
    return [name for family in FAMILIES for name in _rows(family)]
