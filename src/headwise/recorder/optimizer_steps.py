"""The steps of a model's optimizer, counted by PyTorch's own hook, without changes to the training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Calls a function with the number of steps that a model's optimizer has made since the last call, mostly 1.

    Where several optimizers train one model, the first that makes a step counts; another that makes two steps meanwhile
    takes its place. A step that GradScaler skips, because gradients overflowed, is none: it does not call the
    optimizer, or tells a fused one to leave the weights.
    """

    def __init__(self, model: nn.Module, call: Callable[[int], None]) -> None:
        self.model, self.call = model, call
        self._clock: weakref.ref[Optimizer] | None = None  # the optimizer that counts
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that made a step since the last one counted
        self._members: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of the model
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of other models
        self._handle: Any = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop counting."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # by GradScaler, for fused optimizers that skip by themselves
        if optimizer in self._strangers or (overflow is not None and bool(overflow)):
            return
        if not self._trains_model(optimizer):
            self._strangers.add(optimizer)
            return
        clock = None if self._clock is None else self._clock()
        if clock is not None and clock is not optimizer and optimizer not in self._others:
            self._others.add(optimizer)  # it steps beside the one that counts, or has taken its place
            return
        count = 2 if optimizer in self._others else 1
        self._clock = weakref.ref(optimizer)
        self._others.clear()
        self.call(count)

    def _trains_model(self, optimizer: Optimizer) -> bool:
        if optimizer in self._members:
            return True
        parameters = set(self.model.parameters())
        if any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"]):
            self._members.add(optimizer)
            return True
        return False
