"""Scalars and heat maps for experiment trackers: TensorBoard by its writer, Weights & Biases by its active run.

Neither package is imported: a writer is given by the caller, and a run can only be active where wandb was imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..inspection.heatmap import ramp
from .statistics import SHARES
from .training_log import LogEntry, LoggedLayer, head_values

PREFIX = "headwise"
CELL = 16  # pixels of a head in a heat map
COLOURS = 256
SUMMARIES: dict[str, Callable[[np.ndarray], np.floating[Any]]] = {"min": np.min, "mean": np.mean, "max": np.max}


def track(entry: LogEntry, layers: Sequence[LoggedLayer], writer: Any, wandb: bool) -> None:
    """Write an entry to the trackers that there are.

    Args:
        entry: what was recorded.
        layers: all layers of the model.
        writer: TensorBoard's SummaryWriter, or anything with its `add_scalar` and `add_image`; None for none.
        wandb: whether to log to the active run of Weights & Biases, where there is one.
    """
    package = sys.modules.get("wandb") if wandb else None
    run = getattr(package, "run", None)
    if writer is None and run is None:
        return
    numbers, pictures = scalars(entry), head_maps(entry, layers)
    if writer is not None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, entry.step)
        for name, picture in pictures.items():
            writer.add_image(name, picture, entry.step, dataformats="HWC")
    if run is not None and package is not None:
        images = {name: package.Image(picture) for name, picture in pictures.items()}
        # not committed: it joins what the training loop logs next, and does not advance the run's own step
        run.log({**numbers, **images, f"{PREFIX}/step": entry.step}, commit=False)


def scalars(entry: LogEntry) -> dict[str, float]:
    """Least, mean and largest of every statistic over all heads, the mean of every layer, and the number of alarms."""
    numbers: dict[str, float] = {}
    by_name: dict[str, list[float]] = {}
    for (kind, index), values in entry.values.items():
        for name, row in values.items():
            finite = [x for x in row if np.isfinite(x)]
            by_name.setdefault(name, []).extend(finite)
            if finite:
                numbers[f"{PREFIX}/{name}/{kind}.{index}"] = float(np.mean(finite))
    for name, heads in by_name.items():
        for summary, function in SUMMARIES.items():
            if heads:
                numbers[f"{PREFIX}/{name}/{summary}"] = float(function(np.array(heads)))
    numbers[f"{PREFIX}/alarms"] = float(len(entry.alarms))
    return numbers


def head_maps(entry: LogEntry, layers: Sequence[LoggedLayer]) -> dict[str, np.ndarray]:
    """A picture of each statistic and kind of attention, (height, width, 3) uint8: a row per layer, a cell per head."""
    pictures = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        members = [layer for layer in layers if layer.kind == kind]
        for name in dict.fromkeys(name for layer in members for name in entry.values.get(layer.key, {})):
            pictures[f"{PREFIX}/{name}/{kind} heads"] = _picture(head_values(entry, name, members), name)
    return pictures


def _picture(table: np.ndarray, name: str) -> np.ndarray:
    finite = table[np.isfinite(table)]
    low, high = (0.0, 1.0) if name in SHARES or not finite.size else (min(0.0, finite.min()), finite.max())
    palette = np.array([ramp(i / (COLOURS - 1)) for i in range(COLOURS)], np.uint8)
    shares = np.clip((np.nan_to_num(table) - low) / max(high - low, 1e-9), 0.0, 1.0)
    cells = palette[np.rint(shares * (COLOURS - 1)).astype(int)]
    cells[~np.isfinite(table)] = 128  # grey: not measured
    return cells.repeat(CELL, 0).repeat(CELL, 1)
