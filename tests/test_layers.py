"""A layer imports the layers above it, never one below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "headwise"
LAYERS = (
    (
        "heads",
        "errors",
        "files",
        "html",
        "hub",
        "logs",
        "json_documents",
        "lazy",
        "markdown",
        "plans",
        "resampling",
        "shapes",
        "terminal",
    ),
    ("card",),
    ("attention",),
    ("timing",),
    ("models",),
    ("role_definitions",),
    ("inspection",),
    ("circuits",),
    ("roles",),
    ("prune",),
    ("scale",),
    ("recorder",),
    ("ui",),
    ("lab",),
    ("bench",),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# other layers reach transformers' models through `models`
TRANSFORMERS = ("models", "scale", "lab", "bench")
# the root reaches every layer that has public names, so only those below all of them may lean on it
BELOW_ROOT = ("bench", "cli", "__main__")


def imported(source: str, module: tuple[str, ...]) -> Iterator[str]:
    """The parts of headwise that a module imports, at its top or inside: "attention", or "" for the root itself.

    module: the dotted name of the file's package and stem, such as ("headwise", "attention", "masks").
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(module[: len(module) - node.level]) if node.level else []
            base += (node.module or "").split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "headwise":
                yield name[1] if len(name) > 1 and name[1] in RANK else ""


def violations(source: str, path: Path) -> list[str]:
    """What this file, its path relative to the package, may not import."""
    module = ("headwise", *path.with_suffix("").parts)
    package = module[1]
    if package not in RANK:
        return [f"{path}: {package} is in no layer"]
    wrong = [
        name for name in imported(source, module) if (RANK[name] > RANK[package] if name else package not in BELOW_ROOT)
    ]
    return [f"{path}: {package} imports {name or 'the root'}" for name in wrong]


def files() -> list[Path]:
    return [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=str)
def test_imports_point_upwards(path: Path) -> None:
    assert violations((PACKAGE / path).read_text(encoding="utf-8"), path) == []


def test_transformers_is_imported_only_in_layers_that_need_it() -> None:
    importing = {path.parts[0] for path in files() if _imports_transformers(PACKAGE / path)}
    assert importing == set(TRANSFORMERS)


def _imports_transformers(path: Path) -> bool:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return any(name.split(".")[0] == "transformers" for name in names)


def test_the_package_was_found() -> None:
    assert {Path("heads.py"), Path("attention/reference.py"), Path("cli/__init__.py")} <= set(files())


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("attention/made_up.py", "from ..models import load", "models"),
        ("attention/made_up.py", "from .. import cli", "cli"),
        ("attention/made_up.py", "def f():\n    import headwise.bench.suite", "bench"),
        ("attention/made_up.py", "from headwise.roles.atlas import Atlas", "roles"),
        ("attention/made_up.py", "import headwise", "the root"),
        ("attention/made_up.py", "from .. import attend", "the root"),
        ("attention/backends/__init__.py", "from ...cli import main", "cli"),
        ("heads.py", "from .attention import reference", "attention"),
        ("bench/made_up.py", "from ..cli import main", "cli"),
    ],
)
def test_a_violation_is_caught(path: str, source: str, wrong: str) -> None:
    [message] = violations(source, Path(path))
    assert message.endswith(f"imports {wrong}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("attention/made_up.py", "from ..errors import ShapeError\nfrom . import masks\nimport torch"),
        ("attention/backends/__init__.py", "from ..masks import bias\nfrom ...heads import Heads"),
        ("bench/made_up.py", "import headwise\nfrom ..attention import module"),
        ("heads.py", "from .errors import ShapeError"),
    ],
)
def test_the_right_way_is_allowed(path: str, source: str) -> None:
    assert violations(source, Path(path)) == []


def test_a_file_outside_all_layers_is_caught() -> None:
    assert violations("", Path("elsewhere.py")) == ["elsewhere.py: elsewhere is in no layer"]
