"""The directory of a model that is not transformers': safetensors, and headwise.json with its class and heads.

headwise's own stacks are described by their shape, and built again from it. Any other class is built by the user, who
gives the model, whole, to headwise.load(path, into=model).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.checkpoints.pretrained import open_safetensors
from ...attention.nn.stack import Decoder, Encoder, Transformer
from ...attention.validation import shown
from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from ...heads import Heads
from ...shapes import Shape
from .. import multihead
from ..copying import copy_model
from .pruned_directory import FILE, build_record, prune_to_record, tied_names

WEIGHTS = "model.safetensors"
STACKS = {cls.__name__: cls for cls in (Encoder, Decoder, Transformer)}
STACK, MODULES = "stack", "modules"  # the forms: built from a shape, or given by the user


def write_model(model: nn.Module, folder: Path) -> str:
    """Write a model's weights and description; returns the form."""
    from safetensors.torch import save_file

    form = STACK if type(model) in STACKS.values() else MODULES
    record = build_record(model, form)
    if form == STACK:
        stack: Any = model
        record["shape"] = asdict(stack.shape)
        record["dropout"] = next(module.p for module in model.modules() if isinstance(module, nn.Dropout))
    (folder / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    save_file(_tensors(model), folder / WEIGHTS, metadata={"format": "pt"})
    return form


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the state dict once."""
    later_names = {name for name, first in tied_names(model).items() if name != first}
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{type(model).__name__} cannot be saved: {name!r} in its state dict is no tensor but "
                f"{type(value).__name__}"
            )
        if name not in later_names:
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors


def read_model(folder: Path, record: dict[str, Any], into: nn.Module | None) -> Any:
    """The model of a directory, in eval mode.

    Args:
        folder: the directory.
        record: what its headwise.json says.
        into: a whole model of the class that was saved, for classes that headwise cannot build; it is not changed.
    """
    name = record.get("class")
    if record["form"] == STACK:
        if into is not None:
            raise HeadwiseError(f"{str(folder)!r} has all that its {name} is built from; leave into= out")
        model = _build_stack(folder, record)
    else:
        if into is None:
            raise HeadwiseError(
                f"{str(folder)!r} holds a {name}, whose class headwise cannot build; give the model before any "
                f"pruning: headwise.load({str(folder)!r}, into={name}(...))"
            )
        if multihead.plain_class(into).__name__ != name:
            raise HeadwiseError(f"{str(folder)!r} holds a {name}, got into= a {type(into).__name__}")
        model = copy_model(into)
    prune_to_record(model, record["layers"])
    multihead.keep_padded(model)
    _load_weights(model, folder)
    return model.eval()


def _build_stack(folder: Path, record: dict[str, Any]) -> Any:
    """A stack of headwise's on the meta device, by the shape in headwise.json."""
    cls: Any = STACKS.get(str(record.get("class")))
    tensors = len(open_safetensors(folder / WEIGHTS, "cpu").keys())
    try:
        values = dict(record["shape"])
        window = values["window"]
        values |= {
            "heads": Heads(**values["heads"]),
            "rope": dict(values["rope"]),
            "window": tuple(window) if isinstance(window, list) else window,
        }
        shape = Shape(**values)
        if shape.layers + shape.decoder_layers > tensors:
            raise HeadwiseError(f"{shape.layers + shape.decoder_layers} layers, but the file has {tensors} tensors")
        return cls(shape, dropout=float(record["dropout"]), device="meta")
    except (HeadwiseError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{FILE} does not describe a stack of headwise's: {error}") from None


def _load_weights(model: nn.Module, folder: Path) -> None:
    """Put the tensors of the file into a model, all of them and in their own dtypes."""
    file = open_safetensors(folder / WEIGHTS, "cpu")
    weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # this is no dict
    _add_biases(model, set(weights))
    state = model.state_dict(keep_vars=True)
    extra, missing = sorted(set(weights) - set(state)), sorted(set(state) - set(weights) - set(tied_names(model)))
    if extra or missing:
        lacks = f"lacks {missing[0]!r}" if missing else f"has a tensor {extra[0]!r} that the model has not"
        raise CheckpointError(f"{str(folder / WEIGHTS)!r} {lacks}; is this the model that was saved?")
    for name, tensor in weights.items():
        if tensor.shape != state[name].shape:
            raise CheckpointError(
                f"tensor {name!r} is {shown(tensor.shape)}, the model's is {shown(state[name].shape)}; is this the "
                "model that was saved?"
            )
    for name, tensor in weights.items():
        owner, _, leaf = name.rpartition(".")
        module, old = model.get_submodule(owner), state[name]
        if old.is_meta:
            module._parameters[leaf] = nn.Parameter(tensor)
        else:
            old.data = tensor.to(old.device)  # tied parameters stay one


def _add_biases(model: nn.Module, names: set[str]) -> None:
    """Biases of W_O that were added to hold what removed heads contributed."""
    for name in names - set(model.state_dict()):
        owner, _, leaf = name.rpartition(".")
        linear: Any = dict(model.named_modules()).get(owner)
        if leaf == "bias" and linear is not None and linear._parameters.get("bias", 0) is None:
            weight = linear.weight
            linear.bias = nn.Parameter(torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device))
