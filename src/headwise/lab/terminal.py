"""The same charts and verdicts for a terminal: a bar a point, in plain characters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Point, Table, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MARKS = {HOLDS: "✓", ONLY_IF: "~", NOT: "✗", CANNOT_TELL: "?"}
STYLES = {HOLDS: "green", ONLY_IF: "yellow", NOT: "red", CANNOT_TELL: "dim"}
WIDE = 40
EIGHTHS = " ▏▎▍▌▋▊▉"
MOST = 12  # points of a line that are shown


def drawn(record: dict[str, Any], charts: list[Chart], tables: list[Table]) -> RenderableType:
    """A whole result."""
    from rich.console import Group
    from rich.text import Text

    head = Text(f"Claim {record['claim']}: {record['title']}", style="bold")
    blocks: list[RenderableType] = [head, Text()]
    for verdict in verdicts_of(record):
        blocks += [sentence(verdict), Text(f"  {verdict.because} ({verdict.sure})", style="dim")]
    for chart in charts:
        blocks += [Text(), Text(_heading(chart), style="bold"), *_bars(chart)]
    for table in tables:
        blocks += [Text(), _table(table)]
    return Group(*blocks)


def verdicts_of(record: dict[str, Any]) -> list[Verdict]:
    return [Verdict(**verdict) for verdict in record["verdicts"]]


def sentence(verdict: Verdict) -> Text:
    from rich.text import Text

    mark = (f"{MARKS[verdict.word]} {verdict}", STYLES[verdict.word])
    return Text.assemble(mark, f"  “{verdict.says}”")


def _bars(chart: Chart) -> list[RenderableType]:
    from rich.text import Text

    kept = {name: _some(points) for name, points in chart.series.items()}
    values = [point[1] for points in kept.values() for point in points if math.isfinite(point[1])]
    lift = _log if chart.log_y else float
    least, most = (min(map(lift, values)), max(map(lift, values))) if values else (0.0, 1.0)
    floor = least - 0.1 * (most - least or 1) if chart.log_y else min(0.0, least)
    labels = {name: [str(x) if isinstance(x, str) else f"{x:g}" for x, *_ in points] for name, points in kept.items()}
    wide = max((len(label) for of_one in labels.values() for label in of_one), default=0)
    lines: list[RenderableType] = []
    for name, points in kept.items():
        if len(kept) > 1:
            lines.append(Text(f"  {name}", style="cyan"))
        for label, (_, y, low, high) in zip(labels[name], points, strict=True):
            share = (lift(y) - floor) / ((most - floor) or 1) if math.isfinite(y) else 0.0
            seen = "" if low == high else f"  ({low:.3g} to {high:.3g})"
            lines.append(Text(f"  {label:>{wide}} {_bar(share)} {y:.3g}{seen}"))
    return lines


def _heading(chart: Chart) -> str:
    return f"{chart.title}: {chart.y}" + (f" against {chart.x}" if chart.x else "")


def _some(points: list[Point]) -> list[Point]:
    """Not more of a long line than one wants to read; its end is there."""
    if not points or isinstance(points[0][0], str):
        return points
    step = -(-len(points) // MOST)
    return points[::-step][::-1]


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))


def _bar(share: float) -> str:
    eighths = round(8 * WIDE * min(max(share, 0.0), 1.0))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(WIDE + 1)


def _table(table: Table) -> RenderableType:
    from rich.table import Table as Drawn

    made = Drawn(title=table.title, title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in table.head:
        made.add_column(name)
    for row in table.rows:
        made.add_row(*row)
    return made
