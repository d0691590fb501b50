"""Figures of quality against heads removed or merged, for a paper: PNG, SVG or PDF by the file's ending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figure import RC, matplotlib_style, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..prune import Curve
    from ..prune.group_report import GroupReport, Measurement, Point
    from ..prune.quality import Quality

# differ in lightness and marker as well as in hue: distinct in grey, and with any kind of colour vision
LINES = (("#1f4e9c", "o"), ("#d9722b", "s"), ("#2a9d76", "^"), ("#8e3b9d", "D"), ("#c9a227", "v"), ("#5b6b7a", "P"))
SPINES = {"axes.spines.left": True, "axes.spines.bottom": True, "xtick.major.size": 3, "ytick.major.size": 3}


def save_curve(curve: Curve, path: Path) -> None:
    """One line per score: its mean over seeds, and a band from the minimum to the maximum."""
    _save(lambda axes: _draw_curve(axes, curve), path)


def save_grouping(report: GroupReport, path: Path) -> None:
    """Quality against the number of KV heads: one line per grouping, before and after recovery, with intervals."""
    _save(lambda axes: _draw_grouping(axes, report), path)


def _save(draw: Callable[[Axes], None], path: Path) -> None:
    with matplotlib_style({**RC, **SPINES}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3.6), dpi=200, layout="constrained")
        draw(figure.subplots())
        write(figure, path)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    removed_percent = [100 * (1 - share) for share in curve.shares]
    for n, (name, table) in enumerate(curve.values.items()):
        style = _line_style(n)
        axes.plot(removed_percent, table.mean(0), label=name, zorder=3, **style)
        band = {"alpha": 0.15, "color": style["color"], "linewidth": 0}
        axes.fill_between(removed_percent, table.min(0), table.max(0), **band)
    axes.set_xlim(0, None)
    axes.set_xlabel("heads removed, %")
    _finish(axes, curve.full, "all heads")


def _draw_grouping(axes: Axes, report: GroupReport) -> None:
    stages: list[tuple[str, Callable[[Point], Measurement | None]]] = [("", lambda point: point.merged)]
    if report.options.recover:
        stages.append((", recovered", lambda point: point.recovered))
    n = 0
    for ending, measurement_of in stages:
        for grouping in dict.fromkeys(point.grouping for point in report.points):
            points = [point for point in report.points if point.grouping == grouping]
            qualities = [m.quality for point in points if (m := measurement_of(point)) is not None]
            places = [point.kv_heads for point in points]
            values = [quality.value for quality in qualities]
            ends = [[max(q.value - q.low, 0) for q in qualities], [max(q.high - q.value, 0) for q in qualities]]
            axes.errorbar(places, values, yerr=ends, label=grouping + ending, capsize=2, zorder=3, **_line_style(n))
            n += 1
    axes.set_xticks(sorted({point.kv_heads for point in report.points} | set(report.kv_heads_before)))
    axes.set_xlabel("KV heads per layer")
    _finish(axes, report.full, "before merging")


def _line_style(n: int) -> dict[str, Any]:
    colour, mark = LINES[n % len(LINES)]
    return {"color": colour, "marker": mark, "markersize": 4.5, "linewidth": 1.6}


def _finish(axes: Axes, full: Quality, label: str) -> None:
    """The full model's quality as a dashed line, the scale and the legend."""
    axes.axhline(full.value, color="0.45", linestyle=(0, (4, 3)), linewidth=1, label=label, zorder=2)
    if full.name == "perplexity":
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    better = "lower" if full.lower_is_better else "higher"
    axes.set_ylabel(f"{full.name} ({better} is better)")
    axes.legend(frameon=False, loc="best", handlelength=2.4)
