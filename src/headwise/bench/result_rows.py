"""The benchmark in words, and as the README's table: `python -m headwise.bench.result_rows RESULTS.json README.md`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HeadwiseError
from ..files import written
from ..timing.machine import in_words

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
SWEEP = 1.1, 0.9  # the goals of head_stats over the sweep: median and worst ratio
HEADER = ("case", "headwise", "peer", "its time", "ratio", "goal")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; the first line of a case carries its title and our time."""

    case: str
    ours: str
    peer: str
    time: str
    ratio: str
    goal: str
    met: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        return self.case, self.ours, self.peer, self.time, self.ratio, self.goal


def rows(results: dict[str, Any]) -> Iterator[Row]:
    """The cases, from a report's JSON."""
    for case in results["cases"]:
        lead = (case["title"], _ms(case["seconds"]))
        if case["error"]:
            yield Row(case["title"], "", case["error"], "", "error", "", False)
            continue
        for peer in case["peers"]:
            yield Row(*lead, *_peer_cells(peer), peer["met"])
            lead = ("", "")
        yield Row("", "", f"limit: {case['limit']}", _ms(case["limit_seconds"]), f"{case['of_limit']:.0%} of it", "")


def notes(results: dict[str, Any]) -> Iterator[tuple[str, bool | None]]:
    """The sweep, the memory and the errors among them, in words, and whether a goal was met."""
    for name, found in results["sweep"]["summary"].items():
        yield (
            f"{name} over {found['shapes']} untuned shapes, against the fastest sdpa call for each: median ratio "
            f"{_ratio(found['median'])}, worst {_ratio(found['worst'])} ({found['worst_shape']})",
            found["median"] >= SWEEP[0] and found["worst"] >= SWEEP[1] if name == "head_stats" else None,
        )
    for shape in results["sweep"]["shapes"]:
        if shape["error"]:
            yield f"{shape['title']}: {shape['error']}", False
    for item in results["memory"]:
        found = (
            item["error"] or f"{item['peak'] / 1e6:,.0f} MB above the inputs (goal: under {item['goal'] / 1e6:,.0f} MB)"
        )
        yield f"memory of {item['title']}: {found}", item["met"]


def rounds_in_words(settings: dict[str, Any]) -> str:
    """How often everything was measured."""
    more = f" (of more where they last less than {settings['spell']:g} s)" if settings.get("spell") else ""
    return f"{settings['rounds']} interleaved rounds{more}"


def markdown(results: dict[str, Any]) -> str:
    """The table for a README, with the machine it was measured on."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|--:|---|--:|--:|--:|"]
    lines += ["| " + " | ".join(row.cells) + " |" for row in rows(results)]
    rounds = f"Best of {rounds_in_words(results['settings'])}, fp32; ratio: the peer's time divided by ours."
    bullets = [f"- {text}" for text, _ in notes(results)]
    return "\n".join([*lines, "", f"{rounds} {in_words(results['machine'])}.", *([""] if bullets else []), *bullets])


def write(results: dict[str, Any], page: Path) -> None:
    """Put the table between the two marker comments of the page; the page is replaced whole or not at all."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise HeadwiseError(f"{page} needs one line {BEGIN} and after it one line {END}; the table goes between them")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    with written(page) as made:
        made.write_text(f"{before}{BEGIN}\n{markdown(results)}\n{after}", encoding="utf-8")


def _peer_cells(peer: dict[str, Any]) -> tuple[str, str, str, str]:
    goal = "" if peer["goal"] is None else f"≥ {peer['goal']}"
    if peer["missing"]:
        return f"{peer['name']}: {peer['missing']}", "", "", goal
    mark = {True: " ✓", False: " ✗", None: ""}[peer["met"]]
    return peer["name"], _ms(peer["seconds"]), _ratio(peer["ratio"]), goal + mark


def _ratio(ratio: float) -> str:
    return f"{math.floor(1000 * ratio) / 1000:.3f}"  # rounded down: 0.9699 does not reach 0.97


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def main(results: str, page: str) -> None:
    try:
        write(json.loads(Path(results).read_text(encoding="utf-8")), Path(page))
    except (HeadwiseError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m headwise.bench.result_rows RESULTS.json README.md")
    main(*sys.argv[1:])
