"""`headwise atlas relations`: which heads follow which relation between words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import HeadwiseError
from ...terminal import echo
from ..checks import check_output_folder, make_folder
from ..options import PATH, json_option, model_option, seed_option
from ..progress import progress_bars
from ..ranks import only_run
from .files import load_atlas, write_atlas

if TYPE_CHECKING:
    from ...roles.relations.result import Relations


@click.command
@click.option(
    "--conllu",
    type=PATH,
    multiple=True,
    show_default="the bundled probe set",
    help="A CoNLL-U file with gold relations; repeatable.",
)
@click.option(
    "--report",
    type=PATH,
    multiple=True,
    show_default="every other document of --conllu",
    help="A CoNLL-U file to report on; repeatable.",
)
@model_option
@click.option("--out", type=PATH, help="Directory for relations.json.")
@click.option("--atlas", type=PATH, help="Also add the relations to this atlas.json, and write its other files again.")
@seed_option("Seed of the shuffled gold relations.")
@json_option
def command(
    conllu: tuple[Path, ...], report: tuple[Path, ...], model: str, out: Path | None, atlas: Path | None, seed: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Score every head on relations between words.

    Does it find the verb of an object, the noun of an adjective, the antecedent of a pronoun?
    """
    if report and not conllu:
        raise HeadwiseError("--report needs --conllu, on which heads are chosen")
    for folder in (out, atlas and atlas.parent):
        if folder is not None:
            check_output_folder(folder)
    if atlas is not None:
        load_atlas(atlas)  # a file that is none of an atlas is refused before its directory is locked
    with only_run(None if atlas is None else atlas.parent):
        result = _measure(conllu, report, model, seed)
        if out is not None:
            make_folder(out)
            result.save(out / "relations.json")
            echo(f"wrote relations.json to {out}", err=True)
        if atlas is not None:
            write_atlas(replace(load_atlas(atlas), relations=result), atlas.parent)
    echo(json.dumps(result.to_json(), ensure_ascii=False) if as_json else str(result))


def _measure(conllu: tuple[Path, ...], report: tuple[Path, ...], model: str, seed: int) -> Relations:
    from ...roles.relations import conllu as files
    from ...roles.relations.find import relations, sentences_of
    from ...roles.relations.probe_set.sentences import probe_sentences

    choosing = sentences_of(files.read_conllu(*conllu) if conllu else probe_sentences())[0]  # before a model is loaded
    reporting = sentences_of(files.read_conllu(*report))[0] if report else None
    total, step = len(choosing) + len(reporting or ()), 0
    with progress_bars() as progress:

        def count_sentences(count: int) -> None:
            nonlocal step
            step += count
            progress("sentences", step, total)

        return relations(model, choosing, report=reporting, seed=seed, progress=count_sentences)
