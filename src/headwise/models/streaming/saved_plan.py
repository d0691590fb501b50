"""The stream plan that is saved with a model: stream_plan.json beside its weights, an attribute once it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from ...errors import HeadwiseError
from ...plans import StreamPlan
from .plan_layers import check_plan

FILE = "stream_plan.json"
ATTRIBUTE = "stream_plan"  # of a model that was loaded with its plan

Model = TypeVar("Model")


def attached_plan(model: Any) -> StreamPlan | None:
    """The plan that a model was loaded with."""
    plan = getattr(model, ATTRIBUTE, None)
    return plan if isinstance(plan, StreamPlan) else None


def attach_saved_plan(model: Model, folder: Path) -> Model:
    """Give a model that was loaded from a directory the plan that is there."""
    if (folder / FILE).exists():
        setattr(model, ATTRIBUTE, StreamPlan.load(folder / FILE))
    return model


def plan_to_save(model: Any, plan: StreamPlan | None) -> StreamPlan | None:
    """The plan to save with a model: the given plan, or else the one it was loaded with, if it still fits."""
    if plan is not None:
        check_plan(model, plan)
        return plan
    plan = attached_plan(model)
    try:
        if plan is not None:
            check_plan(model, plan)
    except HeadwiseError:  # heads were removed since
        return None
    return plan
