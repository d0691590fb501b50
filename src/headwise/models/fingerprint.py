"""Hashes of content: whether two models, tokenizers or batches are the same, whatever they are called.

Results that are continued later (checkpoints, parts of an atlas) are keyed by them, since the weights behind a name or
a path can change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError

CHUNK = 1 << 24  # elements that are moved to the CPU and hashed at once
# config keys that say where a config comes from; class and dtypes are hashed with the model itself
NOT_CONTENT = (
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype", "torch_dtype",
)  # fmt: skip
# parts of parameters' names that wrappers of a model add
WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
# keys of tokenizer.json that every call sets
PER_CALL = ("truncation", "padding")


def fingerprint(model: Any) -> str:
    """A hash of a model's content, 32 hexadecimal digits: its class, its config and the bytes of every saved tensor.

    The same weights give the same digits on every device and in every process; one changed bit gives others. One tensor
    at a time is copied to the CPU, also of an offloaded model. Of a sharded model each rank hashes its own shards.
    """
    digest = hashlib.sha256()
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else None
    digest.update(json.dumps([type(model).__name__, _content(settings)], sort_keys=True, default=str).encode())
    hashes: dict[int, str] = {}  # by id: a tied tensor is hashed once
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # modules may save anything, such as packed quantized weights
            content = repr(value)
        elif value.is_meta:
            content = tensor_fingerprint(_offloaded_tensor(model, name))
        else:
            content = hashes.get(id(value)) or hashes.setdefault(id(value), tensor_fingerprint(value))
        digest.update(f"\n{name} {content}".encode())
    return digest.hexdigest()[:32]


def structure_fingerprint(model: nn.Module) -> str:
    """A hash of the names and shapes of a model's parameters, 32 hexadecimal digits: the same all through a training.

    Names are those of the model itself, also inside DistributedDataParallel, FSDP and torch.compile.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        path = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        digest.update(f"{path} {tuple(parameter.shape)}\n".encode())
    return digest.hexdigest()[:32]


def tensor_fingerprint(x: Tensor) -> str:
    """A hash of a tensor's dtype, shape and values, wherever it is and however it is laid out."""
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    for part in plain_tensors(x.detach()):
        if part.dim() == 0:
            part = part[None]
        step = max(1, CHUNK * len(part) // max(part.numel(), 1))
        for first in range(0, len(part), step):
            piece = part[first : first + step].flatten()
            # a copy: `contiguous` keeps any stride of a single element, which then has no view as bytes
            digest.update(torch.empty(len(piece), dtype=piece.dtype).copy_(piece).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what a tokenizer does with a text: its vocabulary, rules and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        content: Any = {key: value for key, value in rules.items() if key not in PER_CALL}
    else:
        content = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    special = getattr(tokenizer, "special_tokens_map", None)
    text = json.dumps([type(tokenizer).__name__, special, content], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def batches_fingerprint(batches: Any) -> str:
    """A hash of a list of batches: tensors, mappings or sequences of tensors, numbers and strings."""
    digest = hashlib.sha256()
    for part in _values(batches):
        digest.update(f"{part}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def _values(value: Any) -> Iterator[str]:
    """A value's structure and leaves as strings."""
    if isinstance(value, Tensor):
        yield tensor_fingerprint(value)
    elif isinstance(value, Mapping):
        yield f"{{{len(value)}"
        for key in value:
            yield repr(key)
            yield from _values(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}"
        for item in value:
            yield from _values(item)
    else:
        yield f"{type(value).__name__} {value!r}"


def _content(settings: Any) -> Any:
    """A config and its sub-configs without the keys that say where it comes from."""
    if isinstance(settings, dict):
        return {str(key): _content(x) for key, x in settings.items() if key not in NOT_CONTENT}
    return [_content(x) for x in settings] if isinstance(settings, (list, tuple)) else settings


def plain_tensors(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors with the values of a tensor: itself, or the parts of a wrapping or quantized tensor."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(x, name))
    elif x.is_meta:
        raise UnsupportedError("a tensor on the meta device has no values; load the weights first")
    elif x.is_quantized:
        yield x.dequantize()
    elif x.layout != torch.strided:
        yield x.to_dense()
    else:
        yield x.resolve_conj().resolve_neg() if x.is_complex() or x.is_neg() else x


def _offloaded_tensor(model: Any, name: str) -> Tensor:
    """A tensor that accelerate has offloaded, by its name in the state dict."""
    path, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(path), "_hf_hook", None)
    weights = getattr(hook, "weights_map", None)
    try:
        tensor = weights[leaf]  # type: ignore[index]
    except (TypeError, KeyError):
        raise UnsupportedError(
            f"{name!r} is on the meta device, so {type(model).__name__} has no weights to compare; load them first"
        ) from None
    return tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
