"""Plans as data: which heads of a model to remove. A plan prints, compares, saves and can be edited by hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import CheckpointError, HeadwiseError
from .files import write_atomically
from .json_documents import anything, brief, count, items, load_document, mapping, string

BUDGETS = ("heads", "parameters", "cache", "latency")
VERSION = 1
LARGEST_NUMBER = 1 << 16  # of layers in a model or heads in a layer of a plan's file; a larger number is a mistake

LayerKey = int | tuple[str, int]  # a layer number, or (kind, layer number) in models with several kinds of attention
LayerShape = tuple[str, int, int, int]  # kind, layer number, query heads, KV heads


@dataclass(frozen=True)
class Plan:
    """The heads to remove from a model, and how they were chosen.

    Example:
        >>> plan = Plan({0: [1]}, layers=(("self", 0, 4, 2), ("self", 1, 4, 2)))
        >>> print(plan)
        remove 1 of 8 heads (by hand, budget: heads)
                   0  █· ██  3 of 4
                   1  ██ ██  4 of 4
    """

    heads: dict[Any, list[int]]  # LayerKey -> query heads to remove
    layers: tuple[LayerShape, ...]  # every attention layer of the model that the plan is for
    score: str = "by hand"
    budget: str = "heads"
    keep: float | dict[str, float] | None = None  # the share to keep, or one per kind of attention
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
        if tuple(layers) != self.layers:
            raise HeadwiseError(
                f"this plan is for another model: {_describe_layers(self.layers)}, but {model} has "
                f"{_describe_layers(layers)}"
            )

    def diff(self, other: Plan) -> str:
        """Which heads only one of two plans removes, in words."""
        lines = []
        for key in dict.fromkeys([*self.heads, *other.heads]):
            ours, theirs = set(self.heads.get(key, ())), set(other.heads.get(key, ()))
            for sign, only in (("-", ours - theirs), ("+", theirs - ours)):
                if only:
                    lines.append(f"{sign} {_layer_name(key)}: {', '.join(map(str, sorted(only)))}")
        return "\n".join(lines) or "the same heads"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, one object per layer."""
        removed = {self._full_key(key): list(numbers) for key, numbers in self.heads.items()}
        layers = [
            {"kind": kind, "layer": index, "heads": query, "kv_heads": kv, "remove": removed.get((kind, index), [])}
            for kind, index, query, kv in self.layers
        ]
        origin = {"score": self.score, "budget": self.budget, "keep": self.keep, "notes": list(self.notes)}
        return {"headwise_plan": VERSION, **origin, "layers": layers}

    def _full_key(self, key: LayerKey) -> tuple[str, int]:
        return key if isinstance(key, tuple) else (self.layers[0][0], key)

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """What `to_json` gave, perhaps edited by hand since; anything else is a CheckpointError of one line."""
        if not isinstance(document, Mapping) or "headwise_plan" not in document:
            raise CheckpointError("this is not a plan that headwise wrote: it has no 'headwise_plan'")
        if document["headwise_plan"] != VERSION:
            raise CheckpointError(f"this plan is of version {brief(document['headwise_plan'])}; {VERSION} is known")
        try:
            rows = items(document.get("layers"), "layers", _read_layer)
            if not rows:
                raise ValueError("layers is empty")
            layers = tuple(layer for layer, _ in rows)
            removed = {layer[:2]: heads for layer, heads in rows}
            if len(removed) < len(layers):
                kind, index = Counter(layer[:2] for layer in layers).most_common(1)[0][0]
                raise ValueError(f"{kind[:40]} layer {index} is listed twice")
            return cls(by_layer_key(removed, layers), layers, *_read_origin(document))
        except ValueError as error:
            raise CheckpointError(f"this is not a plan that headwise wrote: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON with one line per layer, to a temporary file that is then moved into place."""
        document = self.to_json()
        rows = ",\n".join("    " + json.dumps(row) for row in document.pop("layers"))
        head = json.dumps(document, indent=2).removesuffix("\n}")
        with write_atomically(path, CheckpointError) as file:
            file.write_text(f'{head},\n  "layers": [\n{rows}\n  ]\n}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file that `save` wrote, perhaps edited by hand since."""
        return cls.from_json(load_document(path, "plan"))

    def __str__(self) -> str:
        lines = [f"remove {self.removed} of {self.total} heads ({self.score}, budget: {self.budget})"]
        by_layer = {self._full_key(key): set(numbers) for key, numbers in self.heads.items()}
        several_kinds = len({kind for kind, *_ in self.layers}) > 1
        for kind, index, query, kv in self.layers:
            group_size, removed = query // kv, by_layer.get((kind, index), set())
            marks = ["·" if head in removed else "█" for head in range(query)]
            groups = ["".join(marks[i : i + group_size]) for i in range(0, query, group_size)]
            drawing = (" " if group_size > 1 else "").join(groups)
            name = f"{kind} {index}" if several_kinds else index
            lines.append(f"{name:>12}  {drawing}  {query - len(removed)} of {query}")
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


def _read_layer(row: Any, path: str) -> tuple[LayerShape, set[int]]:
    """A layer's shape and the heads to remove from it, from one row of a plan's file."""
    row = mapping(row, path, anything)
    kind = string(row.get("kind"), f"{path}.kind")
    index, query, kv = (_read_number(row.get(name), f"{path}.{name}") for name in ("layer", "heads", "kv_heads"))
    if not query or not kv or query % kv:
        raise ValueError(f"{path} has {query} heads and {kv} KV heads; kv_heads must divide heads")
    heads = items(row.get("remove"), f"{path}.remove", _read_number)
    layer = f"{kind[:40]} layer {index}"
    wrong = [head for head in heads if head >= query]
    if wrong:
        raise ValueError(f"{layer} has no head {wrong[0]}; its heads are 0 to {query - 1}")
    if len(set(heads)) < len(heads):
        raise ValueError(f"{layer} loses head {next(head for head in heads if heads.count(head) > 1)} twice")
    return (kind, index, query, kv), set(heads)


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


def _describe_layers(layers: Sequence[LayerShape]) -> str:
    heads = sorted({query for _, _, query, _ in layers})
    return f"{len(layers)} layers of {' or '.join(map(str, heads))} heads"


def _layer_name(key: LayerKey) -> str:
    return f"{key[0]} layer {key[1]}" if isinstance(key, tuple) else f"layer {key}"
