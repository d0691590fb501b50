"""Plans as data: which heads of a model to remove (`Plan`), which KV heads to give a short cache (`StreamPlan`).

A plan prints, compares, saves and can be edited by hand.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from .errors import CheckpointError, HeadwiseError
from .files import write_atomically
from .json_documents import anything, brief, count, items, load_document, mapping, other_format, string

BUDGETS = ("heads", "parameters", "cache", "latency")
VERSION = STREAM_VERSION = 1
SHOWN_LENGTH = 4096  # tokens, at which a printed stream plan gives the size of its cache
LARGEST_WINDOW = 1 << 32
LARGEST_NUMBER = 1 << 16  # of layers in a model or heads in a layer of a plan's file; a larger number is a mistake

LayerKey = int | tuple[str, int]  # a layer number, or (kind, layer number) in models with several kinds of attention
Shape = TypeVar("Shape", bound=tuple[Any, ...])
LayerShape = tuple[str, int, int, int]  # kind, layer number, query heads, KV heads


@dataclass(frozen=True)
class Plan:
    """The heads to remove from a model, and how they were chosen.

    Args:
        heads: the query heads to remove, by layer: {layer: [heads]}, or {(kind, layer): [heads]} for a model with
            several kinds of attention.
        layers: every attention layer of the model that the plan is for: (kind, layer, query heads, KV heads).
        score: what ranked the heads.
        budget: what `keep` counts: "heads", "parameters" or "cache".
        keep: the share to keep, or one share per kind of attention.
        notes: further remarks about the choice.

    Example:
        >>> plan = Plan({0: [1]}, layers=(("self", 0, 4, 2), ("self", 1, 4, 2)))
        >>> print(plan)
        remove 1 of 8 heads (by hand, budget: heads)
                   0  █· ██  3 of 4
                   1  ██ ██  4 of 4
    """

    heads: dict[Any, list[int]]
    layers: tuple[LayerShape, ...]
    score: str = "by hand"
    budget: str = "heads"
    keep: float | dict[str, float] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def removed(self) -> int:
        """How many heads the plan removes."""
        return sum(map(len, self.heads.values()))

    @property
    def total(self) -> int:
        """How many query heads the model has."""
        return sum(query for _, _, query, _ in self.layers)

    def check_layers(self, layers: Sequence[LayerShape], model: str) -> None:
        """Refuse a model, called by its class's name, whose layers are not the plan's."""
        _check_layers(self.layers, layers, model)

    def diff(self, other: Plan) -> str:
        """The heads that only one of two plans removes, as text."""
        return _diff_heads(self.heads, other.heads)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, one object per layer."""
        removed = _by_full_key(self.heads, self.layers)
        layers = [
            {"kind": kind, "layer": index, "heads": query, "kv_heads": kv, "remove": removed.get((kind, index), [])}
            for kind, index, query, kv in self.layers
        ]
        origin = {"score": self.score, "budget": self.budget, "keep": self.keep, "notes": list(self.notes)}
        return {"headwise_plan": VERSION, **origin, "layers": layers}

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """Restore the result of `to_json`, possibly edited; anything else raises a one-line CheckpointError."""
        _check_version(document, "headwise_plan", VERSION, "plan")
        try:
            layers, removed = _read_layers(document, _read_layer)
            return cls(by_layer_key(removed, layers), layers, *_read_origin(document))
        except ValueError as error:
            raise CheckpointError(f"this is not a plan that headwise wrote: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON with one line per layer, to a temporary file that is then moved into place."""
        _save_document(self.to_json(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file that `save` wrote, possibly edited."""
        return load_document(path, "plan", cls.from_json)

    def __str__(self) -> str:
        lines = [f"remove {self.removed} of {self.total} heads ({self.score}, budget: {self.budget})"]
        by_layer = {key: set(numbers) for key, numbers in _by_full_key(self.heads, self.layers).items()}
        several_kinds = len({kind for kind, *_ in self.layers}) > 1
        for kind, index, query, kv in self.layers:
            group_size, removed = query // kv, by_layer.get((kind, index), set())
            marks = ["·" if head in removed else "█" for head in range(query)]
            groups = ["".join(marks[i : i + group_size]) for i in range(0, query, group_size)]
            drawing = (" " if group_size > 1 else "").join(groups)
            name = f"{kind} {index}" if several_kinds else index
            lines.append(f"{name:>12}  {drawing}  {query - len(removed)} of {query}")
        return "\n".join([*lines, *self.notes])


class StreamLayer(NamedTuple):
    """One attention layer of a model whose KV heads may stream, and what they take in its cache."""

    kind: str
    layer: int
    heads: int  # query heads
    kv_heads: int
    token_bytes: int  # a token's key and value in the cache of one KV head
    window: int | None = None  # keys of the model's own sliding window; such a layer stays as it is

    def cache_bytes(self, length: int, streaming: int, window: int, keep_first: int) -> int:
        """Bytes of this layer's cache at a length, where this many of its KV heads stream."""
        whole = length if self.window is None else min(length, self.window)
        keys = (self.kv_heads - streaming) * whole + streaming * min(whole, keep_first + window)
        return keys * self.token_bytes


@dataclass(frozen=True)
class StreamPlan:
    """The KV heads that stream: they keep the first and the most recent keys; all other heads keep all keys.

    Args:
        heads: the KV heads that stream, by layer: {layer: [heads]}, or {(kind, layer): [heads]} for a model with
            several kinds of attention.
        layers: every attention layer of the model that has a cache.
        window: the number of most recent keys that a streaming head sees, the query's own included.
        keep_first: the number of first keys of the sequence, which it sees as well.
        score: what ranked the heads.
        notes: further remarks about the choice.

    Raises:
        HeadwiseError: heads or layers that the model does not have, or a layer with a sliding window of its own.

    Example:
        >>> layers = (StreamLayer("self", 0, 4, 2, 256), StreamLayer("self", 1, 4, 2, 256))
        >>> plan = StreamPlan({0: [1]}, layers, window=64)
        >>> print(plan)
        1 of 4 KV heads stream: window 64, first 4 keys (by hand); cache at 4096 tokens: 0.75
                   0  █~  1 of 2 stream
                   1  ██  0 of 2 stream
        >>> plan.cache_ratio(4096)
        0.754150390625
    """

    heads: dict[Any, list[int]]
    layers: tuple[StreamLayer, ...]
    window: int
    keep_first: int = 4
    score: str = "by hand"
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuse heads that the layers do not have, so that an edited plan fails here and not in a cache."""
        check_window(self.window, "window")
        check_keep_first(self.keep_first)
        shapes = {layer[:2]: layer for layer in self.layers}
        if self.heads and not shapes:
            raise HeadwiseError("a stream plan with heads needs the layers of its model, and there are none")
        for key, numbers in _by_full_key(self.heads, self.layers).items():
            layer = shapes.get(key)
            if layer is None:
                raise HeadwiseError(f"the plan's model has no {_layer_name(key)}; its plan has {len(shapes)} layers")
            problem = _wrong_heads(numbers, layer.kv_heads)
            if problem is None and numbers and layer.window is not None:
                problem = f"has a sliding window of {layer.window} keys and stays as it is"
            if problem is not None:
                raise HeadwiseError(f"{_layer_name(key)} {problem}")

    @property
    def streaming(self) -> int:
        """How many KV heads stream."""
        return sum(map(len, self.heads.values()))

    @property
    def total(self) -> int:
        """How many KV heads the model has."""
        return sum(layer.kv_heads for layer in self.layers)

    def check_layers(self, layers: Sequence[LayerShape], model: str) -> None:
        """Refuse a model, called by its class's name, whose layers with a cache are not the plan's."""
        _check_layers([layer[:4] for layer in self.layers], layers, model)

    def cache_bytes(self, length: int) -> int:
        """Bytes of the KV cache of one sequence of this many tokens."""
        streaming = _by_full_key(self.heads, self.layers)
        return sum(
            layer.cache_bytes(length, len(streaming.get(layer[:2], ())), self.window, self.keep_first)
            for layer in self.layers
        )

    def cache_ratio(self, length: int) -> float:
        """The cache of a sequence of this many tokens, as a share of the cache in which no head streams."""
        whole = sum(layer.cache_bytes(length, 0, self.window, self.keep_first) for layer in self.layers)
        return self.cache_bytes(length) / whole if whole else 1.0

    def diff(self, other: StreamPlan) -> str:
        """The differences of two plans, as text: window, first keys, and the KV heads that only one of them streams."""
        lines = [
            f"{name}: {ours} -> {theirs}"
            for name, ours, theirs in (
                ("window", self.window, other.window),
                ("keep_first", self.keep_first, other.keep_first),
            )
            if ours != theirs
        ]
        return "\n".join([*lines, _diff_heads(self.heads, other.heads)])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, one object per layer."""
        streaming = _by_full_key(self.heads, self.layers)
        layers = [{**layer._asdict(), "stream": streaming.get(layer[:2], [])} for layer in self.layers]
        return {
            "headwise_stream_plan": STREAM_VERSION,
            "window": self.window,
            "keep_first": self.keep_first,
            "score": self.score,
            "notes": list(self.notes),
            "layers": layers,
        }

    @classmethod
    def from_json(cls, document: Any) -> StreamPlan:
        """Restore the result of `to_json`, possibly edited; anything else raises a one-line CheckpointError."""
        _check_version(document, "headwise_stream_plan", STREAM_VERSION, "stream plan")
        try:
            layers, streaming = _read_layers(document, _read_stream_layer)
            return cls(
                by_layer_key(streaming, layers),
                layers,
                count(document.get("window"), "window"),
                count(document.get("keep_first"), "keep_first"),
                string(document.get("score"), "score"),
                tuple(items(document.get("notes"), "notes", string)),
            )
        except (ValueError, HeadwiseError) as error:
            raise CheckpointError(f"this is not a stream plan that headwise wrote: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON with one line per layer, to a temporary file that is then moved into place."""
        _save_document(self.to_json(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StreamPlan:
        """Read a file that `save` wrote, possibly edited."""
        return load_document(path, "stream plan", cls.from_json)

    def __str__(self) -> str:
        lines = [
            f"{self.streaming} of {self.total} KV heads stream: window {self.window}, first {self.keep_first} keys "
            f"({self.score}); cache at {SHOWN_LENGTH} tokens: {self.cache_ratio(SHOWN_LENGTH):.2f}"
        ]
        by_layer = _by_full_key(self.heads, self.layers)
        several_kinds = len({layer.kind for layer in self.layers}) > 1
        for layer in self.layers:
            streaming = by_layer.get(layer[:2], [])
            drawing = "".join("~" if head in streaming else "█" for head in range(layer.kv_heads))
            name = f"{layer.kind} {layer.layer}" if several_kinds else layer.layer
            words = (
                f"{len(streaming)} of {layer.kv_heads} stream"
                if layer.window is None
                else f"sliding window of {layer.window}"
            )
            lines.append(f"{name:>12}  {drawing}  {words}")
        return "\n".join([*lines, *self.notes])


def by_layer_key(
    removed: Mapping[tuple[str, int], Iterable[int]], layers: Iterable[tuple[Any, ...]]
) -> dict[Any, list[int]]:
    """{(kind, layer): heads} -> a plan's `heads`: keyed by the layer alone where there is one kind of attention."""
    several_kinds = len({kind for kind, *_ in layers}) > 1
    return {(key if several_kinds else key[1]): sorted(heads) for key, heads in removed.items() if heads}


def is_share(value: Any) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def check_window(window: Any, name: str) -> int:
    """A number of keys, at least 1."""
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= LARGEST_WINDOW:
        raise HeadwiseError(f"{name} is a number of keys, 1 or more, got {brief(window)}")
    return window


def check_keep_first(keep_first: Any) -> int:
    """A number of keys, 0 or more."""
    if isinstance(keep_first, bool) or not isinstance(keep_first, int) or not 0 <= keep_first <= LARGEST_WINDOW:
        raise HeadwiseError(f"keep_first is a number of keys, 0 or more, got {brief(keep_first)}")
    return keep_first


def read_stream_layer(row: Mapping[str, Any], path: str) -> StreamLayer:
    """A layer from one row of a file; what is wrong in it is a ValueError."""
    kind = string(row.get("kind"), f"{path}.kind")
    index, query, kv = _read_sizes(row, path)
    window = row.get("window")
    return StreamLayer(
        kind,
        index,
        query,
        kv,
        count(row.get("token_bytes"), f"{path}.token_bytes"),
        None if window is None else count(window, f"{path}.window"),
    )


def _read_stream_layer(row: Any, path: str) -> tuple[StreamLayer, set[int]]:
    row = mapping(row, path, anything)
    heads = items(row.get("stream"), f"{path}.stream", _read_number)
    layer = read_stream_layer(row, path)
    problem = _wrong_heads(heads, layer.kv_heads)
    if problem is not None:
        raise ValueError(f"{layer.kind[:40]} layer {layer.layer} {problem}")
    return layer, set(heads)


def _wrong_heads(heads: Sequence[Any], total: int) -> str | None:
    """What is wrong with a list of KV heads, or None."""
    for head in heads:
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < total:
            return f"has no KV head {brief(head)}; its KV heads are 0 to {total - 1}"
    return "streams a KV head twice" if len(set(heads)) < len(heads) else None


def _by_full_key(
    heads: Mapping[LayerKey, Iterable[int]], layers: Sequence[tuple[Any, ...]]
) -> dict[tuple[str, int], list[int]]:
    """A plan's `heads` by (kind, layer)."""
    return {(key if isinstance(key, tuple) else (layers[0][0], key)): list(numbers) for key, numbers in heads.items()}


def _diff_heads(ours: Mapping[LayerKey, Iterable[int]], theirs: Mapping[LayerKey, Iterable[int]]) -> str:
    """The heads that only one of two plans has, in words."""
    lines = []
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = set(ours.get(key, ())), set(theirs.get(key, ()))
        for sign, only in (("-", a - b), ("+", b - a)):
            if only:
                lines.append(f"{sign} {_layer_name(key)}: {', '.join(map(str, sorted(only)))}")
    return "\n".join(lines) or "the same heads"


def _check_version(document: Any, name: str, version: int, noun: str) -> None:
    if not isinstance(document, Mapping) or name not in document:
        raise CheckpointError(f"this is not a {noun} that headwise wrote: it has no {name!r}")
    if document[name] != version:
        raise CheckpointError(f"this {noun}'s {other_format(document[name], version)}")


def _read_layers(
    document: Mapping[str, Any], read: Callable[[Any, str], tuple[Shape, set[int]]]
) -> tuple[tuple[Shape, ...], dict[tuple[str, int], set[int]]]:
    """The layers of a plan's file, and by (kind, layer) the heads that it names."""
    rows = items(document.get("layers"), "layers", read)
    if not rows:
        raise ValueError("layers is empty")
    layers = tuple(layer for layer, _ in rows)
    heads: dict[tuple[str, int], set[int]] = {(layer[0], layer[1]): numbers for layer, numbers in rows}
    if len(heads) < len(layers):
        kind, index = Counter(layer[:2] for layer in layers).most_common(1)[0][0]
        raise ValueError(f"{kind[:40]} layer {index} is listed twice")
    return layers, heads


def _save_document(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    rows = ",\n".join("    " + json.dumps(row) for row in document.pop("layers"))
    head = json.dumps(document, indent=2).removesuffix("\n}")
    with write_atomically(path, CheckpointError) as file:
        file.write_text(f'{head},\n  "layers": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def _read_layer(row: Any, path: str) -> tuple[LayerShape, set[int]]:
    """A layer's shape and the heads to remove from it, from one row of a plan's file."""
    row = mapping(row, path, anything)
    kind = string(row.get("kind"), f"{path}.kind")
    index, query, kv = _read_sizes(row, path)
    heads = items(row.get("remove"), f"{path}.remove", _read_number)
    layer = f"{kind[:40]} layer {index}"
    wrong = [head for head in heads if head >= query]
    if wrong:
        raise ValueError(f"{layer} has no head {wrong[0]}; its heads are 0 to {query - 1}")
    if len(set(heads)) < len(heads):
        raise ValueError(f"{layer} loses head {next(head for head in heads if heads.count(head) > 1)} twice")
    return (kind, index, query, kv), set(heads)


def _read_sizes(row: Mapping[str, Any], path: str) -> tuple[int, int, int]:
    """Layer number, query heads and KV heads."""
    index, query, kv = (_read_number(row.get(name), f"{path}.{name}") for name in ("layer", "heads", "kv_heads"))
    if not query or not kv or query % kv:
        raise ValueError(f"{path} has {query} heads and {kv} KV heads; kv_heads must divide heads")
    return index, query, kv


def _read_number(value: Any, path: str) -> int:
    number = count(value, path)
    if number > LARGEST_NUMBER:
        raise ValueError(f"{path} is {number}, which is more than {LARGEST_NUMBER}")
    return number


def _read_origin(document: Mapping[str, Any]) -> tuple[str, str, float | dict[str, float] | None, tuple[str, ...]]:
    """How the heads were chosen, as a plan's file says: score, budget, share and notes."""
    score, budget = (string(document.get(name), name) for name in ("score", "budget"))
    if budget not in BUDGETS:
        raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {brief(budget)}")
    keep = document.get("keep")
    shares = keep.values() if isinstance(keep, dict) else [] if keep is None else [keep]
    if not all(is_share(share) for share in shares):
        raise ValueError(f"keep must be a share from 0 to 1, or one per kind, got {brief(keep)}")
    return score, budget, keep, tuple(items(document.get("notes"), "notes", string))


def _check_layers(planned: Sequence[LayerShape], layers: Sequence[LayerShape], model: str) -> None:
    if tuple(planned) == tuple(layers):
        return
    ours, theirs = _describe_layers(planned), _describe_layers(layers)
    if ours == theirs:
        pairs = zip(planned, layers, strict=True)
        ours, theirs = next(map(_describe_layer, pair) for pair in pairs if pair[0] != pair[1])
    raise HeadwiseError(f"this plan is for another model: {ours}, but {model} has {theirs}")


def _describe_layers(layers: Sequence[LayerShape]) -> str:
    heads = sorted({query for _, _, query, _ in layers})
    return f"{len(layers)} layers of {' or '.join(map(str, heads))} heads"


def _describe_layer(layer: LayerShape) -> str:
    return f"{_layer_name(layer[:2])} of {layer[2]} heads and {layer[3]} KV heads"


def _layer_name(key: LayerKey) -> str:
    return f"{key[0]} layer {key[1]}" if isinstance(key, tuple) else f"layer {key}"
