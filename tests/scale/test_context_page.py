"""docs/scale.md has the numbers of benchmarks/context_parallel.py."""

from __future__ import annotations

from pathlib import Path

from helpers.tools import load_tool

ROOT = Path(__file__).parents[2]


def test_the_comparison_of_context_parallel_is_up_to_date() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    sections, tool = load_tool("markdown_sections"), load_tool("context_parallel_page")
    assert list(tool.RESULTS.glob("context-parallel-*.json"))
    new = sections.replace_section(page, tool.SECTION, tool.comparisons())
    assert new == page, "python tools/context_parallel_page.py writes it again"
