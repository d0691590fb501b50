"""The command `headwise`. What it takes to run one is imported when it runs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import HeadwiseError
from ..terminal import echo

USAGE_ERROR, INTERRUPTED = 2, 130


class Interrupted(HeadwiseError):
    """Ctrl-C, with words about what was kept; Typer drops those of a KeyboardInterrupt."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code; a user's mistake is one line on stderr, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows no "√" shows "?" instead of failing
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _run(args)
        sys.stdout.flush()
    except Interrupted as error:
        return _fail(str(error), INTERRUPTED)
    except HeadwiseError as error:
        return _fail(str(error), USAGE_ERROR)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return 1
    return _fail("interrupted", INTERRUPTED) if code == INTERRUPTED else code


def _run(args: Sequence[str] | None) -> int:
    """By the short way where a command has one, else by Typer, which takes longer to import than a card to read."""
    from .quick import quick

    given = list(sys.argv[1:] if args is None else args)
    if quick(given):
        return 0
    import typer

    from .app import UsageError, app

    try:
        return app(given, prog_name="headwise", standalone_mode=False) or 0
    except UsageError as error:
        return _fail(_usage(error), USAGE_ERROR)
    except typer.Abort:
        return INTERRUPTED


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """A library's warning may quote a text: matplotlib names the characters that a font has not."""
    echo(warnings.formatwarning(message, category, filename, lineno, line), err=True, nl=False)


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "headwise"
    return f"{error.format_message().rstrip('.')}; see {command} --help"  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    echo("headwise: " + " ".join(message.split()), err=True)
    return code
