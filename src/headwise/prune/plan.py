"""Plan: which heads go, as data that prints, compares, saves and can be edited by hand; and how to make one."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, HeadwiseError
from ..files import written
from ..json_documents import anything, brief, count, items, mapping, parse_json, string
from .scores import Place, Scores

BUDGETS = ("heads", "parameters", "cache", "latency")
VERSION = 1
MOST = 1 << 16  # layers of a model or heads of a layer in a plan's file; a larger number is a mistake
Gone = dict[tuple[str, int], set[int]]


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
        from .importance import places

        found = tuple((place.kind, place.index, place.query, place.kv) for place in places(model))
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
        with written(path) as made:
            made.write_text(f'{head},\n  "layers": [\n{rows}\n  ]\n}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        if not Path(os.fspath(path)).is_file():
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
    """The heads to remove so that a share of what the budget counts is kept; {kind: share} for kinds apart.

    budget: "heads"; "parameters", those that belong to heads; "cache", the KV cache's bytes, which only whole groups
    shrink; "latency", measured with model and inputs. per="layer": the same share of every layer. unit="kv": whole
    groups. A layer keeps at least one head unless allow_empty. base: heads that go in any case.
    """
    check_options(keep, budget, per, unit)
    if budget == "latency":
        from .latency import plan_for_latency

        return plan_for_latency(scores, keep, model, inputs, per=per, unit=unit, allow_empty=allow_empty)
    made = scores if isinstance(scores, Scores) else _bare(scores)
    unit = made.unit if made.unit != "head" else "kv" if budget == "cache" else unit
    gone: Gone = {place.key: set() for place in made.places}
    for key, numbers in (base or {}).items():
        gone[key if isinstance(key, tuple) else (made.places[0].kind, key)] |= set(numbers)
    kinds = list(dict.fromkeys(place.kind for place in made.places))
    _check_counted(made.places, keep, budget)
    for part, share in _parts(made.places, keep, kinds, per):
        _remove(made, part, share, budget, unit, allow_empty, gone)
    layers = tuple((place.kind, place.index, place.query, place.kv) for place in made.places)
    asked = dict(keep) if isinstance(keep, Mapping) else keep
    return Plan(_keyed(gone, layers), layers, made.name, budget, asked, _notes(made.places, gone))


def check_options(keep: Any, budget: str, per: str, unit: str) -> None:
    """Refuse what no plan can be made by, before anything is measured."""
    for share in keep.values() if isinstance(keep, Mapping) else [keep]:
        if not _is_share(share):
            raise HeadwiseError(f"keep is a share from 0 to 1, such as 0.6, got {brief(share)}")
    for name, got, known in (
        ("budget", budget, BUDGETS),
        ("per", per, ("model", "layer")),
        ("unit", unit, ("head", "kv", "layer")),
    ):
        if got not in known:
            raise HeadwiseError(f"{name} must be one of {', '.join(known)}, got {got!r}")


def _check_counted(places: list[Place], keep: float | Mapping[str, float], budget: str) -> None:
    """Whatever a share is asked of has some of what the budget counts."""
    counted = {place.kind for place in places if cost(place, set(), budget)}
    without = [kind for kind in keep if kind not in counted] if isinstance(keep, Mapping) else []
    if not counted or any(kind in {place.kind for place in places} for kind in without):
        whose = f"{without[0]} attention" if without else "this model"
        what = "KV cache" if budget == "cache" else "parameters"
        raise HeadwiseError(
            f'budget="{budget}": {whose} has no {what} that removing heads would save; use budget="heads"'
        )


def _bare(tables: Mapping[str, np.ndarray]) -> Scores:
    """Scores from plain arrays: every head has keys and values of its own, as far as one knows."""
    places, each = [], []
    for kind, table in tables.items():
        for index, row in enumerate(np.asarray(table, dtype=float)):
            row = row[~np.isnan(row)]
            places.append(Place(kind, index, len(row), len(row), f"{kind}.{index}", 0, 1, 1, 1))
            each.append(row[None])
    if not places:
        raise HeadwiseError("there are no scores to plan with; {kind: (layers, heads)} is expected")
    return Scores(places, "given", "head", "no loss", each, signed=False, norm=False)


def _parts(
    places: list[Place], keep: float | Mapping[str, float], kinds: list[str], per: str
) -> list[tuple[list[Place], float]]:
    """The layers that compete with each other, and the share that they keep."""
    if isinstance(keep, Mapping):
        unknown = [kind for kind in keep if kind not in kinds]
        if unknown:
            raise HeadwiseError(f"no {unknown[0]!r} attention here; there are {', '.join(kinds)}")
        apart = [([p for p in places if p.kind == kind], float(keep.get(kind, 1.0))) for kind in kinds]
    else:
        apart = [(places, float(keep))]
    if per == "model":
        return apart
    return [
        ([place for place in members if place.module == name], share)
        for members, share in apart
        for name in dict.fromkeys(place.module for place in members)
    ]


def cost(place: Place, gone: set[int], budget: str) -> float:
    """What a layer still has of what is counted, groups padded as surgery will pad them."""
    size = place.query // place.kv
    left = [sum(head not in gone for head in range(g * size, (g + 1) * size)) for g in range(place.kv)]
    groups = [count for count in left if count]
    if budget == "heads":
        return sum(left)
    count = -(-len(groups) // place.multiple) * place.multiple
    if budget == "cache":
        return count * place.cache
    return count * (max(groups, default=0) * place.head_parameters + place.kv_parameters)


def _remove(
    scores: Scores, part: list[Place], share: float, budget: str, unit: str, allow_empty: bool, gone: Gone
) -> None:
    """Take units away, the least important first, until no more than the share is left."""
    part = [place for place in part if cost(place, set(), budget)]  # an encoder's heads leave nothing in the cache
    if not part:
        return
    counted = part if budget == "heads" else _once(part)
    full = sum(cost(place, set(), budget) for place in counted)
    target = round(share * full) if budget == "heads" else share * full

    def left() -> float:
        return sum(cost(place, gone[place.key], budget) for place in counted)

    units = _units(scores, part, unit)
    coarse = max(len(heads) * len(members) for _, members, heads in units)  # a step of the budget of heads
    for _, members, heads in sorted(units, key=lambda found: found[0]):
        more = left() - target
        if more <= 0:
            return
        step = sum(len(set(heads) - gone[place.key]) for place in members)
        if budget == "heads" and step > 2 * more:
            continue  # it would be further off after than before
        if allow_empty or all(place.query > len(gone[place.key] | set(heads)) for place in members):
            for place in members:
                gone[place.key] |= set(heads)
    over = left() - target
    if over > 0 and not (budget == "heads" and over < coarse) and not math.isclose(left(), target):
        raise HeadwiseError(
            f"{budget}: keep={share:g} cannot be met with at least one head a layer; "
            f"the nearest is keep={left() / full:.4f}, or say allow_empty=True"
        )


def _once(part: list[Place]) -> list[Place]:
    """Layers that are one module have its parameters once."""
    return list({place.module: place for place in part}.values())


def _units(scores: Scores, part: list[Place], unit: str) -> list[tuple[float, list[Place], list[int]]]:
    """(score, layers, heads) of everything that can go; layers that are one module go together."""
    found = []
    for name in dict.fromkeys(place.module for place in part):
        members = [place for place in part if place.module == name]
        own = sum(scores.of(place.key) for place in members)
        for heads in members[0].units(unit):
            rows = [i for i, u in enumerate(members[0].units(scores.unit)) if set(u) & set(heads)]
            value = float(np.nansum(np.asarray(own)[rows]))
            found.append((value, members, heads))
    return found


def _notes(places: list[Place], gone: Gone) -> tuple[str, ...]:
    padded = []
    for place in places:
        size = place.query // place.kv
        left = [sum(h not in gone[place.key] for h in range(g * size, (g + 1) * size)) for g in range(place.kv)]
        groups = [count for count in left if count]
        uneven = sum(max(groups) - count for count in groups) if groups else 0
        padded.append(uneven + -len(groups) % place.multiple)
    if not sum(padded):
        return ()
    return (
        f"{sum(padded)} zeroed heads in {sum(map(bool, padded))} layers even out groups that keep different numbers of "
        'heads; unit="kv" removes whole groups',
    )


def _keyed(gone: Mapping[tuple[str, int], Iterable[int]], layers: Iterable[tuple[Any, ...]]) -> dict[Any, list[int]]:
    many = len({kind for kind, *_ in layers}) > 1
    return {(key if many else key[1]): sorted(numbers) for key, numbers in gone.items() if numbers}


def _counted(layers: tuple[tuple[str, int, int, int], ...]) -> str:
    heads = sorted({query for _, _, query, _ in layers})
    return f"{len(layers)} layers of {' or '.join(map(str, heads))} heads"


def _name(key: Any) -> str:
    return f"{key[0]} layer {key[1]}" if isinstance(key, tuple) else f"layer {key}"


def in_steps(
    model: Any,
    batches: list[Any],
    keep: float,
    score: str = "michel",
    steps: int = 4,
    *,
    progress: Callable[[int, int], None] | None = None,
    scoring: Mapping[str, Any] | None = None,
    scored: Callable[..., Scores] | None = None,
    **how: Any,
) -> Plan:
    """A plan made step by step: after each, what is left is scored again without the heads that went.

    scored: what takes the place of `importance`, where several processes share the work.
    """
    from .importance import importance, places

    scored = scored or importance
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise HeadwiseError(f"steps must be a whole number of at least 1, got {steps!r}")
    heads = sum(place.query for place in places(model))
    if steps > heads:
        raise HeadwiseError(f"steps must be at most the number of heads, {heads}, got {brief(steps)}")
    made: Plan | None = None
    for step in range(1, steps + 1):
        gone = made.heads if made else None
        scores = scored(model, batches, score, masked=gone, **(scoring or {}))
        made = plan(scores, 1 - (1 - keep) * step / steps, base=gone, **how)
        if progress:
            progress(step, steps)
    assert made is not None
    return made
