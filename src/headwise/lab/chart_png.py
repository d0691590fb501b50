"""All charts of a claim in one PNG, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadwiseError
from ..files import write_atomically
from .claim import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 130
COLUMNS, WIDTH, HEIGHT = 2, 6.2, 4.0  # charts per row; inches per chart
GROUP_WIDTH = 0.8  # of a group of bars, where 1 is the distance between groups


def save_charts(charts: list[Chart], path: Path) -> None:
    """Write the charts to one PNG file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HeadwiseError("a picture needs matplotlib; get it with: pip install 'headwise[plot]'") from error
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for chart, ax in zip(charts, axes, strict=False):
        _draw(chart, ax)
    for ax in axes[len(charts) :]:
        ax.axis("off")
    with write_atomically(path) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})


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
    width = GROUP_WIDTH / len(chart.series)
    for i, (name, points) in enumerate(chart.series.items()):
        positions = [names.index(str(point[0])) + (i - (len(chart.series) - 1) / 2) * width for point in points]
        y = [point[1] for point in points]
        errors = [[point[1] - point[2] for point in points], [point[3] - point[1] for point in points]]
        ax.bar(positions, y, width * 0.95, yerr=errors, capsize=2, label=name, error_kw={"linewidth": 0.8})
    tilted = sum(map(len, names)) > 50
    ax.set_xticks(
        range(len(names)), names, rotation=30 if tilted else 0, ha="right" if tilted else "center", fontsize=8
    )
