"""Copies of models that run on their own weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..errors import UnsupportedError


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """A copy of a model. What `module.forward = torch.compile(module.forward)` made is not compiled in it.

    copy.deepcopy does not copy functions: one in place of a forward would keep computing with the first model.
    """
    memo = {} if memo is None else memo
    duplicate = copy.deepcopy(model, memo)
    for (path, original), copied_module in zip(model.named_modules(), duplicate.modules(), strict=True):
        forward: Any = vars(original).get("forward")
        if forward is None or vars(copied_module).get("forward") is not forward:
            continue
        plain: Any = forward
        while hasattr(plain, "_torchdynamo_orig_callable"):
            plain = plain._torchdynamo_orig_callable
        bound_forward = copy.deepcopy(plain, memo)
        if bound_forward is plain:
            raise UnsupportedError(
                f"{type(original).__name__} (at {path or 'the top'}) has a function in place of its forward, and a "
                "copy would compute with the weights of this model; give it a method, types.MethodType(function, "
                "module)"
            )
        if getattr(bound_forward, "__func__", None) is type(copied_module).forward:
            del vars(copied_module)["forward"]
        else:
            vars(copied_module)["forward"] = bound_forward
    return duplicate
