"""The tables of benchmark results in Markdown files, between their marker comments."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from headwise.bench.result_rows import rounds_in_words
from headwise.errors import HeadwiseError
from headwise.timing import describe_machine, machine_summary
from helpers.tools import load_tool

bench_table, view_table, sections = (load_tool(name) for name in ("bench_table", "view_table", "markdown_sections"))
BEGIN, END = sections.markers(bench_table.SECTION)
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def sample(ratio: float = 0.9699) -> dict[str, Any]:
    peer = {"name": "sdpa", "seconds": 0.05, "ratio": ratio, "goal": 0.97, "missing": "", "met": ratio >= 0.97}
    case = {
        "title": "dense",
        "seconds": 0.0516,
        "error": "",
        "limit": "sgemm",
        "limit_seconds": 0.0387,
        "of_limit": 0.75,
    }
    highlights = [
        {**case, "name": name, "title": name, "peers": [{**peer, "name": against}]}
        for name, against in bench_table.HIGHLIGHTS
    ]
    return {
        "machine": describe_machine(),
        "settings": {"rounds": 3, "device": "cpu"},
        "cases": [{**case, "name": "dense", "peers": [peer]}, *highlights],
        "sweep": {
            "summary": {"attend": {"worst": 0.5, "worst_shape": "odd one", "median": 12.34, "shapes": 40}},
            "shapes": [{"title": "bad one", "error": "differs"}],
        },
        "memory": [{"title": "head_stats", "peak": 110_000_000, "goal": 10**9, "error": "", "met": True}],
    }


def test_the_markdown_table_has_rows_notes_and_the_machine() -> None:
    text = bench_table.table(sample())
    assert "| dense | 51.6 ms | sdpa | 50.0 ms | 0.969 |" in text
    assert "|  |  | limit: sgemm | 38.7 ms | 75% of it |" in text
    assert "Best of 3 interleaved rounds" in text
    assert rounds_in_words({"rounds": 9, "spell": 1.5}).endswith("(of more where they last less than 1.5 s)")
    assert machine_summary(describe_machine()) in text
    assert "median ratio 12.340, worst 0.500 (odd one)" in text
    assert "- bad one: differs" in text
    assert "- memory of head_stats: 110 MB above the inputs\n" in text + "\n"
    assert "goal" not in text and "0.97 " not in text


def test_only_the_section_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page, readme, results = tmp_path / "page.md", tmp_path / "readme.md", tmp_path / "x.json"
    for file in (page, readme):
        file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter √\n", encoding="utf-8")
    page.chmod(0o640)
    results.write_text(json.dumps(sample(0.98)), encoding="utf-8")
    for _ in range(2):  # the second time changes nothing
        bench_table.main(str(results), page, readme)
        for file, content in ((page, bench_table.table), (readme, bench_table.highlights)):
            text = file.read_text(encoding="utf-8")
            assert text == f"before\n{BEGIN}\n{content(sample(0.98))}\n{END}\nafter √\n"
    assert page.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [page, readme, results]


def test_the_readme_has_five_rows_that_name_their_peer() -> None:
    text = bench_table.highlights(sample())
    assert "| decode | 51.6 ms | sdpa enable_gqa | 50.0 ms | 0.969 |" in text
    assert text.count("| 51.6 ms |") == 5
    assert "Over 40 untuned shapes, against the fastest sdpa call for each: median 12.340, worst 0.500." in text


def test_the_written_tables_are_those_of_their_results() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    [name] = re.findall(r"tools/bench_table.py (benchmarks/results/\S+\.json)`", page)
    results = json.loads((ROOT / name).read_text(encoding="utf-8"))
    assert sections.replace_section(page, bench_table.SECTION, bench_table.table(results)) == page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sections.replace_section(readme, bench_table.SECTION, bench_table.highlights(results)) == readme


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN * 2}{END}"])
def test_a_page_without_both_markers_in_order_is_refused_and_left_alone(text: str, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(HeadwiseError, match="needs one line <!-- benchmark:begin -->"):
        sections.write_section(page, bench_table.SECTION, bench_table.table(sample()))
    assert page.read_text() == text
    assert list(tmp_path.iterdir()) == [page]


def test_a_failed_write_leaves_the_page_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\n{END}\n")

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HeadwiseError, match="README.md.* cannot be written: disk full$"):
        sections.write_section(page, bench_table.SECTION, bench_table.table(sample()))
    assert page.read_text() == f"{BEGIN}\n{END}\n"
    assert list(tmp_path.iterdir()) == [page]


def test_the_readmes_table_of_the_view_is_that_of_its_results() -> None:
    [results] = BENCHMARKS.joinpath("results").glob("view-*.json")
    content = view_table.table(json.loads(results.read_text(encoding="utf-8")))
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert sections.replace_section(readme, view_table.SECTION, content) == readme


def test_the_view_table_marks_goals_and_explains_missing_figures(tmp_path: Path) -> None:
    figure = {"what": "size", "value": 2.5, "unit": "MB", "goal": 3.0, "least": False, "met": True, "why": ""}
    missing = figure | {"value": None, "goal": None, "met": None, "why": "not installed"}
    text = view_table.table({"machine": describe_machine(), "figures": [figure, missing]})
    assert "| size | 2.50 MB | at most 3.00 ✓ |" in text and "| size | – MB | not installed |" in text
