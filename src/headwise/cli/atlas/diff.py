"""`headwise atlas diff`: which heads changed their roles from one atlas to another."""

from __future__ import annotations

import json

import click

from ...terminal import echo
from ..options import json_option
from .files import load_atlas


@click.command
@click.argument("before")
@click.argument("after")
@json_option
def command(before: str, after: str, as_json: bool) -> None:
    """Compare the roles in two atlases.

    BEFORE and AFTER are each an atlas.json, or the name of a model whose atlas is bundled.
    """
    changes = load_atlas(before).diff(load_atlas(after))
    echo(json.dumps(changes.to_json(), indent=2) if as_json else str(changes))
