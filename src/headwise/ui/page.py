"""The view as one HTML file: no network, no files beside it, safe whatever the tokens are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import html
from ..files import write_atomically
from . import bundle

FULL_HEIGHT = "\nbody { margin: 0; }\n#headwise > .headwise { min-height: 100vh; }\n"
BODY = """
<div id="headwise"><p>Loading …</p></div>
<noscript>This page draws itself by a script that it carries; nothing is fetched. Please allow it.</noscript>
"""


def page(
    data: Any, *, title: str = "headwise", host: str = "hosts/page.js", connect: str = "'none'"
) -> tuple[str, str]:
    """The whole HTML, and the Content-Security-Policy in it.

    Args:
        data: what `payload.data` gave.
        title: of the page, as plain text.
        host: the file under js/ that connects the page with the view.
        connect: where the page may send requests to, as in the policy.
    """
    return html.page(
        title, BODY, bundle.style() + FULL_HEIGHT, script=bundle.script(host), data=("headwise-data", data),
        connect=connect, images="data:" if _has_image(data) else "'none'",
    )  # fmt: skip


def _has_image(data: Any) -> bool:
    """Whether the page shows an image, which it carries itself."""
    return any(text.get("image") for run in data.get("runs", ()) for text in run["texts"])


def save(data: Any, path: str | Path, *, title: str = "headwise") -> None:
    """Write the page; it appears whole or not at all."""
    with write_atomically(path) as file:
        file.write_text(page(data, title=title)[0], encoding="utf-8")
