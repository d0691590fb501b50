"""A training log drawn for the terminal: every statistic over time, the heads of one step, the alarms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ..inspection.heatmap import head_table
from .alarms import summarize
from .statistics import STATISTICS
from .training_log import TrainingLog, head_values

BARS = "▁▂▃▄▅▆▇█"
LINE_CELLS = 40  # of a statistic over time
NUMBER_CELLS = 9
SHOWN_ALARMS = 12  # lines of them
LISTED_HEADS = 3  # of a line


def draw_log(
    log: TrainingLog, width: int, *, colour: bool, statistic: str = "entropy", step: int | None = None
) -> RenderableType:
    """The whole log, and one statistic of every head in one step, by default the last."""
    parts: list[RenderableType] = [_title(log), Text()]
    for kind in log.kinds:
        parts += [_summary(log, kind, width), Text()]
    for kind in log.kinds:
        table = log.table(statistic, kind, step)
        if np.isfinite(table).any():
            name = f"{statistic}, {kind}" if len(log.kinds) > 1 else statistic
            heading = Text.assemble((name, "bold"), f" at step {log.entry(step).step:,}: {STATISTICS[statistic]}\n")
            layers = [layer.index for layer in log.layers(kind)]
            parts += [heading.append_text(head_table(table, layers, width, colour=colour)), Text()]
    return Group(*parts, _alarms(log))


def sparkline(values: Sequence[float], cells: int = LINE_CELLS) -> str:
    """Numbers over time as a line of bars, each the mean of its share of the time; blank where there is no number."""
    pieces = np.array_split(np.array(values, float), min(cells, len(values)))
    means = [float(np.mean(piece[np.isfinite(piece)])) if np.isfinite(piece).any() else np.nan for piece in pieces]
    finite = [x for x in means if np.isfinite(x)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((x - low) * scale)] if np.isfinite(x) else " " for x in means)


def _title(log: TrainingLog) -> Text:
    header, steps = log.header, log.steps
    heads = sum(layer.heads for layer in header.layers)
    text = Text.assemble((header.model, "bold"), f": {heads} heads in {len(header.layers)} layers; ")
    entries = f"{len(steps)} entries" if len(steps) != 1 else "1 entry"
    text.append(f"{entries}, steps {steps[0]:,} to {steps[-1]:,}")
    if log.torn:
        text.append("\nthe last line is incomplete, as a kill leaves it, and was left out", "dim")
    return text


def _summary(log: TrainingLog, kind: str, width: int) -> Text:
    """One line per statistic: its range over the heads in the last step, and its course."""
    heading = f"{kind} heads, step {log.steps[-1]:,}"
    label = max(len(heading), *(len(name) + 2 for name in log.names))
    cells = max(1, min(LINE_CELLS, width - label - 3 * NUMBER_CELLS - 2))
    numbers = "".join(f"{name:>{NUMBER_CELLS}}" for name in ("least", "mean", "largest"))
    layers = log.layers(kind)
    text = Text(no_wrap=True).append(f"{heading:<{label}}{numbers}  {'over the steps'[:cells]}\n", "dim")
    if "max_logit" not in log.names:
        text.append("  max_logit: not recorded, the scores before softcap and mask are not known\n", "dim")
    for name in log.names:
        tables = [head_values(entry, name, layers) for entry in log.entries]
        last = tables[-1][np.isfinite(tables[-1])]
        if not last.size:
            continue
        # of a maximum, the largest of all heads; else their mean
        summarized = np.max if name == "max_logit" else np.mean
        course = [float(summarized(x[np.isfinite(x)])) if np.isfinite(x).any() else np.nan for x in tables]
        numbers = "".join(f"{x:>{NUMBER_CELLS}.3g}" for x in (last.min(), last.mean(), last.max()))
        text.append(f"  {name:<{label - 2}}{numbers}")
        text.append(f"  {sparkline(course, cells)}\n", "cyan")
    text.right_crop(1)
    return text


def _alarms(log: TrainingLog) -> Text:
    lines = [line for entry in log.entries for line in summarize(list(entry.alarms), LISTED_HEADS)]
    text = Text("Alarms\n" if lines else "No alarm was raised.", "bold" if lines else "dim")
    for line in lines[-SHOWN_ALARMS:]:
        text.append(f"  {line}\n")
    if len(lines) > SHOWN_ALARMS:
        text.append(f"  and {len(lines) - SHOWN_ALARMS} earlier ones; to_json() lists all\n", "dim")
    text.rstrip()
    return text
