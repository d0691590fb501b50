"""Untrusted JSON: parsing, and checks of the values in it. Whatever is wrong raises a ValueError.

The messages complete a sentence such as "'atlas.json' is damaged: ...".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
LARGEST = 2**63 - 1  # whole number, as in arrays of int64
DIGITS = 18  # of a whole number in a text, so that it fits into 64 bits
LONGEST = 300  # characters of an error message
SHOWN = 60  # characters of a value in a message


def parse_json(text: str) -> Any:
    """As json.loads, without its RecursionError and without NaN and Infinity, which are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def brief(value: Any) -> str:
    """The repr of a value for a message, cut to SHOWN characters."""
    try:
        shown = repr(value)
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."


def in_words(error: Exception) -> str:
    """The message of an error on one line, cut to LONGEST characters."""
    said = f"{brief(error.args[0])} is missing" if isinstance(error, KeyError) and error.args else str(error)
    words = " ".join(said.split()) or type(error).__name__
    return words if len(words) <= LONGEST else words[:LONGEST] + "..."


def whole_number(text: str) -> int | None:
    """The number that ASCII digits spell; None for anything else, including "²" and "٣"."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None


def mapping(value: Any, what: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """A JSON object, with `read` applied to each of its values."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {brief(value)}")
    return {key: read(x, f"{what}.{key[:SHOWN]}") for key, x in value.items()}


def items(value: Any, what: str, read: Callable[[Any, str], T]) -> list[T]:
    """A JSON list, with `read` applied to each of its values."""
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list, got {brief(value)}")
    return [read(x, f"{what}[{i}]") for i, x in enumerate(value)]


def anything(value: Any, what: str) -> Any:
    return value


def string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, got {brief(value)}")
    return value


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, got {brief(value)}")
    return value


def count(value: Any, what: str) -> int:
    """A whole number, 0 or larger."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"{what} must be a whole number from 0 on, got {brief(value)}")
    return value


def finite(value: Any, what: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"{what} must be a finite number, got {brief(value)}")
    return float(value)


def finite_or_none(value: Any, what: str) -> float:
    """A finite number; NaN for null, which stands for what was not measured."""
    return math.nan if value is None else finite(value, what)
