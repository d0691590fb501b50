"""A training log as one HTML page: the heads in colours, with a slider over the steps of the training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from .. import html
from ..errors import HeadwiseError
from ..files import write_atomically
from ..recorder.statistics import STATISTICS
from ..recorder.training_log import LogEntry, TrainingLog
from ..terminal import one_line
from . import bundle

MOST_NUMBERS = 2_000_000  # in a page; of longer logs some steps are left out
LOGARITHMIC = ("max_logit",)
BODY = """
<main id="recorder" class="headwise">
<p>This page draws itself by a script that it carries; nothing is fetched.</p>
</main>
"""


def save_training_page(log: TrainingLog, path: str | Path) -> None:
    """Write a page: every head coloured by any statistic, in any recorded step; the lines of a head; the alarms."""
    if not log.entries:
        raise HeadwiseError("the log has no entry yet, so there is nothing to draw")
    title = f"{one_line(log.header.model)}: its heads while it trained"
    style = bundle.report_style() + bundle.read("recorder.css")
    text, _ = html.page(
        title, BODY, style, script=bundle.script("recorder.js"), data=("recorder-data", page_data(log, title))
    )
    with write_atomically(path) as file:
        file.write_text(text, encoding="utf-8")


def page_data(log: TrainingLog, title: str) -> dict[str, Any]:
    """What the page's script draws; recorder.js has the types."""
    entries = _thin_out(log)
    steps = [entry.step for entry in entries]
    first, final = log.entries[0].step, log.entries[-1].step
    left_out = f", of which the page has {len(steps)}" if len(steps) < len(log.entries) else ""
    torn = " The last line of the file is incomplete and was left out." if log.torn else ""
    span = f"{len(log.entries)} entries from step {first:,} to {final:,}"
    entry_count = span if len(log.entries) != 1 else f"1 entry, at step {first:,}"
    summary = (
        f"{sum(layer.heads for layer in log.header.layers)} heads in {len(log.header.layers)} layers; "
        f"{entry_count}{left_out}.{torn}"
    )
    return {
        "title": title,
        "summary": summary,
        "steps": steps,
        "layers": {
            kind: [{"layer": layer.index, "heads": layer.heads} for layer in log.layers(kind)] for kind in log.kinds
        },
        "statistics": {
            name: {kind: [_table(log, name, kind, entry) for entry in entries] for kind in _kinds_with(log, name)}
            for name in log.names
        },
        "meanings": STATISTICS,
        "logarithmic": LOGARITHMIC,
        "alarms": [
            {
                "step": alarm.step,
                "kind": alarm.layer[0],
                "layer": alarm.layer[1],
                "heads": [alarm.head] if alarm.other is None else [alarm.head, alarm.other],
                "text": str(alarm),
            }
            for alarm in log.alarms
            if alarm.layer in {layer.key for layer in log.header.layers}
        ],
    }


def _thin_out(log: TrainingLog) -> list[LogEntry]:
    """Entries evenly spaced, as many as a page can hold, the first and the last among them."""
    numbers = len(log.names) * sum(layer.heads for layer in log.header.layers)
    most = max(2, MOST_NUMBERS // max(numbers, 1))
    if len(log.entries) <= most:
        return list(log.entries)
    return [log.entries[i] for i in np.linspace(0, len(log.entries) - 1, most).round().astype(int)]


def _kinds_with(log: TrainingLog, name: str) -> list[str]:
    present = {key[0] for entry in log.entries for key, values in entry.values.items() if name in values}
    return [kind for kind in log.kinds if kind in present]


def _table(log: TrainingLog, name: str, kind: str, entry: LogEntry) -> list[list[float | None]]:
    rows = (entry.values.get(layer.key, {}).get(name, []) for layer in log.layers(kind))
    return [[float(f"{x:.4g}") if math.isfinite(x) else None for x in row] for row in rows]
