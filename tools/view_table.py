"""Write the figures of benchmarks/view.py into benchmarks/README.md: python tools/view_table.py RESULTS.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from markdown_sections import write_section

from headwise.errors import HeadwiseError
from headwise.timing.machine import machine_summary

README = Path(__file__).parents[1] / "benchmarks" / "README.md"
SECTION = "view"


def table(results: dict[str, Any]) -> str:
    """One row per figure, and the machine they were measured on."""
    lines = ["| what | measured | goal |", "|---|--:|---|"]
    lines += [
        f"| {figure['what']} | {_number(figure['value'])} {figure['unit']} | {_goal(figure)} |"
        for figure in results["figures"]
    ]
    return "\n".join([*lines, "", f"{machine_summary(results['machine'])}."])


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _goal(figure: dict[str, Any]) -> str:
    if figure["goal"] is None:
        return str(figure["why"])
    mark = {True: " ✓", False: " ✗", None: ""}[figure["met"]]
    return f"{'at least' if figure['least'] else 'at most'} {_number(figure['goal'])}{mark}"


def main(results: str, page: Path = README) -> None:
    try:
        write_section(page, SECTION, table(json.loads(Path(results).read_text(encoding="utf-8"))))
    except (HeadwiseError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/view_table.py RESULTS.json")
    main(sys.argv[1])
