"""The steps of a model's optimizer, counted by PyTorch's own hook: a training loop needs no line for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Calls a function after every step of the optimizer that has parameters of a model.

    Where several optimizers train one model, the first that makes a step counts. A step that GradScaler skips, because
    gradients overflowed, is none: it does not call the optimizer, or tells a fused one to leave the weights.
    """

    def __init__(self, model: nn.Module, call: Callable[[], None]) -> None:
        self.model, self.call = model, call
        self._clock: weakref.ref[Optimizer] | None = None  # the optimizer that counts
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of other models
        self._handle: Any = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop counting."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        clock = None if self._clock is None else self._clock()
        if clock is None:
            if optimizer in self._strangers:
                return
            if not self._trains_model(optimizer):
                self._strangers.add(optimizer)
                return
            self._clock = weakref.ref(optimizer)
        elif clock is not optimizer:
            return
        overflow = getattr(
            optimizer, "found_inf", None
        )  # set by GradScaler for fused optimizers, which skip themselves
        if overflow is None or not bool(overflow):
            self.call()

    def _trains_model(self, optimizer: Optimizer) -> bool:
        parameters = set(self.model.parameters())
        return any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"])
