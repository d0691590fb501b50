"""The report of a pruning run as Markdown; names from outside are shown, never interpreted."""

from __future__ import annotations

from ..markdown import code_span as code_span
from ..markdown import escape as escape
from ..markdown import fence
from ..terminal import escape_controls
from .rank_scores import ScoreComparison
from .report import PruneReport, comparison_rows, export_lines, recovery_summary, savings_limit, score_rows


def markdown(report: PruneReport) -> str:
    """The whole page."""
    plan = escape_controls(str(report.plan))
    rows = "\n".join(f"| {escape(a)} | {b} | {c} |" for a, b, c in comparison_rows(report))
    parts = [
        f"# {escape(report.model)}, {report.plan.removed} of {report.plan.total} heads removed",
        f"The most that removing heads can save: {savings_limit(report)}.",
        "| | before | after |\n|---|--:|--:|\n" + rows,
        "\n".join(f"- {line}" for line in report.verdict()),
        f"Heads were scored on {report.scored} texts and measured on {report.measured} others; intervals are 95 %, by "
        "bootstrap over texts; times are medians of 7 interleaved passes.",
        "## The plan\n" + fence(plan, "text"),
    ]
    if report.comparison is not None:
        parts.append(_score_section(report.comparison))
    if report.losses:
        parts.append(f"## Recovery\n{escape(recovery_summary(report))}")
    if report.saved:
        result = report.saved
        parts.append(f"## Saved\nForm: {result.form} ({escape(result.why)}). Load it with {code_span(result.load)}.")
        parts += ["\n".join(f"- {escape(line)}" for line in export_lines(report))] if report.exports else []
    return "\n\n".join(parts) + "\n"


def _score_section(comparison: ScoreComparison) -> str:
    rows = "\n".join(f"| {escape(a)} | {b} | {c} |" for a, b, c in score_rows(comparison))
    header = "| score | rank correlation | seconds |\n|---|--:|--:|"
    return f"## Scores against ablation\n{header}\n{rows}\n\n{escape(comparison.summary())}"
