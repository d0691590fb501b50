"""An atlas as one HTML page, and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import html
from ..errors import HeadwiseError
from ..files import write_atomically
from ..role_definitions import all_roles, meanings
from ..roles.atlas import Atlas
from ..roles.atlas.export import probe_lines
from . import bundle

COLUMNS = 4  # of a figure
MOST_ROLES = 16  # in a figure
BODY = """
<main id="atlas" class="headwise">
<p>This page draws itself by a script that it carries; nothing is fetched.</p>
</main>
"""


def save_page(atlas: Atlas, path: str | Path) -> None:
    """Write a page: every head coloured by any score, a table by role, and the similarity map if it was measured."""
    title = f"{atlas.model}: what its heads do"
    text, _ = html.page(
        title, BODY, bundle.report_style(), script=bundle.script("atlas.js"),
        data=("atlas-data", _data(atlas, title)),
    )  # fmt: skip
    with write_atomically(path) as file:
        file.write_text(text, encoding="utf-8")


def _data(atlas: Atlas, title: str) -> dict[str, Any]:
    document = atlas.to_json()
    ways = set(atlas.ways.values())
    summary = (
        f"{len(atlas)} heads, {atlas.unnamed:.0%} of them without a clean role, {atlas.sink_only:.0%} that attend only "
        f"to sinks (the first token, special tokens or punctuation); {atlas.about['texts']:,} texts, "
        f"{atlas.about['tokens']:,} tokens."
    )
    summary = " ".join([summary, *(line.strip() for line in probe_lines(atlas) if line)])
    roles = [role for role in all_roles() if ways & set(role.ways) and role.score in document["scores"]]
    return {
        "title": title,
        "summary": summary,
        "layers": atlas.layers,
        "roles": document["roles"],
        "scores": document["scores"],
        "meanings": meanings(),
        "maps": {kind: entry["map"] for kind, entry in atlas.about.get("likeness", {}).items()},
        "definitions": {role.name: {"score": role.score, "words": role.meaning} for role in roles},
    }


def save_picture(atlas: Atlas, path: str | Path) -> None:
    """Write a figure: one panel per role that any head has, layers by heads, coloured by score; rings mark the role."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HeadwiseError("pictures need matplotlib; get it with: pip install 'headwise[plot]'") from error
    roles = atlas.roles
    panels = [
        (definition, kind)
        for definition in all_roles()
        for kind in atlas.layers
        if any((role.role, role.kind) == (definition.name, kind) for role in roles)
    ][:MOST_ROLES]
    if not panels:
        first = next(iter(atlas.layers))
        panels = [(definition, first) for definition in all_roles() if first in atlas.scores.get(definition.score, {})]
        panels = panels[:COLUMNS]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    rows, heads = (max(table.shape[axis] for table in atlas.scores["entropy"].values()) for axis in (0, 1))
    figure = Figure(figsize=(columns * (0.22 * heads + 1.1), lines * (0.2 * rows + 0.9)), dpi=150, layout="constrained")
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, (definition, kind) in zip(axes, panels, strict=False):
        table = atlas.scores[definition.score][kind]
        image = ax.imshow(table, cmap="GnBu", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        members = [role for role in roles if (role.role, role.kind) == (definition.name, kind)]
        rows_of = {layer: row for row, layer in enumerate(atlas.layers[kind])}
        points = ([role.head for role in members], [rows_of[role.layer] for role in members])
        ax.scatter(*points, s=26, facecolors="none", edgecolors="#c2410c", linewidths=1.2)
        title = definition.name if len(atlas.layers) == 1 else f"{definition.name} ({kind})"
        ax.set_title(title, fontsize=9, loc="left")
        ax.tick_params(labelsize=6, length=0)
    bar = figure.colorbar(image, ax=list(axes), aspect=40, pad=0.01, shrink=0.8)
    bar.set_label(f"score; ringed: has the role ({atlas.model})", fontsize=8)
    with write_atomically(path) as file:
        figure.savefig(file, format="png")
