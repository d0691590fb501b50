"""The report of a pruning run as Markdown; names from outside are shown, never interpreted."""

from __future__ import annotations

import re

from ..terminal import escape_controls, one_line
from .rank_scores import ScoreComparison
from .report import PruneReport, comparison_rows, recovery_summary, savings_limit, score_rows

# what Markdown, or GitHub's form of it, reads as more than a character: HTML, links, tables, mathematics, mentions
SPECIAL = re.compile(r"[\\`*_{}\[\]<>&|#!~$@:]")


def markdown(report: PruneReport) -> str:
    """The whole page."""
    plan = escape_controls(str(report.plan))
    fence = backticks(plan, 3)
    rows = "\n".join(f"| {escape(a)} | {b} | {c} |" for a, b, c in comparison_rows(report))
    parts = [
        f"# {escape(report.model)}, {report.plan.removed} of {report.plan.total} heads removed",
        f"The most that removing heads can save: {savings_limit(report)}.",
        "| | before | after |\n|---|--:|--:|\n" + rows,
        "\n".join(f"- {line}" for line in report.verdict()),
        f"Heads were scored on {report.scored} texts and measured on {report.measured} others; intervals are 95 %, by "
        "bootstrap over texts; times are medians of 7 interleaved passes.",
        f"## The plan\n{fence}text\n{plan}\n{fence}",
    ]
    if report.comparison is not None:
        parts.append(_score_section(report.comparison))
    if report.losses:
        parts.append(f"## Recovery\n{escape(recovery_summary(report))}")
    if report.saved:
        result = report.saved
        parts.append(f"## Saved\nForm: {result.form} ({escape(result.why)}). Load it with {code_span(result.load)}.")
    return "\n\n".join(parts) + "\n"


def _score_section(comparison: ScoreComparison) -> str:
    rows = "\n".join(f"| {escape(a)} | {b} | {c} |" for a, b, c in score_rows(comparison))
    header = "| score | rank correlation | seconds |\n|---|--:|--:|"
    return f"## Scores against ablation\n{header}\n{rows}\n\n{escape(comparison.summary())}"


def escape(text: str) -> str:
    """A text from outside, such as a model's name, on one line and with no character that Markdown interprets."""
    return SPECIAL.sub(lambda character: "\\" + character[0], one_line(text))


def code_span(text: str) -> str:
    """A text from outside as a code span, delimited by more backticks than it has in a row."""
    text = one_line(text)
    ticks = backticks(text, 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def backticks(text: str, least: int) -> str:
    """More backticks than the text has in a row, at least `least`."""
    return "`" * max([least, *(1 + len(run) for run in re.findall("`+", text))])
