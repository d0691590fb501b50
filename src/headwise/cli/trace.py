"""`headwise trace`: multi-head attention step by step, drawn for the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ..terminal import console, echo
from .options import Whole, context_option, json_option, seed_option

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..attention.trace import Step, Trace

LARGEST = 65_536  # of any one size; the trace itself checks their product
WIDE = 100  # columns; a narrower terminal has no room for the names of the axes


@click.command
@click.option("--d-model", type=Whole(1, LARGEST), default=512, help="Width of a token.")
@click.option("--heads", type=Whole(1, LARGEST), default=8, help="Query heads.")
@context_option(10, "Tokens in the sequence.", largest=2**63)
@click.option("--kv-heads", type=Whole(1), show_default="as many as query heads", help="Key/value heads.")
@click.option("--head-dim", type=Whole(1, LARGEST), show_default="d_model / heads", help="Width of one head.")
@click.option("--batch", type=Whole(1), default=1, help="Sequences at once.")
@click.option("--causal", is_flag=True, help="Each token attends to itself and the tokens before it.")
@click.option("--no-bias", is_flag=True, help="Projections without biases.")
@seed_option("Seed of the random parameters and tokens.")
@json_option
def command(
    d_model: int,
    heads: int,
    context: int,
    kv_heads: int | None,
    head_dim: int | None,
    batch: int,
    causal: bool,
    no_bias: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Show multi-head attention step by step.

    Every step comes with its shape, its parameters and a few real numbers.
    """
    from ..attention.trace import trace
    from ..heads import Heads

    result = trace(
        Heads.split(d_model, heads, kv_heads, head_dim),
        batch=batch,
        tokens=context,
        causal=causal,
        bias=not no_bias,
        seed=seed,
    )
    if as_json:
        echo(json.dumps(result.to_json(), indent=2))
        return
    screen = console()
    screen.print(_drawing(result, wide=screen.width >= WIDE))
    if not result.equal:
        raise click.exceptions.Exit(1)


def _drawing(result: Trace, *, wide: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column("step")
    table.add_column("shape and numbers")
    if wide:
        table.add_column("axes", style="dim")
    table.add_column("parameters", justify="right")
    for number, step in enumerate(result.steps, start=1):
        axes = [", ".join(step.axes)] if wide else []
        table.add_row(str(number), _description(step), _value(step), *axes, _parameters(step))
    return Group(_title(result), Text(), table, Text(), _totals(result))


def _description(step: Step) -> Text:
    from rich.text import Text

    return Text.assemble((step.formula, "bold"), "\n", (step.meaning, "dim"))


def _value(step: Step) -> Text:
    from rich.text import Text

    numbers = " ".join(f"{number:5.2f}" for number in step.sample)
    ellipsis = " …" if step.shape[-1] > len(step.sample) else ""
    return Text.assemble((str(step.shape), "green"), "\n", (numbers + ellipsis, "cyan"))


def _parameters(step: Step) -> str:
    if not step.weights:
        return ""
    return f"{step.weights:,}" + (f" + {step.biases:,}" if step.biases else "")


def _title(result: Trace) -> Text:
    from rich.text import Text

    heads = result.heads
    kv = "" if heads.kv == heads.query else f", {_several(heads.kv, 'key/value head')}"
    sizes = f"d_model {heads.width}, {_several(heads.query, 'head')} of {heads.dim}{kv} ({heads.kind})"
    causal = ", causal" if result.causal else ""
    run = f"batch {result.batch}, {_several(result.tokens, 'token')}{causal}, seed {result.seed}"
    return Text.assemble(
        ("Multi-head attention, step by step\n", "bold"),
        f"{sizes}; {run}\n",
        (f"The numbers follow token {result.tokens - 1}, the last, through head 0.", "dim"),
    )


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _totals(result: Trace) -> Text:
    from rich.text import Text

    total = f"{result.weights:,} weights + {result.biases:,} biases = {result.weights + result.biases:,} parameters"
    mark, style = ("✓", "green") if result.equal else ("✗", "bold red")
    check = f"the steps and the module's own forward differ by at most {result.difference:.1e}"
    return Text.assemble((total, "bold"), "\n", (mark, style), " ", check)
