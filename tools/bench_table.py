"""Write the results of `headwise bench --json` into docs/benchmarks.md, and a few of them into README.md:

python tools/bench_table.py RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from markdown_sections import write_section

from headwise.bench.result_rows import notes, ratio_in_words, rounds_in_words, rows, time_in_words
from headwise.errors import HeadwiseError
from headwise.timing.machine import machine_summary

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
SECTION = "benchmark"
HEADER = ("case", "headwise", "peer", "its time", "ratio")
# the README's rows: name of the case, name of the peer
HIGHLIGHTS = (
    ("causal", "sdpa is_causal"),
    ("decode", "sdpa enable_gqa"),
    ("window", "FlexAttention, compiled"),
    ("training", "nn.MultiheadAttention"),
    ("stats", "sdpa without statistics"),
)


def table(results: dict[str, Any]) -> str:
    """All cases, the machine they were measured on, and the notes below."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|--:|---|--:|--:|"]
    lines += ["| " + " | ".join(row.cells[: len(HEADER)]) + " |" for row in rows(results)]
    rounds = f"Best of {rounds_in_words(results['settings'])}, fp32; ratio: the peer's time divided by ours."
    bullets = [f"- {text}" for text, _ in notes(results, goals=False)]
    return "\n".join([*lines, "", f"{rounds} {_machine(results)}.", *([""] if bullets else []), *bullets])


def highlights(results: dict[str, Any]) -> str:
    """The README's rows, and what the median and the worst of the untuned shapes are."""
    cases = {case["name"]: case for case in results["cases"]}
    lines = ["| what | headwise | faster than what | its time | times as fast |", "|---|--:|---|--:|--:|"]
    for name, against in HIGHLIGHTS:
        [peer] = [peer for peer in cases[name]["peers"] if peer["name"] == against]
        times = time_in_words(cases[name]["seconds"]), time_in_words(peer["seconds"])
        title = cases[name]["title"]
        lines.append(f"| {title} | {times[0]} | {against} | {times[1]} | {ratio_in_words(peer['ratio'])} |")
    sweep = results["sweep"]["summary"]["attend"]
    words = (
        f"{_machine(results)}. Over {sweep['shapes']} untuned shapes, against the fastest sdpa call for each: median "
        f"{ratio_in_words(sweep['median'])}, worst {ratio_in_words(sweep['worst'])}."
    )
    return "\n".join([*lines, "", words])


def _machine(results: dict[str, Any]) -> str:
    return machine_summary(results["machine"])


def main(results: str, page: Path = PAGE, readme: Path = README) -> None:
    try:
        measured = json.loads(Path(results).read_text(encoding="utf-8"))
        write_section(page, SECTION, table(measured))
        write_section(readme, SECTION, highlights(measured))
    except (HeadwiseError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/bench_table.py RESULTS.json")
    main(sys.argv[1])
