"""`headwise atlas show`: a bundled or saved atlas as a table by role, or all that is known about one head."""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import HeadwiseError
from ..options import PATH, json_option, model_option
from .files import load_atlas, print_atlas, table_options


@click.command
@click.argument("atlas", type=PATH, required=False)
@model_option
@table_options
@json_option
def command(atlas: Path | None, model: str, head: str | None, best: int, as_json: bool) -> None:
    """Show a bundled or saved atlas.

    ATLAS is an atlas.json; without it, the bundled atlas of --model is shown.
    """
    if atlas is not None:
        return print_atlas(load_atlas(atlas), head, best, as_json)
    from ...roles.atlas.bundled import NAMES, bundled_atlas

    bundled = bundled_atlas(model)
    if bundled is None:
        raise HeadwiseError(
            f"no atlas is bundled for {model!r}, only for {' and '.join(NAMES)}; "
            "give --texts, a file with one text per line, to measure one"
        )
    return print_atlas(bundled, head, best, as_json)
