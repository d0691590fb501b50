"""The shell of every HTML page that headwise writes: self-contained, and safe whatever its texts contain."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib.resources import files
from typing import Any


def escape(text: str) -> str:
    """Text that may stand between tags or in an attribute; a lone surrogate, which is not UTF-8, becomes "?"."""
    return html.escape(text.encode("utf-8", "replace").decode())


@functools.cache
def theme() -> str:
    """The style sheet that all pages share: colours for light and dark, type, and cards, inside class "headwise"."""
    return files(__package__).joinpath("theme.css").read_text(encoding="utf-8")


def embedded_json(value: Any) -> str:
    """JSON that may stand inside a script element: a token may be "</script>" or "<!--"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate is not UTF-8, but it is JSON


def content_policy(style: str, script: str = "", *, connect: str = "'none'", images: str = "'none'") -> str:
    """The Content-Security-Policy that allows one style sheet, at most one script, and nothing else by default."""
    scripts = f"script-src '{_digest(script)}'; " if script else ""
    return (
        f"default-src 'none'; {scripts}style-src '{_digest(style)}'; connect-src {connect}; img-src {images}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page(
    title: str,
    body: str,
    style: str,
    *,
    script: str = "",
    data: tuple[str, Any] | None = None,
    connect: str = "'none'",
    images: str = "'none'",
) -> tuple[str, str]:
    """A whole HTML page and its Content-Security-Policy.

    Args:
        title: the page's title, as plain text.
        body: HTML of the body, escaped by the caller.
        style: the style sheet.
        script: an ES module that runs after the body; "" for none.
        data: (id, value): a JSON value that the script finds in the element of this id.
        connect: sources that the script may fetch from, as in the policy.
        images: sources of images, as in the policy.

    Returns:
        The HTML, and the policy that it carries, for servers that also send it as a header.

    Example:
        >>> text, policy = page("Heads", "<p>12 heads</p>", "p { color: teal }")
        >>> "<title>Heads</title>" in text
        True
    """
    policy = content_policy(style, script, connect=connect, images=images)
    scripts = ""
    if data is not None:
        scripts += f'<script type="application/json" id="{escape(data[0])}">{embedded_json(data[1])}</script>\n'
    if script:
        scripts += f'<script type="module">{script}</script>\n'
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body.strip()}
{scripts}</body>
</html>
"""
    return text, policy
