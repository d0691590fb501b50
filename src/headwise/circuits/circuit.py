"""circuit: the edges between heads that carry a metric, scored by gradients and verified by patching the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import HeadwiseError
from ..models.batches import batch_size, run
from ..models.evaluation import evaluating
from ..models.structure.partition import check_whole_weights
from ..models.structure.sites import require_sites
from ..models.structure.wrappers import inner_model
from ..models.text_inputs import device_of
from ..resampling import bootstrap_counts, interval
from .circuit_graph import CircuitGraph, circuit_graph
from .circuit_result import Circuit, CircuitNode, CurvePoint, Edge, Share
from .edge_passes import Activations, reader_gradients, record, run_edges, select
from .inputs import Pair, model_pairs, named_tensors, to_device
from .metric import LogitDifference, Measure, Metric, metric_key
from .residual_stream import residual_stream

Progress = Callable[[int, int], None]  # finished steps, total number of steps
MEMORY = 2**30  # bytes of activations that are held at once
COPIES = 4  # of what all writers add: clean, corrupted, the difference, the change
SERIES = (1, 2, 5)  # sizes of the curve: 10, 20, 50, 100, ...
REFINEMENTS = 3  # sizes between the last two of the series, to find where the target is reached
RESAMPLES = 1000


@torch.inference_mode(False)  # whose tensors autograd could not keep
@torch.enable_grad()
def circuit(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    *,
    size: int | None = None,
    target: float = 0.8,
    steps: int = 5,
    draws: int = 5,
    seed: int = 0,
    tokenizer: Any = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> Circuit:
    """Find the circuit behind a metric: its strongest edges, and how much of the metric they explain.

    An edge leads from the output that one node (the embedding, a head, a feed-forward block) writes into the residual
    stream to the input of another: the query, key or value input of a head (of a KV head, if heads share keys and
    values), a feed-forward block, or the output. Edges are scored by edge attribution patching with integrated
    gradients (Hanna et al. 2024): the difference between the writer's outputs in the clean and the corrupted run, times
    the gradient of the metric with respect to the reader's input, averaged over points between the two runs'
    embeddings.

    Then the circuit is verified. The model runs on the clean prompts with only the best edges, while all other edges
    carry their values from the corrupted run; faithfulness is the share of the difference that remains. Completeness is
    the share that is lost if the circuit's edges are corrupted and all other edges are clean. Both are measured for
    several sizes, with random edges as a baseline.

    Args:
        model: a pre-norm model of one stack: GPT-2, Llama and similar models, headwise.Decoder, pre-norm encoders.
        clean: a batch, a list of batches, a text or a list of texts.
        corrupted: the same prompts, changed so that the answer is different; with the same number of tokens each.
        metric: `LogitDifference`, or a function of the model's output; higher on the clean prompts.
        size: the number of edges. By default the smallest circuit that reaches the target.
        target: the faithfulness to reach.
        steps: points between the corrupted and the clean embeddings.
        draws: random circuits per size.
        seed: the seed of the random circuits.
        tokenizer: for texts, and for answers that are strings.
        memory: bytes of activations to store at once; with a `LogitDifference`, batches are split into parts that fit.
        progress: called with the number of finished passes and an upper bound on their total number.

    Returns:
        A Circuit, which can be printed, saved and compared.

    Raises:
        UnsupportedError: for a model whose edges are not known.
        ShapeError: for prompts of different lengths.
        HeadwiseError: if the corrupted run has the same metric, or an option is out of range.

    Example:
        >>> clean = "When Mary and John went to the store, John gave a drink to"
        >>> corrupted = "When Mary and John went to the store, Anna gave a drink to"
        >>> metric = headwise.LogitDifference(" Mary", " John")
        >>> print(headwise.circuit(model, clean, corrupted, metric, tokenizer=tokenizer))
    """
    _check_options(size, target, steps, draws)
    model = inner_model(model)
    sites = require_sites(model)
    check_whole_weights(model, sites, "find a circuit of")
    device = device_of(model)
    pairs = [Pair(*(to_device(batch, device) for batch in pair)) for pair in model_pairs(clean, corrupted, tokenizer)]
    whole = Measure(metric, [pair.clean for pair in pairs], tokenizer)  # refuses bad answers before anything runs
    with evaluating(model):
        # a function may know how many prompts there are
        first = _first_rows(pairs[0], 1) if isinstance(metric, LogitDifference) else pairs[0]
        probe_of = whole.first_prompt() if isinstance(metric, LogitDifference) else metric
        probe = Measure(probe_of, [first.clean])

        def probe_metric(batch: Any) -> Tensor:
            return probe(run(model, batch), 0)[0]

        key = (metric_key(metric), *sorted(named_tensors(first.clean)))
        stream = residual_stream(model, sites, probe_metric, first.clean, key)
        graph = circuit_graph(model, sites, stream, probe_metric, first.clean)
        if size is not None and size > graph.edges:
            raise HeadwiseError(f"size is {size:,}, but the model has only {graph.edges:,} edges; give a smaller one")
        parts = pairs
        if isinstance(metric, LogitDifference):
            parts = [part for pair in pairs for part in _split(pair, graph, memory)]
        measure = Measure(metric, [pair.clean for pair in parts], tokenizer)
        search = _Search(model, graph, parts, measure, steps, draws, seed, _Steps(progress, len(parts) * (steps + 2)))
        search.score()
        return search.verify(size, target)


def _check_options(size: int | None, target: float, steps: int, draws: int) -> None:
    for name, value, least in (("size", size, 1), ("steps", steps, 1), ("draws", draws, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise HeadwiseError(f"{name} must be a whole number from {least} on, got {value!r}")
    if not 0 < target <= 1:
        raise HeadwiseError(f"target must be a share of the metric, above 0 and up to 1, got {target!r}")


def _first_rows(pair: Pair, rows: int, start: int = 0) -> Pair:
    return Pair(*(_rows(batch, start, rows) for batch in pair))


def _rows(batch: Any, start: int, rows: int) -> Any:
    """Some prompts of a batch."""
    size = batch_size(batch)

    def cut(x: Any) -> Any:
        return x[start : start + rows] if isinstance(x, Tensor) and x.dim() and len(x) == size else x

    if isinstance(batch, Mapping):
        return {name: cut(x) for name, x in batch.items()}
    return tuple(map(cut, batch)) if isinstance(batch, tuple) else cut(batch)


def _split(pair: Pair, graph: CircuitGraph, memory: int) -> list[Pair]:
    """A pair in parts whose activations fit into memory."""
    rows = batch_size(pair.clean)
    length = max(x.shape[1] for x in named_tensors(pair.clean).values() if x.dim() > 1)
    width = graph.readers[0].norm_width
    each = COPIES * graph.width * length * width * 4
    step = max(1, min(rows, memory // each))
    return [_first_rows(pair, step, start) for start in range(0, rows, step)]


@dataclass
class _Steps:
    """Progress over passes whose number is not known beforehand."""

    progress: Progress | None
    total: int
    done: int = 0

    def add(self) -> None:
        self.done += 1
        self.total = max(self.total, self.done)
        if self.progress is not None:
            self.progress(self.done, self.total)


class _Search:
    """The scores of all edges, and circuits measured."""

    def __init__(
        self,
        model: nn.Module,
        graph: CircuitGraph,
        parts: Sequence[Pair],
        measure: Measure,
        steps: int,
        draws: int,
        seed: int,
        passes: _Steps,
    ) -> None:
        self.model, self.graph, self.parts, self.measure = model, graph, parts, measure
        self.steps, self.draws, self.passes = steps, draws, passes
        self.random = np.random.default_rng(seed)
        self.scores = np.zeros((0, graph.edges))  # (prompts, edges), in the metric's units
        self.clean = self.corrupted = np.zeros(0)  # (prompts,)
        self._counts: np.ndarray | None = None  # of the bootstrap

    # scores

    def score(self) -> None:
        """Score all edges on all prompts."""
        scores, clean, corrupted = [], [], []
        for number, pair in enumerate(self.parts):
            first, second = self._record(number, pair.clean), self._record(number, pair.corrupted)
            scores.append(self._edge_scores(number, pair, first, second))
            clean.append(first.values.double().cpu().numpy())
            corrupted.append(second.values.double().cpu().numpy())
        self.scores, self.clean, self.corrupted = map(np.concatenate, (scores, clean, corrupted))
        difference, size = self.difference.mean(), np.abs(np.concatenate([self.clean, self.corrupted])).mean()
        if abs(difference) <= 1e-6 * size:
            raise HeadwiseError(
                f"the metric ({self.measure.words}) is {self.clean.mean():.4g} on the clean and on the corrupted "
                "prompts, so there is nothing to explain; change the prompts or the answers"
            )

    @property
    def difference(self) -> np.ndarray:
        """(prompts,)"""
        return self.clean - self.corrupted

    def _metric(self, number: int) -> Callable[[Any], Tensor]:
        return lambda batch: self.measure(run(self.model, batch), number)[0]

    def _record(self, number: int, batch: Any) -> Activations:
        self.passes.add()
        return record(self.model, self.graph, self._metric(number), batch)

    def _edge_scores(self, number: int, pair: Pair, clean: Activations, corrupted: Activations) -> np.ndarray:
        """(prompts, edges)."""
        change = clean.written - corrupted.written  # (U, B, T, d)
        rows = len(clean.values)
        totals: list[Tensor] = []
        for step in range(self.steps):
            self.passes.add()
            share = (step + 0.5) / self.steps
            embeddings = {
                module: torch.lerp(corrupted.embeddings[module], x, share) for module, x in clean.embeddings.items()
            }
            gradients = reader_gradients(self.model, self.graph, self._metric(number), pair.clean, embeddings)
            parts = []
            for reader in self.graph.readers:
                gradient = gradients[reader].flatten(2).transpose(0, 1)  # (B, S, T * d)
                carried = select(change, reader.writers).flatten(2).permute(1, 2, 0)  # (B, T * d, P)
                scores = (gradient @ carried) * reader.scales  # (B, S, P)
                parts.append(scores.flatten(1))
            points = torch.cat(parts, 1).double() / self.steps  # (B, edges)
            totals.append(points if len(points) == rows else points.sum(0, keepdim=True))
        return torch.stack(totals).sum(0).cpu().numpy()

    # verification

    def verify(self, size: int | None, target: float) -> Circuit:
        """The circuit of a size, or the smallest that reaches the target, with the curve of those measured."""
        ranking = np.argsort(-np.abs(self.scores.mean(0)), kind="stable")
        points: dict[int, CurvePoint] = {}
        notes = []
        if size is not None:
            points[size] = self._measure_size(ranking, size)
        else:
            size = self._reach(ranking, target, points)
            if points[size].faithfulness.mean < target:
                notes.append(f"no size that was measured reaches {target:g}")
        curve = tuple(points[edges] for edges in sorted(points))
        return self._result(ranking[:size], curve, tuple(notes))

    def _reach(self, ranking: np.ndarray, target: float, points: dict[int, CurvePoint]) -> int:
        """The smallest size that reaches the target, of those measured on the way; else the best."""
        total, last = self.graph.edges, 0
        powers = range(1, math.ceil(math.log10(max(total, 10))) + 1)
        series = [n * 10**power for power in powers for n in SERIES if n * 10**power < total] + [total]
        for edges in series:
            points[edges] = self._measure_size(ranking, edges)
            if points[edges].faithfulness.mean >= target:
                break
            last = edges
        else:
            return max(points, key=lambda n: points[n].faithfulness.mean)
        for _ in range(REFINEMENTS if last else 0):
            between = round(math.sqrt(last * edges))
            if between in (last, edges):
                break
            points[between] = self._measure_size(ranking, between)
            last, edges = (last, between) if points[between].faithfulness.mean >= target else (between, edges)
        return edges

    def _measure_size(self, ranking: np.ndarray, size: int) -> CurvePoint:
        chosen = np.zeros(self.graph.edges, dtype=bool)
        chosen[ranking[:size]] = True
        draws = []
        for _ in range(self.draws):
            random = np.zeros_like(chosen)
            random[self.random.permutation(len(chosen))[:size]] = True
            draws.append(random)
        values = self._run([chosen, ~chosen, *draws])  # (circuits, prompts)
        remainder, loss = values[0] - self.corrupted, self.clean - values[1]
        by_draw = [(row - self.corrupted).mean() / self.difference.mean() for row in values[2:]]
        return CurvePoint(
            size, self._share(remainder), self._share(loss), Share(float(np.mean(by_draw)), min(by_draw), max(by_draw))
        )

    def _run(self, circuits: Sequence[np.ndarray]) -> np.ndarray:
        """(circuits, prompts): the metric with only the edges of each circuit."""
        columns = []
        for number, pair in enumerate(self.parts):
            corrupted = self._record(number, pair.corrupted)
            values = []
            for edges in circuits:
                self.passes.add()
                weights = self._weights(edges, corrupted.written)
                values.append(run_edges(self.model, self.graph, self._metric(number), pair.clean, corrupted, weights))
            columns.append(torch.stack(values).double().cpu().numpy())
        return np.concatenate(columns, 1)

    def _weights(self, edges: np.ndarray, like: Tensor) -> list[Tensor]:
        """Per reader (S, P): which of its edges are kept."""
        weights, first = [], 0
        for reader in self.graph.readers:
            shape = len(reader.slots), len(reader.writers)
            own = edges[first : first + shape[0] * shape[1]].reshape(shape)
            weights.append(torch.as_tensor(own).to(like))
            first += shape[0] * shape[1]
        return weights

    def _share(self, numerators: np.ndarray) -> Share:
        """The ratio of two means over prompts, with its bootstrap interval."""
        mean = float(numerators.mean() / self.difference.mean())
        if len(numerators) < 2:
            return Share(mean, math.nan, math.nan)
        if self._counts is None:
            self._counts = bootstrap_counts(len(numerators), RESAMPLES)
        low, high = interval((self._counts @ numerators) / (self._counts @ self.difference))
        return Share(mean, float(low), float(high))

    # result

    def _result(self, chosen: np.ndarray, curve: tuple[CurvePoint, ...], notes: tuple[str, ...]) -> Circuit:
        ends = self._edge_ends()
        edges = []
        for number in chosen:
            source, target, slot_input = ends[number]
            score = self._share(self.scores[:, number])
            edges.append(Edge(source, target, slot_input, *score))
        touched = {name for edge in edges for name in (edge.source, edge.target)}
        nodes = tuple(node for node in self._all_nodes() if node.id in touched)
        step = "1 point" if self.steps == 1 else f"{self.steps} points"
        return Circuit(
            tuple(edges),
            nodes,
            self.graph.edges,
            curve,
            self.measure.words,
            float(self.clean.mean()),
            float(self.corrupted.mean()),
            len(self.clean),
            f"edge attribution patching with integrated gradients, {step}",
            notes,
            type(self.model).__name__,
        )

    def _edge_ends(self) -> list[tuple[str, str, str]]:
        return [
            (self.graph.nodes[writer].id, slot.node, slot.input)
            for reader in self.graph.readers
            for slot in reader.slots
            for writer in reader.writers
        ]

    def _all_nodes(self) -> list[CircuitNode]:
        """Writers, shared KV heads and the output, from input to output."""
        nodes: list[CircuitNode] = []
        for node in self.graph.nodes:
            heads: tuple[int, ...] = (node.head,) if node.type == "head" else ()
            nodes.append(CircuitNode(node.id, node.type, node.layer, 2 * len(nodes) + 1, node.kind, heads))
        orders = {node.id: node.order for node in nodes}
        for reader in self.graph.readers:
            for slot in reader.slots:
                layer = reader.layer
                if layer is not None and slot.node not in orders:
                    group = layer.query // layer.kv
                    heads = tuple(range(slot.head * group, (slot.head + 1) * group))
                    site = layer.site
                    order = orders[f"{site.kind}.{site.index}.{heads[0]}"] - 1
                    orders[slot.node] = order
                    nodes.append(CircuitNode(slot.node, "kv", site.index, order, site.kind, heads))
        last = max(orders.values())
        layer_count = max(node.layer for node in nodes) + 1
        nodes.append(CircuitNode("output", "output", layer_count, last + 1))
        return sorted(nodes, key=lambda node: node.order)
