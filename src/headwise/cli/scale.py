"""`headwise scale`: which heads live on which rank, and what each way of splitting sends. Needs no torch."""

from __future__ import annotations

import json
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
@json_option
def command(model: str, ranks: int, context: int, batch: int, dtype: str, as_json: bool) -> None:
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
    if as_json:
        echo(
            json.dumps(
                {
                    "model": model,
                    "plans": [{"from_layer": first, **plan.to_json()} for first, plan in plans],
                    "costs": [cost.to_json() for cost in ways],
                    "crossings": points,
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
    echo("\n".join(lines))


def _table(ways: list[Any]) -> str:
    rows = [("way", "sent forward", "per training step", "computed", "weights held", "")]
    rows += [
        (cost.way, format_bytes(cost.forward), format_bytes(cost.training), f"{cost.flops / 1e12:.3g} TFLOP",
         format_bytes(cost.weights), cost.note)
        for cost in ways
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
        for row in rows
    )
