"""The view as one file: no network, nothing beside it, safe whatever the tokens are."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import written

# in this order, so that everything is defined before it is used
MODULES = (
    "lib/colour",
    "lib/run",
    "lib/dom",
    "lib/heatmap",
    "lib/links",
    "views/map",
    "views/head",
    "views/steps",
    "views/compare",
    "lib/live",
    "lib/state",
    "lib/requests",
    "app",
)
IMPORT = re.compile(r"^import\s[^;]*?from\s\"\.{1,2}/[a-z/]+\.js\";\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const))", re.MULTILINE)


@functools.cache
def module() -> str:
    """The ES module with `export default { render }`, in one piece."""
    return "\n".join(_source(name) for name in MODULES)


@functools.cache
def style() -> str:
    return _read("view.css")


def _source(name: str) -> str:
    """A part without its own imports and exports: all parts share one scope."""
    return EXPORT.sub("", IMPORT.sub("", _read(f"{name}.js")))


def _read(name: str) -> str:
    return (files(__package__) / "js" / name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: a token may be "</script>" or "<!--"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no UTF-8, but it is JSON


def shown(text: str) -> str:
    """Text that may stand between tags or in an attribute; half a surrogate pair, which is no UTF-8, as "?"."""
    return html.escape(text.encode("utf-8", "replace").decode())


def page(data: Any, *, title: str = "headwise", host: str = "hosts/page", connect: str = "'none'") -> tuple[str, str]:
    """The whole HTML and the policy in it. host: the script between the page and the module; connect: where it asks."""
    script = f"{module()}\n{_source(host)}\nmount();\n"
    css = style() + "\nbody { margin: 0; }\n#headwise > .headwise { min-height: 100vh; }\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; connect-src {connect}; "
        "img-src 'none'; base-uri 'none'; form-action 'none'"
    )
    whole = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{shown(title)}</title>
<style>{css}</style>
</head>
<body>
<div id="headwise"><p>Loading …</p></div>
<noscript>This page draws itself by a script that it carries; nothing is fetched. Please allow it.</noscript>
<script type="application/json" id="headwise-data">{embedded(data)}</script>
<script type="module">{script}</script>
</body>
</html>
"""
    return whole, policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def save(data: Any, path: str | Path, *, title: str = "headwise") -> None:
    """Write the page; it appears whole or not at all."""
    with written(path) as made:
        made.write_text(page(data, title=title)[0], encoding="utf-8")
