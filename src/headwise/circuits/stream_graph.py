"""How a metric depends on what a model writes into its residual stream, read from the autograd graph of one pass.

The stream is the sum that attention outputs are added to. From the metric downwards, the graph first has the output
layers, then the topmost sum that an attention output is part of: the stream's end. From there on down, sums, views,
multiplications by constants and norms (at their actual scale) lead to the writers: attention outputs, the outputs of
other modules (feed-forward blocks), and leaves (embeddings).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

Node = Any  # of PyTorch's autograd graph
# operations that are linear in all their operands together
SUMS = {
    "Add", "Sub", "Rsub", "Neg", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Transpose", "T", "Permute",
    "Expand", "Slice", "Select", "Index", "IndexSelect", "Gather", "Clone", "ToCopy", "Squeeze", "Unsqueeze", "Split",
    "SplitWithSizes", "Unbind", "Cat", "Stack", "Alias", "Sum", "Mean", "MaskedFill", "Where", "AsStrided", "Repeat",
    "FrozenNorm", "UnsafeSplit", "Flip", "Roll", "ConstantPadNd", "Diagonal", "MaskedScatter", "IndexPut",
    "Copy", "CopySlices",
}  # fmt: skip
# linear while only one operand depends on the stream
SCALINGS = {"Mul", "Div"}
PRODUCTS = {"Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "Mv", "Dot", "Convolution", "MkldnnLinear"}
CONSTANTS = {"Add", "Sub", "Rsub", "Addmm", "Baddbmm", "Linear", "Convolution"}  # which may add something constant


LOOSE = nn.Identity()  # stands for the module of a model's inputs and parameters, which are no module's output


class ModuleCall(NamedTuple):
    """One call of a module in a pass."""

    name: str  # the module's path
    module: nn.Module
    number: int  # which of its calls in the pass


@dataclass
class StreamGraph:
    """The record of one pass, to be read with `read_writers`."""

    leaves: dict[int, ModuleCall] = field(default_factory=dict)  # by id of the leaf tensor
    attention: dict[int, int] = field(default_factory=dict)  # by id of an attention output's leaf: its layer number
    outputs: dict[Node, list[ModuleCall]] = field(default_factory=dict)  # modules by the node of their output
    norms: dict[Node, ModuleCall] = field(default_factory=dict)  # frozen norms by their node
    tensors: list[Tensor] = field(default_factory=list)  # kept alive, so that ids stay theirs


@dataclass
class StreamReading:
    """The writers of a stream, and the way from its end to the metric."""

    leaves: list[int] = field(default_factory=list)  # ids of the leaf tensors that are writers
    calls: list[ModuleCall] = field(default_factory=list)  # other writers: module outputs
    earlier: list[ModuleCall] = field(default_factory=list)  # norms of a post-norm stream below its last layer
    norms: list[ModuleCall] = field(default_factory=list)  # norms on the way, to be held at their actual scale
    final_norm: ModuleCall | None = None  # the one whose output the output layers read
    output_norms: list[ModuleCall] = field(default_factory=list)  # norms among the output layers, not of the stream
    nonlinear: str | None = None  # an operation between stream and metric that is not linear
    has_constant: bool = False  # whether something constant may be added on the way to the metric
    problem: str | None = None  # why the stream cannot be taken apart


def read_writers(graph: StreamGraph, values: Tensor, in_branch: Callable[[ModuleCall], bool]) -> StreamReading:
    """The writers behind a metric's values.

    Args:
        graph: what the pass recorded.
        values: the metric; its graph is read.
        in_branch: whether a module may be a writer as a whole: one without attention in it.
    """
    reader = _Reader(graph, in_branch)
    end = reader.find_end(values.grad_fn)
    if end is None:
        no_sum = "no sum was found that attention outputs are added to"
        reader.reading.problem = no_sum if values.requires_grad else "the metric gives no gradient"
    else:
        reader.collect_writers(end)
    return reader.reading


class _Reader:
    def __init__(self, graph: StreamGraph, in_branch: Callable[[ModuleCall], bool]) -> None:
        self.graph, self.in_branch = graph, in_branch
        self.reading = StreamReading()
        self._reach: dict[Node, frozenset[int]] = {}
        self._last_layer = -1

    # the leaves below a node, through linear operations alone

    def reach(self, node: Node) -> frozenset[int]:
        """Ids of the leaves that a node is a sum of."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._reach:
                stack.pop()
                continue
            below = _operands(top) if self._passes(top) else []
            missing = [other for other in below if other not in self._reach]
            if missing:
                stack += missing
                continue
            leaf = _leaf(top)
            own = frozenset([id(leaf)]) if leaf is not None and id(leaf) in self.graph.leaves else frozenset()
            self._reach[top] = own.union(*(self._reach[other] for other in below))
            stack.pop()
        return self._reach[node]

    def _passes(self, node: Node) -> bool:
        name = _operation(node)
        return name in SUMS or (name in SCALINGS and len(_operands(node)) == 1)

    def _attention(self, node: Node) -> set[int]:
        """The layer numbers of the attention outputs that a node is a sum of."""
        return {self.graph.attention[leaf] for leaf in self.reach(node) if leaf in self.graph.attention}

    # above the stream

    def find_end(self, top: Node) -> Node | None:
        """The topmost sum with an attention output in it; notes what lies above it."""
        ends: list[Node] = []
        seen, stack = set(), [top]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            operands = _operands(node)
            if self._is_end(node, operands):
                ends.append(node)
                continue
            self._note(node, operands)
            stack += operands
        if len(ends) > 1:
            self.reading.problem = "the metric depends on several streams, or on one in several places"
        return ends[0] if ends else None

    def _is_end(self, node: Node, operands: list[Node]) -> bool:
        return _operation(node) == "Add" and len(operands) > 1 and bool(self._attention(node))

    def _note(self, node: Node, operands: list[Node]) -> None:
        name = _operation(node)
        if name in CONSTANTS and any(other is None for other, _ in node.next_functions):
            self.reading.has_constant = True
        if node in self.graph.norms and self.reach(node):
            self.reading.norms.append(self.graph.norms[node])
            self.reading.final_norm = self.reading.final_norm or self.graph.norms[node]
        elif node in self.graph.norms:
            self.reading.output_norms.append(self.graph.norms[node])
        linear = self._passes(node) or (name in PRODUCTS and len(operands) == 1) or _leaf(node) is not None
        if not linear and self.reading.nonlinear is None:
            self.reading.nonlinear = name

    # the stream

    def collect_writers(self, end: Node) -> None:
        """Fill the reading with the writers below the stream's end."""
        self._last_layer = max(self._attention(end))
        chosen: dict[ModuleCall, tuple[ModuleCall, ...]] = {}  # with the possible writers around each
        leaf_chains: dict[int, tuple[ModuleCall, ...]] = {}
        seen: set[Node] = set()
        stack: list[tuple[Node, tuple[ModuleCall, ...], int]] = [(end, (), 0)]
        while stack:
            node, chain, split = stack.pop()  # chain[split:]: possible writers below the last sum
            leaf = _leaf(node)
            if leaf is not None and id(leaf) in self.graph.leaves:
                leaf_chains[id(leaf)] = chain
                continue
            chain += tuple(self._possible_writers(node))
            if node in self.graph.norms and self._ends_layers(node):
                self.reading.earlier.append(self.graph.norms[node])
                continue
            if not self._passes(node):
                below_sum = chain[split:] or chain[::-1]
                if not below_sum:
                    self.reading.problem = f"its residual stream passes through {_operation(node)}, which adds nothing"
                    return
                chosen[below_sum[0]] = chain
                continue
            if node in seen:
                continue
            seen.add(node)
            if node in self.graph.norms:
                self.reading.norms.append(self.graph.norms[node])
            operands = _operands(node)
            split = len(chain) if len(operands) > 1 else split
            stack += [(operand, chain, split) for operand in operands]
        whole = {call for call, chain in chosen.items() if not (set(chain) - {call}) & set(chosen)}
        self.reading.calls = list(whole)
        self.reading.leaves = [leaf for leaf, chain in leaf_chains.items() if not set(chain) & whole]

    def _possible_writers(self, node: Node) -> Iterator[ModuleCall]:
        """The modules whose output this node is and that read the stream without passing it on, outermost first."""
        calls = self.graph.outputs.get(node, [])
        if calls and not self._attention(node):
            yield from (call for call in reversed(calls) if self.in_branch(call))

    def _ends_layers(self, node: Node) -> bool:
        """Whether a norm is that of a post-norm stream at the end of a layer before the last."""
        layers = self._attention(node)
        return bool(layers) and max(layers) < self._last_layer and len(self.reach(node)) > 1


def _operation(node: Node) -> str:
    """The name of a node's operation: "Add" for AddBackward0."""
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def _operands(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _leaf(node: Node) -> Tensor | None:
    """The leaf tensor of an AccumulateGrad node."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def block_of(name: str, others: Iterable[str]) -> str:
    """The longest path with a number in it that a module shares with one of the others; "" if there is none."""
    return max((_shared_block(name, other) for other in others), key=len, default="")


def _shared_block(name: str, other: str) -> str:
    pairs = zip(name.split("."), other.split("."), strict=False)
    shared = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    numbers = [i for i, part in enumerate(shared) if part.isdecimal()]
    return ".".join(shared[: numbers[-1] + 1]) if numbers else ""
