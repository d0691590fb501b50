"""What a run of pruning found, as JSON, Markdown and HTML."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import written
from ..terminal import escape_controls, one_line

if TYPE_CHECKING:
    from .rank_scores import Against
    from .session import Report

Rows = list[tuple[str, str, str]]
# what Markdown, or GitHub's form of it, reads as more than a character: HTML, links, tables, mathematics, mentions
MARKS = re.compile(r"[\\`*_{}\[\]<>&|#!~$@:]")


def to_json(report: Report) -> dict[str, Any]:
    return {
        "model": report.model,
        "asked": asdict(report.asked),
        "plan": report.plan.to_json(),
        "most_that_heads_can_save": {
            "parameters": report.before.of_heads,
            "of": report.before.parameters,
            "share_of_time_in_attention_layers": report.attention_share,
        },
        "before": report.before.to_json(),
        "after": report.after.to_json(),
        "quality": {name: found.to_json() for name, found in report.quality.items()},
        "latency_ms": [asdict(found) | {"ratio": found.ratio} for found in report.latency],
        "verdict": report.verdict(),
        "texts": {"scored": report.scored, "measured": report.measured},
        "recovery_losses": report.losses,
        "recovery_run": report.recovery_run,
        "scores": report.scores.to_json() if report.scores is not None else None,
        "against_ablation": report.against.to_json() if report.against else None,
        "saved": report.saved.to_json() if report.saved else None,
    }


def ceiling(report: Report) -> str:
    """The most that removing heads can save, before anything is removed."""
    before = report.before
    words = (
        f"all heads together are {before.of_heads:,} of {before.parameters:,} parameters "
        f"({before.of_heads / before.parameters:.0%}); the attention layers take {report.attention_share:.0%} "
        f"of the time at batch {report.latency[0].batch} x {report.latency[0].length} tokens: "
        "no plan can save more than that"
    )
    return words + (f"; the KV cache is {before.cache:,} bytes a token" if before.cache else "")


def rows(report: Report) -> Rows:
    """name, before, after"""
    before, after, found = report.before, report.after, report.quality
    table: Rows = [
        ("heads", f"{report.plan.total}", f"{report.plan.total - report.plan.removed}"),
        ("parameters", f"{before.parameters:,}", _share(after.parameters, before.parameters)),
    ]
    if before.cache:
        table.append(("KV cache, bytes a token", f"{before.cache:,}", _share(after.cache, before.cache)))
    full = found["full"]
    for name, words in (("pruned", full.name), ("recovered", f"{full.name}, after recovery")):
        if name in found:
            table.append((words, _interval(full), _interval(found[name])))
    for measured in report.latency:
        where = f"ms a pass, batch {measured.batch} x {measured.length}"
        table.append((where, f"{measured.full:.1f}", f"{measured.pruned:.1f} ({measured.ratio:.2f})"))
    return table


def _share(after: int, before: int) -> str:
    return f"{after:,} ({after / before:.1%})"


def _interval(found: Any) -> str:
    return f"{found.value:.4g} ({found.low:.4g} to {found.high:.4g})"


def plain(text: str) -> str:
    """A text of others, such as a model's name, as it is shown in Markdown: nothing in it is a mark."""
    return MARKS.sub(lambda found: "\\" + found[0], one_line(text))


def code(text: str) -> str:
    """A text of others as a code span, delimited by more backticks than it has in a row."""
    text = one_line(text)
    ticks = _fence(text, 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _fence(text: str, least: int) -> str:
    return "`" * max([least, *(1 + len(run) for run in re.findall("`+", text))])


def markdown(report: Report) -> str:
    drawn = escape_controls(str(report.plan))
    fence = _fence(drawn, 3)
    parts = [
        f"# {plain(report.model)}, {report.plan.removed} of {report.plan.total} heads removed",
        f"The most that removing heads can save: {ceiling(report)}.",
        "| | before | after |\n|---|--:|--:|\n" + "\n".join(f"| {plain(a)} | {b} | {c} |" for a, b, c in rows(report)),
        "\n".join(f"- {line}" for line in report.verdict()),
        f"Heads were scored on {report.scored} texts and measured on {report.measured} others; intervals are 95 %, by "
        "bootstrap over texts; times are medians of 7 interleaved passes.",
        f"## The plan\n{fence}text\n{drawn}\n{fence}",
    ]
    if report.against is not None:
        lines = "\n".join(f"| {plain(a)} | {b} | {c} |" for a, b, c in compared(report.against))
        parts.append(
            f"## Scores against ablation\n| score | rank correlation | seconds |\n|---|--:|--:|\n{lines}\n\n"
            + plain(report.against.words())
        )
    if report.losses:
        parts.append(f"## Recovery\n{plain(recovered(report))}")
    if report.saved:
        saved = report.saved
        parts.append(f"## Saved\nForm: {saved.form} ({plain(saved.why)}). Load it with {code(saved.load)}.")
    return "\n\n".join(parts) + "\n"


def recovered(report: Report) -> str:
    first, last = report.losses[0], sum(report.losses[-10:]) / len(report.losses[-10:])
    found = report.quality
    return (
        f"{len(report.losses)} steps of distillation from the full model; its loss went from {first:.4g} to {last:.4g} "
        f"(mean of the last ten steps). {found['full'].name} on texts that it did not see: {_interval(found['full'])} "
        f"in full, {_interval(found['pruned'])} pruned, {_interval(found['recovered'])} recovered."
    )


def compared(found: Against) -> Rows:
    """score, rank correlation with ablation, seconds"""
    rows = [(row.score, f"{row.correlation:.2f}", f"{row.seconds:.1f}") for row in found.rows]
    return [*rows, ("ablation", "1.00", f"{found.seconds:.1f}")]


def write(report: Report, folder: Path, picture: bool = False) -> None:
    """pruning.md, pruning.html and pruning.json in a directory."""
    from .report_html import page

    text = json.dumps(to_json(report), indent=2)
    for name, content in (
        ("pruning.md", markdown(report)),
        ("pruning.html", page(report, picture)),
        ("pruning.json", text + "\n"),
    ):
        put(folder / name, content)


def put(path: Path, content: str) -> None:
    """A file written aside and moved into place."""
    with written(path) as made:
        made.write_text(content, encoding="utf-8")
