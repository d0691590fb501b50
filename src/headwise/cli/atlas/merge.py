"""`headwise atlas merge`: the atlases of parts of a corpus as one."""

from __future__ import annotations

from pathlib import Path

import click

from ..checks import check_output_folder
from ..options import PATH, json_option
from ..ranks import only_run
from .files import load_atlas, out_option, print_atlas, table_options, write_atlas


@click.command
@click.argument("first", type=PATH, metavar="ATLAS")
@click.argument("others", type=PATH, nargs=-1, required=True, metavar="ATLAS...")
@out_option
@table_options
@json_option
def command(
    first: Path, others: tuple[Path, ...], out: Path | None, head: str | None, best: int, as_json: bool
) -> None:
    """Merge the atlases of parts of a corpus.

    Each ATLAS is an atlas.json that was measured with --part and --out, with its sums beside it.
    """
    if out is not None:
        check_output_folder(out)
    atlas = load_atlas(first).merge(*map(load_atlas, others))
    if out is not None:
        with only_run(out):
            write_atlas(atlas, out)
    print_atlas(atlas, head, best, as_json)
