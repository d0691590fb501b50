"""`headwise lab`: the claims and their verdicts; one of them run anew, or all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import HeadwiseError
from ..terminal import console, echo
from .checks import LARGEST_SEED, check_output_folder
from .ranks import Alone, check_over, together

if TYPE_CHECKING:
    from ..lab.store import Progress

ALL_OUT, ONE_OUT = Path("docs/lab"), Path("lab")


def lab(
    claims: Annotated[list[int] | None, typer.Argument(help="Run these claims, by number; none lists all.")] = None,
    all_claims: Annotated[bool, typer.Option("--all", help="Run every claim.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The long version: more random starts.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="The first random start; the others follow it.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Where models are trained: cpu, cuda, ...")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Where JSON, PNG and Markdown go: lab/, or docs/lab/ with --all.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Where finished pieces are kept; the user's cache.")] = None,
    over: Annotated[str, typer.Option(help="Under torchrun, how models are trained: ddp or fsdp.")] = "ddp",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """What everyone says about multi-head attention, measured: each claim an experiment with a verdict."""
    if not claims and not all_claims:
        _list(as_json)
        return
    from ..lab.claims import claim_numbers, load_claim
    from ..lab.session import measure, write_result
    from ..lab.store import DEFAULT, FULL, Lab
    from ..models.loading.locate import cache

    if claims and all_claims:
        raise HeadwiseError("give numbers of claims or --all, not both")
    numbers = list(dict.fromkeys(claims or claim_numbers()))
    for number in numbers:
        load_claim(number)
    _check_device(device)
    check_over(over)
    records = []
    out = out or (ALL_OUT if all_claims else ONE_OUT)
    work = cache() / "lab" if work is None else work
    for folder in (out, work):
        check_output_folder(folder)
    with together() as ranks, _bars(ranks.first) as progress:
        those = None if isinstance(ranks, Alone) else ranks
        desk = Lab(FULL if full else DEFAULT, seed, device, work, progress, ranks=those, over=over)
        for done, number in enumerate(numbers):
            progress(f"claim {number}", done, len(numbers))
            records.append(measure(number, desk))
            if ranks.first:
                write_result(records[-1], out)
    if not ranks.first:
        return
    if as_json:
        echo(json.dumps(records, indent=2))
    else:
        _show(records, out)


def _list(as_json: bool) -> None:
    from ..lab.claims import claim_numbers, load_claim
    from ..lab.session import read_results

    found = read_results()
    if as_json:
        kept = [{key: x for key, x in record.items() if key != "figures"} for record in found.values()]
        echo(json.dumps(kept, indent=2))
        return
    from rich.text import Text

    from ..lab.terminal import read_verdicts, verdict_line

    screen = console()
    for number in claim_numbers():
        record = found.get(number)
        title = record["title"] if record else load_claim(number).title
        screen.print(Text(f"{number}. {title}", style="bold"))
        for verdict in read_verdicts(record) if record else []:
            screen.print(Text("   ").append_text(verdict_line(verdict)))
        if record is None:
            screen.print(Text(f"   not measured yet; headwise lab {number} does", style="dim"))
    screen.print(Text("\nheadwise lab NUMBER runs one; its page says how it was measured", style="dim"))


def _show(records: list[dict[str, Any]], out: Path) -> None:
    from ..lab.claims import load_claim
    from ..lab.terminal import draw_result

    screen = console()
    for record in records:
        chosen, figures = load_claim(record["claim"]), record["figures"]
        screen.print(draw_result(record, chosen.charts(figures), chosen.tables(figures)))
        screen.print()
    echo(f"written to {out}/", err=True)


def _check_device(device: str) -> None:
    import torch

    try:
        float(torch.ones(1, device=device))  # read back, for the device "meta" takes tensors and computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(f"device {device[:60]!r} cannot be used here ({words}); try cpu") from error


@contextmanager
def _bars(shown: bool) -> Iterator[Progress]:
    """What is being done, on stderr: the newest kinds of work as bars, gone at the end."""
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    screen = console(stderr=True)
    with Bars(console=screen, transient=True, disable=not (shown and screen.is_terminal)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total, visible=done < total)

        yield show
