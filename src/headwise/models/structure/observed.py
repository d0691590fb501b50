"""Attention layers that no class declares, as they were seen while their model ran under `watch`.

They are remembered per module for as long as it lives, so that the layers of a model that ran once are known before it
runs again: by their numbers, their heads and the linear layer that reads the heads' outputs.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace

from torch import nn


@dataclass
class ObservedLayer:
    """One attention layer of a module: one of its attention calls in a pass."""

    heads: int
    order: int  # its place among the attention calls of a pass
    part: int  # which attention call of one call of the module; 0 unless it makes several
    output: weakref.ref[nn.Module] | None = None  # the linear layer that reads its heads' outputs
    in_order: bool = True  # whether they lie head by head there
    readers: int = 0  # how many linear layers read them

    @property
    def w_o(self) -> nn.Module | None:
        return None if self.output is None else self.output()


_lock = threading.RLock()
_layers: weakref.WeakKeyDictionary[nn.Module, list[ObservedLayer]] = weakref.WeakKeyDictionary()


def observed_layers(module: nn.Module) -> list[ObservedLayer]:
    """The layers that a module was seen to serve, in the order of its calls; empty if none was."""
    with _lock:
        return list(_layers.get(module, ()))


def add_layer(module: nn.Module, layer: ObservedLayer) -> None:
    """Remember one more layer of a module."""
    with _lock:
        _layers.setdefault(module, []).append(layer)


def copy_layers(model: nn.Module, duplicate: nn.Module) -> None:
    """Remember of a copy of a model what is known of the model."""
    copied_modules = dict(duplicate.named_modules())
    copies = {module: copied_modules[path] for path, module in model.named_modules() if path in copied_modules}
    for module, copied in copies.items():
        for layer in observed_layers(module):
            w_o = copies.get(layer.w_o) if layer.w_o is not None else None
            add_layer(copied, replace(layer, output=None if w_o is None else weakref.ref(w_o)))


def forget_layers(module: nn.Module) -> None:
    """Forget what was seen of a module: it has other heads now."""
    with _lock:
        _layers.pop(module, None)
