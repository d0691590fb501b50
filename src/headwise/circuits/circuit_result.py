"""Circuit: the edges behind a metric, and how much of it they alone explain."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..files import write_atomically
from ..json_documents import anything, count, finite, finite_or_none, in_words, items, load_document, string

FORMAT = 1  # of the saved file
LISTED = 20  # edges that a printed circuit shows


class Share(NamedTuple):
    """A share of the metric with the ends of its interval; NaN if there is none."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = "" if self.low != self.low else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.mean:.2f}{ends}"


class CircuitNode(NamedTuple):
    """A writer of the residual stream, a KV head that several query heads share, or the output."""

    id: str
    type: str  # "embedding", "head", "kv", "feed-forward" or "output"
    layer: int
    order: int  # from input to output
    kind: str = ""  # of a head's attention
    heads: tuple[int, ...] = ()  # the query heads


class Edge(NamedTuple):
    """An edge from the output of one node to an input of another."""

    source: str
    target: str
    input: str  # "query", "key", "value" or "input"
    score: float  # the estimated share of the metric's difference that it carries
    low: float
    high: float

    @property
    def ends(self) -> tuple[str, str, str]:
        return self.source, self.target, self.input

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} ({self.input}) {self.score:+.3f}"


class CurvePoint(NamedTuple):
    """A circuit of some size, measured."""

    edges: int
    faithfulness: Share  # of the difference, with these edges alone
    completeness: Share  # of the difference, that is lost without them
    random: Share  # faithfulness of random circuits of this size, over draws


@dataclass(frozen=True)
class Circuit:
    """The strongest edges, verified.

    Attributes:
        edges: the edges of the circuit, the strongest first.
        nodes: the nodes that the edges connect, from input to output.
        total: how many edges the model has.
        curve: faithfulness and completeness by size, with random circuits as a baseline.
        metric, clean, corrupted: what was measured, and its means in the two runs.
        prompts: the number of pairs.
        method: how edges were scored.
        notes: remarks about the numbers.

    Example:
        >>> circuit = headwise.circuit(model, clean, corrupted, metric, tokenizer=tokenizer)
        >>> circuit.faithfulness, circuit.heads
        >>> circuit.save("circuit.json")
    """

    edges: tuple[Edge, ...]
    nodes: tuple[CircuitNode, ...]
    total: int
    curve: tuple[CurvePoint, ...]
    metric: str
    clean: float
    corrupted: float
    prompts: int
    method: str
    notes: tuple[str, ...] = ()
    model: str = ""

    @property
    def size(self) -> int:
        return len(self.edges)

    @property
    def point(self) -> CurvePoint:
        """The measurement of this circuit's own size."""
        return next(point for point in self.curve if point.edges == self.size)

    @property
    def faithfulness(self) -> float:
        """The share of the metric's difference that remains with these edges alone, all others corrupted."""
        return self.point.faithfulness.mean

    @property
    def completeness(self) -> float:
        """The share of the metric's difference that is lost without these edges."""
        return self.point.completeness.mean

    def heads(self) -> list[tuple[str, int, int]]:
        """(kind, layer, head) of the query heads in the circuit."""
        return [(node.kind, node.layer, head) for node in self.nodes if node.type == "head" for head in node.heads]

    def diff(self, other: Circuit) -> CircuitDiff:
        """The edges that only this circuit has, and those that only the other has."""
        own, others = {edge.ends: edge for edge in self.edges}, {edge.ends: edge for edge in other.edges}
        return CircuitDiff(
            tuple(edge for ends, edge in own.items() if ends not in others),
            tuple(edge for ends, edge in others.items() if ends not in own),
            sum(ends in others for ends in own),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "headwise": "circuit",
            "format": FORMAT,
            "model": self.model,
            "metric": self.metric,
            "clean": self.clean,
            "corrupted": self.corrupted,
            "prompts": self.prompts,
            "method": self.method,
            "size": self.size,
            "total": self.total,
            "nodes": [_node_json(node) for node in self.nodes],
            "edges": [
                {"from": e.source, "to": e.target, "input": e.input, "score": e.score, **_ends(e.low, e.high)}
                for e in self.edges
            ],
            "curve": [
                {
                    "edges": point.edges,
                    **{
                        name: [_or_none(x) for x in getattr(point, name)]
                        for name in ("faithfulness", "completeness", "random")
                    },
                }
                for point in self.curve
            ],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, document: Any) -> Circuit:
        """A circuit from what `to_json` gave.

        Raises:
            CheckpointError: if the document is not valid.
        """
        try:
            return _read(document)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise CheckpointError(f"this is no circuit that headwise wrote: {in_words(error)}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, to a temporary file that is then moved into place."""
        with write_atomically(path, CheckpointError) as file:
            file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Circuit:
        """Read a file that `save` wrote."""
        return load_document(path, "circuit", cls.from_json)

    def __str__(self) -> str:
        lines = [
            f"circuit of {self.size} of {self.total:,} edges for {self.metric}, {self.clean:.3g} clean and "
            f"{self.corrupted:.3g} corrupted ({self.prompts} prompts)",
            f"  faithfulness {self.point.faithfulness}, random edges {self.point.random}; completeness "
            f"{self.point.completeness}",
            *(f"  {edge}" for edge in self.edges[:LISTED]),
        ]
        if self.size > LISTED:
            lines.append(f"  and {self.size - LISTED} more")
        return "\n".join([*lines, *self.notes])


class CircuitDiff(NamedTuple):
    """How two circuits differ."""

    only: tuple[Edge, ...]  # in the first
    other_only: tuple[Edge, ...]
    shared: int

    def __str__(self) -> str:
        lines = [
            f"{self.shared} edges in both, {len(self.only)} in the first alone, {len(self.other_only)} in the other"
        ]
        lines += [f"  - {edge}" for edge in self.only[:LISTED]]
        lines += [f"  + {edge}" for edge in self.other_only[:LISTED]]
        return "\n".join(lines)


def _or_none(value: float) -> float | None:
    return value if value == value else None


def _ends(low: float, high: float) -> dict[str, float | None]:
    return {"low": _or_none(low), "high": _or_none(high)}


def _node_json(node: CircuitNode) -> dict[str, Any]:
    document: dict[str, Any] = {"id": node.id, "type": node.type, "layer": node.layer, "order": node.order}
    if node.heads:
        document |= {"kind": node.kind, "heads": list(node.heads)}
    if node.type == "head":
        document["head"] = node.heads[0]
    return document


def _read(document: Any) -> Circuit:
    if not isinstance(document, dict) or document.get("headwise") != "circuit":
        raise ValueError('"headwise": "circuit" is missing')
    if count(document["format"], "format") > FORMAT:
        raise ValueError(f"its format {document['format']} is newer than this headwise, which reads {FORMAT}")
    nodes = tuple(_read_node(row) for row in items(document["nodes"], "nodes", anything))
    edges = tuple(_read_edge(row, {node.id for node in nodes}) for row in items(document["edges"], "edges", anything))
    curve = tuple(
        CurvePoint(count(row["edges"], "edges"), *(_read_share(row[name], name) for name in CurvePoint._fields[1:]))
        for row in items(document["curve"], "curve", anything)
    )
    if all(point.edges != len(edges) for point in curve):
        raise ValueError(f"its curve has no circuit of {len(edges)} edges")
    words = {name: string(document[name], name) for name in ("metric", "method", "model")}
    return Circuit(
        edges,
        nodes,
        count(document["total"], "total"),
        curve,
        clean=finite(document["clean"], "clean"),
        corrupted=finite(document["corrupted"], "corrupted"),
        prompts=count(document["prompts"], "prompts"),
        notes=tuple(items(document["notes"], "notes", string)),
        **words,
    )


def _read_node(row: dict[str, Any]) -> CircuitNode:
    layer = row["layer"]
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ValueError(f"a node's layer must be a whole number, got {layer!r}")
    heads = tuple(items(row.get("heads", []), "heads", count))
    names = [string(row[name], name) for name in ("id", "type")]
    return CircuitNode(
        names[0], names[1], layer, count(row["order"], "order"), string(row.get("kind", ""), "kind"), heads
    )


def _read_edge(row: dict[str, Any], nodes: set[str]) -> Edge:
    names = [string(row[name], name) for name in ("from", "to", "input")]
    missing = next((name for name in names[:2] if name not in nodes), None)
    if missing is not None:
        raise ValueError(f"an edge leads to {missing!r}, which is no node")
    low, high = (finite_or_none(row[name], name) for name in ("low", "high"))
    return Edge(names[0], names[1], names[2], finite(row["score"], "score"), low, high)


def _read_share(value: Any, path: str) -> Share:
    numbers = items(value, path, finite_or_none)
    return Share(*numbers)
