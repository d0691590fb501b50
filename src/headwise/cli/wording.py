"""Messages of the library in the words of the command line: `truncate=True` is `--truncate` here."""

from __future__ import annotations

import re

# Python arguments that library messages recommend, each an option of the same name in the commands
ARGUMENTS = (
    "allow_empty",
    "conllu",
    "device",
    "keep",
    "out",
    "overwrite",
    "port",
    "resume",
    "texts",
    "token",
    "truncate",
)
ARGUMENT = re.compile(rf"\b({'|'.join(ARGUMENTS)})=(?:True\b)?")


def name_options(message: str) -> str:
    """A message with the options of the command line in place of Python arguments."""
    return ARGUMENT.sub(lambda match: f"--{match[1].replace('_', '-')}", message)
