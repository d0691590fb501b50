"""The root of the command line: its commands, one row each, and completion for shells."""

from __future__ import annotations

import click

from .. import __version__
from ..terminal import echo
from .groups import LazyGroup

# one module of this package each, in the order of the help
COMMANDS = (
    "inspect", "atlas", "circuit", "prune", "stream", "group", "record", "trace", "serve", "lab", "bench", "card",
    "diff", "scale",
)  # fmt: skip


@click.group(
    cls=LazyGroup,
    package=__package__,
    modules=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"], "show_default": True},
)
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    help='Print a script that completes commands, options and choices: eval "$(headwise --completion bash)".',
)
@click.pass_context
def app(context: click.Context, version: bool, completion: str | None) -> None:
    """Multi-head attention, every head in the open."""
    if version:
        echo(f"headwise {__version__}")
    elif completion is not None:
        echo(_script(completion))
    elif context.invoked_subcommand is None:
        echo(context.get_help())


def _script(shell: str) -> str:
    from click.shell_completion import get_completion_class

    from . import COMPLETE

    completion = get_completion_class(shell)
    assert completion is not None
    return completion(app, {}, "headwise", COMPLETE).source()
