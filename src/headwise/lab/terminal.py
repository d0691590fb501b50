"""A result in the terminal: verdicts, tables, and charts with one bar of plain characters per point."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..terminal import FittingTable
from .claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Point, Table, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MARKS = {HOLDS: "✓", ONLY_IF: "~", NOT: "✗", CANNOT_TELL: "?"}
STYLES = {HOLDS: "green", ONLY_IF: "yellow", NOT: "red", CANNOT_TELL: "dim"}
BAR_WIDTH = 40  # characters
EIGHTHS = " ▏▎▍▌▋▊▉"
MAX_POINTS = 12  # bars per line chart


def draw_result(record: dict[str, Any], charts: list[Chart], tables: list[Table]) -> RenderableType:
    """A whole result: verdicts with their figures, charts, tables."""
    from rich.console import Group
    from rich.text import Text

    head = Text(f"Claim {record['claim']}: {record['title']}", style="bold")
    blocks: list[RenderableType] = [head, Text()]
    for verdict in read_verdicts(record):
        words = f"{verdict.because}{verdict.needs_sentence}"
        blocks += [verdict_line(verdict), Text(f"  {words} ({verdict.sure})", style="dim")]
    for chart in charts:
        blocks += [Text(), Text(_heading(chart), style="bold"), *_bars(chart)]
    for table in tables:
        blocks += [Text(), _table(table)]
    return Group(*blocks)


def read_verdicts(record: dict[str, Any]) -> list[Verdict]:
    """The verdicts of a saved record. One from before verdicts said what it would take to tell gets that in words."""
    older = {"needs": "another run of the claim, which will say what"}
    return [
        Verdict(**(older if row["word"] == CANNOT_TELL and "needs" not in row else {}), **row)
        for row in record["verdicts"]
    ]


def verdict_line(verdict: Verdict) -> Text:
    """A mark, the verdict and the sentence it is about, on one line."""
    from rich.text import Text

    mark = (f"{MARKS[verdict.word]} {verdict}", STYLES[verdict.word])
    return Text.assemble(mark, f"  “{verdict.says}”")


def _bars(chart: Chart) -> list[RenderableType]:
    from rich.text import Text

    series = {name: _thin_out(points) for name, points in chart.series.items()}
    values = [point[1] for points in series.values() for point in points if math.isfinite(point[1])]
    scale = _log if chart.log_y else float
    smallest, largest = (min(map(scale, values)), max(map(scale, values))) if values else (0.0, 1.0)
    floor = smallest - 0.1 * (largest - smallest or 1) if chart.log_y else min(0.0, smallest)
    labels = {name: [str(x) if isinstance(x, str) else f"{x:g}" for x, *_ in points] for name, points in series.items()}
    label_width = max((len(label) for group in labels.values() for label in group), default=0)
    lines: list[RenderableType] = []
    for name, points in series.items():
        if len(series) > 1:
            lines.append(Text(f"  {name}", style="cyan"))
        for label, (_, y, low, high) in zip(labels[name], points, strict=True):
            share = (scale(y) - floor) / ((largest - floor) or 1) if math.isfinite(y) else 0.0
            spread = "" if low == high else f"  ({low:.3g} to {high:.3g})"
            lines.append(Text(f"  {label:>{label_width}} {_bar(share)} {y:.3g}{spread}"))
    return lines


def _heading(chart: Chart) -> str:
    return f"{chart.title}: {chart.y}" + (f" against {chart.x}" if chart.x else "")


def _thin_out(points: list[Point]) -> list[Point]:
    """At most MAX_POINTS points of a line, evenly spaced, with its last one; bars keep all of theirs."""
    if not points or isinstance(points[0][0], str):
        return points
    step = -(-len(points) // MAX_POINTS)
    return points[::-step][::-1]


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))


def _bar(share: float) -> str:
    eighths = round(8 * BAR_WIDTH * min(max(share, 0.0), 1.0))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(BAR_WIDTH + 1)


def _table(table: Table) -> RenderableType:
    from rich.table import Table as RichTable

    grid = RichTable(title=table.title, title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in table.head:
        grid.add_column(name)
    for row in table.rows:
        grid.add_row(*row)
    return FittingTable(grid)
