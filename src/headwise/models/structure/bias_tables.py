"""Position biases with an entry per head that are made outside the attention layer which uses them."""

from __future__ import annotations

import inspect

from torch import nn

TABLE = "relative_attention_bias"  # T5: layer 0 has it, and passes its bias on to the other layers
BIAS_ARGUMENTS = ("position_bias", "alibi")  # of a layer's forward: biases with an entry per head
SAME_FOR_ALL_HEADS = ("SpeechT5Attention",)


def takes_bias(cls: type[nn.Module]) -> bool:
    """Whether the forward of an attention class is passed a bias with an entry per head."""
    parameters = inspect.signature(cls.forward).parameters
    return any(name in parameters for name in BIAS_ARGUMENTS) and cls.__name__ not in SAME_FOR_ALL_HEADS


def has_shared_table(module: nn.Module) -> bool:
    """Whether a module holds a table of biases that serves other layers too."""
    return hasattr(module, TABLE) and takes_bias(type(module))
