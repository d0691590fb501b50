"""Pruning: which heads matter, and a smaller model without the others.

`headwise.importance`, `headwise.plan`, `headwise.group_kv_heads`, `headwise.context_need` and `headwise.stream_plan`
are names of the root. `prune_and_measure` does what `headwise prune` does: it scores, prunes, recovers and measures,
and gives a `PruneReport`; `group_and_measure` and `stream_and_measure` do what `headwise group` and `headwise stream`
do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .batches import TextBatches as TextBatches
    from .batches import make_batches as make_batches
    from .batches import read_labels as read_labels
    from .batches import read_texts as read_texts
    from .curve import Curve as Curve
    from .group_report import GroupOptions as GroupOptions
    from .group_report import GroupReport as GroupReport
    from .group_session import group_and_measure as group_and_measure
    from .group_session import save_grouped as save_grouped
    from .grouping import GroupedHeads as GroupedHeads
    from .head_scores import HeadScores as HeadScores
    from .plan import plan_in_steps as plan_in_steps
    from .recovery import recover as recover
    from .registry import Score as Score
    from .registry import score as score
    from .report import PruneOptions as PruneOptions
    from .report import PruneReport as PruneReport
    from .scoring import ScoringRun as ScoringRun
    from .session import prune_and_measure as prune_and_measure
    from .session import save_result as save_result
    from .stream_corpus import StreamTexts as StreamTexts
    from .stream_corpus import stream_texts as stream_texts
    from .stream_report import StreamOptions as StreamOptions
    from .stream_report import StreamReport as StreamReport
    from .stream_session import save_stream_report as save_stream_report
    from .stream_session import stream_and_measure as stream_and_measure
    from .training_group import TrainingGroup as TrainingGroup

_MODULES = {
    "Curve": "curve",
    "GroupOptions": "group_report",
    "GroupReport": "group_report",
    "GroupedHeads": "grouping",
    "HeadScores": "head_scores",
    "PruneOptions": "report",
    "PruneReport": "report",
    "Score": "registry",
    "ScoringRun": "scoring",
    "StreamOptions": "stream_report",
    "StreamReport": "stream_report",
    "StreamTexts": "stream_corpus",
    "TextBatches": "batches",
    "TrainingGroup": "training_group",
    "group_and_measure": "group_session",
    "make_batches": "batches",
    "plan_in_steps": "plan",
    "prune_and_measure": "session",
    "read_labels": "batches",
    "read_texts": "batches",
    "recover": "recovery",
    "save_grouped": "group_session",
    "save_result": "session",
    "save_stream_report": "stream_session",
    "score": "registry",
    "stream_and_measure": "stream_session",
    "stream_texts": "stream_corpus",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
