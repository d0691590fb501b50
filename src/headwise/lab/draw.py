"""A claim's charts as one picture, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadwiseError
from ..files import written
from .claim import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 130
ACROSS, WIDE, HIGH = 2, 6.2, 4.0  # charts side by side; inches of each
BAR = 0.8  # of the room between two


def save(charts: list[Chart], path: Path) -> None:
    """All charts of a claim in one PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HeadwiseError("a picture needs matplotlib; get it with: pip install 'headwise[plot]'") from error
    across = min(ACROSS, len(charts))
    down = -(-len(charts) // across)
    figure = Figure(figsize=(WIDE * across, HIGH * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for chart, ax in zip(charts, axes, strict=False):
        _draw(chart, ax)
    for ax in axes[len(charts) :]:
        ax.axis("off")
    with written(path) as made:
        figure.savefig(made, format="png", dpi=DPI, metadata={"Software": None})


def _draw(chart: Chart, ax: Axes) -> None:
    bars = any(isinstance(point[0], str) for points in chart.series.values() for point in points)
    (_bars if bars else _lines)(chart, ax)
    ax.set_title(chart.title, fontsize=10)
    ax.set_xlabel(chart.x)
    ax.set_ylabel(chart.y)
    if chart.log_y:
        ax.set_yscale("log")
    if len(chart.series) > 1:
        ax.legend(frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _lines(chart: Chart, ax: Axes) -> None:
    for name, points in chart.series.items():
        x, y, low, high = ([float(point[i]) for point in points] for i in range(4))
        (line,) = ax.plot(x, y, marker="o", markersize=3, label=name)
        ax.fill_between(x, low, high, alpha=0.2, color=line.get_color())
    if chart.log_x:
        ax.set_xscale("log", base=2)
        ticks = sorted({float(point[0]) for points in chart.series.values() for point in points})
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _bars(chart: Chart, ax: Axes) -> None:
    names = list(dict.fromkeys(str(point[0]) for points in chart.series.values() for point in points))
    wide = BAR / len(chart.series)
    for i, (name, points) in enumerate(chart.series.items()):
        at = [names.index(str(point[0])) + (i - (len(chart.series) - 1) / 2) * wide for point in points]
        y = [point[1] for point in points]
        errors = [[point[1] - point[2] for point in points], [point[3] - point[1] for point in points]]
        ax.bar(at, y, wide * 0.95, yerr=errors, capsize=2, label=name, error_kw={"linewidth": 0.8})
    turn = sum(map(len, names)) > 50
    ax.set_xticks(range(len(names)), names, rotation=30 if turn else 0, ha="right" if turn else "center", fontsize=8)
