"""The model inside what wraps it: torch.compile, DDP and FSDP, PEFT, pipelines, sentence-transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

SHARDED = ("FSDPModule", "FullyShardedDataParallel")
COMPILED = ("torch", "OptimizedModule")
PEFT = ("peft", "PeftModel")
# by package and name of a wrapper's class or of a base of it: how to get at the model inside
WRAPPERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    COMPILED: lambda wrapper: wrapper._orig_mod,
    ("torch", "DistributedDataParallel"): lambda wrapper: wrapper.module,
    ("torch", "DataParallel"): lambda wrapper: wrapper.module,
    ("torch", "FullyShardedDataParallel"): lambda wrapper: wrapper.module,
    ("torch", "AveragedModel"): lambda wrapper: wrapper.module,
    PEFT: lambda wrapper: wrapper.get_base_model(),
    ("transformers", "Pipeline"): lambda wrapper: wrapper.model,
    ("sentence_transformers", "SentenceTransformer"): lambda wrapper: wrapper[0].auto_model,
}


def inner_model(model: Any) -> Any:
    """The model that does the work; the same where nothing wraps it.

    Calls of the wrapper run it, so hooks on it see them. A compiled model runs uncompiled for as long as it has hooks,
    which a warning says.
    """
    compiled = False
    while (kind := _wrapper_kind(model)) is not None:
        compiled = compiled or kind == COMPILED
        model = WRAPPERS[kind](model)
    if compiled:
        warnings.warn(
            f"{type(model).__name__} is compiled; inside of the `with` it runs uncompiled, since compiled code calls "
            "no hooks",
            stacklevel=3,
        )
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has cut the weights of a model, or of a part of it, into pieces for each rank."""
    classes = (base for module in model.modules() for base in type(module).__mro__)
    return any(base.__module__.startswith("torch.distributed") and base.__name__ in SHARDED for base in classes)


def is_transformers_model(model: Any) -> bool:
    """Whether a model is one of transformers itself: other packages have a save_pretrained and a config too."""
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__)
    return ("transformers", "PreTrainedModel") in classes


def is_peft_model(model: Any) -> bool:
    """Whether a model is peft's wrapper of one, whose `save_pretrained` writes the adapters alone."""
    return _wrapper_kind(model) == PEFT


def _wrapper_kind(model: Any) -> tuple[str, str] | None:
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__)
    return next((kind for kind in classes if kind in WRAPPERS), None)
