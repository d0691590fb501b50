"""A circuit as one HTML page: its graph and curve, the heads' effects, and their attention on a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..circuits.effects import Effects, HeadEffect
from . import page, payload
from .capture import Pass
from .overlays import Overlays, to_overlays

LISTED = 20  # heads in a table
MOST_EDGES = 500  # that a page can draw; a circuit may have thousands


def save_circuit_page(
    pass_: Pass,
    path: str | Path,
    circuit: Mapping[str, Any],
    effects: Sequence[Effects] = (),
    *,
    corrupted: str | None = None,
) -> None:
    """Write the view of a pass with a circuit in it.

    Args:
        pass_: the model's pass over a clean prompt; a click on a head shows its attention there.
        path: of the page.
        circuit: what `Circuit.to_json` gave.
        effects: of the same model's heads, to colour them by; the strongest head of the last ones is chosen at first.
        corrupted: the corrupted prompt.
    """
    page.save(page_data(pass_, circuit, effects, corrupted), path, title=f"{pass_.name}: circuit")


def page_data(
    pass_: Pass, circuit: Mapping[str, Any], effects: Sequence[Effects] = (), corrupted: str | None = None
) -> dict[str, Any]:
    """The data of the page; circuit.js has the types."""
    overlays = Overlays()
    for each in reversed(effects):  # the map begins with the last one
        overlays.add(to_overlays(each))
    strongest = effects[-1].strongest(1) if effects else []
    content = payload.data(pass_, scores=overlays, heads=[f"{row.kind} {row.layer}.{row.head}" for row in strongest])
    tables = [_table(each) for each in effects]
    content["runs"][0] |= {"circuit": _strongest_edges(circuit), "effects": tables, "corrupted": corrupted}
    return content


def _strongest_edges(circuit: Mapping[str, Any]) -> dict[str, Any]:
    """The circuit without the edges that no page could draw, and without the nodes of those alone."""
    edges = circuit["edges"][:MOST_EDGES]
    ends = {edge[side] for edge in edges for side in ("from", "to")}
    return {**circuit, "edges": edges, "nodes": [node for node in circuit["nodes"] if node["id"] in ends]}


def _table(effects: Effects) -> dict[str, Any]:
    about = effects.about
    return {
        "name": about.name,
        "method": about.method,
        "notes": list(about.notes),
        "heads": [_row(row) for row in effects.strongest(LISTED)],
        "rest": [[name, effect] for name, effect in effects.rest.items()],
    }


def _row(row: HeadEffect) -> dict[str, Any]:
    ends = {name: None if np.isnan(x) else x for name, x in (("low", row.low), ("high", row.high))}
    return row._asdict() | ends
