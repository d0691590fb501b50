"""`headwise trace`: multi-head attention step by step, drawn for the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ..terminal import console, echo
from .checks import LARGEST_SEED

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..attention.trace import Step, Trace

LARGEST = 65_536  # of any one size; together they are checked by the trace itself
WIDE = 100  # columns from which the names of the axes have room


def trace(
    d_model: Annotated[int, typer.Option(min=1, max=LARGEST, help="Width of a token.")] = 512,
    heads: Annotated[int, typer.Option(min=1, max=LARGEST, help="Query heads.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in the sequence.")] = 10,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads; as many as query heads by default.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Width of one head; d_model / heads by default.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and those before it.")] = False,
    no_bias: Annotated[bool, typer.Option("--no-bias", help="Projections without biases.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the random parameters and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the steps as JSON.")] = False,
) -> None:
    """Show multi-head attention at work: every step with its shape, its parameters and a few real numbers."""
    from ..attention.trace import trace as run
    from ..heads import Heads

    result = run(
        Heads.split(d_model, heads, kv_heads, head_dim),
        batch=batch,
        tokens=tokens,
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
        raise typer.Exit(1)


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
        table.add_row(str(number), _what(step), _value(step), *axes, _parameters(step))
    return Group(_title(result), Text(), table, Text(), _totals(result))


def _what(step: Step) -> Text:
    from rich.text import Text

    return Text.assemble((step.formula, "bold"), "\n", (step.meaning, "dim"))


def _value(step: Step) -> Text:
    from rich.text import Text

    numbers = " ".join(f"{number:5.2f}" for number in step.sample)
    more = " …" if step.shape[-1] > len(step.sample) else ""
    return Text.assemble((str(step.shape), "green"), "\n", (numbers + more, "cyan"))


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
