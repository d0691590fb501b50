"""Write the table of `headwise bench --json` into a README: python tools/bench_table.py RESULTS.json README.md"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from markdown_sections import write_section

from headwise.bench.result_rows import notes, rounds_in_words, rows
from headwise.errors import HeadwiseError
from headwise.timing.machine import machine_summary

SECTION = "benchmark"
HEADER = ("case", "headwise", "peer", "its time", "ratio", "goal")


def table(results: dict[str, Any]) -> str:
    """The table, the machine it was measured on, and the notes below it."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|--:|---|--:|--:|--:|"]
    lines += ["| " + " | ".join(row.cells) + " |" for row in rows(results)]
    rounds = f"Best of {rounds_in_words(results['settings'])}, fp32; ratio: the peer's time divided by ours."
    bullets = [f"- {text}" for text, _ in notes(results)]
    machine = machine_summary(results["machine"])
    return "\n".join([*lines, "", f"{rounds} {machine}.", *([""] if bullets else []), *bullets])


def main(results: str, page: str) -> None:
    try:
        write_section(Path(page), SECTION, table(json.loads(Path(results).read_text(encoding="utf-8"))))
    except (HeadwiseError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/bench_table.py RESULTS.json README.md")
    main(*sys.argv[1:])
