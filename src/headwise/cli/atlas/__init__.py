"""`headwise atlas`: what every head of a model does, measured on a corpus, and what can be done with such an atlas."""

from __future__ import annotations

import os

import click

from ...errors import HeadwiseError
from ..groups import LazyGroup
from ..ranks import world_size

COMMANDS = ("show", "measure", "probe", "merge", "diff", "relations", "ablate")


class AtlasGroup(LazyGroup):
    """Without the name of a command: `show` where it has all the options given, else `measure`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        completing = context.resilient_parsing and not args
        named = bool(args) and (args[0] in (*self.modules, *context.help_option_names) or self._is_misspelt(args[0]))
        if not completing and not named:
            args = [self._default(context, args), *args]
        return super().parse_args(context, args)

    def _is_misspelt(self, name: str) -> bool:
        """Whether a name is like a command's, and no atlas to show."""
        return bool(self.similar_names(name)) and not os.path.lexists(name)

    def _default(self, context: click.Context, args: list[str]) -> str:
        show = self.get_command(context, "show")
        assert show is not None
        show_options = {name for param in show.get_params(context) for name in param.opts}
        options = {arg.partition("=")[0] for arg in args if arg.startswith("--")}
        return "show" if options <= show_options else "measure"


@click.group(cls=AtlasGroup, package=__package__, modules=COMMANDS)
@click.pass_context
def command(context: click.Context) -> None:
    """Show or measure what every head does over a corpus.

    An atlas has roles with scores, baselines and intervals. Without COMMAND it measures where --texts is given, and
    else shows the bundled atlas of a model:

    \b
      headwise atlas --model smollm2
      headwise atlas --model smollm2 --texts sentences.txt --out atlas
    """
    if world_size() > 1 and context.invoked_subcommand != "measure":
        raise HeadwiseError(
            "torchrun shares texts among its ranks: give --texts, or start the command without torchrun"
        )
