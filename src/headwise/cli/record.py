"""`headwise record`: what every head did while a model trained, from the log that `headwise.Recorder` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import click

from ..errors import HeadwiseError
from ..terminal import console, echo
from .options import PATH, LazyChoice, Whole, json_option
from .wording import name_options_in


def _statistics() -> Iterable[str]:
    from ..recorder.statistics import STATISTICS

    return STATISTICS


@click.command
@click.argument("log", type=PATH, metavar="FILE")
@click.option(
    "--stat",
    type=LazyChoice(_statistics),
    default="entropy",
    metavar="NAME",
    help="Statistic of the table: entropy, max_logit, first, sink, confidence, output or twin.",
)
@click.option("--step", type=Whole(0), show_default="the last", help="Optimizer step of the table.")
@click.option("--html", type=PATH, help="Write a page with a time slider over all heads, as one offline file.")
@json_option
def command(log: Path, stat: str, step: int | None, html: Path | None, as_json: bool) -> None:
    """Show the heads of a training run.

    FILE is what headwise.Recorder(model, path=FILE) writes, also while the training is running.
    """
    from ..recorder.training_log import TrainingLog

    run = TrainingLog.load(log)
    if not run.entries:
        raise HeadwiseError(f"{str(log)!r} has no entry yet")
    if html is not None:
        from ..ui.recorder_page import save_training_page

        save_training_page(run, html)
        echo(f"written to {html}", err=True)
    if as_json:
        echo(json.dumps(run.to_json()))
    elif html is None:
        from ..recorder.terminal import draw_log

        screen = console(soft_wrap=False)
        drawing = draw_log(run, screen.width, colour=screen.color_system is not None, statistic=stat, step=step)
        screen.print(name_options_in(drawing))
