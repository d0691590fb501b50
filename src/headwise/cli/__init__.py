"""The command `headwise`. Each command imports what it needs inside, so that help starts without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import HeadwiseError
from . import bench, inspect, serve, trace

USAGE_ERROR, INTERRUPTED = 2, 130

# typer carries click inside or beside it, depending on its version; this leads to the base of usage errors in both
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="headwise",
    help="Multi-head attention, every head in the open.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect.inspect)
app.command("serve")(serve.serve)
app.command("trace")(trace.trace)
app.command("bench")(bench.bench)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code; a user's mistake is one line on stderr, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows no "√" shows "?" instead of failing
    try:
        code = app(args, prog_name="headwise", standalone_mode=False) or 0
        sys.stdout.flush()
    except HeadwiseError as error:
        return _fail(str(error), USAGE_ERROR)
    except UsageError as error:
        return _fail(_usage(error), USAGE_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return 1
    return _fail("interrupted", INTERRUPTED) if code == INTERRUPTED else code


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "headwise"
    return f"{error.format_message().rstrip('.')}; see {command} --help"  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> int:
    typer.echo("headwise: " + " ".join(message.split()), err=True)
    return code
