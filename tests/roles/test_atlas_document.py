"""docs/atlas.md matches the bundled atlases."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_atlas_page_matches_the_bundled_atlases() -> None:
    spec = importlib.util.spec_from_file_location("atlas_page", DOCS / "atlas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "atlas.md").read_text(encoding="utf-8") == module.page()
