"""`headwise bench`: speed and memory against the peers, drawn for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import console, echo

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ..bench.suite import Job

STYLES = {True: "green", False: "bold red", None: ""}
MARKS = {True: "✓", False: "✗", None: "·"}


def bench(
    cases: Annotated[list[str] | None, typer.Option(help="Only these cases, by name; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and shapes, nothing compiled.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; the best of them counts.")] = None,
    sweep: Annotated[bool | None, typer.Option(help="Forty untuned shapes; by default unless cases are named.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that torch may use.")] = None,
    isa: Annotated[str | None, typer.Option(help="Let all contestants use no better instructions: avx2.")] = None,
    device: Annotated[str, typer.Option(help="Where attention is measured: cpu, cuda, mps.")] = "cpu",
    explain: Annotated[bool, typer.Option("--explain", help="Say which path each case takes, and why.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure headwise and its peers side by side on this machine, and compare with the goals."""
    if isa:
        import sys

        from ..timing.machine import restrict_instructions

        restrict_instructions(isa, sys.argv[1:])
    import torch

    from ..bench.suite import Options, run

    options = Options(tuple(cases or ()), quick, rounds or 0, sweep, device)
    if threads:
        torch.set_num_threads(threads)
    _warn_if_busy()
    report = run(options, _progress)
    results = report.to_json()
    if as_json:
        echo(json.dumps(results, indent=2))
    else:
        console().print(_drawing(results, explain=explain))
    for error in report.errors:
        echo(f"headwise: {error}", err=True)
    if report.errors:
        raise typer.Exit(1)


def _warn_if_busy() -> None:
    """Ratios hold on a machine that does other things, but only roughly."""
    import os

    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores / 2:
        echo(f"headwise: the machine is busy (load {load:.1f} on {cores} cores); the times will be noisy", err=True)


def _progress(jobs: list[Job]) -> Iterator[Job]:
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.title)
            yield job
            progress.advance(task)


def _drawing(results: dict[str, Any], *, explain: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..bench.result_rows import notes, rounds_in_words
    from ..timing.machine import machine_summary

    blocks: list[list[RenderableType]] = [
        [Text(machine_summary(results["machine"]), style="dim")],
        [_table(results)] if results["cases"] else [],
        [Text(f"{MARKS[met]} {text}", style=STYLES[met]) for text, met in notes(results)],
        _paths([*results["cases"], *results["sweep"]["shapes"]]) if explain else [],
        [
            Text(
                f"ratio: the peer's time / ours; best of {rounds_in_words(results['settings'])} on "
                f"{results['settings']['device']}",
                style="dim",
            )
        ],
    ]
    return Group(*(Group(*block, Text()) for block in blocks if block))


def _table(results: dict[str, Any]) -> Table:
    """A line for each case, and below it one for each peer."""
    from rich.table import Table

    from ..bench.result_rows import rows

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("case and peers")
    for name in ("time", "ratio", "goal"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(results):
        if row.case:
            table.add_row(row.case, row.ours, style="bold")
        table.add_row(f"  {row.peer}", row.time, row.ratio, row.goal, style=STYLES[row.met])
    return table


def _paths(results: Iterable[dict[str, Any]]) -> list[RenderableType]:
    from rich.text import Text

    return [Text.assemble((result["title"], "bold"), f": {result['path']}") for result in results]
