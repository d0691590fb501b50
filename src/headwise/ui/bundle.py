"""The JavaScript and CSS of the view in one piece each, joined from the ES modules under js/ without a build step.

The imports of the files order them. Each file becomes a function of its own, so that two files may use the same name.
A file under js/views/ is part of the page because it is there: it registers its view itself, and may have a style
sheet of the same name beside it.
"""

from __future__ import annotations

import functools
import posixpath
import re
from importlib.resources import files

from .. import html

APP = "app.js"
IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.{1,2}/[^"]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
DEFAULT = re.compile(r"^export default (.*);\n", re.MULTILINE)


@functools.cache
def module() -> str:
    """The view as one ES module with `export default { render }`, the contract of anywidget."""
    return f"{_join_modules((*views(), APP))}export default {_variable(APP)}.default;\n"


@functools.cache
def script(entry: str) -> str:
    """A file and everything that it imports, for a page of its own; with the view, also every file of js/views/."""
    order = _in_order((entry,))
    return _join_modules((*views(), entry)) if APP in order else _join_modules((entry,))


@functools.cache
def style() -> str:
    """The style sheet of the view."""
    sheets = ("view.css", *(f"views/{name}" for name in _names("views", ".css")))
    return html.theme() + "".join(map(read, sheets))


def report_style() -> str:
    """The style sheet of the pages of an atlas and of a training log."""
    return html.theme() + read("report.css")


def views() -> tuple[str, ...]:
    """The files that register views."""
    return tuple(f"views/{name}" for name in _names("views", ".js"))


def read(path: str) -> str:
    """A file under js/."""
    return files(__package__).joinpath("js", *path.split("/")).read_text(encoding="utf-8")


def _names(folder: str, ending: str) -> list[str]:
    entries = files(__package__).joinpath("js", folder).iterdir()
    return sorted(entry.name for entry in entries if entry.name.endswith(ending))


def _imports(path: str) -> list[str]:
    return [_resolve(path, match[2]) for match in IMPORT.finditer(read(path))]


def _resolve(path: str, imported: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), imported))


def _in_order(entries: tuple[str, ...]) -> list[str]:
    """The entries and what they import, each file after all that it imports."""
    order: list[str] = []
    open_files: list[str] = []

    def visit(path: str) -> None:
        if path in order:
            return
        if path in open_files:
            raise ValueError(f"these files import each other: {' -> '.join([*open_files, path])}")
        open_files.append(path)
        for imported in _imports(path):
            visit(imported)
        order.append(open_files.pop())

    for entry in entries:
        visit(entry)
    return order


def _join_modules(entries: tuple[str, ...]) -> str:
    return "".join(map(_scoped, _in_order(entries)))


def _scoped(path: str) -> str:
    """A file as a function that returns its exports; imports become constants inside it."""
    source = read(path)
    exports = EXPORT.findall(source)
    source = IMPORT.sub(
        lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = {_variable(_resolve(path, match[2]))};\n", source
    )
    source = EXPORT.sub("", source)
    if default := DEFAULT.search(source):
        source = DEFAULT.sub("", source)
        exports.append(f"default: {default[1]}")
    return f"// {path}\nconst {_variable(path)} = (() => {{\n{source}return {{ {', '.join(exports)} }};\n}})();\n"


def _variable(path: str) -> str:
    return "$" + re.sub(r"\W", "_", path.removesuffix(".js"))
