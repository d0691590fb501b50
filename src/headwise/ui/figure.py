"""Pictures of what heads do, by matplotlib: all heads by one statistic, and one head's matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeadwiseError
from ..files import written
from ..inspection.comparison import Comparison
from ..inspection.result import STATISTICS, Inspection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
COLOURS = "GnBu"  # from white to dark: it prints, also in grey, and little ink means little weight
CELL = 0.42  # inches
LARGEST = 24.0  # inches; what is larger is drawn with smaller cells and without numbers
# the first has Latin, Greek, Cyrillic and Arabic; the others help where they are installed
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Sans Devanagari", "Arial Unicode MS")
RC: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: it can be found, and edited for a paper
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def save(
    found: Inspection | Comparison, path: str | Path, *, head: str | None = None, statistic: str = "entropy"
) -> None:
    """Write a picture: every head by a statistic, or one head's matrix; of two texts, one picture beside the other.

    The format is the name's ending (png, svg, pdf). The file appears whole or not at all.
    """
    with drawing(RC):
        write(_drawn(found, head, statistic), Path(path))


@contextmanager
def drawing(rc: dict[Any, Any]) -> Iterator[None]:
    """While this lasts, matplotlib draws in our way."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
        from matplotlib import rc_context
    except ImportError as error:
        raise HeadwiseError("pictures need matplotlib; get it with: pip install 'headwise[plot]'") from error
    with rc_context({**rc, "font.family": _fonts()}):
        yield


def _fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return [font for font in FONTS if font in installed] or ["sans-serif"]


def _drawn(found: Inspection | Comparison, head: str | None, statistic: str) -> Figure:
    from matplotlib.figure import Figure

    texts = [found.first, found.second] if isinstance(found, Comparison) else [found]
    values = [one.table(statistic) if head is None else one.matrix(head) for one in texts]
    low = min(float(np.nanmin(x)) for x in values)
    high = max(float(np.nanmax(x)) for x in values)
    scale = (min(low, 0.0), high) if head is None else (0.0, high)
    sizes = [_size(one, x, matrix=head is not None) for one, x in zip(texts, values, strict=True)]
    width, height = sum(size[0] for size in sizes), max(size[1] for size in sizes)
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(texts), squeeze=False)[0]
    for one, x, ax in zip(texts, values, axes, strict=True):
        image = _head_matrix(ax, one, x, scale) if head is not None else _all_heads(ax, one, x, scale)
        ax.set_title(_wrapped(one.text, width / len(texts)), fontsize=10, loc="left", pad=10)
    bar = figure.colorbar(image, ax=list(axes), aspect=30, pad=0.02, shrink=0.85)
    bar.outline.set_visible(False)
    name = f"weight, head {head}" if head is not None else f"{statistic}: {STATISTICS[statistic]}"
    bar.set_label(f"{name} ({_model(found)})")
    return figure


def _model(found: Inspection | Comparison) -> str:
    """The model's name, short enough for a picture."""
    one = found.first if isinstance(found, Comparison) else found
    return Path(one.model).name or one.model


def _size(one: Inspection, values: np.ndarray, *, matrix: bool) -> tuple[float, float]:
    """Inches for the cells and what stands around them."""
    rows, columns = values.shape
    labels = 0.085 * min(max(map(len, one.words.names)), 16) if matrix else 0.35
    return min(columns * CELL + labels, LARGEST) + 1.3, min(rows * CELL + labels, LARGEST) + 0.9


def _all_heads(ax: Axes, one: Inspection, table: np.ndarray, scale: tuple[float, float]) -> Any:
    image = _cells(ax, table, scale)
    ax.set_xticks(range(table.shape[1]), [str(head) for head in range(table.shape[1])])
    ax.set_yticks(range(len(one.layers)), [str(layer) for layer in one.layers])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return image


def _head_matrix(ax: Axes, one: Inspection, weights: np.ndarray, scale: tuple[float, float]) -> Any:
    image = _cells(ax, weights, scale)
    names = [name.replace("$", r"\$") for name in one.words.names]  # or matplotlib reads a formula
    size = min(9.0, 900 / max(len(names), 1))
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
    ax.set_yticks(range(len(names)), names, fontsize=size)
    ax.xaxis.tick_top()
    ax.set_ylabel("from")
    ax.set_xlabel("to")
    ax.xaxis.set_label_position("top")
    return image


def _cells(ax: Axes, values: np.ndarray, scale: tuple[float, float]) -> Any:
    """A grid of coloured cells with thin white lines between them, and numbers where they have room."""
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
        shown: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "white" if dark else "0.15"}
        ax.text(column, row, f"{value:.2f}", **shown)
    return image


def _wrapped(text: str, inches: float) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text.replace("$", r"\$"), max(int(inches * 10), 20))[:3])


def write(figure: Figure, path: Path) -> None:
    """Under a temporary name first: a run that is stopped half-way leaves no half picture."""
    kinds = figure.canvas.get_supported_filetypes()
    kind = path.suffix[1:].lower() or "png"
    if kind not in kinds:
        raise HeadwiseError(f"a picture cannot be {path.suffix!r}; name it .png, .svg or .pdf")
    with written(path) as made:
        figure.savefig(made, format=kind, bbox_inches="tight", pad_inches=0.12)
