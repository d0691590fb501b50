"""The lab: common claims about multi-head attention, each an experiment with a verdict.

    from headwise.lab import DEFAULT, Lab, load_claim, measure
    record = measure(3, Lab(DEFAULT))   # figures, verdicts, machine and versions, as JSON values

A claim is one file in `claims/`, named `cNN_topic.py`, with a `Claim` called `CLAIM`; it is found by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .claim import CANNOT_TELL as CANNOT_TELL
    from .claim import HOLDS as HOLDS
    from .claim import NOT as NOT
    from .claim import ONLY_IF as ONLY_IF
    from .claim import Chart as Chart
    from .claim import Claim as Claim
    from .claim import Table as Table
    from .claim import Verdict as Verdict
    from .claims import claim_numbers as claim_numbers
    from .claims import load_claim as load_claim
    from .model import Recipe as Recipe
    from .session import measure as measure
    from .session import read_results as read_results
    from .session import write_result as write_result
    from .store import DEFAULT as DEFAULT
    from .store import FULL as FULL
    from .store import TINY as TINY
    from .store import Budget as Budget
    from .store import Lab as Lab
    from .train import TrainedModel as TrainedModel

_MODULES = {
    "CANNOT_TELL": "claim",
    "DEFAULT": "store",
    "FULL": "store",
    "HOLDS": "claim",
    "NOT": "claim",
    "ONLY_IF": "claim",
    "TINY": "store",
    "Budget": "store",
    "Chart": "claim",
    "Claim": "claim",
    "Lab": "store",
    "Recipe": "model",
    "Table": "claim",
    "TrainedModel": "train",
    "Verdict": "claim",
    "claim_numbers": "claims",
    "load_claim": "claims",
    "measure": "session",
    "read_results": "session",
    "write_result": "session",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
