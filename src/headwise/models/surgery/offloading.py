"""Models whose weights accelerate keeps in host memory or on disk, and fetches for each call."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from ...errors import UnsupportedError
from ..copying import copy_model

# what accelerate sets on a model or module; `to` and its relatives are closures over the original model
ATTRIBUTES = (
    "_hf_hook", "_old_forward", "hf_device_map", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron",
)  # fmt: skip


def is_offloaded(model: nn.Module) -> bool:
    """Whether a hook of accelerate fetches weights of this model for each call."""
    return any(True for module in model.modules() for _ in _offloading_hooks(module))


def in_memory(model: nn.Module) -> Any:
    """A copy of a model with all weights in memory: an offloaded one becomes a plain model on the CPU."""
    offloaded = is_offloaded(model)
    weights = dict(_fetch_weights(model)) if offloaded else {}
    check_present(model, weights)
    hooks = [vars(module).get("_hf_hook") for module in model.modules()]
    # the weights are fetched from the hooks, which are left out of the copy
    duplicate = copy_model(model, {id(hook): None for hook in hooks if hook is not None} if offloaded else {})
    if not offloaded:
        return duplicate
    for module in duplicate.modules():
        _unhook(module)
    for path, tensor in weights.items():
        owner, _, name = path.rpartition(".")
        _set_tensor(duplicate.get_submodule(owner), name, tensor)
    tie: Any = getattr(duplicate, "tie_weights", None)
    if tie is not None:
        tie()
    return duplicate.to("cpu")


def _hooks(hook: Any) -> Iterator[Any]:
    """A hook, or those that it chains."""
    parts = getattr(hook, "hooks", None)
    if isinstance(parts, (tuple, list)):
        for part in parts:
            yield from _hooks(part)
    elif hook is not None:
        yield hook


def _offloading_hooks(module: nn.Module) -> Iterator[Any]:
    for hook in _hooks(vars(module).get("_hf_hook")):
        if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None:
            yield hook


def _fetch_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight on the meta device, from where accelerate keeps it."""
    for path, module in model.named_modules():
        for hook in _offloading_hooks(module):
            recurse = bool(getattr(hook, "place_submodules", False))
            tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
            for name, tensor in tensors:
                if tensor.is_meta:
                    yield f"{path}.{name}".lstrip("."), hook.weights_map[name].detach().clone().cpu()


def check_present(model: nn.Module, fetched: Collection[str] = ()) -> None:
    """Refuse a model with weights on the meta device, except those that were fetched."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    absent = [name for name, tensor in tensors if tensor.is_meta and name not in fetched]
    if absent:
        raise UnsupportedError(
            f"{len(absent)} of {len(tensors)} weights of {type(model).__name__} are not in memory (meta device), "
            f"such as {absent[0]}; load the model with its weights"
        )


def _unhook(module: nn.Module) -> None:
    """Remove accelerate's attributes from a module, and put its forward back."""
    values = vars(module)
    original = values.get("_old_forward")
    if original is not None:
        values.pop("forward", None)
        if getattr(original, "__func__", None) is not type(module).forward:
            values["forward"] = original
    for name in ATTRIBUTES:
        values.pop(name, None)


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = module._parameters.get(name)
    if old is None:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=old.requires_grad)
