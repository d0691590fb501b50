"""An ImageInspection drawn for the terminal: the patches as blocks, on the colours of a head's weights."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from . import heatmap
from .image_result import EVERY_PATCH, ImageInspection, strongest_patches
from .terminal import draw_statistic_table, draw_title

PATCH_CELLS = 2  # columns of the terminal per patch, so that a patch is square
LISTED_HEADS = 8
LISTED_PATCHES = 3  # per head


def draw_image(
    result: ImageInspection, width: int, *, colour: bool, statistic: str = "entropy", head: str | None = None
) -> RenderableType:
    """The weights of a head over the patches, those of the strongest by default; then all heads by a statistic."""
    parts: list[RenderableType] = [draw_title(result)]
    for source in result.sources:
        parts += [Text(), *_draw_source(result, source, head, width, colour)]
    if head is None:
        parts += [Text(), draw_statistic_table(result, statistic, width, colour)]
    return Group(*parts)


def _draw_source(
    result: ImageInspection, source: str | None, head: str | None, width: int, colour: bool
) -> list[RenderableType]:
    heads = result.strongest_heads(source)
    (layer, number), grid = heads[0] if head is None else (result.head_key(head), result.patch_weights(head, source))
    from_label = source or EVERY_PATCH
    reason = " (the largest weight of any head)" if head is None else ""
    return [
        Text.assemble("Head ", (f"{layer}.{number}", "bold cyan"), f" from {from_label}", (reason, "dim")),
        draw_patches(grid, width, colour=colour),
        Text(_scale_note(result, grid), "dim"),
        *([Text(), _draw_heads(heads, from_label)] if head is None else []),
    ]


def draw_patches(grid: np.ndarray, width: int, *, colour: bool) -> Text:
    """(rows, columns) of weights as blocks; in a narrow terminal, neighbours share a block by their largest weight."""
    cells = PATCH_CELLS if (grid.shape[1] * PATCH_CELLS) <= width else 1
    grid = _pool(grid, -(-grid.shape[1] * cells // width))
    largest = max(float(grid.max()), 1e-9)
    text = Text(no_wrap=True)
    for row in grid / largest:
        for share in row:
            shade = heatmap.SHADES[round(float(share) * (len(heatmap.SHADES) - 1))]
            text.append((" " if colour else shade) * cells, heatmap.style(heatmap.ramp(float(share))) if colour else "")
        text.append("\n")
    text.right_crop(1)
    return text


def _pool(grid: np.ndarray, side: int) -> np.ndarray:
    """The largest weight of every side x side patches."""
    if side <= 1:
        return grid
    rows, columns = (-(-length // side) for length in grid.shape)
    padded = np.zeros((rows * side, columns * side), grid.dtype)
    padded[: grid.shape[0], : grid.shape[1]] = grid
    pooled: np.ndarray = padded.reshape(rows, side, columns, side).max((1, 3))
    return pooled


def _scale_note(result: ImageInspection, grid: np.ndarray) -> str:
    on_special = f", {max(1 - float(grid.sum()), 0.0):.2f} on special tokens" if result.image.special else ""
    return f"from 0 to {float(grid.max()):.3f}{on_special}; uniform attention: {1 / result.tokens:.3f}"


def _draw_heads(heads: list[tuple[tuple[int, int], np.ndarray]], from_label: str) -> Text:
    text = Text(f"Heads by their strongest patch from {from_label}")
    for (layer, number), grid in heads[:LISTED_HEADS]:
        text.append(f"\n  {f'{layer}.{number}':<6}", "bold cyan")
        patches = strongest_patches(grid)[:LISTED_PATCHES]
        text.append("  ".join(f"{patch['row']},{patch['column']} {patch['weight']:.3f}" for patch in patches))
        text.append(f"  on patches {float(grid.sum()):.2f}", "dim")
    rest = len(heads) - LISTED_HEADS
    return text.append(f"\n  and {rest} more; to_json() lists all", "dim") if rest > 0 else text
