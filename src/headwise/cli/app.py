"""The commands, as Typer has them. Each imports what it needs inside, so that help starts without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from ..terminal import echo
from . import atlas, bench, card, inspect, lab, prune, scale, serve, trace

# typer carries click inside or beside it, depending on its version; this leads to the base of usage errors in both
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="headwise",
    help="Multi-head attention, every head in the open.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect.inspect)
app.command("atlas")(atlas.atlas)
app.command("prune")(prune.prune)
app.command("trace")(trace.trace)
app.command("serve")(serve.serve)
app.command("lab")(lab.lab)
app.command("bench")(bench.bench)
app.command("card")(card.card)
app.command("diff")(card.diff)
app.command("scale")(scale.scale)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        echo(context.get_help())
