"""The command `headwise`. Every command is a module here, and imports what it needs when it runs."""

from __future__ import annotations

import errno
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import HeadwiseError
from ..terminal import LOOK_ALIKES, echo

if TYPE_CHECKING:
    import click

USAGE_ERROR, INTERRUPTED = 2, 130
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
START_UP_OBJECTS = 50_000  # before the first garbage collection; Python begins after 700
COMPLETE = "_HEADWISE_COMPLETE"  # the variable by which a shell asks for completions


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a user error is one line on stderr, never a traceback."""
    _prepare_streams()
    thresholds = gc.get_threshold()
    gc.set_threshold(START_UP_OBJECTS, *thresholds[1:])  # loading modules makes many objects and no garbage
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _invoke(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
    except HeadwiseError as error:
        from .wording import name_options

        return _fail(name_options(str(error)), USAGE_ERROR)
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in FULL_DISK or error.filename is not None:
            raise
        _discard_output()  # files are written by `headwise.files`, which names them: this was stdout
        return _fail(f"the output cannot be written: {error.strerror}", USAGE_ERROR)
    finally:
        gc.set_threshold(*thresholds)
    return code


def _prepare_streams() -> None:
    """Make stdout and stderr take any text, wherever they lead."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors=LOOK_ALIKES)


def _discard_output() -> None:
    """Lead stdout nowhere: the interpreter would complain as it writes the rest at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _invoke(args: list[str]) -> int:
    import click

    from .app import app

    if COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(app, {}, "headwise", COMPLETE, os.environ[COMPLETE])
    try:
        with app.make_context("headwise", args) as context:
            app.invoke(context)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.UsageError as error:
        return _fail(_usage(error), USAGE_ERROR)
    return 0


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print a library's warning escaped: it may quote a text, as matplotlib names characters missing from a font."""
    echo(warnings.formatwarning(message, category, filename, lineno, line), err=True, nl=False)


def _usage(error: click.UsageError) -> str:
    """The message of a wrong command line, and which help to read."""
    command, message = error.ctx.command_path if error.ctx else "headwise", error.format_message().rstrip(".")
    return f"{message} See {command} --help" if message.endswith("?") else f"{message}; see {command} --help"


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    echo("headwise: " + " ".join(message.split()), err=True)
    return code
