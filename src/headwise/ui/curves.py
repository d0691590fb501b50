"""A picture of quality against the share of heads kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadwiseError
from ..files import written

if TYPE_CHECKING:
    from ..prune.curve import Curve


def save_curve(found: Curve, path: Path) -> None:
    """A line a score, its mean over seeds, and a band from the least to the largest."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HeadwiseError("a picture needs matplotlib; get it with: pip install 'headwise[plot]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    removed = [100 * (1 - share) for share in found.shares]
    for name, table in found.values.items():
        (line,) = axes.plot(removed, table.mean(0), marker="o", label=name)
        axes.fill_between(removed, table.min(0), table.max(0), alpha=0.2, color=line.get_color())
    axes.axhline(found.full.value, color="grey", linestyle=":", label="all heads")
    if found.full.name == "perplexity":
        axes.set_yscale("log")
    axes.set_xlabel("heads removed, %")
    axes.set_ylabel(found.full.name)
    axes.legend(frameon=False)
    with written(path) as made:
        figure.savefig(made, format="png", dpi=150)
