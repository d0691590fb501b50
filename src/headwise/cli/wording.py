"""Messages of the library in the words of the command line: `truncate=True` is `--truncate` here."""

from __future__ import annotations

import re

# Python arguments that library messages recommend; the commands have options of the same names
ARGUMENTS = ("allow_empty", "device", "keep", "out", "overwrite", "port", "token", "truncate")
ARGUMENT = re.compile(rf"\b({'|'.join(ARGUMENTS)})=(True\b|(?=\w))?")


def name_options(message: str) -> str:
    """A message with the options of the command line in place of Python arguments.

    `truncate=True` becomes `--truncate`, `keep=0.2` becomes `--keep 0.2`, and `port=` becomes `--port`.
    """
    return ARGUMENT.sub(_option, message)


def _option(match: re.Match[str]) -> str:
    space = " " if match[2] == "" else ""  # a value follows
    return f"--{match[1].replace('_', '-')}{space}"
