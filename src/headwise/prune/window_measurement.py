"""What the layers of a decoder lose with limited windows, measured while the model runs one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.structure.heads import w_o
from ..models.structure.linear_layers import weight_problem, whole_weight
from ..models.structure.partition import check_whole
from ..models.structure.projections import find_projections
from ..models.structure.sites import Site, attention_sites
from ..models.text_inputs import is_encoder_decoder
from ..models.watching.call_reader import Reading
from ..models.watching.eager import EagerReading
from ..models.watching.layers import Layer
from ..plans import StreamLayer
from .attention_layers import attention_layers
from .context_need_result import ContextNeed, LayerSums
from .scoring import in_rows
from .window_sums import check_reading, measure_call, own_window

WINDOW_NAMES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # in configs
DIFFERENT = 0.02  # relative distance of W_O's input from the heads' outputs that no rounding explains


@dataclass(frozen=True)
class _Call:
    """The record of one attention call of a layer."""

    layer: StreamLayer
    tokens: np.ndarray  # (B,), those whose losses count
    sums: LayerSums


class WindowMeasurement:
    """The layers of a model that have a cache, and what was measured of them in the current batch."""

    def __init__(self, model: nn.Module, windows: tuple[int, ...], keep_first: int) -> None:
        _check_decoder(model)
        self.windows, self.keep_first = windows, keep_first
        layers = attention_layers(model, partial(find_projections, plain=False))  # no head is cut out
        self.kv_heads = {layer.key: layer.kv for layer in layers if layer.cache}
        self.sites: dict[tuple[str, int], Site] = {
            site.key: site for site in attention_sites(model) if site.key in self.kv_heads
        }
        if not self.sites:
            raise UnsupportedError(f"no attention layer of {type(model).__name__} is known to have a KV cache")
        self.linears = {key: w_o(model, site)[1] for key, site in self.sites.items()}
        self.weights = {key: _output_weight(linear, self.sites[key]) for key, linear in self.linears.items()}
        self.counted: Tensor | None = None  # (B, T) bool, the queries of the current batch that count; None: all
        self.calls: dict[tuple[str, int], _Call] = {}
        self._outputs: dict[nn.Module, Tensor] = {}  # by W_O: the heads' outputs (B, T, heads * width) on their way
        self._differences: dict[tuple[str, int], list[Tensor | None]] | None = None  # by layer and window

    def heads_before_w_o(self) -> _InputCheck:
        """Inside `with`, W_O's inputs are compared with the outputs of the heads."""
        return _InputCheck({self.linears[key]: site for key, site in self.sites.items()}, self._outputs)

    def observe(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        """Measure one attention call, while the model runs."""
        site = self.sites.get(layer.key)
        if site is None:
            return
        if layer.key in self.calls:
            raise UnsupportedError(f"{site} attends more than once in a pass; give whole sequences without a cache")
        exact = check_reading(reading, site)
        if reading.k.shape[1] != self.kv_heads[layer.key]:
            raise UnsupportedError(
                f"{site} attends with {reading.k.shape[1]} KV heads, and {self.kv_heads[layer.key]} are cached"
            )
        with torch.no_grad():
            measured = measure_call(exact, real, self.counted, self.weights[layer.key], self.windows, self.keep_first)
        left = own_window(exact)
        shape = StreamLayer(
            *layer.key, reading.q.shape[1], reading.k.shape[1],
            (reading.k.shape[3] + reading.v.shape[3]) * reading.k.element_size(),
            _declared_window(site) if left is None else left + 1,
        )  # fmt: skip
        self.calls[layer.key] = _Call(shape, measured.tokens, measured.sums)
        self._outputs[self.linears[layer.key]] = measured.outputs
        if self._differences is not None:
            self._differences[layer.key] = measured.differences

    @contextmanager
    def keep_differences(self) -> Iterator[None]:
        """Inside `with`, what windows change of the heads' outputs is kept for `first_order_changes`."""
        self._differences = {}
        try:
            yield
        finally:
            self._differences = None

    def first_order_changes(self, gradients: dict[tuple[str, int], Tensor]) -> list[np.ndarray]:
        """Per layer (B, W, KV heads): what windows change of a loss whose gradients by the heads' outputs are given.

        NaN for a layer with a window of its own, whose heads do not stream.
        """
        assert self._differences is not None
        changes = []
        for key, call in self.calls.items():
            size = (len(call.tokens), len(self.windows), call.layer.kv_heads)
            change = np.full(size, 0.0 if call.layer.window is None else np.nan)
            for i, difference in enumerate(self._differences[key]):
                if difference is not None and call.layer.window is None:
                    product = gradients[key].reshape(difference.shape).to(difference.dtype) * difference
                    per_head = product.unflatten(-1, (call.layer.kv_heads, -1)).sum((1, 3), dtype=torch.float64)
                    change[:, i] = -per_head.cpu().numpy()
            changes.append(change)
        return changes

    def finish_batch(self, size: int) -> ContextNeed:
        """The measured layers of a batch; the next one can begin."""
        missing = next((site for key, site in self.sites.items() if key not in self.calls), None)
        if missing is not None:
            raise UnsupportedError(f"{missing} was not called on this batch; give one that runs all layers")
        calls = [self.calls[key] for key in self.sites]
        self.calls = {}
        self._outputs.clear()
        if any(len(call.tokens) != size for call in calls):
            raise UnsupportedError(f"a batch of {size} sequences is attended to in another number of rows")
        layers, sums = tuple(call.layer for call in calls), tuple(call.sums for call in calls)
        return ContextNeed(layers, self.windows, self.keep_first, calls[0].tokens, sums)


def _check_decoder(model: nn.Module) -> None:
    name = type(model).__name__
    check_whole(model, attention_sites(model), "measure the context need of")
    if is_encoder_decoder(model):
        raise UnsupportedError(f"{name} is an encoder-decoder; context_need measures decoders alone")
    if any(getattr(module, "is_kv_shared_layer", False) for module in model.modules()):
        raise UnsupportedError(f"layers of {name} share keys and values with others; their need is not one layer's")


def _declared_window(site: Site) -> int | None:
    """The keys of a layer's sliding window by its config: on a text that fits into it, attention does not show it."""
    config = getattr(site.module, "config", None)
    types = getattr(config, "layer_types", None)
    if types and site.index < len(types):
        name = WINDOW_NAMES.get(types[site.index])
        window = None if name is None else getattr(config, name, None)
    elif getattr(config, "use_sliding_window", True):
        window = getattr(site.module, "sliding_window", getattr(config, "sliding_window", None))
    else:
        window = None
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def _output_weight(linear: nn.Module, site: Site) -> Tensor:
    """W_O (width, heads * head width)."""
    problem = weight_problem(linear, values=False)
    if problem is not None:
        raise UnsupportedError(f"W_O of {site} cannot be read: {problem[0]}; {problem[1]}")
    return in_rows(linear, whole_weight(linear))


class _InputCheck:
    """Compares the input of every W_O with the heads' outputs: gates, norms or another order of heads are refused."""

    def __init__(self, sites: dict[nn.Module, Site], outputs: dict[nn.Module, Tensor]) -> None:
        self.sites, self.outputs = sites, outputs

    def __enter__(self) -> None:
        self.handles = [linear.register_forward_pre_hook(self._compare) for linear in self.sites]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _compare(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        outputs = self.outputs.pop(linear, None)
        if outputs is None:
            return
        x = args[0].to(outputs.dtype)
        known = outputs != 0  # zero at padding, where models differ
        same = x.numel() == outputs.numel()
        if same:
            distance = torch.where(known, x.reshape(outputs.shape) - outputs, 0).norm()
            same = bool(distance <= DIFFERENT * outputs.norm())
        if not same:
            raise UnsupportedError(
                f"{self.sites[linear]} changes the outputs of its heads before W_O, so their change through W_O is not "
                "known"
            )
