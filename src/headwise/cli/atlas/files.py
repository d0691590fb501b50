"""What the commands of `headwise atlas` share: atlases read, written and printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...errors import HeadwiseError
from ...terminal import echo
from ..checks import make_folder
from ..options import PATH, Whole

if TYPE_CHECKING:
    from ...roles.atlas.result import Atlas

F = TypeVar("F", bound=Callable[..., Any])

out_option = click.option("--out", type=PATH, help="Directory for atlas.json, .csv, .html, .png and the sums.")


def table_options(command: F) -> F:
    """Add the options for the table of an atlas."""
    command = click.option("--best", type=Whole(1), default=4, help="Heads named per role.")(command)
    return click.option("--head", metavar="L.H", help="Show every score of one head, such as 3.1.")(command)


def load_atlas(source: str | Path) -> Atlas:
    """An atlas from its file, or a bundled one by the name of its model."""
    from ...roles.atlas.bundled import bundled_atlas
    from ...roles.atlas.result import Atlas

    bundled = bundled_atlas(source) if isinstance(source, str) else None
    return Atlas.load(source) if bundled is None else bundled


def write_atlas(atlas: Atlas, out: Path) -> None:
    """Write an atlas with its table, page and picture into a directory."""
    from ...ui.atlas import save_page, save_picture

    make_folder(out)
    atlas.save(out / "atlas.json", sums=atlas.tally is not None)
    atlas.to_csv(out / "atlas.csv")
    save_page(atlas, out / "atlas.html")
    names = ["atlas.json", "atlas.csv", "atlas.html"]
    try:
        save_picture(atlas, out / "atlas.png")
        names.append("atlas.png")
    except HeadwiseError as error:  # without matplotlib the other files are still written
        echo(f"no picture: {error}", err=True)
    echo(f"wrote {', '.join(names)} to {out}", err=True)


def print_atlas(atlas: Atlas, head: str | None, best: int, as_json: bool) -> None:
    """Print an atlas as a table by role or as JSON; with `head`, all scores of that head."""
    if head is not None:
        echo(_head(atlas, head, as_json))
    elif as_json:
        echo(json.dumps(atlas.to_json(), ensure_ascii=False))
    else:
        from ...roles.atlas.export import text

        echo(text(atlas, best))


def _head(atlas: Atlas, head: str, as_json: bool) -> str:
    kind, layer, number = atlas.head_key(head)
    rows = [row for row in atlas.rows() if (row["kind"], row["layer"], row["head"]) == (kind, layer, number)]
    roles = [role.role for role in atlas.roles_of(head)]
    if as_json:
        return json.dumps({"kind": kind, "layer": layer, "head": number, "roles": roles, "scores": rows}, indent=2)
    lines = [f"{atlas.model} {layer}.{number} ({kind}): {', '.join(roles) or 'no clean role'}"]
    lines += [
        f"  {row['score']:<20} {_number(row['value'])} [{_number(row['low'])}–{_number(row['high'])}]  "
        f"baseline {_number(row['baseline'])}"
        for row in rows
    ]
    return "\n".join(lines)


def _number(x: float | None) -> str:
    return "   -" if x is None else f"{x:.3f}"
