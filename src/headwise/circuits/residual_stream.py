"""The residual stream of a model: its writers, found once per model, and detached from the graph in every pass.

In a pass under `StreamPass`, every writer's output is a leaf of the autograd graph and the norms on the way are linear
at their actual scale. Only the stream itself and the output layers remain in the graph, so the gradient of a metric
with respect to a writer's output covers only its direct path, without later heads and feed-forward blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.hooks import Hooks
from ..models.passes import PassTracker
from ..models.structure.heads import w_o
from ..models.structure.sites import Site, first_per_module
from .inputs import named_tensors
from .stream_gradients import FrozenNorm, NormForm, SparseLinear, norm_form
from .stream_graph import LOOSE, ModuleCall, StreamGraph, StreamReading, block_of, read_writers

WriterType = Literal["attention", "feed-forward", "embedding", "earlier layers"]


class Writer(NamedTuple):
    """Something that adds to the residual stream."""

    type: WriterType
    label: str  # what it is called in results
    place: ModuleCall  # whose output it is; LOOSE for an input or a parameter of the model
    site: Site | None = None  # of attention


@dataclass(frozen=True)
class ResidualStream:
    """The writers of a model's residual stream."""

    writers: tuple[Writer, ...]
    norms: frozenset[tuple[nn.Module, int]]  # calls of norms on the way to the output, held at their actual scale
    final_norm: tuple[nn.Module, int] | None  # the one whose output the output layers read
    readers: frozenset[nn.Module]  # norms, and linear layers in the blocks, that are not on the way to the output
    output_layers: frozenset[nn.Module]  # linear layers beside the blocks
    nonlinear: str | None  # an operation between the stream and the metric that is not linear
    has_constant: bool  # whether a constant, such as an output bias, is added there


class NormRecord(NamedTuple):
    """A norm on the way in one pass."""

    output: Tensor  # (..., d)
    beta: Tensor | None


@dataclass
class StreamPass:
    """The record of one pass: a leaf per writer, the heads' outputs, and the norms on the path."""

    values: Tensor | None = None  # the metric
    leaves: dict[tuple[nn.Module, int], Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # loose parameters and inputs, by name
    heads: dict[Site, Tensor] = field(default_factory=dict)  # (B, T, heads * width), before W_O
    norms: dict[tuple[nn.Module, int], NormRecord] = field(default_factory=dict)


class _KnownStream(NamedTuple):
    modules: tuple[int, ...]  # ids of the model's modules then
    key: tuple[Any, ...]
    stream: ResidualStream


_streams: weakref.WeakKeyDictionary[nn.Module, _KnownStream] = weakref.WeakKeyDictionary()


def residual_stream(
    model: nn.Module, sites: list[Site], run: Callable[[Any], Tensor], batch: Any, key: tuple[Any, ...]
) -> ResidualStream:
    """The residual stream of a model, found in a pass and remembered for as long as the model lives.

    Args:
        model: in eval mode, its parameters without gradients.
        sites: its attention layers.
        run: runs the model on a batch and gives the metric.
        batch: to find it with.
        key: the metric and the names of the inputs, which the stream's end depends on.

    Raises:
        UnsupportedError: if the stream is no sum, or weights are not in memory.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__} has weights without values here (offloaded, or on the meta device); load it whole"
        )
    modules = tuple(map(id, model.modules()))
    known = _streams.get(model)
    if known is not None and known.modules == modules and known.key == key:
        return known.stream
    probe = _Probe(model, sites)
    values = probe.run(run, batch)
    reading = read_writers(probe.graph, values, probe.may_write)
    if reading.problem:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be taken apart into what its heads write: {reading.problem}"
        )
    stream = _stream(sites, probe, reading)
    _streams[model] = _KnownStream(modules, key, stream)
    return stream


def leaf_of(cut: StreamPass, writer: Writer) -> Tensor:
    """The leaf of a writer in a pass."""
    place = writer.place.module, writer.place.number
    return cut.leaves[place] if place in cut.leaves else cut.parameters[writer.place.name]


def run_cut(
    model: nn.Module, sites: list[Site], stream: ResidualStream, run: Callable[[Any], Tensor], batch: Any
) -> StreamPass:
    """One pass in which the writers' outputs are leaves."""
    return CutPass(model, sites, stream).run(run, batch)


class _StreamHooks:
    """The hooks that finding a stream and detaching it share."""

    def __init__(self, model: nn.Module, sites: list[Site]) -> None:
        self.model, self.sites = model, sites
        self.hooks = Hooks(model, [site.module for site in sites], "attribute")
        self.tracker = PassTracker(
            model, sites, self.hooks, awaits="W_O", consequence="what its heads write cannot be told"
        )
        self.names = {module: name for name, module in model.named_modules()}
        self.blocks = {block_of(site.name, [site.name]) for site in sites} - {""}
        self.calls: dict[nn.Module, int] = {}
        self.order: dict[tuple[nn.Module, int], int] = {}  # of the calls of all modules, as they end
        self.rows = 0  # prompts of the batch

    def call_number(self, module: nn.Module) -> int:
        """Which of its calls in this pass a module has just ended."""
        self.calls[module] = number = self.calls.get(module, -1) + 1
        self.order[module, number] = len(self.order)
        return number

    def run_with(self, set_hooks: Callable[[], None], run: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """The metric of a batch, run with hooks."""
        tensors = named_tensors(batch)
        self.rows = next(iter(tensors.values())).shape[0]
        try:
            self.hooks.set(None, set_hooks)
            with torch.enable_grad():
                return run(batch)
        finally:
            self.hooks.remove()
            self.tracker.reset()

    def follow_heads(self, store: Callable[[Site, Tensor], None]) -> None:
        """Call store with a site and its heads' outputs before W_O."""
        first_sites = first_per_module(self.sites)
        self.tracker.follow([site.module for site in first_sites])
        for site in first_sites:

            def note(x: Tensor, module: nn.Module = site.module) -> None:
                layer = self.tracker.site(module)
                if layer is not None:
                    store(layer, x)

            self.tracker.before_w_o(site, note)

    def leaf(self, x: Tensor) -> Tensor:
        """A leaf with the values of x, one row per prompt where x has one for all."""
        x = x.detach()
        if x.dim() == 3 and x.shape[0] == 1 < self.rows:
            x = x.expand(self.rows, -1, -1)
        return x.clone().requires_grad_()

    def attention_output(self, site: Site) -> nn.Module:
        """The module whose output is that of a site's W_O."""
        return site.module if isinstance(site.module, nn.MultiheadAttention) else w_o(self.model, site)[1]


class _Probe(_StreamHooks):
    """The pass that finds the writers."""

    def __init__(self, model: nn.Module, sites: list[Site]) -> None:
        super().__init__(model, sites)
        self.graph = StreamGraph()
        self.site_of: dict[int, Site] = {}  # by id of an attention output's leaf
        self.inside = {module for site in sites for module in site.module.modules()}
        paths = [site.name.split(".") for site in sites]
        self.around = {".".join(path[:end]) for path in paths for end in range(len(path) + 1)}

    def place_in_order(self, call: ModuleCall) -> int:
        """When a module's call ended; before all others for the model's inputs and parameters."""
        return -1 if call.module is LOOSE else self.order[call.module, call.number]

    def may_write(self, call: ModuleCall) -> bool:
        return call.name not in self.around and call.module not in self.inside

    def run(self, run: Callable[[Any], Tensor], batch: Any) -> Tensor:
        batch, leaves = _loose_leaves(self.model, self.blocks, batch)
        for name, x in leaves.items():
            self._add_leaf(x, ModuleCall(name, LOOSE, 0))
        return self.run_with(self._set_hooks, run, batch)

    def _set_hooks(self) -> None:
        self.follow_heads(lambda site, x: None)
        writers = {self.attention_output(site): site.module for site in self.sites}
        for module in self.model.modules():
            if module not in writers:
                self.hooks.after(module, self._after)
        for module, attention in writers.items():
            self.hooks.after(module, partial(self._cut, attention))

    def _cut(self, attention: nn.Module, module: nn.Module, args: Any, output: Any) -> Any:
        site = self.tracker.site(attention)
        number = self.call_number(module)
        x = first_tensor(output)
        if site is None or x is None:
            return None
        leaf = self.leaf(x)
        self._add_leaf(leaf, ModuleCall(self.names[module], module, number))
        self.graph.attention[id(leaf)] = site.index
        self.site_of[id(leaf)] = site
        return with_first_tensor(output, leaf.clone())

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = ModuleCall(self.names[module], module, self.call_number(module))
        x = first_tensor(output)
        if x is None or not x.is_floating_point():
            return None
        if not x.requires_grad:
            is_source = isinstance(output, Tensor) and self.may_write(call) and not is_inside(call.name, self.blocks)
            if not is_source or x.dim() < 2:
                return None
            leaf = self.leaf(x)
            self._add_leaf(leaf, call)
            return leaf.clone()
        form = norm_form(module, args[0], output) if args else None
        if form is not None:
            frozen = freeze(form, args[0], output)
            self.graph.norms[frozen.grad_fn] = call
            self.graph.tensors.append(frozen)
            return frozen
        self.graph.outputs.setdefault(x.grad_fn, []).append(call)
        self.graph.tensors.append(x)
        return None

    def _add_leaf(self, leaf: Tensor, call: ModuleCall) -> None:
        self.graph.leaves[id(leaf)] = call
        self.graph.tensors.append(leaf)


class CutPass(_StreamHooks):
    """A pass with the writers of a known stream as leaves."""

    def __init__(self, model: nn.Module, sites: list[Site], stream: ResidualStream) -> None:
        super().__init__(model, sites)
        self.stream = stream
        self.result = StreamPass()
        self.written = {(writer.place.module, writer.place.number) for writer in stream.writers}

    def run(self, run: Callable[[Any], Tensor], batch: Any) -> StreamPass:
        loose = {writer.place.name for writer in self.stream.writers if writer.place.module is LOOSE}
        batch, self.result.parameters = _loose_leaves(self.model, self.blocks, batch, loose)
        self.result.values = self.run_with(self.set_hooks, run, batch)
        return self.result

    def set_hooks(self) -> None:
        self.follow_heads(self._store_heads)
        writing = {module for module, _ in self.written} - {LOOSE}
        on_way = {module for module, _ in self.stream.norms}
        for module in writing | on_way:
            self.hooks.after(module, self._after)
        for module in self.stream.output_layers:
            self.hooks.after(module, _sparsely)
        for module in self.stream.readers:  # what they lead to needs no graph: it ends in a writer
            self.hooks.before(module, _detach)

    def leaf_of(self, writer: Writer) -> Tensor:
        """The leaf of a writer in the last pass."""
        return leaf_of(self.result, writer)

    def _store_heads(self, site: Site, x: Tensor) -> None:
        self.result.heads[site] = x.detach()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        number = self.call_number(module)
        x = first_tensor(output)
        if x is None:
            return None
        if (module, number) in self.written:
            leaf = self.leaf(x)
            self.result.leaves[module, number] = leaf
            return with_first_tensor(output, leaf.clone())
        if (module, number) not in self.stream.norms:
            return None
        form = norm_form(module, args[0], output)
        if form is None:
            raise UnsupportedError(f"{type(module).__name__} (at {self.names[module]}) is no LayerNorm or RMSNorm")
        frozen = freeze(form, args[0], output)
        self.result.norms[module, number] = NormRecord(frozen, form.beta)
        return frozen


def _detach(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in args)


def _sparsely(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter and len(args) == 1
    if not plain or not isinstance(output, Tensor) or not output.requires_grad or output.dim() != 3:
        return None
    return SparseLinear.apply(args[0], output.detach(), module.weight)


def freeze(form: NormForm, x: Tensor, y: Tensor) -> Tensor:
    """A norm's output y for x, whose gradient passes at the norm's actual scale."""
    with torch.no_grad():
        slope = form.slope(x.detach(), y.detach())
    frozen: Tensor = FrozenNorm.apply(x, y.detach(), slope, form.centred)
    return frozen


def first_tensor(output: Any) -> Tensor | None:
    """A module's output, or the first of several."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def with_first_tensor(output: Any, x: Tensor) -> Any:
    """An output of the same form with another first tensor."""
    return x if isinstance(output, Tensor) else type(output)([x, *output[1:]])


def _loose_leaves(
    model: nn.Module, blocks: set[str], batch: Any, names: set[str] | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """A batch and the leaves, by name: inputs and parameters that are added to the stream themselves.

    Those are floating inputs of three axes or more, and parameters beside the blocks with one row for a class token or
    one per position. They require gradients until the model is restored.
    """
    leaves: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        plain = isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, nn.MultiheadAttention))
        if plain or is_inside(module_name, blocks):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            path = f"{module_name}.{name}".lstrip(".")
            if parameter.dim() in (2, 3) and parameter.is_floating_point() and (names is None or path in names):
                leaves[path] = parameter.requires_grad_(True)
    inputs = {
        name: x.detach().clone().requires_grad_()
        for name, x in named_tensors(batch).items()
        if x.is_floating_point() and x.dim() >= 3 and "mask" not in name
    }
    return _with_tensors(batch, inputs), {**leaves, **inputs}


def is_inside(name: str, blocks: set[str]) -> bool:
    """Whether a module is one of the blocks, or inside one."""
    return any((name + ".").startswith(block + ".") for block in blocks)


def _with_tensors(batch: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A batch with other tensors under some of the names that `named_tensors` gives."""
    if not tensors:
        return batch
    if isinstance(batch, Mapping):
        return {**batch, **tensors}
    values = batch if isinstance(batch, tuple) else (batch,)
    new = tuple(tensors.get(f"input {i}", x) for i, x in enumerate(values))
    return new if isinstance(batch, tuple) else new[0]


def _stream(sites: list[Site], probe: _Probe, reading: StreamReading) -> ResidualStream:
    """The writers that were read, named and in the order of the model."""
    first = min(
        probe.order[call.module, call.number] for leaf, call in probe.graph.leaves.items() if leaf in probe.site_of
    )
    writers: list[Writer] = []
    for leaf in reading.leaves:
        call, site = probe.graph.leaves[leaf], probe.site_of.get(leaf)
        writers.append(Writer("attention", str(site), call, site) if site else Writer("embedding", call.name, call))
    for call in reading.calls:
        before = probe.order[call.module, call.number] < first and not block_of(call.name, [call.name])
        label = call.name if before else _block_label(call.name, sites)
        writers.append(Writer("embedding" if before else "feed-forward", label, call))
    writers += [Writer("earlier layers", "earlier layers", call) for call in reading.earlier]
    embeddings = sum(writer.type == "embedding" for writer in writers)
    writers = [
        writer._replace(label="embedding" if embeddings == 1 else f"embedding {writer.label}")
        if writer.type == "embedding"
        else writer
        for writer in writers
    ]
    writers.sort(key=lambda writer: probe.place_in_order(writer.place))
    norms = frozenset((call.module, call.number) for call in reading.norms)
    on_way = {module for module, _ in norms} | {writer.place.module for writer in writers}
    on_way |= {call.module for call in reading.output_norms}
    linear = {module for module in probe.model.modules() if isinstance(module, nn.Linear)} - on_way
    inside = {module for module in linear if is_inside(probe.names[module], probe.blocks)}
    readers = inside | {call.module for call in probe.graph.norms.values()} - on_way
    final = None if reading.final_norm is None else (reading.final_norm.module, reading.final_norm.number)
    return ResidualStream(
        tuple(writers),
        norms,
        final,
        frozenset(readers),
        frozenset(linear - inside),
        reading.nonlinear,
        reading.has_constant,
    )


def _block_label(name: str, sites: Sequence[Site]) -> str:
    """The label of a writer that is not attention: by the layer of the attention in the same block."""
    block = block_of(name, [site.name for site in sites])
    members = [site for site in sites if (site.name + ".").startswith(block + ".")]
    if not block or len({site.index for site in members}) > 1:
        return name
    several = len({site.kind for site in sites if not site.kind.endswith("cross")}) > 1
    return f"{members[0].kind} feed-forward {members[0].index}" if several else f"feed-forward {members[0].index}"
