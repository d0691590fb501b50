"""The ranges of pyproject.toml are those whose ends `make compat` runs, and its page shows no failure."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from helpers.tools import load_tool

compat = load_tool("compat")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirement(name: str) -> Requirement:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["models"]]
    (line,) = [line for line in lines if Requirement(line).name == name]
    return Requirement(line)


def lowest(name: str) -> Version:
    return min(Version(x.version) for x in requirement(name).specifier if x.operator == ">=")


def test_lowest_versions_of_pyproject_are_tested():
    environments = compat.ENVIRONMENTS
    for name in ("torch", "transformers"):
        versions = [Version(getattr(environment, name)) for environment in environments]
        assert min(versions) == lowest(name), name
        assert all(version in requirement(name).specifier for version in versions), name
    assert f">={min((e.python for e in environments), key=Version)}" == PROJECT["requires-python"]


def test_page_shows_every_environment_and_no_failure():
    text = compat.PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| 3.")]
    assert len(rows) == len(compat.ENVIRONMENTS)
    for row, environment in zip(rows, compat.ENVIRONMENTS, strict=True):
        assert row.startswith(f"| {environment.python} | {environment.torch} | {environment.transformers} |")
        assert " passed" in row and "failed" not in row and "error" not in row, row


def test_every_python_that_the_project_claims_is_tested():
    prefix = "Programming Language :: Python :: 3."
    claimed = {line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)}
    assert claimed == {environment.python.removeprefix("3.") for environment in compat.ENVIRONMENTS}


def test_interpreters_of_pyenv_come_before_its_shims(tmp_path, monkeypatch):
    """A shim of a version that is not selected is on the path, and fails."""
    shim, real = (tmp_path / folder / "python3.99" for folder in ("shims", ".pyenv/versions/3.99.1/bin"))
    for path in (shim, real):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(shim.parent))
    assert compat.Environment("3.99", "2.13.0", "5.15.0").interpreter() == str(real)
