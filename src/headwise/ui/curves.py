"""A figure of quality against the share of heads removed, for a paper: PNG, SVG or PDF by the file's ending."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figure import RC, matplotlib_style, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..prune import Curve

# differ in lightness and marker as well as in hue: distinct in grey, and with any kind of colour vision
LINES = (("#1f4e9c", "o"), ("#d9722b", "s"), ("#2a9d76", "^"), ("#8e3b9d", "D"), ("#c9a227", "v"), ("#5b6b7a", "P"))
SPINES = {"axes.spines.left": True, "axes.spines.bottom": True, "xtick.major.size": 3, "ytick.major.size": 3}


def save_curve(curve: Curve, path: Path) -> None:
    """One line per score: its mean over seeds, and a band from the minimum to the maximum."""
    with matplotlib_style({**RC, **SPINES}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3.6), dpi=200, layout="constrained")
        _draw_curve(figure.subplots(), curve)
        write(figure, path)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    removed_percent = [100 * (1 - share) for share in curve.shares]
    for n, (name, table) in enumerate(curve.values.items()):
        colour, mark = LINES[n % len(LINES)]
        style: dict[str, Any] = {"color": colour, "marker": mark, "markersize": 4.5, "linewidth": 1.6}
        axes.plot(removed_percent, table.mean(0), label=name, zorder=3, **style)
        axes.fill_between(removed_percent, table.min(0), table.max(0), alpha=0.15, color=colour, linewidth=0)
    axes.axhline(curve.full.value, color="0.45", linestyle=(0, (4, 3)), linewidth=1, label="all heads", zorder=2)
    if curve.full.name == "perplexity":
        axes.set_yscale("log")
    axes.set_xlim(0, None)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("heads removed, %")
    better = "lower" if curve.full.lower_is_better else "higher"
    axes.set_ylabel(f"{curve.full.name} ({better} is better)")
    axes.legend(frameon=False, loc="best", handlelength=2.4)
