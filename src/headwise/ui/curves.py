"""A picture of quality against the share of heads kept, for a paper: PNG, SVG or PDF by the name's ending."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figure import RC, drawing, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..prune.curve import Curve

# apart in lightness and in shape as well as in hue: they are told apart in grey, and by any kind of colour vision
LINES = (("#1f4e9c", "o"), ("#d9722b", "s"), ("#2a9d76", "^"), ("#8e3b9d", "D"), ("#c9a227", "v"), ("#5b6b7a", "P"))
SPINES = {"axes.spines.left": True, "axes.spines.bottom": True, "xtick.major.size": 3, "ytick.major.size": 3}


def save_curve(found: Curve, path: Path) -> None:
    """A line a score, its mean over seeds, and a band from the least to the largest."""
    with drawing({**RC, **SPINES}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3.6), dpi=200, layout="constrained")
        _curve(figure.subplots(), found)
        write(figure, path)


def _curve(axes: Axes, found: Curve) -> None:
    removed = [100 * (1 - share) for share in found.shares]
    for place, (name, table) in enumerate(found.values.items()):
        colour, mark = LINES[place % len(LINES)]
        style: dict[str, Any] = {"color": colour, "marker": mark, "markersize": 4.5, "linewidth": 1.6}
        axes.plot(removed, table.mean(0), label=name, zorder=3, **style)
        axes.fill_between(removed, table.min(0), table.max(0), alpha=0.15, color=colour, linewidth=0)
    axes.axhline(found.full.value, color="0.45", linestyle=(0, (4, 3)), linewidth=1, label="all heads", zorder=2)
    if found.full.name == "perplexity":
        axes.set_yscale("log")
    axes.set_xlim(0, None)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("heads removed, %")
    better = "lower" if found.full.lower_is_better else "higher"
    axes.set_ylabel(f"{found.full.name} ({better} is better)")
    axes.legend(frameon=False, loc="best", handlelength=2.4)
