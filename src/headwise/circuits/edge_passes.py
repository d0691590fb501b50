"""Passes over the edges of a circuit graph: what writers add, how the metric depends on readers, some edges alone.

Shapes: U writers, S slots of a reader, P writers that it reads, (B, T, d) the stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.hooks import Hooks
from ..models.passes import PassTracker
from ..models.structure.linear_layers import row_dim
from ..models.structure.sites import Site, first_per_module
from .circuit_graph import CircuitGraph, Reader, head_id, projections_of, slot_rows
from .residual_stream import first_tensor, with_first_tensor
from .stream_gradients import norm_form
from .stream_graph import LOOSE

Run = Callable[[Any], Tensor]  # runs the model on a batch and gives the metric
Embeddings = dict[nn.Module, Tensor]  # outputs of the embedding modules


@dataclass
class Activations:
    """The recorded activations of one pass."""

    values: Tensor  # the metric, (B,) or (1,)
    written: Tensor  # (U, B, T, d): what each writer adds, without its factor
    read: dict[Reader, Tensor]  # (B, T, d): the stream before each reader's norm
    embeddings: Embeddings


class _EdgeHooks(ABC):
    """Hooks on the writers and readers of a graph."""

    def __init__(self, model: nn.Module, graph: CircuitGraph) -> None:
        self.model, self.graph = model, graph
        self.number = {node.id: number for number, node in enumerate(graph.nodes)}
        self.shape: torch.Size = torch.Size()  # (B, T, d); some models flatten it on the way
        self.readers_of: dict[nn.Module, list[Reader]] = {}
        for reader in graph.readers:
            self.readers_of.setdefault(reader.norm, []).append(reader)
        self.hooks = Hooks(model, [site.module for site in graph.sites], "attribute")
        self.tracker = PassTracker(
            model, graph.sites, self.hooks, awaits="W_O", consequence="what its heads write cannot be told"
        )

    def run(self, run: Run, batch: Any) -> Tensor:
        try:
            self.hooks.set(None, self.set_hooks)
            return run(batch)
        finally:
            self.hooks.remove()
            self.tracker.reset()

    @abstractmethod
    def set_hooks(self) -> None:
        """Set the hooks of one kind of pass."""

    def note_shape(self) -> None:
        """Set the hook that keeps the stream's shape, before those that need it."""

        def note(norm: nn.Module, args: tuple[Any, ...]) -> None:
            self.shape = args[0].shape

        self.hooks.before(self.graph.readers[0].norm, note)

    def follow_writers(self, store: Callable[[int, Tensor], None]) -> None:
        """Call store with the number of a writer and what it adds: (H, B, T, d) for the heads of a layer."""
        sites = first_per_module(self.graph.sites)
        self.tracker.follow([site.module for site in sites])
        for site in sites:
            writes = _HeadWrites(self.model, site)

            def note(x: Tensor, site: Site = site, writes: _HeadWrites = writes) -> None:
                store(self.number[head_id(site, 0)], writes(x))

            self.tracker.before_w_o(site, note)
        for writer in self.graph.stream.writers:
            if writer.type == "feed-forward":
                self.hooks.after(writer.place.module, self._storing(store, self.number[writer.label]))

    def _storing(self, store: Callable[[int, Tensor], None], number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = first_tensor(output)
            if x is not None:
                store(number, x.reshape(1, *self.shape))

        return hook

    def follow_embeddings(self, change: Callable[[nn.Module, Tensor], Tensor | None]) -> None:
        """Call change with the output of each embedding module; it may give another."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            x = first_tensor(output)
            changed = None if x is None else change(module, x)
            return None if changed is None else with_first_tensor(output, changed)

        for writer in self.graph.stream.writers:
            if writer.type == "embedding" and writer.place.module is not LOOSE:
                self.hooks.after(writer.place.module, hook)


class _HeadWrites:
    """The contribution of each head of a layer to the stream, from W_O's input: (B, T, H * width) -> (H, B, T, d)."""

    def __init__(self, model: nn.Module, site: Site) -> None:
        layer = projections_of(model, site)
        weight = layer.out.get_parameter("weight").detach()
        columns = weight if row_dim(layer.out) == 0 else weight.T  # (d, H * width)
        self.columns = columns.unflatten(1, (layer.query, -1)).permute(1, 2, 0)  # (H, width, d)

    def __call__(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (len(self.columns), -1)).permute(2, 0, 1, 3)  # (H, B, T, width)
        return heads @ self.columns[:, None]


class _Record(_EdgeHooks):
    def __init__(self, model: nn.Module, graph: CircuitGraph) -> None:
        super().__init__(model, graph)
        self.parts: dict[int, Tensor] = {}
        self.read: dict[Reader, Tensor] = {}
        self.embeddings: Embeddings = {}

    def set_hooks(self) -> None:
        self.note_shape()
        self.follow_writers(self.parts.__setitem__)
        self.follow_embeddings(self._note_embedding)
        for norm in self.readers_of:
            self.hooks.before(norm, self._note_input)

    def _note_embedding(self, module: nn.Module, x: Tensor) -> None:
        if module in self.embeddings:
            raise UnsupportedError(f"{type(module).__name__} is called twice per pass; circuits need one embedding")
        self.embeddings[module] = x

    def _note_input(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        for reader in self.readers_of[norm]:
            self.read[reader] = args[0].reshape(self.shape)


def record(model: nn.Module, graph: CircuitGraph, run: Run, batch: Any) -> Activations:
    """The activations of a plain pass."""
    hooks = _Record(model, graph)
    with torch.no_grad():
        values = hooks.run(run, batch)
        hooks.parts[0] = hooks.read[graph.readers[0]][None]  # the first reader sees the embeddings alone
        written = torch.cat([hooks.parts[number] for number in sorted(hooks.parts)])
    return Activations(values, written, hooks.read, hooks.embeddings)


class _Gradients(_EdgeHooks):
    """A pass between two inputs, with gradients by what every reader reads."""

    def __init__(self, model: nn.Module, graph: CircuitGraph, embeddings: Embeddings) -> None:
        super().__init__(model, graph)
        self.embeddings = embeddings
        self.normed: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # input and output of the norms
        self.projected: dict[nn.Module, Tensor] = {}
        self.block_inputs: dict[nn.Module, Tensor] = {}  # of the modules of feed-forward blocks
        self.final: Tensor | None = None

    def set_hooks(self) -> None:
        self.note_shape()
        self.follow_embeddings(lambda module, x: self.embeddings[module].clone())
        for norm in self.readers_of:
            self.hooks.after(norm, self._note_norm)
        self.hooks.before(self.graph.readers[-1].norm, self._tap_output)
        for reader in self.graph.readers:
            for module in reader.modules:
                if reader.layer is None:
                    self.hooks.before(module, self._tap, kwargs=True)
                else:
                    self.hooks.after(module, self._note_projection)

    def _note_norm(self, norm: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.normed[norm] = args[0].detach().reshape(self.shape), output.detach().reshape(self.shape)

    def _note_projection(self, module: nn.Module, args: Any, output: Any) -> None:
        self.projected[module] = output

    def _tap_output(self, norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.final = args[0].view_as(args[0])
        return (self.final, *args[1:])

    def _tap(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        norm = next(reader.norm for reader in self.graph.readers if module in reader.modules)
        output = self.normed[norm][1]

        def tap(x: Tensor) -> Tensor:
            self.block_inputs[module] = tapped = x.view_as(x)
            return tapped

        return _change_input(args, kwargs, output, tap)


def _change_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor, change: Callable[[Tensor], Tensor]
) -> Any:
    """A call's arguments with the tensor that has the target's memory changed."""

    def changed(x: Any) -> Any:
        same = isinstance(x, Tensor) and x.data_ptr() == target.data_ptr() and x.numel() == target.numel()
        return change(x) if same else x

    return tuple(map(changed, args)), {name: changed(x) for name, x in kwargs.items()}


def reader_gradients(
    model: nn.Module, graph: CircuitGraph, run: Run, batch: Any, embeddings: Embeddings
) -> dict[Reader, Tensor]:
    """The gradient of the metric by what each slot reads, before the norm: {reader: (S, B, T, d)}.

    embeddings: the outputs of the embedding modules to run with.
    """
    hooks = _Gradients(model, graph, {module: x.detach().requires_grad_() for module, x in embeddings.items()})
    with torch.enable_grad():
        values = hooks.run(run, batch)
    assert hooks.final is not None
    places = [*hooks.projected.values(), *hooks.block_inputs.values(), hooks.final]
    gradients = list(torch.autograd.grad(values.sum(), places))
    by_module = dict(zip([*hooks.projected, *hooks.block_inputs], gradients, strict=False))
    result = {graph.readers[-1]: gradients[-1].reshape(1, *hooks.shape)}
    with torch.no_grad():
        for reader in graph.readers[:-1]:
            x, y = hooks.normed[reader.norm]
            form = norm_form(reader.norm, x, y)
            if form is None:
                raise UnsupportedError(f"{type(reader.norm).__name__} is no LayerNorm or RMSNorm")
            if reader.layer is None:
                total = torch.stack([by_module[module].reshape(x.shape) for module in reader.modules]).sum(0)
                result[reader] = form.pull_back(x, y, total)[None]
            else:
                result[reader] = form.pull_back(x, y, _through_projections(reader, by_module, x))
    return result


def _through_projections(reader: Reader, gradients: dict[nn.Module, Tensor], like: Tensor) -> Tensor:
    """(S, B, T, d): gradients by the norm's output, from those by the rows of each slot."""
    result = like.new_empty(len(reader.slots), *like.shape)
    for linear, rows in slot_rows(reader):
        weight, _ = _matrix(linear)
        gradient = gradients[linear].reshape(*like.shape[:-1], -1)
        for slot, own in rows:
            result[slot] = gradient[..., own] @ weight[own]
    return result


def _matrix(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W (rows, d) and bias of a linear layer or Conv1D."""
    weight: Tensor = linear.get_parameter("weight").detach()
    bias = linear._parameters.get("bias")
    return weight if row_dim(linear) == 0 else weight.T, None if bias is None else bias.detach()


@dataclass
class _Edges(_EdgeHooks):
    """A pass in which every slot reads the corrupted stream, and what its edges carry beyond it."""

    model: nn.Module
    graph: CircuitGraph
    corrupted: Activations
    weights: Sequence[Tensor]  # per reader (S, P): 1 for an edge that is kept, 0 for one that is patched
    changed: Tensor = field(init=False)  # (U, B, T, d): what writers add now, less what they add in the corrupted run
    slot_inputs: dict[Reader, Tensor] = field(default_factory=dict)  # (S, B, T, d), after the norm
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)  # of the norms, to find who reads them

    def __post_init__(self) -> None:
        super().__init__(self.model, self.graph)
        self.changed = torch.zeros_like(self.corrupted.written)

    def set_hooks(self) -> None:
        self.note_shape()
        self.follow_writers(self._store)
        for norm in self.readers_of:
            self.hooks.before(norm, self._read)
            self.hooks.after(norm, self._note_output)
        for reader in self.graph.readers:
            for module in reader.modules:
                if reader.layer is None:
                    self.hooks.before(module, self._give, kwargs=True)
                else:
                    self.hooks.after(module, self._project)

    def _store(self, number: int, parts: Tensor) -> None:
        own = slice(number, number + len(parts))
        self.changed[own] = parts - self.corrupted.written[own]

    def _read(self, norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        for reader in self.readers_of[norm]:
            if reader is self.graph.readers[0]:
                self.changed[0] = args[0] - self.corrupted.written[0]
            x = self._input(reader)
            if reader is self.graph.readers[-1]:
                return (x[0].reshape(args[0].shape), *args[1:])
            self.slot_inputs[reader] = norm.forward(x)
        return None

    def _input(self, reader: Reader) -> Tensor:
        """(S, B, T, d)."""
        weights = self.weights[self.graph.readers.index(reader)] * reader.scales  # (S, P)
        corrupted = self.corrupted.read[reader]
        carried = weights @ select(self.changed, reader.writers).flatten(1)
        return corrupted + carried.view(len(weights), *corrupted.shape)

    def _note_output(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs[norm] = output

    def _give(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reader = next(reader for reader in self.graph.readers if module in reader.modules)
        x = self.slot_inputs[reader][0]
        return _change_input(args, kwargs, self.outputs[reader.norm], lambda old: x.reshape(old.shape))

    def _project(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        reader = next(reader for reader in self.graph.readers if module in reader.modules)
        x, (weight, bias) = self.slot_inputs[reader], _matrix(module)
        result = torch.empty_like(output)
        flat = result.view(*x.shape[1:-1], -1)
        for slot, own in next(rows for linear, rows in slot_rows(reader) if linear is module):
            flat[..., own] = F.linear(x[slot], weight[own], None if bias is None else bias[own])
        return result


def select(parts: Tensor, numbers: Sequence[int]) -> Tensor:
    """parts[numbers], without a copy where the numbers are 0, 1, 2, ..., as in a model without parallel blocks."""
    return parts[: len(numbers)] if list(numbers) == list(range(len(numbers))) else parts[list(numbers)]


def run_edges(
    model: nn.Module, graph: CircuitGraph, run: Run, clean: Any, corrupted: Activations, weights: Sequence[Tensor]
) -> Tensor:
    """The metric on the clean input with only some edges; all others carry their values from the corrupted run.

    weights: per reader (S, P), as `graph.readers`: 1 for an edge that is kept, 0 for one that is patched.
    """
    with torch.no_grad():
        return _Edges(model, graph, corrupted, weights).run(run, clean)
