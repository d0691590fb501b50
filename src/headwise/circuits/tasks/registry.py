"""The registry of tasks: what a pair of prompts is, and how a task writes one."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from ...errors import HeadwiseError

NOT_TASKS = ("prompt_pairs", "registry", "words")  # modules of this package beside the tasks


class Candidate(NamedTuple):
    """A pair of prompts before a tokenizer has seen it: `answer` continues the clean prompt, `other` does not.

    Both tokens carry the space before them.
    """

    clean: str
    corrupted: str
    answer: str
    other: str


Draw = Callable[[Random], Candidate]


@dataclass(frozen=True)
class Task:
    """A task, and the forms of its prompts: the first of which enough pairs fit a tokenizer is used."""

    name: str
    description: str
    forms: list[Draw] = field(default_factory=list)


_TASKS: dict[str, Task] = {}


def prompt_form(name: str, description: str) -> Callable[[Draw], Draw]:
    """Register a function that draws one pair, as a form of a task.

    Args:
        name: of the task; the forms of a task are tried in the order of their registration.
        description: one sentence about the task, for users.

    Example:
        >>> @prompt_form("copy", "the word after 'Repeat:' comes again")
        ... def copy(random: Random) -> Candidate:
        ...     word, other = random.sample([" red", " blue", " green"], 2)
        ...     return Candidate(f"Repeat:{word}", f"Repeat:{other}", word, other)
    """

    def register(draw: Draw) -> Draw:
        _TASKS.setdefault(name, Task(name, description)).forms.append(draw)
        return draw

    return register


def task_names() -> list[str]:
    """The names of all tasks."""
    _import_tasks()
    return sorted(_TASKS)


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        HeadwiseError: if there is none, naming all.
    """
    if name not in task_names():
        raise HeadwiseError(f"there is no task {name!r}; there are {', '.join(task_names())}")
    return _TASKS[name]


@functools.cache
def _import_tasks() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in NOT_TASKS:
            importlib.import_module(f"{__package__}.{module.name}")
