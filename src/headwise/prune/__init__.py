"""Pruning: which heads matter, and a smaller model without the others.

`headwise.importance`, `headwise.plan` and `headwise.Plan` are names of the root; these are the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .head_scores import HeadScores as HeadScores
    from .recovery import recover as recover
    from .registry import Score as Score
    from .registry import score as score
    from .scoring import ScoringRun as ScoringRun

_MODULES = {
    "HeadScores": "head_scores",
    "Score": "registry",
    "ScoringRun": "scoring",
    "recover": "recovery",
    "score": "registry",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
