"""Plan: which heads go, as data that prints, compares, saves and can be edited by hand; and how to make one."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from ..errors import CheckpointError, HeadwiseError
from ..files import written
from ..roles.json_documents import anything, brief, count, items, mapping, parse_json, string
from .attention_layers import UNITS, AttentionLayer, attention_layers
from .head_scores import HeadScores
from .importance import importance
from .objective import Loss

BUDGETS = ("heads", "parameters", "cache", "latency")
VERSION = 1
MOST = 1 << 16  # layers of a model or heads of a layer in a plan's file; a larger number is a mistake
SCOPES = ("model", "layer")  # where heads compete: over the whole model, or within each layer
Removed = dict[tuple[str, int], set[int]]  # heads to remove, by (kind, layer)


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of `plan` that other ways of planning pass on to it."""

    budget: str
    per: str
    unit: str
    allow_empty: bool


@dataclass(frozen=True)
class Plan:
    """The heads to remove from a model, {layer: [heads]} or {(kind, layer): [heads]}, and where that comes from."""

    heads: dict[Any, list[int]]
    layers: tuple[tuple[str, int, int, int], ...]  # kind, layer, query heads, KV heads: the model it is for
    score: str = "by hand"
    budget: str = "heads"
    keep: float | dict[str, float] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def removed(self) -> int:
        return sum(map(len, self.heads.values()))

    @property
    def total(self) -> int:
        return sum(query for _, _, query, _ in self.layers)

    def check(self, model: Any) -> None:
        """The plan is for a model of these layers and heads."""
        found = tuple((layer.kind, layer.index, layer.query, layer.kv) for layer in attention_layers(model))
        if found != self.layers:
            raise HeadwiseError(
                f"this plan is for another model: {_counted(self.layers)}, but {type(model).__name__} has "
                f"{_counted(found)}"
            )

    def diff(self, other: Plan) -> str:
        """Which heads only one of two plans removes, in words."""
        lines = []
        for key in dict.fromkeys([*self.heads, *other.heads]):
            mine, theirs = set(self.heads.get(key, ())), set(other.heads.get(key, ()))
            for sign, only in (("-", mine - theirs), ("+", theirs - mine)):
                if only:
                    lines.append(f"{sign} {_name(key)}: {', '.join(map(str, sorted(only)))}")
        return "\n".join(lines) or "the same heads"

    def to_json(self) -> dict[str, Any]:
        removed = {self._key(key): list(numbers) for key, numbers in self.heads.items()}
        return {
            "headwise_plan": VERSION, "score": self.score, "budget": self.budget, "keep": self.keep,
            "notes": list(self.notes),
            "layers": [
                {"kind": kind, "layer": index, "heads": query, "kv_heads": kv, "remove": removed.get((kind, index), [])}
                for kind, index, query, kv in self.layers
            ],
        }  # fmt: skip

    def _key(self, key: Any) -> tuple[str, int]:
        return key if isinstance(key, tuple) else (self.layers[0][0], key)

    @classmethod
    def from_json(cls, given: Any) -> Plan:
        """What `to_json` gave, perhaps edited by hand since; anything else is one line."""
        if not isinstance(given, Mapping) or "headwise_plan" not in given:
            raise CheckpointError("this is not a plan that headwise wrote: it has no 'headwise_plan'")
        if given["headwise_plan"] != VERSION:
            raise CheckpointError(f"this plan is of version {brief(given['headwise_plan'])}; {VERSION} is known")
        try:
            rows = items(given.get("layers"), "layers", _row)
            if not rows:
                raise ValueError("layers is empty")
            layers = tuple(layer for layer, _ in rows)
            gone = {layer[:2]: removed for layer, removed in rows}
            if len(gone) < len(layers):
                kind, index = Counter(layer[:2] for layer in layers).most_common(1)[0][0]
                raise ValueError(f"{kind[:40]} layer {index} is there twice")
            return cls(_keyed(gone, layers), layers, *_origin(given))
        except ValueError as error:
            raise CheckpointError(f"this is not a plan that headwise wrote: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, one line a layer; written aside and moved into place."""
        given = self.to_json()
        rows = ",\n".join("    " + json.dumps(row) for row in given.pop("layers"))
        head = json.dumps(given, indent=2).removesuffix("\n}")
        with written(path, CheckpointError) as made:
            made.write_text(f'{head},\n  "layers": [\n{rows}\n  ]\n}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        if not os.path.isfile(path):
            raise CheckpointError(f"there is no plan at {str(path)!r}")
        try:
            given = parse_json(Path(os.fspath(path)).read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(f"{str(path)!r} is not a plan that headwise wrote: {error}") from None
        return cls.from_json(given)

    def __str__(self) -> str:
        lines = [f"remove {self.removed} of {self.total} heads ({self.score}, budget: {self.budget})"]
        gone = {self._key(key): set(numbers) for key, numbers in self.heads.items()}
        many = len({kind for kind, *_ in self.layers}) > 1
        for kind, index, query, kv in self.layers:
            size, removed = query // kv, gone.get((kind, index), set())
            marks = ["·" if head in removed else "█" for head in range(query)]
            groups = ["".join(marks[i : i + size]) for i in range(0, query, size)]
            drawn = (" " if size > 1 else "").join(groups)
            lines.append(f"{f'{kind} {index}' if many else index:>12}  {drawn}  {query - len(removed)} of {query}")
        return "\n".join([*lines, *self.notes])


def _row(row: Any, what: str) -> tuple[tuple[str, int, int, int], set[int]]:
    """(kind, layer, query heads, KV heads) and the heads that go, from one row of a plan's file."""
    row = mapping(row, what, anything)
    kind = string(row.get("kind"), f"{what}.kind")
    index, query, kv = (_number(row.get(name), f"{what}.{name}") for name in ("layer", "heads", "kv_heads"))
    if not query or not kv or query % kv:
        raise ValueError(f"{what} has {query} heads and {kv} KV heads; kv_heads must divide heads")
    heads = items(row.get("remove"), f"{what}.remove", _number)
    where = f"{kind[:40]} layer {index}"
    wrong = [head for head in heads if head >= query]
    if wrong:
        raise ValueError(f"{where} has no head {wrong[0]}; its heads are 0 to {query - 1}")
    if len(set(heads)) < len(heads):
        raise ValueError(f"{where} loses head {next(head for head in heads if heads.count(head) > 1)} twice")
    return (kind, index, query, kv), set(heads)


def _number(value: Any, what: str) -> int:
    number = count(value, what)
    if number > MOST:
        raise ValueError(f"{what} is {number}, which is more than {MOST}")
    return number


def _origin(given: Mapping[str, Any]) -> tuple[str, str, float | dict[str, float] | None, tuple[str, ...]]:
    """Where a plan comes from, as its file says: score, budget, share and notes."""
    score, budget = (string(given.get(name), name) for name in ("score", "budget"))
    if budget not in BUDGETS:
        raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {brief(budget)}")
    keep = given.get("keep")
    shares = keep.values() if isinstance(keep, dict) else [] if keep is None else [keep]
    if not all(_is_share(share) for share in shares):
        raise ValueError(f"keep must be a share from 0 to 1, or one per kind, got {brief(keep)}")
    return score, budget, keep, tuple(items(given.get("notes"), "notes", string))


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def plan(
    scores: Mapping[str, np.ndarray],
    keep: float | Mapping[str, float] = 0.6,
    *,
    budget: str = "heads",
    per: str = "model",
    unit: str = "head",
    allow_empty: bool = False,
    base: Mapping[Any, Iterable[int]] | None = None,
    model: Any = None,
    inputs: Any = None,
) -> Plan:
    """The heads to remove so that a share of the budget is kept, the least important first.

    Args:
        scores: {kind: (layers, heads)}, high for heads that matter: what `importance` gives, or plain arrays.
        keep: the share of the budget to keep, from 0 to 1; {kind: share} for one share per kind of attention.
        budget: what is counted: "heads"; "parameters", those that belong to heads; "cache", the bytes of the KV
            cache, which only whole groups shrink; "latency", the time of a pass, measured with model and inputs.
        per: "model", all heads compete; "layer", the same share of every layer.
        unit: what is removed at once: "head", "kv" (whole groups) or "layer".
        allow_empty: a layer may lose all its heads; else it keeps at least one.
        base: heads that are removed in any case, {layer: [heads]}.
        model, inputs: for budget="latency", the full model and a batch to time it with.

    Returns:
        A Plan, which prints, compares, saves, can be edited by hand, and is what `prune_heads` takes.

    Raises:
        HeadwiseError: where an option is unknown, or no plan meets the budget; the message names the nearest share.

    Example:
        >>> scores = headwise.importance(model, batches)
        >>> plan = headwise.plan(scores, keep=0.75)
        >>> smaller = headwise.prune_heads(model, plan)
    """
    check_options(keep, budget, per, unit)
    if budget == "latency":
        from .latency import plan_for_latency

        return plan_for_latency(scores, keep, model, inputs, per=per, unit=unit, allow_empty=allow_empty)
    scores = scores if isinstance(scores, HeadScores) else _from_arrays(scores)
    unit = scores.unit if scores.unit != "head" else "kv" if budget == "cache" else unit
    removed: Removed = {layer.key: set() for layer in scores.layers}
    for key, heads in (base or {}).items():
        removed[key if isinstance(key, tuple) else (scores.layers[0].kind, key)] |= set(heads)
    _check_budget_applies(scores.layers, keep, budget)
    for competing, share in _competitions(scores.layers, keep, per):
        _remove_least_important(scores, competing, share, budget, unit, allow_empty, removed)
    counts = tuple((layer.kind, layer.index, layer.query, layer.kv) for layer in scores.layers)
    shares = dict(keep) if isinstance(keep, Mapping) else keep
    return Plan(_keyed(removed, counts), counts, scores.name, budget, shares, _padding_notes(scores.layers, removed))


def check_options(keep: Any, budget: str, per: str, unit: str) -> None:
    """Refuse unknown options of `plan`, before anything is measured."""
    for share in keep.values() if isinstance(keep, Mapping) else [keep]:
        if not _is_share(share):
            raise HeadwiseError(f"keep is a share from 0 to 1, such as 0.6, got {brief(share)}")
    for name, value, known in (("budget", budget, BUDGETS), ("per", per, SCOPES), ("unit", unit, UNITS)):
        if value not in known:
            raise HeadwiseError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check_budget_applies(layers: list[AttentionLayer], keep: float | Mapping[str, float], budget: str) -> None:
    """Every kind that is to keep a share has something that the budget counts."""
    countable = {layer.kind for layer in layers if cost(layer, set(), budget)}
    without = [kind for kind in keep if kind not in countable] if isinstance(keep, Mapping) else []
    if not countable or any(kind in {layer.kind for layer in layers} for kind in without):
        owner = f"{without[0]} attention" if without else "this model"
        missing = "KV cache" if budget == "cache" else "parameters"
        raise HeadwiseError(
            f'budget="{budget}": {owner} has no {missing} that removing heads would save; use budget="heads"'
        )


def _from_arrays(tables: Mapping[str, np.ndarray]) -> HeadScores:
    """Scores from plain arrays, which do not say which heads share keys and values: each counts as its own group."""
    layers, examples = [], []
    for kind, table in tables.items():
        for index, row in enumerate(np.asarray(table, dtype=float)):
            row = row[~np.isnan(row)]
            layers.append(AttentionLayer(kind, index, len(row), len(row), f"{kind}.{index}", 1, 1, 1))
            examples.append(row[None])
    if not layers:
        raise HeadwiseError("there are no scores to plan with; {kind: (layers, heads)} is expected")
    return HeadScores(layers, "given", "head", "no loss", examples, signed=False, normalised=False)


def _competitions(
    layers: list[AttentionLayer], keep: float | Mapping[str, float], per: str
) -> list[tuple[list[AttentionLayer], float]]:
    """The layers whose heads compete with each other, and the share that they keep."""
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    if isinstance(keep, Mapping):
        unknown = [kind for kind in keep if kind not in kinds]
        if unknown:
            raise HeadwiseError(f"no {unknown[0]!r} attention here; there are {', '.join(kinds)}")
        by_share = [([layer for layer in layers if layer.kind == kind], float(keep.get(kind, 1.0))) for kind in kinds]
    else:
        by_share = [(layers, float(keep))]
    if per == "model":
        return by_share
    return [(module_layers, share) for members, share in by_share for module_layers in _by_module(members)]


def _by_module(layers: list[AttentionLayer]) -> list[list[AttentionLayer]]:
    """Layers that share one module, together: they lose the same heads, and its parameters count once."""
    modules: dict[str, list[AttentionLayer]] = {}
    for layer in layers:
        modules.setdefault(layer.module, []).append(layer)
    return list(modules.values())


def _heads_left(layer: AttentionLayer, removed: set[int]) -> list[int]:
    """How many query heads each KV group keeps."""
    return [sum(head not in removed for head in group) for group in layer.units("kv")]


def cost(layer: AttentionLayer, removed: set[int], budget: str) -> float:
    """What a layer without the removed heads counts in a budget, its groups padded as surgery will pad them."""
    left = _heads_left(layer, removed)
    groups = [count for count in left if count]
    if budget == "heads":
        return sum(left)
    padded = -(-len(groups) // layer.multiple) * layer.multiple
    if budget == "cache":
        return padded * layer.cache
    return padded * (max(groups, default=0) * layer.head_parameters + layer.kv_parameters)


def _remove_least_important(
    scores: HeadScores,
    layers: list[AttentionLayer],
    share: float,
    budget: str,
    unit: str,
    allow_empty: bool,
    removed: Removed,
) -> None:
    """Add units to `removed`, the least important first, until no more than the share of the budget is left."""
    layers = [layer for layer in layers if cost(layer, set(), budget)]  # an encoder has no KV cache
    if not layers:
        return
    counted = layers if budget == "heads" else [members[-1] for members in _by_module(layers)]
    full = sum(cost(layer, set(), budget) for layer in counted)
    target = round(share * full) if budget == "heads" else share * full

    def left() -> float:
        return sum(cost(layer, removed[layer.key], budget) for layer in counted)

    candidates = _candidates(scores, layers, unit)
    largest_step = max(len(heads) * len(members) for _, members, heads in candidates)
    for _, members, heads in sorted(candidates, key=lambda candidate: candidate[0]):
        excess = left() - target
        if excess <= 0:
            return
        step = sum(len(set(heads) - removed[layer.key]) for layer in members)
        if budget == "heads" and step > 2 * excess:
            continue  # it would end further from the target
        if allow_empty or all(layer.query > len(removed[layer.key] | set(heads)) for layer in members):
            for layer in members:
                removed[layer.key] |= set(heads)
    excess = left() - target
    if excess > 0 and not (budget == "heads" and excess < largest_step) and not math.isclose(left(), target):
        raise HeadwiseError(
            f"{budget}: keep={share:g} cannot be met with at least one head per layer; "
            f"the nearest is keep={left() / full:.4f}, or say allow_empty=True"
        )


def _candidates(
    scores: HeadScores, layers: list[AttentionLayer], unit: str
) -> list[tuple[float, list[AttentionLayer], list[int]]]:
    """(score, layers, heads) of every unit that can be removed."""
    candidates = []
    for members in _by_module(layers):
        first = members[0]
        module_scores = np.asarray(sum(scores.of(layer.key) for layer in members))
        for heads in first.units(unit):
            columns = [i for i, scored in enumerate(first.units(scores.unit)) if set(scored) & set(heads)]
            candidates.append((float(np.nansum(module_scores[columns])), members, heads))
    return candidates


def _padding_notes(layers: list[AttentionLayer], removed: Removed) -> tuple[str, ...]:
    """Says how many zeroed heads surgery has to add, if any."""
    padding = []
    for layer in layers:
        groups = [count for count in _heads_left(layer, removed[layer.key]) if count]
        uneven = sum(max(groups) - count for count in groups) if groups else 0
        padding.append(uneven + -len(groups) % layer.multiple)
    if not sum(padding):
        return ()
    return (
        f"{sum(padding)} zeroed heads in {sum(map(bool, padding))} layers even out groups that keep different numbers "
        'of heads; unit="kv" removes whole groups',
    )


def _keyed(gone: Mapping[tuple[str, int], Iterable[int]], layers: Iterable[tuple[Any, ...]]) -> dict[Any, list[int]]:
    many = len({kind for kind, *_ in layers}) > 1
    return {(key if many else key[1]): sorted(numbers) for key, numbers in gone.items() if numbers}


def _counted(layers: tuple[tuple[str, int, int, int], ...]) -> str:
    heads = sorted({query for _, _, query, _ in layers})
    return f"{len(layers)} layers of {' or '.join(map(str, heads))} heads"


def _name(key: Any) -> str:
    return f"{key[0]} layer {key[1]}" if isinstance(key, tuple) else f"layer {key}"


def plan_in_steps(
    model: Any,
    batches: list[Any],
    keep: float,
    score: str = "michel",
    steps: int = 4,
    *,
    loss: Loss | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    compute_scores: Callable[..., HeadScores] = importance,
    **options: Unpack[PlanOptions],
) -> Plan:
    """A plan made in several steps: after each, the remaining heads are scored again without the removed ones.

    Args:
        model, batches, score, loss, seed: as in `importance`.
        keep: the share to keep in the end; each step removes an equal part of the rest.
        steps: their number.
        progress: called with the steps done and the steps in all.
        compute_scores: stands in for `importance` where several processes share the work.
        options: budget, per, unit and allow_empty, as in `plan`.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise HeadwiseError(f"steps must be a whole number of at least 1, got {steps!r}")
    heads = sum(layer.query for layer in attention_layers(model))
    if steps > heads:
        raise HeadwiseError(f"steps must be at most the number of heads, {heads}, got {brief(steps)}")
    stepwise: Plan | None = None
    for step in range(1, steps + 1):
        removed = stepwise.heads if stepwise else None
        scores = compute_scores(model, batches, score, loss, masked=removed, seed=seed)
        stepwise = plan(scores, 1 - (1 - keep) * step / steps, base=removed, **options)
        if progress:
            progress(step, steps)
    assert stepwise is not None
    return stepwise
