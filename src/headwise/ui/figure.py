"""Figures by matplotlib: all heads by one statistic, or the matrix of one head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeadwiseError
from ..files import write_atomically
from ..inspection import STATISTICS, Comparison, Inspection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
COLOURS = "GnBu"  # from white to dark: prints well, also in grey; little ink means little weight
CELL = 0.42  # inches
LARGEST = 24.0  # inches; a larger figure has smaller cells and no numbers
# the first covers Latin, Greek, Cyrillic and Arabic; the others are used where installed
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Sans Devanagari", "Arial Unicode MS")
RC: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: searchable, and editable for a paper
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def save_figure(
    result: Inspection | Comparison, path: str | Path, *, head: str | None = None, statistic: str = "entropy"
) -> None:
    """Write a figure: every head by a statistic, or one head's matrix; a comparison as two panels.

    Args:
        result: what `headwise.inspect` gave.
        path: its ending is the format: png, svg or pdf. The file appears whole or not at all.
        head: such as "3.1", for its matrix; all heads by default.
        statistic: to colour the heads by.
    """
    with matplotlib_style(RC):
        write(_figure(result, head, statistic), Path(path))


@contextmanager
def matplotlib_style(rc: dict[Any, Any]) -> Iterator[None]:
    """In this context, matplotlib uses our settings and the installed fonts."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
        from matplotlib import rc_context
    except ImportError as error:
        raise HeadwiseError("pictures need matplotlib; get it with: pip install 'headwise[plot]'") from error
    with rc_context({**rc, "font.family": _fonts()}):
        yield


def _fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    available = set(fontManager.get_font_names())
    return [font for font in FONTS if font in available] or ["sans-serif"]


def _figure(result: Inspection | Comparison, head: str | None, statistic: str) -> Figure:
    from matplotlib.figure import Figure

    inspections = [result.first, result.second] if isinstance(result, Comparison) else [result]
    values = [inspection.table(statistic) if head is None else inspection.matrix(head) for inspection in inspections]
    low = min(float(np.nanmin(x)) for x in values)
    high = max(float(np.nanmax(x)) for x in values)
    scale = (min(low, 0.0), high) if head is None else (0.0, high)
    sizes = [_size(inspection, x, matrix=head is not None) for inspection, x in zip(inspections, values, strict=True)]
    width, height = sum(size[0] for size in sizes), max(size[1] for size in sizes)
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(inspections), squeeze=False)[0]
    for inspection, x, ax in zip(inspections, values, axes, strict=True):
        image = _head_matrix(ax, inspection, x, scale) if head is not None else _all_heads(ax, inspection, x, scale)
        ax.set_title(_wrap(inspection.text, width / len(inspections)), fontsize=10, loc="left", pad=10)
    colourbar = figure.colorbar(image, ax=list(axes), aspect=30, pad=0.02, shrink=0.85)
    colourbar.outline.set_visible(False)
    name = f"weight, head {head}" if head is not None else f"{statistic}: {STATISTICS[statistic]}"
    colourbar.set_label(f"{name} ({_model(result)})")
    return figure


def _model(result: Inspection | Comparison) -> str:
    """The model's name, short enough for a figure."""
    inspection = result.first if isinstance(result, Comparison) else result
    return Path(inspection.model).name or inspection.model


def _size(inspection: Inspection, values: np.ndarray, *, matrix: bool) -> tuple[float, float]:
    """Inches for the cells and the labels around them."""
    rows, columns = values.shape
    labels = 0.085 * min(max(map(len, inspection.words.names)), 16) if matrix else 0.35
    return min(columns * CELL + labels, LARGEST) + 1.3, min(rows * CELL + labels, LARGEST) + 0.9


def _all_heads(ax: Axes, inspection: Inspection, table: np.ndarray, scale: tuple[float, float]) -> Any:
    image = _cells(ax, table, scale)
    ax.set_xticks(range(table.shape[1]), [str(head) for head in range(table.shape[1])])
    ax.set_yticks(range(len(inspection.layers)), [str(layer) for layer in inspection.layers])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return image


def _head_matrix(ax: Axes, inspection: Inspection, weights: np.ndarray, scale: tuple[float, float]) -> Any:
    image = _cells(ax, weights, scale)
    names = [name.replace("$", r"\$") for name in inspection.words.names]  # or matplotlib reads a formula
    size = min(9.0, 900 / max(len(names), 1))
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
    ax.set_yticks(range(len(names)), names, fontsize=size)
    ax.xaxis.tick_top()
    ax.set_ylabel("from")
    ax.set_xlabel("to")
    ax.xaxis.set_label_position("top")
    return image


def _cells(ax: Axes, values: np.ndarray, scale: tuple[float, float]) -> Any:
    """A grid of coloured cells with thin white lines between them, and numbers where they fit."""
    image = ax.imshow(values, cmap=COLOURS, vmin=scale[0], vmax=scale[1], aspect="equal", interpolation="nearest")
    rows, columns = values.shape
    if max(rows, columns) * CELL > LARGEST:
        return image
    ax.set_xticks(np.arange(-0.5, columns), minor=True)
    ax.set_yticks(np.arange(-0.5, rows), minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8)
    ax.tick_params(which="minor", length=0)
    for row, column in np.ndindex(rows, columns):
        value = values[row, column]
        if np.isnan(value) or (scale[1] <= 1 and value < 0.005):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "white" if dark else "0.15"}
        ax.text(column, row, f"{value:.2f}", **style)
    return image


def _wrap(text: str, inches: float) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text.replace("$", r"\$"), max(int(inches * 10), 20))[:3])


def write(figure: Figure, path: Path) -> None:
    """Write under a temporary name first, so that an interrupted run leaves no partial file."""
    file_types = figure.canvas.get_supported_filetypes()
    file_type = path.suffix[1:].lower() or "png"
    if file_type not in file_types:
        raise HeadwiseError(f"a picture cannot be {path.suffix!r}; name it .png, .svg or .pdf")
    with write_atomically(path) as file:
        figure.savefig(file, format=file_type, bbox_inches="tight", pad_inches=0.12)
