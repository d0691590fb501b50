"""The recorder: per-head health while a model trains. `headwise.Recorder` is a name of the root.

`recorder` watches the passes of every N-th optimizer step; `totals` adds them up, `rank_totals` over ranks; `alarms`
compares them with thresholds; `log_file` appends them to a JSONL file, which `training_log` reads; `trackers` hands
them to TensorBoard and Weights & Biases; `terminal` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .alarms import Alarm as Alarm
    from .alarms import Thresholds as Thresholds
    from .recorder import Recorder as Recorder
    from .training_log import LogEntry as LogEntry
    from .training_log import TrainingLog as TrainingLog

_MODULES = {
    "Alarm": "alarms",
    "LogEntry": "training_log",
    "Recorder": "recorder",
    "Thresholds": "alarms",
    "TrainingLog": "training_log",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
