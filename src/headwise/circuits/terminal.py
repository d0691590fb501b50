"""Effects and circuits drawn for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .effects import Effects, HeadEffect

LISTED = 10  # heads or edges


def draw_effects(effects: Sequence[Effects], number: int = LISTED) -> RenderableType:
    """The strongest heads of several effects, beside each other."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = [each.strongest(number) for each in effects]
    for each, rows in zip(effects, columns, strict=True):
        table.add_column("head", style="cyan")
        table.add_column(each.name, justify="right")
        table.add_column("95 % interval" if any(row.low == row.low for row in rows) else "", style="dim")
    several = len({row.kind for rows in columns for row in rows}) > 1
    for place in range(max(map(len, columns), default=0)):
        cells: list[Any] = []
        for rows in columns:
            cells += _effect_cells(rows[place], several) if place < len(rows) else ["", "", ""]
        table.add_row(*cells)
    explanations = [Text(f"{each.name}: {each.about.method}", style="dim") for each in effects]
    notes = [Text(note, style="dim") for each in effects for note in each.about.notes]
    return Group(Text("Strongest heads", style="bold"), table, *explanations, *notes)


def _effect_cells(row: HeadEffect, several: bool) -> list[Any]:
    name = f"{row.kind} {row.layer}.{row.head}" if several else f"{row.layer}.{row.head}"
    ends = "" if np.isnan(row.low) else f"{row.low:+.3f} to {row.high:+.3f}"
    return [name, Text(f"{row.effect:+.3f}", style="red" if row.effect < 0 else "green"), ends]


def draw_circuit(circuit: Mapping[str, Any], number: int = LISTED) -> RenderableType:
    """A circuit (as `Circuit.to_json` gives it): its strongest edges, and how much of the metric they explain."""
    names = {node["id"]: _node_name(node) for node in circuit["nodes"]}
    edges = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for edge in circuit["edges"][:number]:
        into = "" if edge["input"] == "input" else f"{edge['input']} of "
        colour = "red" if edge["score"] < 0 else "green"
        source, target = (names.get(edge[side], edge[side]) for side in ("from", "to"))
        edges.add_row(source, f"→ {into}{target}", Text(f"{edge['score']:+.3f}", style=colour))
    shown = min(number, len(circuit["edges"]))
    size = f"{circuit['size']:,} edges" + (f" of the model's {circuit['total']:,}" if circuit.get("total") else "")
    title = Text.assemble(("Circuit", "bold"), f": {size}, of which the {shown} strongest ")
    return Group(
        title.append(f"({circuit['method']})", style="dim"),
        edges,
        Text(),
        Text("How much of the metric it explains", style="bold"),
        _curve(circuit),
        Text(
            "faithfulness: what the edges alone keep; completeness: what is lost without them; random: faithfulness of "
            "random edges",
            style="dim",
        ),
        *(Text(note, style="dim") for note in circuit["notes"]),
    )


def _curve(circuit: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("edges", "faithfulness", "completeness", "random"):
        table.add_column(name, justify="right")
    for point in circuit["curve"]:
        cells = [_share(point[name]) for name in ("faithfulness", "completeness", "random")]
        table.add_row(f"{point['edges']:,}", *cells, style="bold" if point["edges"] == circuit["size"] else "")
    return table


def _share(triple: Sequence[float | None] | None) -> str:
    if triple is None or triple[0] is None:
        return "–"
    mean, *ends = (None if x is None else f"{round(x, 2) + 0.0:.2f}" for x in triple)  # + 0.0: no "-0.00"
    return str(mean) if None in ends else f"{mean} ({ends[0]} to {ends[1]})"


def _node_name(node: Mapping[str, Any]) -> str:
    if node["type"] == "head":
        return f"head {node['layer']}.{node['head']}"
    if node["type"] == "kv":
        return f"KV head {node['layer']}.{node['heads'][0] // len(node['heads'])}"
    return f"feed-forward {node['layer']}" if node["type"] == "feed-forward" else str(node["type"])
