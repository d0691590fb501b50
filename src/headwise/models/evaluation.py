"""A context in which a model is in eval mode and its parameters need no gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode and disable gradients of the parameters; both are restored."""
    training = {module: module.training for module in model.modules()}
    requires_grad = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.eval()
    for parameter in requires_grad:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, required in requires_grad.items():
            parameter.requires_grad_(required)
