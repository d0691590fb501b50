"""`headwise atlas probe`: roles of decoder heads that need inputs of their own, added to a saved atlas."""

from __future__ import annotations

from pathlib import Path

import click

from ..checks import check_output_folder
from ..options import PATH, json_option, model_option, seed_option
from ..progress import progress_bars
from ..ranks import only_run
from .files import load_atlas, print_atlas, table_options, write_atlas
from .measure import parse_probes


@click.command
@click.argument("atlas", type=PATH)
@model_option
@click.option("--probes", metavar="NAMES", default="all", help="all, or names separated by commas.")
@seed_option("Seed of the probes' inputs.")
@table_options
@json_option
def command(atlas: Path, model: str, probes: str, seed: int, head: str | None, best: int, as_json: bool) -> None:
    """Add probes to an atlas.

    ATLAS is an atlas.json of the model, whose files are written again. Probes are retrieval, streaming, copying,
    successor and function: roles of decoder heads that are measured on inputs of their own instead of a corpus.
    """
    from ...roles.atlas.build import add_probes

    names = parse_probes(probes)
    load_atlas(atlas)  # a file that is none of an atlas is refused before its directory is locked
    check_output_folder(atlas.parent)
    with only_run(atlas.parent), progress_bars() as progress:
        result = add_probes(
            load_atlas(atlas), model, probes=names, seed=seed,
            progress=lambda step, total: progress("probes", step, total),
        )  # fmt: skip
        write_atlas(result, atlas.parent)
    print_atlas(result, head, best, as_json)
