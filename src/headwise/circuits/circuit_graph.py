"""The nodes and edges of a model's computation: who writes into the residual stream, and who reads which part of it.

Writers are the embedding, every head and every feed-forward block. Readers are the query, key and value inputs of every
attention layer, the feed-forward blocks and the output. Each reads the stream through a norm, so the model must be
pre-norm; an edge leads from a writer to each reader whose norm's input has the writer's output in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.structure.linear_layers import output_width
from ..models.structure.projections import Projections, ProjectionsError, projections
from ..models.structure.sites import Site
from .residual_stream import CutPass, ResidualStream, Writer, is_inside
from .stream_graph import LOOSE, block_of

Input = Literal["query", "key", "value", "input"]
ROLES: dict[str, Input] = {"q": "query", "k": "key", "v": "value"}
OUTPUT, EMBEDDING = "output", "embedding"


class Node(NamedTuple):
    """A writer, or the output."""

    id: str
    type: Literal["embedding", "head", "feed-forward", "output"]
    layer: int
    kind: str = ""  # of a head's attention
    head: int = -1


class Slot(NamedTuple):
    """One input of a reader: what an edge leads into."""

    node: str
    input: Input
    head: int = 0  # query head, or KV head for keys and values


@dataclass(eq=False)
class Reader:
    """A reader of the stream through one norm: an attention layer, a feed-forward block, or the output."""

    norm: nn.Module
    slots: list[Slot]
    modules: list[nn.Module]  # that are given the norm's output; the projections of an attention layer
    layer: Projections | None = None  # of an attention layer
    writers: list[int] = field(default_factory=list)  # numbers of the nodes that its input is a sum of
    scales: Tensor = field(default_factory=lambda: torch.empty(0))  # by which they are multiplied on their way
    norm_width: int = 0  # of the stream


@dataclass(eq=False)
class CircuitGraph:
    """All nodes and readers of a model."""

    nodes: list[Node]  # writers, in the order in which they write
    readers: list[Reader]  # in the order in which they read
    stream: ResidualStream
    sites: list[Site]

    @property
    def edges(self) -> int:
        return sum(len(reader.slots) * len(reader.writers) for reader in self.readers)

    @property
    def width(self) -> int:
        """The number of writers."""
        return len(self.nodes)


def circuit_graph(
    model: nn.Module, sites: list[Site], stream: ResidualStream, run: Callable[[Any], Tensor], batch: Any
) -> CircuitGraph:
    """The graph of a pre-norm model, found in one pass.

    Raises:
        UnsupportedError: for a model whose readers do not each read the stream through their own norm.
    """
    _check_stream(model, stream)
    reads = _Reads(model, sites, stream)
    reads.run(run, batch)
    nodes = _nodes(model, sites, stream)
    readers = [*_attention_readers(model, sites, reads), *_block_readers(model, sites, stream, reads)]
    readers.sort(key=lambda reader: reads.order_of[reader.norm])
    readers.append(Reader(next(iter(stream.norms))[0], [Slot(OUTPUT, "input")], []))
    graph = CircuitGraph(nodes, readers, stream, sites)
    for reader in readers:
        _connect(model, graph, reader, reads)
    return graph


def head_id(site: Site, head: int) -> str:
    return f"{site.kind}.{site.index}.{head}"


def kv_id(site: Site, head: int) -> str:
    """The node of a KV head that several query heads share."""
    return f"{site.kind}.{site.index}.kv{head}"


def _check_stream(model: nn.Module, stream: ResidualStream) -> None:
    name = type(model).__name__
    if any(writer.type == "earlier layers" for writer in stream.writers) or stream.final_norm is None:
        raise _refusal(name, "norms that stand before attention, feed-forward blocks and output, not after the sums")
    if len(stream.norms) > 1:
        raise _refusal(name, "heads that write into the stream without a norm in between")
    if any(
        writer.type == "embedding" and writer.place.module is LOOSE and writer.place.name.startswith("input")
        for writer in stream.writers
    ):
        raise _refusal(name, "embeddings that are modules' outputs, of token ids")


def _refusal(name: str, needed: str) -> UnsupportedError:
    return UnsupportedError(f"circuits need {needed}, and {name} has none; headwise.patch works on it")


class _Reads(CutPass):
    """A pass that notes who reads which norm's output."""

    def __init__(self, model: nn.Module, sites: list[Site], stream: ResidualStream) -> None:
        super().__init__(model, sites, stream)
        self.inputs: dict[nn.Module, Tensor] = {}  # of norms: the stream, with its graph
        self.consumers: dict[nn.Module, list[nn.Module]] = {}  # by norm, as they are called
        self.order_of: dict[nn.Module, int] = {}
        self._outputs: dict[nn.Module, Tensor] = {}

    def set_hooks(self) -> None:
        norms = {module for module in self.stream.readers if not isinstance(module, nn.Linear)}
        norms |= {module for module, _ in self.stream.norms}
        attention = {module for site in self.sites for module in site.module.modules()}
        for norm in norms - attention:
            self.hooks.before(norm, self._note_input)
        super().set_hooks()
        for norm in norms - attention:
            self.hooks.after(norm, self._note_output)
        for module in self.model.modules():
            if is_inside(self.names[module], self.blocks) and module not in norms:
                self.hooks.before(module, self._note_consumer, kwargs=True)

    def _note_input(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        if norm in self.inputs:
            raise _refusal(type(self.model).__name__, "norms that are called once per pass")
        if args and isinstance(args[0], Tensor):
            self.order_of[norm] = len(self.order_of)
            self.inputs[norm] = args[0]

    def _note_output(self, norm: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._outputs[norm] = output

    def _note_consumer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in itertools.chain(args, kwargs.values()):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            for norm, output in self._outputs.items():
                if x.data_ptr() == output.data_ptr() and x.numel() == output.numel():
                    self.consumers.setdefault(norm, []).append(module)


def _nodes(model: nn.Module, sites: list[Site], stream: ResidualStream) -> list[Node]:
    """The writers in their order; all embeddings are one."""
    nodes = [Node(EMBEDDING, "embedding", -1)]
    for writer in stream.writers:
        if writer.site is not None:
            site = writer.site
            count = projections_of(model, site).query
            nodes += [Node(head_id(site, head), "head", site.index, site.kind, head) for head in range(count)]
        elif writer.type == "feed-forward":
            nodes.append(Node(writer.label, "feed-forward", _layer_of(writer, sites)))
    if len({node.id for node in nodes}) < len(nodes):
        raise _refusal(type(model).__name__, "one feed-forward block per layer")
    return nodes


def _layer_of(writer: Writer, sites: list[Site]) -> int:
    block = block_of(writer.place.name, [site.name for site in sites])
    return next((site.index for site in sites if block and (site.name + ".").startswith(block + ".")), -1)


def projections_of(model: nn.Module, site: Site) -> Projections:
    """The projections of a layer, each a separate linear layer."""
    if isinstance(site.module, nn.MultiheadAttention):
        raise _refusal("nn.MultiheadAttention", "projections that are linear layers")
    try:
        return projections(model, site)
    except ProjectionsError as error:
        raise UnsupportedError(
            f"the edges into {site} are not known: {error.reason}; headwise.patch works on it"
        ) from None


def _attention_readers(model: nn.Module, sites: list[Site], reads: _Reads) -> list[Reader]:
    readers = []
    written = {writer.site for writer in reads.stream.writers}
    for site in sites:
        if site not in written:
            raise _refusal(type(model).__name__, "one stack of layers")
        layer = projections_of(model, site)
        norms = {
            norm for part in layer.parts for norm, consumers in reads.consumers.items() if part.linear in consumers
        }
        modules = [part.linear for part in layer.parts]
        if len(norms) != 1 or any(module not in reads.consumers[min(norms, key=id)] for module in modules):
            raise _refusal(type(model).__name__, f"queries, keys and values of one norm's output ({site})")
        slots = [
            Slot(
                head_id(site, head) if role == "q" or layer.kv == layer.query else kv_id(site, head), ROLES[role], head
            )
            for role, count in (("q", layer.query), ("k", layer.kv), ("v", layer.kv))
            for head in range(count)
        ]
        readers.append(Reader(norms.pop(), slots, modules, layer))
    return readers


def _block_readers(model: nn.Module, sites: list[Site], stream: ResidualStream, reads: _Reads) -> list[Reader]:
    """Readers of the feed-forward blocks: the outermost modules that are given a norm's output."""
    attention = {module for site in sites for module in site.module.modules()}
    writers = [writer for writer in stream.writers if writer.type == "feed-forward"]
    readers: dict[str, Reader] = {}
    for norm, consumers in reads.consumers.items():
        outer: list[nn.Module] = []
        for module in consumers:
            name = reads.names[module]
            around = any(site.module in set(module.modules()) for site in sites)
            if module in attention or around or any(is_inside(name, {reads.names[other]}) for other in outer):
                continue
            outer.append(module)
            block = block_of(name, [writer.place.name for writer in writers])
            writer = next((w for w in writers if block and is_inside(w.place.name, {block})), None)
            if writer is None:
                raise _refusal(type(model).__name__, f"a writer for each reader of the stream ({name})")
            reader = readers.setdefault(writer.label, Reader(norm, [Slot(writer.label, "input")], []))
            if reader.norm is not norm:
                raise _refusal(type(model).__name__, f"feed-forward blocks that read one norm's output ({name})")
            reader.modules.append(module)
    missing = [writer.label for writer in writers if writer.label not in readers]
    if missing:
        raise _refusal(type(model).__name__, f"feed-forward blocks that read a norm's output ({missing[0]})")
    return list(readers.values())


def _connect(model: nn.Module, graph: CircuitGraph, reader: Reader, reads: _Reads) -> None:
    """Which writers a reader's input is a sum of, and their factors, by the gradient of the input."""
    writers = graph.stream.writers
    numbers = {node.id: number for number, node in enumerate(graph.nodes)}
    x = reads.inputs[reader.norm]
    leaves = [reads.leaf_of(writer) for writer in writers]
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    gradients: list[Tensor | None] = list(
        torch.autograd.grad(x, leaves, direction, retain_graph=True, allow_unused=True)
    )
    factors: dict[int, float] = {}
    for writer, gradient in zip(writers, gradients, strict=True):
        if gradient is None:
            continue
        if writer.type == "embedding":
            factors[numbers[EMBEDDING]] = 1.0  # all embeddings together are read off the first reader's input
            continue
        factor = _factor(gradient, direction)
        if factor is None:
            raise _refusal(type(model).__name__, f"outputs that are added to the stream as they are ({writer.label})")
        if writer.site is None:
            factors[numbers[writer.label]] = factor
        else:
            count = sum(node.kind == writer.site.kind and node.layer == writer.site.index for node in graph.nodes)
            factors |= {numbers[head_id(writer.site, head)]: factor for head in range(count)}
    reader.norm_width = x.shape[-1]
    reader.writers = sorted(factors)
    reader.scales = torch.tensor([factors[number] for number in reader.writers], dtype=x.dtype, device=x.device)


def _factor(gradient: Tensor, direction: Tensor) -> float | None:
    """The number that a writer's output is multiplied by; None where it is not one number."""
    if gradient.numel() != direction.numel():
        return None
    gradient, direction = gradient.flatten(), direction.flatten()  # some models flatten prompts and tokens on the way
    factor = float((gradient.double() * direction).sum() / (direction.double() ** 2).sum())
    rounding = 64 * torch.finfo(gradient.dtype).eps * abs(factor)
    return factor if torch.allclose(gradient, factor * direction, rtol=rounding, atol=8 * rounding) else None


def slot_rows(reader: Reader) -> list[tuple[nn.Module, list[tuple[int, slice]]]]:
    """For each projection of an attention layer the slots that its rows make: (number of the slot, rows)."""
    layer = reader.layer
    assert layer is not None
    first = {"q": 0, "k": layer.query, "v": layer.query + layer.kv}
    result = []
    for part in layer.parts:
        blocks = part.layout(layer.query, layer.kv)
        size = output_width(part.linear) // len(blocks)
        rows = [(first[role] + head, slice(i * size, (i + 1) * size)) for i, (role, head) in enumerate(blocks)]
        result.append((part.linear, rows))
    return result
