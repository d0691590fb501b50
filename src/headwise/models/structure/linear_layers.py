"""Linear layers as they are found in models: nn.Linear, GPT-2's Conv1D, and what only looks like one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Problem = tuple[str, str]  # why the weights are not plain, and what to do about it
QUANTIZED: Problem = (
    "quantized or wrapped weights",
    "prune and save the model before it is quantized, or load it unquantized",
)
ADAPTER: Problem = "it carries an adapter", "merge that first, with merge_and_unload() of peft's PeftModel"
ADAPTER_NAMES = ("base_layer", "lora_A", "modules_to_save")  # attributes of the layers that peft puts around others


def output_width(linear: nn.Module) -> int:
    """The output width of a linear layer (or Conv1D); 0 for any other module."""
    width = getattr(linear, "out_features", getattr(linear, "nf", None))
    return width if isinstance(width, int) else 0


def row_dim(linear: nn.Module) -> int:
    """The dimension of the weight that counts outputs: 0, or 1 for GPT-2's Conv1D."""
    return 1 if type(linear).__name__ == "Conv1D" else 0


def weight_problem(linear: nn.Module, *, values: bool = True) -> Problem | None:
    """Why the weight of a linear layer is not a plain matrix, and what to do; None where it is one.

    values: whether its values are needed; its shape is also known where ranks have parts of it.
    """
    if problem := wrapping_problem(linear, values=values):
        return problem
    weight = linear._parameters.get("weight")
    if weight is None or weight.dtype not in FLOATS or weight.dim() != 2:
        return QUANTIZED
    return None


def whole_weight(linear: nn.Module) -> Tensor:
    """The weight of a linear layer, whole also where it is a DTensor: all ranks must then call this.

    Raises:
        UnsupportedError: if this rank has a part of it that is no DTensor.
    """
    weight: Any = linear.get_parameter("weight").detach()
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    rows, columns = output_width(linear), getattr(linear, "in_features", getattr(linear, "nx", 0))
    if sorted(weight.shape) != sorted((rows, columns)):
        raise UnsupportedError(
            f"this rank has {tuple(weight.shape)} of a {type(linear).__name__}'s weight of {(rows, columns)}; give the "
            "model before it is split"
        )
    whole: Tensor = weight
    return whole


def wrapping_problem(module: nn.Module, *, values: bool = True) -> Problem | None:
    """Why the parameters of a module are not simply its own tensors, and what to do; None where they are."""
    if any(hasattr(module, name) for name in ADAPTER_NAMES):
        return ADAPTER
    if nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrized", "call torch.nn.utils.parametrize.remove_parametrizations first"
    if "weight" not in module._parameters and type(vars(module).get("weight")) in (Tensor, nn.Parameter):
        return "its weight is computed by a hook", "call remove_weight_norm or the like of torch.nn.utils first"
    tensors = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    sharded = [x for x in tensors if hasattr(x, "device_mesh")]
    if sharded and values:
        return "its weight is sharded over ranks", "prune and save the model before it is sharded"
    tensors = [x for x in tensors if not hasattr(x, "device_mesh")]
    if any(type(x) not in (nn.Parameter, Tensor) and type(x).__name__ != "Buffer" for x in tensors):
        # torchao's, bitsandbytes' and others'
        return QUANTIZED
    if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
        return QUANTIZED
    return None
