"""plan: from importance scores to a Plan, the heads to remove so that a share of a budget is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, Unpack

import numpy as np

from ..errors import HeadwiseError
from ..json_documents import brief
from ..plans import BUDGETS, Plan, by_layer_key, is_share
from .attention_layers import UNITS, AttentionLayer, attention_layers
from .head_scores import HeadScores
from .importance import importance
from .objective import Loss

SCOPES = ("model", "layer")  # where heads compete: over the whole model, or within each layer
RemovedHeads = dict[tuple[str, int], set[int]]  # heads to remove, by (kind, layer)


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of `plan` that other ways of planning pass on to it."""

    budget: str
    per: str
    unit: str
    allow_empty: bool


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
        scores: {kind: (layers, heads)}, high for important heads: the result of `importance`, or plain arrays.
        keep: the share of the budget to keep, from 0 to 1; {kind: share} for one share per kind of attention.
        budget: what is counted: "heads"; "parameters", those that belong to heads; "cache", the bytes of the KV cache,
            which shrinks only if whole groups are removed; "latency", the time of a pass, measured with model and
            inputs.
        per: "model", all heads compete; "layer", the same share of every layer.
        unit: what is removed at once: "head", "kv" (whole groups) or "layer".
        allow_empty: a layer may lose all its heads; else it keeps at least one.
        base: heads that are removed in any case, {layer: [heads]}.
        model, inputs: for budget="latency", the full model and a batch to time it with.

    Returns:
        A Plan, which can be printed, compared, saved, edited, and passed to `prune_heads`.

    Raises:
        HeadwiseError: if an option is unknown, or no plan meets the budget; the message names the nearest share.

    Example:
        >>> scores = headwise.importance(model, batches)
        >>> plan = headwise.plan(scores, keep=0.75)
        >>> smaller = headwise.prune_heads(model, plan)
    """
    check_options(keep, budget, per, unit)
    if not isinstance(scores, Mapping):
        raise HeadwiseError(
            f"scores are {{kind: (layers, heads)}}, as headwise.importance gives them, got {type(scores).__name__}"
        )
    if budget == "latency":
        from .latency import plan_for_latency

        return plan_for_latency(scores, keep, model, inputs, per=per, unit=unit, allow_empty=allow_empty)
    scores = scores if isinstance(scores, HeadScores) else _from_arrays(scores)
    unit = scores.unit if scores.unit != "head" else "kv" if budget == "cache" else unit
    removed: RemovedHeads = {layer.key: set() for layer in scores.layers}
    for key, heads in (base or {}).items():
        removed[key if isinstance(key, tuple) else (scores.layers[0].kind, key)] |= set(heads)
    _check_budget_applies(scores.layers, keep, budget)
    for competing, share in _competitions(scores.layers, keep, per):
        _remove_least_important(scores, competing, share, budget, unit, allow_empty, removed)
    counts = tuple((layer.kind, layer.index, layer.query, layer.kv) for layer in scores.layers)
    shares = dict(keep) if isinstance(keep, Mapping) else keep
    return Plan(
        by_layer_key(removed, counts), counts, scores.name, budget, shares, _padding_notes(scores.layers, removed)
    )


def check_options(keep: Any, budget: str, per: str, unit: str) -> None:
    """Refuse unknown options of `plan`, before anything is measured."""
    for share in keep.values() if isinstance(keep, Mapping) else [keep]:
        if not is_share(share):
            raise HeadwiseError(f"keep is a share from 0 to 1, such as 0.6, got {brief(share)}")
    for name, value, allowed in (("budget", budget, BUDGETS), ("per", per, SCOPES), ("unit", unit, UNITS)):
        if value not in allowed:
            raise HeadwiseError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_budget_applies(layers: list[AttentionLayer], keep: float | Mapping[str, float], budget: str) -> None:
    """Every kind that is to keep a share has something that the budget counts."""
    countable = {layer.kind for layer in layers if cost(layer, set(), budget)}
    uncounted = [kind for kind in keep if kind not in countable] if isinstance(keep, Mapping) else []
    if not countable or any(kind in {layer.kind for layer in layers} for kind in uncounted):
        owner = f"{uncounted[0]} attention" if uncounted else "this model"
        missing = "KV cache" if budget == "cache" else "parameters"
        raise HeadwiseError(
            f'budget="{budget}": {owner} has no {missing} that removing heads would save; use budget="heads"'
        )


def _from_arrays(tables: Mapping[str, np.ndarray]) -> HeadScores:
    """Scores from plain arrays, which do not say which heads share keys and values: each counts as its own group."""
    layers, examples = [], []
    for kind, table in tables.items():
        for index, row in enumerate(np.asarray(table, dtype=float)):
            count = int(np.isfinite(row).sum())
            if not count or not np.isfinite(row[:count]).all() or not np.isnan(row[count:]).all():
                raise HeadwiseError(
                    f"the scores of {kind} layer {index} are not finite; only heads that the layer does not have, at "
                    "the end of the row, are NaN"
                )
            row = row[:count]
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
            raise HeadwiseError(f"the model has no {unknown[0]!r} attention; its kinds are {', '.join(kinds)}")
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


def _group_sizes(layer: AttentionLayer, removed: set[int]) -> list[int]:
    """How many query heads each KV group keeps."""
    return [sum(head not in removed for head in group) for group in layer.units("kv")]


def cost(layer: AttentionLayer, removed: set[int], budget: str) -> float:
    """The cost of a layer without the removed heads in a budget, with its groups padded as surgery will pad them."""
    sizes = _group_sizes(layer, removed)
    groups = [count for count in sizes if count]
    if budget == "heads":
        return sum(sizes)
    padded_groups = -(-len(groups) // layer.multiple) * layer.multiple
    if budget == "cache":
        return padded_groups * layer.cache
    return padded_groups * (max(groups, default=0) * layer.head_parameters + layer.kv_parameters)


def _remove_least_important(
    scores: HeadScores,
    layers: list[AttentionLayer],
    share: float,
    budget: str,
    unit: str,
    allow_empty: bool,
    removed: RemovedHeads,
) -> None:
    """Add units to `removed`, the least important first, until no more than the share of the budget is left."""
    layers = [layer for layer in layers if cost(layer, set(), budget)]  # an encoder has no KV cache
    if not layers:
        return
    counted_layers = layers if budget == "heads" else [members[-1] for members in _by_module(layers)]
    full = sum(cost(layer, set(), budget) for layer in counted_layers)
    target = round(share * full) if budget == "heads" else share * full

    def remaining_cost() -> float:
        return sum(cost(layer, removed[layer.key], budget) for layer in counted_layers)

    candidates = _candidates(scores, layers, unit)
    largest_step = max(len(heads) * len(members) for _, members, heads in candidates)
    for _, members, heads in sorted(candidates, key=lambda candidate: candidate[0]):
        excess = remaining_cost() - target
        if excess <= 0:
            return
        step = sum(len(set(heads) - removed[layer.key]) for layer in members)
        if budget == "heads" and step > 2 * excess:
            continue  # it would end further from the target
        if allow_empty or all(layer.query > len(removed[layer.key] | set(heads)) for layer in members):
            for layer in members:
                removed[layer.key] |= set(heads)
    excess = remaining_cost() - target
    if excess > 0 and not (budget == "heads" and excess < largest_step) and not math.isclose(remaining_cost(), target):
        raise HeadwiseError(
            f"{budget}: keep={share:g} cannot be met with at least one head per layer; "
            f"the nearest is keep={remaining_cost() / full:.4f}, or say allow_empty=True"
        )


def _candidates(
    scores: HeadScores, layers: list[AttentionLayer], unit: str
) -> list[tuple[float, list[AttentionLayer], list[int]]]:
    """(score, layers, heads) of every unit that can be removed."""
    candidates = []
    for members in _by_module(layers):
        first = members[0]
        module_scores = np.asarray(sum(scores.layer_scores(layer.key) for layer in members))
        for heads in first.units(unit):
            columns = [i for i, scored_heads in enumerate(first.units(scores.unit)) if set(scored_heads) & set(heads)]
            candidates.append((float(np.nansum(module_scores[columns])), members, heads))
    return candidates


def _padding_notes(layers: list[AttentionLayer], removed: RemovedHeads) -> tuple[str, ...]:
    """Says how many zeroed heads surgery has to add, if any."""
    padding = []
    for layer in layers:
        groups = [count for count in _group_sizes(layer, removed[layer.key]) if count]
        uneven = sum(max(groups) - count for count in groups) if groups else 0
        padding.append(uneven + -len(groups) % layer.multiple)
    if not sum(padding):
        return ()
    return (
        f"{sum(padding)} zeroed heads in {sum(map(bool, padding))} layers even out groups that keep different numbers "
        'of heads; unit="kv" removes whole groups',
    )


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
    """A plan made in several steps: after each step, the remaining heads are scored again without the removed ones.

    Args:
        model, batches, score, loss, seed: as in `importance`.
        keep: the share to keep in the end; each step removes an equal part of the rest.
        steps: the number of steps.
        progress: called with the number of finished steps and their total number.
        compute_scores: replaces `importance` if several processes share the work.
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
