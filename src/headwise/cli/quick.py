"""The short way: `headwise card MODEL` and `headwise diff A B` in their plain forms, without Typer.

A card is read in a few milliseconds, Typer imported in a hundred. Whatever is not plain (help, an unknown option,
a value that is no number) is left to Typer, which words it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

PLAIN = {"--json": "as_json", "--layers": "layers"}
VALUED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--context": ("context", int),
    "--batch": ("batch", int),
    "--dtype": ("dtype", str),
    "--memory": ("memory", str),
}
TAKES = {
    "card": (1, {"context", "batch", "dtype", "memory", "as_json", "layers"}),
    "diff": (2, {"context", "batch", "dtype", "as_json"}),
}


def quick(args: Sequence[str]) -> bool:
    """Whether the arguments were plain, and have been dealt with."""
    parsed = parse(args)
    if parsed is None:
        return False
    from . import cards

    command, names, options = parsed
    getattr(cards, f"show_{command}")(*names, **options)
    return True


def parse(args: Sequence[str]) -> tuple[str, list[str], dict[str, Any]] | None:
    """The command, its names and its options; None for anything but a plain form."""
    if not args or args[0] not in TAKES:
        return None
    names: list[str] = []
    options: dict[str, Any] = {}
    rest = iter(args[1:])
    for word in rest:
        if word in PLAIN:
            options[PLAIN[word]] = True
        elif word in VALUED:
            key, form = VALUED[word]
            value = next(rest, None)
            if value is None or (form is int and not (value.isdecimal() and 1 <= len(value) <= 6 and int(value) > 0)):
                return None
            options[key] = form(value)
        elif word.startswith("-"):
            return None
        else:
            names.append(word)
    wanted, known = TAKES[args[0]]
    return (args[0], names, options) if len(names) == wanted and options.keys() <= known else None
