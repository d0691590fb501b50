"""The results of a benchmark as rows of a table and notes in words, from its JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SWEEP_GOALS = 1.1, 0.9  # of head_stats over the sweep: median and worst ratio


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; the first row of a case has its title and our time."""

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
    """One row per case and peer, and one for the limit of each case."""
    for case in results["cases"]:
        lead = (case["title"], time_in_words(case["seconds"]))
        if case["error"]:
            yield Row(case["title"], "", case["error"], "", "error", "", False)
            continue
        for peer in case["peers"]:
            yield Row(*lead, *_peer_cells(peer), peer["met"])
            lead = ("", "")
        yield Row(
            "", "", f"limit: {case['limit']}", time_in_words(case["limit_seconds"]), f"{case['of_limit']:.0%} of it", ""
        )


def notes(results: dict[str, Any], goals: bool = True) -> Iterator[tuple[str, bool | None]]:
    """The sweep and the memory in words, their errors included, and whether a goal was met.

    Args:
        results: of a benchmark.
        goals: whether the words name the goals.
    """
    median_goal, worst_goal = SWEEP_GOALS
    for name, summary in results["sweep"]["summary"].items():
        yield (
            f"{name} over {summary['shapes']} untuned shapes, against the fastest sdpa call for each: median ratio "
            f"{ratio_in_words(summary['median'])}, worst {ratio_in_words(summary['worst'])} ({summary['worst_shape']})",
            summary["median"] >= median_goal and summary["worst"] >= worst_goal if name == "head_stats" else None,
        )
    for shape in results["sweep"]["shapes"]:
        if shape["error"]:
            yield f"{shape['title']}: {shape['error']}", False
    for item in results["memory"]:
        goal = f" (goal: under {item['goal'] / 1e6:,.0f} MB)" if goals else ""
        result = item["error"] or f"{item['peak'] / 1e6:,.0f} MB above the inputs{goal}"
        yield f"memory of {item['title']}: {result}", item["met"]


def rounds_in_words(settings: dict[str, Any]) -> str:
    """How often everything was measured."""
    extra = f" (of more where they last less than {settings['spell']:g} s)" if settings.get("spell") else ""
    return f"{settings['rounds']} interleaved rounds{extra}"


def _peer_cells(peer: dict[str, Any]) -> tuple[str, str, str, str]:
    goal = "" if peer["goal"] is None else f"≥ {peer['goal']}"
    if peer["missing"]:
        return f"{peer['name']}: {peer['missing']}", "", "", goal
    mark = {True: " ✓", False: " ✗", None: ""}[peer["met"]]
    return peer["name"], time_in_words(peer["seconds"]), ratio_in_words(peer["ratio"]), goal + mark


def ratio_in_words(ratio: float) -> str:
    """Three decimals."""
    return f"{math.floor(1000 * ratio) / 1000:.3f}"  # rounded down: 0.9699 does not reach 0.97


def time_in_words(seconds: float | None) -> str:
    """Milliseconds in three significant digits."""
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"
