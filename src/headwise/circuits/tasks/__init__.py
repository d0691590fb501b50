"""Bundled tasks: pairs of prompts whose answers a model must get from one word of the prompt.

Each task is one module here, whose functions register the ways to write its pairs; `registry` finds them. Users call
`headwise.circuits.task`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .prompt_pairs import Accuracy as Accuracy
    from .prompt_pairs import PromptPairs as PromptPairs
    from .prompt_pairs import task as task
    from .registry import task_names as task_names

_MODULES = {
    "Accuracy": "prompt_pairs",
    "PromptPairs": "prompt_pairs",
    "task": "prompt_pairs",
    "task_names": "registry",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
