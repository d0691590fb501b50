"""The sub-packages of card depend on each other in one direction, as its docstring says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headwise.card

CARD = Path(headwise.card.__file__).parent
MAY_IMPORT = {"config": {"config"}, "parameters": {"parameters", "config"}, "sources": {"sources", "config"}}
VALUES = {"types"}  # what all of them are made of


def imported(path: Path) -> set[str]:
    """The modules and sub-packages of card that a file in one of its sub-packages imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            names |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_sub_packages_import_only_what_is_below_them(package: str) -> None:
    files = sorted((CARD / package).glob("*.py"))
    assert len(files) > 3
    for path in files:
        assert imported(path) <= MAY_IMPORT[package] | VALUES, path.name
