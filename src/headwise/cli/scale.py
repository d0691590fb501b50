"""`headwise scale`: which heads would live on which rank, and what each way of splitting sends. Needs no torch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..terminal import echo


def scale(
    model: Annotated[str, typer.Argument(help="A config.json, safetensors or GGUF file, directory or famous name.")],
    ranks: Annotated[int, typer.Option(min=1, max=65_536, help="How many ranks share it.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once, over all ranks.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of what is sent: bf16, fp16 or fp32.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a model over ranks: where its heads live, which counts divide, bytes and FLOPs for each way of splitting."""
    from ..card import read
    from ..scale.cost_model import costs, crossings
    from ..scale.head_plan import HeadPlan

    card = read(model)
    kinds = {layer.heads: layer.index for layer in reversed(card.attention.layers) if layer.sharing != "none"}
    plans = [(first, HeadPlan(heads, ranks)) for heads, first in reversed(kinds.items())]
    found, points = costs(card, ranks, context, batch, dtype), crossings(card, dtype)
    if as_json:
        echo(
            json.dumps(
                {
                    "model": model,
                    "plans": [{"from_layer": first, **plan.to_json()} for first, plan in plans],
                    "costs": [cost.to_json() for cost in found],
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
    lines += [_table(found), "", f"Of one layer, batch {batch}, {context} tokens, {dtype}; the busiest rank."]
    echo("\n".join(lines))


def _table(found: list[Any]) -> str:
    from ..scale.cost_model import format_bytes

    rows = [("way", "sent forward", "a training step", "computed", "weights held", "")]
    rows += [
        (cost.way, format_bytes(cost.forward), format_bytes(cost.training), f"{cost.flops / 1e12:.3g} TFLOP",
         format_bytes(cost.weights), cost.note)
        for cost in found
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
        for row in rows
    )
