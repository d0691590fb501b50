"""Loading checkpoints into our stacks: a directory with config.json and safetensors, without transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ...shapes import Shape
from ..nn.stack import Decoder, Encoder
from ..validation import shown
from ..visibility_options import FLOATS
from .architectures import ARCHITECTURES, Architecture

Stack = TypeVar("Stack", bound=Encoder | Decoder)

# tensors of some checkpoints that are computed, not learned
_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
# TensorFlow's names, still in files that are widely used
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def load(stack: type[Stack], path: str | Path, dtype: torch.dtype | None, device: torch.device | str) -> Stack:
    """Load the Encoder or Decoder of a checkpoint directory, in eval mode; dtype None keeps the file's."""
    folder = Path(path)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{str(path)!r} is not a directory; give one with config.json and model.safetensors")
    config = read_json(folder / "config.json")
    architecture = _architecture(stack, config)
    checkpoint = Checkpoint(folder, architecture, str(device))
    shape = architecture.shape(config, checkpoint.tensors)
    if shape.head == "tied" and not checkpoint.tied():
        shape = replace(shape, head="own")
    model = _allocate_nothing(stack, shape, len(checkpoint.tensors))  # the file's tensors become the parameters
    parameters = model.state_dict()
    checkpoint.check_names(parameters)
    state = {ours: checkpoint.read(ours, like).to(dtype) for ours, like in parameters.items()}
    _check_dtypes(state.values())
    model.load_state_dict(state, assign=True)
    model.eval()
    return model


def _allocate_nothing(stack: type[Stack], shape: Shape, tensors: int) -> Stack:
    """A model on the meta device, for a file of this many tensors."""
    if shape.layers > tensors:  # all layers would be built before a missing tensor is noticed
        raise CheckpointError(f"config.json says {shape.layers} layers, but the file has {tensors} tensors in all")
    try:
        return stack(shape, device="meta")
    except (TypeError, RuntimeError, OverflowError) as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(f"config.json has a size that no tensor can have: {why}") from error


def _architecture(stack: type, config: dict[str, Any]) -> Architecture:
    """The architecture that a config names, checked to fit the stack."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UnsupportedError(f"model_type {kind!r} is not known here; known are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    expected = {"encoder": Encoder, "decoder": Decoder}[architecture.kind]
    if not issubclass(stack, expected):
        raise UnsupportedError(f"{kind} checkpoints are {architecture.kind}s; use {expected.__name__}.from_pretrained")
    return architecture


class Checkpoint:
    """The tensors of a checkpoint directory by our names; each is read when it is needed."""

    def __init__(self, folder: Path, architecture: Architecture, device: str) -> None:
        self.architecture = architecture
        tensors: dict[str, tuple[Any, str]] = {}  # modern name -> the open file and the name in it
        for file in weight_files(folder):
            opened = open_safetensors(folder / file, device)
            for name in opened.keys():  # noqa: SIM118  # not a dict
                tensors[_modern(name)] = opened, name
        first = architecture.modules["embed.tokens"] + ".weight"
        self.prefix = architecture.prefix if architecture.prefix + first in tensors else ""
        self.tensors = {name.removeprefix(self.prefix): place for name, place in tensors.items()}

    def read(self, ours: str, like: Tensor) -> Tensor:
        """The tensor of one of our parameters, in our memory layout and of the shape of `like`."""
        name, part = self._theirs(ours)
        opened, full_name = self.tensors[name]
        tensor = opened.get_tensor(full_name)
        if part is not None:
            tensor = tensor.chunk(3, -1)[part].clone()
        if self.architecture.transposed and ours.startswith("blocks.") and tensor.dim() == 2:
            tensor = tensor.T.contiguous()
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"tensor {full_name!r} is {shown(tensor.shape)}; config.json says {shown(like.shape)}"
            )
        return tensor

    def tied(self) -> bool:
        """Whether the output layer really is the embeddings: the file has none, or an equal one."""
        output = self.tensors.get("lm_head.weight")
        if output is None:
            return True
        opened, name = self.tensors[self._theirs("embed.tokens.weight")[0]]
        return torch.equal(opened.get_tensor(name), output[0].get_tensor(output[1]))

    def check_names(self, parameters: dict[str, Tensor]) -> None:
        """Require a tensor for every parameter, and none left over in the body; heads and buffers may be."""
        used = {"lm_head.weight"}
        for ours, like in parameters.items():
            name, _ = self._theirs(ours)
            if name not in self.tensors:
                full = name if ours.startswith("head.") else self.prefix + name
                raise CheckpointError(f"the checkpoint has no tensor {full!r} {shown(like.shape)}")
            used.add(name)
        body = {name.partition(".")[0] for name in self.architecture.modules.values()}
        for name, (_, full) in self.tensors.items():
            if name not in used and name.partition(".")[0] in body and not _BUFFERS.search(name):
                raise CheckpointError(f"the checkpoint has a tensor {full!r} that config.json has not")

    def _theirs(self, ours: str) -> tuple[str, int | None]:
        """The tensor's name for one of our parameters, and which third of it where three are fused."""
        module, leaf = ours.rsplit(".", 1)
        layer = re.search(r"\d+", module)
        theirs = self.architecture.modules[re.sub(r"\d+", "{}", module)]
        theirs, _, part = theirs.partition("/")
        return f"{theirs.format(layer and layer.group())}.{leaf}", int(part) if part else None


def weight_files(folder: Path) -> list[str]:
    """The names of the weight files: one, or those that an index lists."""
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or any(Path(str(file)).name != file for file in files.values()):
            raise CheckpointError(f"{index.name} has no weight_map from tensors to files beside it")
        return sorted(set(files.values()))
    if any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{str(folder)!r} has its weights only as a pickle (.bin), which can run code when read; "
            "save them as model.safetensors, where you trust them: transformers' from_pretrained, then save_pretrained"
        )
    raise CheckpointError(f"{str(folder)!r} has no model.safetensors and no model.safetensors.index.json")


def open_safetensors(path: Path, device: str) -> Any:
    """Open a safetensors file; its header is read and checked against the file's length."""
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as safetensors: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{str(path)!r} is nested too deeply to be read; get it anew") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} must hold an object, got {type(content).__name__}")
    return content


def _modern(name: str) -> str:
    """A tensor's name with TensorFlow's words replaced by PyTorch's."""
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _check_dtypes(tensors: Iterable[Tensor]) -> None:
    """Require one floating dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        names = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"the checkpoint's tensors are {names}; give a dtype, say dtype=torch.float32")
