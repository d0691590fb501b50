"""An atlas to look at: one page without a network, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import html
from ..errors import HeadwiseError
from ..files import written
from ..roles.atlas.atlas import Atlas
from ..roles.atlas.roles import MEANING, ROLES
from . import bundle

COLUMNS = 4  # of a picture
LARGEST = 16  # roles in a picture
BODY = """
<main id="atlas"><p>This page draws itself by a script that it carries; nothing is fetched.</p></main>
"""


def save_page(atlas: Atlas, path: str | Path) -> None:
    """Every head coloured by any score, a table by role, and where it was measured the map of likeness."""
    title = f"{atlas.model}: what its heads do"
    text, _ = html.page(
        title, BODY, bundle.read("atlas.css"), script=bundle.script("atlas.js"),
        data=("atlas-data", _data(atlas, title)),
    )  # fmt: skip
    with written(path) as made:
        made.write_text(text, encoding="utf-8")


def _data(atlas: Atlas, title: str) -> dict[str, Any]:
    found = atlas.to_json()
    ways = set(atlas.ways.values())
    summary = (
        f"{len(atlas)} heads, {atlas.unnamed:.0%} of them without a clean role, {atlas.resting:.0%} that only rest on "
        f"the first token, added tokens or punctuation; {atlas.about['texts']:,} texts, "
        f"{atlas.about['tokens']:,} tokens. Score and, in brackets, what equal attention has."
    )
    return {
        "title": title, "summary": summary, "layers": atlas.layers, "roles": found["roles"], "scores": found["scores"],
        "meanings": MEANING, "maps": {kind: one["map"] for kind, one in atlas.about.get("likeness", {}).items()},
        "definitions": {one.name: {"score": one.score, "words": one.words} for one in ROLES if ways & set(one.ways)},
    }  # fmt: skip


def save_picture(atlas: Atlas, path: str | Path) -> None:
    """Layers by heads for every role that some head has, each by its score; a ring where a head has the role."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HeadwiseError("pictures need matplotlib; get it with: pip install 'headwise[plot]'") from error
    roles = atlas.roles
    shown = [
        (one, kind)
        for one in ROLES
        for kind in atlas.layers
        if any((role.role, role.kind) == (one.name, kind) for role in roles)
    ][:LARGEST]
    if not shown:
        first = next(iter(atlas.layers))
        shown = [(one, first) for one in ROLES if first in atlas.scores.get(one.score, {})][:COLUMNS]
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    rows, heads = (max(table.shape[axis] for table in atlas.scores["entropy"].values()) for axis in (0, 1))
    figure = Figure(figsize=(columns * (0.22 * heads + 1.1), lines * (0.2 * rows + 0.9)), dpi=150, layout="constrained")
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    for ax, (one, kind) in zip(axes, shown, strict=False):
        table = atlas.scores[one.score][kind]
        image = ax.imshow(table, cmap="GnBu", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        having = [role for role in roles if (role.role, role.kind) == (one.name, kind)]
        rows_of = {layer: row for row, layer in enumerate(atlas.layers[kind])}
        at = ([role.head for role in having], [rows_of[role.layer] for role in having])
        ax.scatter(*at, s=26, facecolors="none", edgecolors="#c2410c", linewidths=1.2)
        ax.set_title(one.name if len(atlas.layers) == 1 else f"{one.name} ({kind})", fontsize=9, loc="left")
        ax.tick_params(labelsize=6, length=0)
    bar = figure.colorbar(image, ax=list(axes), aspect=40, pad=0.01, shrink=0.8)
    bar.set_label(f"score; ringed: has the role ({atlas.model})", fontsize=8)
    with written(path) as made:
        figure.savefig(made, format="png")
