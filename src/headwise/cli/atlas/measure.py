"""`headwise atlas measure`: statistics of every head over a corpus, resumable, shared under torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import HeadwiseError
from ...terminal import echo, one_line
from ..checks import check_output_folder, make_folder
from ..options import Whole, context_option, field_option, json_option, model_option, seed_option, texts_option
from ..progress import progress_bars
from ..ranks import SingleProcess, joined_ranks, only_run
from ..requirements import check_requirements
from .files import out_option, print_atlas, table_options, write_atlas

if TYPE_CHECKING:
    from ...roles.atlas.result import Atlas
    from ...scale.ranks import Ranks

UNFINISHED = "unfinished.safetensors"  # in the output directory: the sums of an unfinished run


@click.command
@texts_option()
@model_option
@out_option
@click.option("--limit", type=Whole(1), help="Texts at most.")
@context_option(512, "Tokens per text at most.", least=4)
@field_option
@click.option(
    "--part", metavar="I/N", help="Only every N-th text, beginning with text I, counted from 0; merge joins the parts."
)
@click.option(
    "--probes",
    metavar="NAMES",
    help="Also measure roles that need inputs of their own: all, or names separated by commas.",
)
@seed_option("Seed of the random tokens that measure induction, and of the probes.")
@table_options
@json_option
def command(
    texts: Path, model: str, out: Path | None, limit: int | None, context: int, field: str, part: str | None,
    probes: str | None, seed: int, head: str | None, best: int, as_json: bool,
) -> None:  # fmt: skip
    """Measure what every head does over a corpus.

    With --out, an interrupted run is resumed by the same command.
    """
    share, probe_list = parse_part(part), parse_probes(probes)
    if out is not None:
        check_output_folder(out)
    if head is not None:
        from ...roles.atlas.result import parse_head

        parse_head(head)  # before anything is measured
    check_requirements("models", models=[model])
    with joined_ranks() as ranks:
        if ranks.count > 1 and part is not None:
            raise HeadwiseError("torchrun shares the texts among its ranks itself; leave out --part")
        options = {"limit": limit, "length": context, "field": field, "seed": seed, "probes": probe_list}
        with only_run(out, ranks):
            with _resumption_named(out):
                atlas = _measure(texts, model, out, share, ranks, options)
            if out is not None and ranks.first:
                write_atlas(atlas, out)
                if ranks.count == 1:
                    (out / UNFINISHED).unlink(missing_ok=True)  # only now is everything that was measured on disk
        if ranks.first:
            print_atlas(atlas, head, best, as_json)


@contextmanager
def _resumption_named(out: Path | None) -> Iterator[None]:
    """After Ctrl-C, the last line says how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if out is None:
            words = "nothing was saved; with --out DIRECTORY the same command goes on where it was interrupted"
        elif (out / UNFINISHED).exists() or (out / "unfinished").exists():
            words = f"what was measured is saved in {one_line(str(out))}, and the same command goes on from there"
        else:
            words = "nothing was measured yet; the same command begins again"
        raise KeyboardInterrupt(f"{str(stop) or 'interrupted'}; {words}") from None


def parse_part(text: str | None) -> tuple[int, int]:
    """ "1/4" as (1, 4); the whole corpus is (0, 1)."""
    if text is None:
        return 0, 1
    from ...json_documents import whole_number

    i, n = (whole_number(side) for side in (text.partition("/")[0], text.partition("/")[2]))
    if i is None or n is None or i >= n:
        raise HeadwiseError(f"--part is I/N such as 0/4, with I below N, got {text[:60]!r}")
    return i, n


def parse_probes(text: str | None) -> list[str]:
    """ "retrieval,streaming" as the names of probes; "all" names all of them."""
    if text is None:
        return []
    from ...roles.atlas.probes.run import probe_names

    return probe_names([name.strip() for name in text.split(",")])


def _measure(
    texts: Path,
    model: str,
    out: Path | None,
    part: tuple[int, int],
    ranks: SingleProcess | Ranks,
    options: dict[str, Any],
) -> Atlas:
    from ...models.loading.loader import load, tokenizer
    from ...roles.atlas.corpus import check_file

    check_file(texts, options["field"])  # before a model is loaded
    resume = None if out is None else out / (UNFINISHED if ranks.count == 1 else "unfinished")
    if resume is not None and resume.exists() and ranks.first:
        echo(f"resuming from {resume}; remove it to begin again", err=True)
    model_tokenizer = tokenizer(model)  # before the weights: it finds a wrong name soonest
    full_model = load(model)
    with progress_bars(ranks.first) as progress:

        def count_texts(step: int, total: int | None) -> None:
            progress("texts", step, total)

        run_options: dict[str, Any] = {"name": model, "resume": resume, "progress": count_texts, **options}
        if ranks.count > 1:
            from ...scale.data_parallel import atlas as measure_on_ranks

            result = measure_on_ranks(full_model, texts, model_tokenizer, out=out and out / "atlas.json", **run_options)
        else:
            from ...roles.atlas.build import add_probes
            from ...roles.atlas.build import atlas as measure

            probes = run_options.pop("probes")
            result = measure(full_model, texts, model_tokenizer, part=part, keep_checkpoint=True, **run_options)
            if probes and part[0] == 0:
                result = add_probes(
                    result, full_model, model_tokenizer, probes=probes, seed=options["seed"],
                    progress=lambda step, total: progress("probes", step, total),
                )  # fmt: skip
    if out is not None and ranks.first:
        from ...roles.atlas.similarity import head_similarity

        make_folder(out)
        result.save(out / "atlas.json", sums=True)  # what took long is on disk before the rest begins
        similarity = head_similarity(
            full_model, texts, model_tokenizer, field=options["field"], length=options["length"], seed=options["seed"]
        )
        result.about["likeness"] = {kind: table.to_json() for kind, table in similarity.items()}
    return result
