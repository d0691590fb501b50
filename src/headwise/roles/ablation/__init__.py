"""Whether the heads of a role matter more for a task than random heads do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .ablate import Ablation as Ablation
    from .ablate import ablate_heads as ablate_heads
    from .tasks import Task as Task
    from .tasks import agreement_task as agreement_task
    from .tasks import relation_task as relation_task
    from .tasks import repetition_task as repetition_task
    from .tasks import text_task as text_task

_MODULES = {
    "Ablation": "ablate",
    "Task": "tasks",
    "ablate_heads": "ablate",
    "agreement_task": "tasks",
    "relation_task": "tasks",
    "repetition_task": "tasks",
    "text_task": "tasks",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
