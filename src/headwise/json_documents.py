"""Untrusted JSON: parsing, and checks of the values in it. Whatever is wrong raises a ValueError.

The messages complete a sentence such as "'atlas.json' is damaged: ...".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .errors import CheckpointError

T = TypeVar("T")
LARGEST = 2**63 - 1  # whole number, as in arrays of int64
DIGITS = 18  # of a whole number in a text, so that it fits into 64 bits
LONGEST = 300  # characters of an error message
MAX_VALUE_LENGTH = 60  # characters of a value in a message


def parse_json(text: str) -> Any:
    """Like json.loads, but without RecursionError, and refusing NaN and Infinity, which are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def load_document(path: str | os.PathLike[str], noun: str, read: Callable[[Any], T]) -> T:
    """What `read` makes of the JSON of a file that headwise wrote; noun, such as "plan", says what it should hold.

    Raises:
        CheckpointError: if there is no file, or it cannot be read, or is no JSON, or `read` refuses it.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"there is no {noun} at {str(path)!r}")
    try:
        document = parse_json(Path(os.fspath(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not a {noun} that headwise wrote: {error}") from None
    try:
        return read(document)
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def brief(value: Any) -> str:
    """The repr of a value for a message, cut to MAX_VALUE_LENGTH characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "..."


def other_format(number: Any, known: int) -> str:
    """What is wrong with the format number of a file if `known` is supported: "format 2 is newer than ..."."""
    is_newer = isinstance(number, int) and not isinstance(number, bool) and number > known
    newer = "is newer than this headwise, which" if is_newer else "is none; this headwise"
    return f"format {brief(number)} {newer} reads {known}"


def in_words(error: Exception) -> str:
    """The message of an error on one line, cut to LONGEST characters."""
    message = f"{brief(error.args[0])} is missing" if isinstance(error, KeyError) and error.args else str(error)
    words = " ".join(message.split()) or type(error).__name__
    return words if len(words) <= LONGEST else words[:LONGEST] + "..."


def whole_number(text: str) -> int | None:
    """The number that ASCII digits spell; None for anything else, including "²" and "٣"."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None


def mapping(value: Any, path: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """A JSON object, with `read` applied to each of its values."""
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be an object, got {brief(value)}")
    return {key: read(x, f"{path}.{key[:MAX_VALUE_LENGTH]}") for key, x in value.items()}


def items(value: Any, path: str, read: Callable[[Any, str], T]) -> list[T]:
    """A JSON list, with `read` applied to each of its values."""
    if not isinstance(value, list):
        raise ValueError(f"{path} must be a list, got {brief(value)}")
    return [read(x, f"{path}[{i}]") for i, x in enumerate(value)]


def anything(value: Any, path: str) -> Any:
    return value


def string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path} must be a text, got {brief(value)}")
    return value


def flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{path} must be true or false, got {brief(value)}")
    return value


def count(value: Any, path: str) -> int:
    """A whole number, 0 or larger."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"{path} must be a whole number from 0 on, got {brief(value)}")
    return value


def finite(value: Any, path: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"{path} must be a finite number, got {brief(value)}")
    return float(value)


def finite_or_none(value: Any, path: str) -> float:
    """A finite number; NaN for null, which stands for what was not measured."""
    return math.nan if value is None else finite(value, path)
