"""plan: from importance scores to a Plan, the heads to remove so that a share of a budget is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import HeadwiseError
from ..json_documents import brief
from ..plans import BUDGETS, Plan, by_layer_key, is_share
from .scores import Place, Scores

Gone = dict[tuple[str, int], set[int]]


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
    return Plan(by_layer_key(gone, layers), layers, made.name, budget, asked, _notes(made.places, gone))


def check_options(keep: Any, budget: str, per: str, unit: str) -> None:
    """Refuse what no plan can be made by, before anything is measured."""
    for share in keep.values() if isinstance(keep, Mapping) else [keep]:
        if not is_share(share):
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
