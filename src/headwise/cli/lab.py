"""`headwise lab`: the claims and their verdicts; some of them measured again, or all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import HeadwiseError
from ..terminal import console, echo
from .checks import check_output_folder
from .options import PATH, Whole, json_option, seed_option, training_option
from .progress import progress_bars
from .ranks import SingleProcess, joined_ranks, only_run
from .requirements import check_requirements

OUT = Path("lab")
MOST_STARTS = 1000
REAL_MODELS = {  # claim -> the bundled models that it measures
    5: ("minilm",),
    8: ("minilm", "smollm2"),
    11: ("minilm", "smollm2"),
    12: ("minilm",),
    13: ("smollm2",),
}


@click.command
@click.argument("claims", type=int, nargs=-1, metavar="[NUMBER]...")
@click.option("--all", "all_claims", is_flag=True, help="Run every claim.")
@click.option("--full", is_flag=True, help="The long version: more random starts.")
@click.option(
    "--starts", type=Whole(1, MOST_STARTS), show_default="2, or 20 with --full", help="Random starts per model."
)
@seed_option("The first random start; the others follow it.")
@click.option("--device", default="cpu", help="Where models are trained: cpu, cuda, ...")
@click.option("--out", type=PATH, default=OUT, show_default="lab/", help="Directory for JSON, PNG and Markdown.")
@click.option("--work", type=PATH, show_default="the user's cache", help="Directory for finished pieces of work.")
@training_option
@json_option
def command(
    claims: tuple[int, ...],
    all_claims: bool,
    full: bool,
    starts: int | None,
    seed: int,
    device: str,
    out: Path,
    work: Path | None,
    over: str,
    as_json: bool,
) -> None:
    """Measure common claims about multi-head attention.

    Without a NUMBER it lists the claims with their verdicts.
    """
    if not claims and not all_claims:
        _list(as_json)
        return
    from ..lab.claims import claim_numbers, load_claim
    from ..lab.result_page import stem
    from ..lab.session import measure, write_result
    from ..lab.store import DEFAULT, FULL, Lab
    from ..models.loading.locate import cache

    if claims and all_claims:
        raise HeadwiseError("give numbers of claims or --all, not both")
    numbers = list(dict.fromkeys(claims or claim_numbers()))
    real = [model for number in numbers for model in REAL_MODELS.get(number, ())]
    check_requirements(*(["models"] if real else []), models=real)
    for number in numbers:
        load_claim(number)
    _check_device(device)
    records = []
    work = cache() / "lab" if work is None else work
    for folder in (out, work):
        check_output_folder(folder)
    with joined_ranks() as ranks, _work_named(work), progress_bars(ranks.first) as progress:
        rank_group = None if isinstance(ranks, SingleProcess) else ranks
        budget = FULL if full else DEFAULT
        budget = replace(budget, starts=starts or budget.starts)
        lab = Lab(budget, seed, device, work, progress, ranks=rank_group, over=over)
        for index, number in enumerate(numbers):
            progress(f"claim {number}", index, len(numbers))
            with only_run(out / stem(number), ranks):  # claims may be measured side by side
                records.append(measure(number, lab))
                if ranks.first:
                    write_result(records[-1], out)
    if not ranks.first:
        return
    if as_json:
        echo(json.dumps(records, indent=2))
    else:
        _show(records, out)


@contextmanager
def _work_named(work: Path) -> Iterator[None]:
    """Whoever interrupts a run is told where its finished pieces are."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if stop.args:
            raise
        words = f"interrupted; finished pieces of work are in {work}, and the same command goes on from there"
        raise KeyboardInterrupt(words) from None


def _list(as_json: bool) -> None:
    from ..lab.claims import claim_numbers, load_claim
    from ..lab.session import read_results

    records = read_results()
    if as_json:
        short = [{key: x for key, x in record.items() if key != "figures"} for record in records.values()]
        echo(json.dumps(short, indent=2))
        return
    from rich.text import Text

    from ..lab.terminal import read_verdicts, verdict_line

    screen = console()
    for number in claim_numbers():
        record = records.get(number)
        title = record["title"] if record else load_claim(number).title
        screen.print(Text(f"{number}. {title}", style="bold"))
        for verdict in read_verdicts(record) if record else []:
            screen.print(Text("   ").append_text(verdict_line(verdict)))
        if record is None:
            screen.print(Text(f"   not measured yet; headwise lab {number} measures it", style="dim"))
    screen.print(Text("\nheadwise lab NUMBER runs one; its page says how it was measured", style="dim"))


def _show(records: list[dict[str, Any]], out: Path) -> None:
    from ..lab.claims import load_claim
    from ..lab.terminal import draw_result

    screen = console()
    for record in records:
        claim, figures = load_claim(record["claim"]), record["figures"]
        screen.print(draw_result(record, claim.charts(figures), claim.tables(figures)))
        screen.print()
    echo(f"written to {out}/", err=True)


def _check_device(device: str) -> None:
    import torch

    try:
        float(torch.ones(1, device=device))  # read back: the device "meta" takes tensors and computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(f"device {device[:60]!r} cannot be used here ({words}); try cpu") from error
