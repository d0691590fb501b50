"""`headwise scale`: which heads live on which rank, and what each way of splitting sends.

Needs no torch, unless ranks are simulated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from ..terminal import echo, format_bytes
from .options import Whole, context_option, json_option


@click.command
@click.argument("model")
@click.option("--ranks", type=Whole(1, 65_536), default=8, help="Number of ranks.")
@context_option(4096, "Context length of every sequence.")
@click.option("--batch", type=Whole(1), default=1, help="Sequences at once, over all ranks.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="bf16", help="Data type of what is sent.")
@click.option("--simulate", is_flag=True, help="Run a layer as the first, middle and last rank, and count the bytes.")
@json_option
def command(model: str, ranks: int, context: int, batch: int, dtype: str, simulate: bool, as_json: bool) -> None:
    """Plan a model over several ranks.

    Where do its heads live, which rank counts divide them, and what does each way of splitting send and compute?

    MODEL is a config.json, a directory, a .safetensors or .gguf file, a famous name (bert-base, llama3-8b) or a hub id.
    """
    from ..card import read
    from ..scale.cost_model import costs, crossings
    from ..scale.head_plan import HeadPlan

    card = read(model)
    kinds = {layer.heads: layer.index for layer in reversed(card.attention.layers) if layer.sharing != "none"}
    plans = [(first, HeadPlan(heads, ranks)) for heads, first in reversed(kinds.items())]
    ways, points = costs(card, ranks, context, batch, dtype), crossings(card, context, dtype)
    runs = _simulated_ranks(model, ranks, context, batch, dtype) if simulate else []
    if as_json:
        echo(
            json.dumps(
                {
                    "model": model,
                    "plans": [{"from_layer": first, **plan.to_json()} for first, plan in plans],
                    "costs": [cost.to_json() for cost in ways],
                    "crossings": points,
                    **({"simulated": [run.to_json() for run in runs]} if simulate else {}),
                },
                indent=2,
            )
        )
        return
    lines: list[str] = []
    for first, plan in plans:
        lines += [f"layers as layer {first}: {plan}", ""]
    counts = ", ".join(map(str, points["rank_counts"]))
    lines += [f"transformers' own splitting works on {counts} ranks; headwise's on any number.", ""]
    lines += [_table(ways), "", f"One layer on the busiest rank; batch {batch}, {context} tokens, {dtype}."]
    if simulate:
        lines += ["", _simulation_table(runs), "", "Bytes counted in one process, in which each rank ran alone."]
    echo("\n".join(lines))


def _simulated_ranks(model: str, ranks: int, context: int, batch: int, dtype: str) -> list[Any]:
    from ..scale.simulation import WAYS, simulate

    ways = [way for way in WAYS if way != "sequence" or context >= 2 * ranks]
    return simulate(model, ranks, context, batch, dtype, ways=ways)


def _table(ways: list[Any]) -> str:
    rows = [("way", "sent forward", "per training step", "computed", "weights held", "")]
    rows += [
        (cost.way, format_bytes(cost.forward), format_bytes(cost.training), f"{cost.flops / 1e12:.3g} TFLOP",
         format_bytes(cost.weights), cost.note)
        for cost in ways
    ]  # fmt: skip
    return _aligned(rows)


def _simulation_table(runs: list[Any]) -> str:
    rows = [("way", "rank", "sent forward", "per training step", "weights held", "")]
    rows += [
        (run.way, str(run.rank), *(f"{x:,}" for x in (run.counted.forward, run.counted.training, run.counted.weights)),
         "as computed" if run.exact else f"computed: {run.formula}")
        for run in runs
    ]  # fmt: skip
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns of equal width, to the right but for the first; the last column holds notes."""
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
        for row in rows
    )
