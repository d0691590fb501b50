"""Generated documents match what their scripts in tools/ write."""

from __future__ import annotations

from pathlib import Path

from helpers.tools import TOOLS, load_tool

ROOT = Path(__file__).parents[1]


def test_the_page_of_the_atlas_matches_the_bundled_atlases() -> None:
    written = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    assert load_tool("atlas_page").page() == written, "run tools/atlas_page.py page"


def test_every_script_that_make_runs_exists() -> None:
    words = (ROOT / "Makefile").read_text(encoding="utf-8").split()
    scripts = {word for word in words if word.startswith("tools/") and word.endswith(".py")}
    assert scripts
    assert [script for script in scripts if not (TOOLS.parent / script).is_file()] == []
