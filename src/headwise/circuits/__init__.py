"""What heads write and cause: attribution, patching, circuits and head matrices.

Users call these functions from the root package, such as `headwise.attribute`. Functions with the names of their
modules: `circuit.circuit`, `composition.composition`, `head_matrices.head_matrices`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .attribution import attribute as attribute
    from .circuit_result import Circuit as Circuit
    from .composition import Composition as Composition
    from .composition import HeadPair as HeadPair
    from .effects import Effects as Effects
    from .head_matrices import HeadMatrices as HeadMatrices
    from .low_rank import LowRank as LowRank
    from .metric import LogitDifference as LogitDifference
    from .patching import patch as patch
    from .tasks.prompt_pairs import PromptPairs as PromptPairs
    from .tasks.prompt_pairs import task as task
    from .tasks.registry import task_names as task_names
    from .tokens import Copying as Copying
    from .tokens import TokenEffect as TokenEffect
    from .tokens import TokenPair as TokenPair

_MODULES = {
    "Circuit": "circuit_result",
    "Composition": "composition",
    "Copying": "tokens",
    "Effects": "effects",
    "HeadMatrices": "head_matrices",
    "HeadPair": "composition",
    "LogitDifference": "metric",
    "LowRank": "low_rank",
    "PromptPairs": "tasks.prompt_pairs",
    "TokenEffect": "tokens",
    "TokenPair": "tokens",
    "attribute": "attribution",
    "patch": "patching",
    "task": "tasks.prompt_pairs",
    "task_names": "tasks.registry",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
