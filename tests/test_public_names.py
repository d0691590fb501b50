"""The public names of every sub-package are in its `__init__`, and are imported only when they are used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "headwise"
LAYERS = ("card", "models", "inspection", "circuits", "roles", "prune", "scale", "recorder", "ui")
PACKAGES = sorted(
    ".".join(("headwise", *path.parent.relative_to(PACKAGE).parts))
    for layer in LAYERS
    for path in (PACKAGE / layer).rglob("__init__.py")
)
PRIVATE = "Nothing here is public"


def init_file(package: str) -> Path:
    return PACKAGE.joinpath(*package.split(".")[1:], "__init__.py")


def public_names(package: str) -> list[str]:
    return list(getattr(importlib.import_module(package), "__all__", []))


def typed_imports(package: str) -> list[str]:
    """The names that a package's `__init__` imports for type checkers."""
    tree = ast.parse(init_file(package).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return sorted(alias.name for block in blocks for node in ast.walk(block) for alias in getattr(node, "names", []))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_public_names_or_says_that_it_has_none(package: str) -> None:
    doc = importlib.import_module(package).__doc__ or ""
    assert bool(public_names(package)) != (PRIVATE in doc)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_is_typed(package: str) -> None:
    module = importlib.import_module(package)
    names = public_names(package)
    assert names == sorted(names) and len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)
    assert typed_imports(package) == names
    if names:
        assert dir(module) == names


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_is_that_of_a_module(package: str) -> None:
    """Importing the module would put it in the name's place, so the name's meaning would depend on earlier imports."""
    modules = {path.stem for path in init_file(package).parent.iterdir() if path.name != "__init__.py"}
    assert not modules & set(public_names(package))


def test_importing_the_packages_imports_neither_torch_nor_transformers() -> None:
    lazy = [package for package in PACKAGES if package != "headwise.prune.scores"]  # it registers all scores
    code = f"import sys, {', '.join(lazy)}; print(*sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_packages_were_found() -> None:
    assert {"headwise.card", "headwise.models.watching", "headwise.roles.relations.probe_set"} <= set(PACKAGES)
