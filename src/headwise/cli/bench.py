"""`headwise bench`: speed and memory against the peers, drawn for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..terminal import console, echo
from .options import LazyChoice, Whole, json_option
from .progress import progress_bars

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ..bench.suite import Job

STYLES = {True: "green", False: "bold red", None: ""}
MARKS = {True: "✓", False: "✗", None: "·"}


def _case_names() -> Iterable[str]:
    from ..bench.suite import NAMES

    return NAMES


@click.command
@click.option(
    "--cases", type=LazyChoice(_case_names), multiple=True, metavar="CASE", help="Only this case; repeatable."
)
@click.option("--quick", is_flag=True, help="Fewer rounds and shapes, nothing compiled.")
@click.option("--rounds", type=Whole(1), help="Rounds of measurement, of which the fastest counts.")
@click.option(
    "--sweep/--no-sweep", default=None, show_default="unless cases are named", help="Also measure forty untuned shapes."
)
@click.option("--threads", type=Whole(1, 4096), help="Threads that torch may use.")
@click.option("--isa", type=click.Choice(["avx2"]), help="Restrict all contestants to this instruction set.")
@click.option("--device", default="cpu", help="Where attention is measured: cpu, cuda or mps.")
@click.option("--explain", is_flag=True, help="Say which backend each case uses, and why.")
@json_option
def command(
    cases: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    sweep: bool | None,
    threads: int | None,
    isa: str | None,
    device: str,
    explain: bool,
    as_json: bool,
) -> None:
    """Measure headwise and its peers on this machine.

    They run side by side; the ratios are compared with the goals.
    """
    if isa:
        import sys

        from ..timing.machine import restrict_instructions

        restrict_instructions(isa, sys.argv[1:])
    import torch

    from ..bench.suite import Options, run

    options = Options(cases, quick, rounds or 0, sweep, device)
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
        raise click.exceptions.Exit(1)


def _warn_if_busy() -> None:
    """Warn when other processes keep the cores busy: the ratios are then only approximate."""
    import os

    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores / 2:
        echo(f"headwise: the machine is busy (load {load:.1f} on {cores} cores); the times will be noisy", err=True)


def _progress(jobs: list[Job]) -> Iterator[Job]:
    with progress_bars() as progress:
        for index, job in enumerate(jobs):
            progress("cases", index, len(jobs))
            yield job


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
    """One line per case, and below it one per peer."""
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
