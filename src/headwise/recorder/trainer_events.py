"""The events of transformers' Trainer, by the names that it calls; transformers itself is not imported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class TrainerEvents(ABC):
    """What `Trainer(callbacks=[...])` expects of a callback: one method per event, most of which do nothing here."""

    @abstractmethod
    def begin_at(self, step: int) -> None:
        """The training begins, or is resumed, after a number of steps."""

    @abstractmethod
    def finish_step(self, step: int) -> None:
        """A step has ended."""

    @abstractmethod
    def stop(self) -> None:
        """The training has ended."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begin_at(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.finish_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _ignore_event


def _ignore_event(*args: Any, **others: Any) -> None:
    """An event that the recorder does not need."""
