"""patch: what changes when a head has the activation of another run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, ShapeError, UnsupportedError
from ..json_documents import brief
from ..models.batches import batch_size
from ..models.evaluation import evaluating
from ..models.structure.heads import query_heads
from ..models.structure.selection import HeadSelection, LayerChoice, select_heads
from ..models.structure.sites import Site, require_sites
from ..models.structure.wrappers import inner_model
from ..models.text_inputs import device_of
from ..resampling import spearman
from .activations import KINDS, PER_KV_HEAD
from .effects import EffectLayer, Effects, EffectsAbout
from .gradient_patching import estimate_pair
from .inputs import Pair, model_batches, model_pairs, named_tensors, to_device
from .metric import Measure, Metric
from .patch_runs import Baseline, PatchRuns, Target, check_cacheless, mean_activations
from .positions import Positions
from .sweep import Progress, sweep
from .sweep_file import SweepFile, sweep_identity

METHODS = ("exact", "gradient")
DIRECTIONS = ("denoise", "noise")
MEMORY = 1 << 30
ROUNDING = 64  # units in the last place, within which two values of the metric are the same
BOTH_CONTEXTS = (
    "Gradients between the two inputs are a mean over both contexts: noise and denoise have the same estimate, and "
    "exact patching in one direction may rank weak heads otherwise."
)
SATURATION = (
    "The gradient of queries and keys is small where the softmax is saturated, so heads that attend to one key are "
    'estimated too low (Kramar et al. 2024); method="exact" is not.'
)
PHRASES = {"denoise": ("clean", "corrupted", "restored"), "noise": ("corrupted", "clean", "destroyed")}


@torch.inference_mode(False)  # whose tensors autograd could not keep
def patch(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    *,
    what: Literal["output", "query", "key", "value", "pattern"] = "output",
    method: Literal["exact", "gradient"] = "exact",
    direction: Literal["denoise", "noise"] = "denoise",
    positions: Any = None,
    heads: LayerChoice = None,
    steps: int = 1,
    mean_of: Any = None,
    tokenizer: Any = None,
    sample: int = 8,
    seed: int = 0,
    memory: int = MEMORY,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Effects:
    """Activation patching: the share of a metric that each head's activation from another run restores or destroys.

    An effect is the mean change of the metric caused by the patch, divided by the mean difference between the clean and
    the corrupted run; it is 1 if one head accounts for the whole difference. The two directions answer different
    questions: whether a head is sufficient, and whether it is necessary.

    Args:
        model: for outputs, any model whose heads can be masked; for everything else, models of transformers' registry,
            headwise's own modules and nn.MultiheadAttention.
        clean: a batch (a dict of model inputs, a tensor or a tuple), a list of batches, or texts.
        corrupted: the same number of prompts, each with as many tokens as its clean prompt.
        metric: `headwise.LogitDifference`, or a function of the model's output that gives (B,) numbers or one.
        what: the activation that is replaced. "output": the head's output before W_O. "query", "key", "value": the
            inputs of attention, after rotary embeddings and norms. "pattern": the attention weights, applied to the
            run's own values.
        method: "exact", one pass per head, several heads in a batch; or "gradient", a first-order estimate of all
            heads from two forward passes and one backward (attribution patching).
        direction: "denoise" inserts clean activations into the corrupted run and gives the share restored; "noise"
            inserts corrupted activations into the clean run and gives the share destroyed.
        positions: the tokens where activations are replaced, all by default: a position or several; a tensor
            (prompts,) of one per prompt; or a bool mask (prompts, T), also as a list of one per batch. Numbers count
            a prompt's own tokens, without padding, negative ones from the last. Padding is never patched.
        heads: layers, or {layer: [heads]}, where a layer is its number, (kind, number) or its module's path; all by
            default, and True for all. Named heads are query heads: a key or value is then replaced only for these heads
            and not for others that share it. By default it is replaced for all query heads of the group, with one
            effect per KV head.
        steps: of method="gradient". From 2 on, the gradient is a mean over as many points between the two inputs
            (integrated gradients): embeddings, and inputs that are floating-point numbers, are interpolated. The result
            is a mean over both contexts and the same in both directions (except for patterns), so it is not always
            closer to exact patching.
        mean_of: batches or texts; each head's mean over all their tokens is inserted instead of the activation of the
            other run. Effects are still a share of the difference to the other run.
        tokenizer: for texts and for answers that are strings.
        sample: of method="gradient": how many heads, drawn at random, to patch exactly on the first batch; the rank
            correlation with the estimate is in `about.notes` and `about.details`. 0 for none.
        seed: the seed of the sample.
        memory: estimated bytes for copies of a batch and for activations; with more memory, more heads run at once.
        work: a file that stores the results after every pass. The same call resumes from it; a file of other weights,
            inputs or options is refused.
        progress: called with the heads done and their number, counted once per pair of batches.

    Returns:
        Effects by kind of attention: (layers, heads), or (layers, KV heads) for keys and values of all heads.

    Raises:
        HeadwiseError: for unknown heads or options, a metric that is not finite, or a corrupted run with the same
            metric as the clean run.
        ShapeError: for pairs of prompts with different numbers of tokens.
        UnsupportedError: for layers whose activations cannot be replaced; the message names them.

    Example:
        >>> metric = headwise.LogitDifference(" Mary", " John", tokenizer=tokenizer)
        >>> effects = headwise.patch(model, clean_texts, corrupted_texts, metric, tokenizer=tokenizer)
        >>> effects.strongest(3)
    """
    _check_options(what, method, direction, steps, mean_of, sample, memory, work)
    model = inner_model(model)
    sites = require_sites(model)
    selection = None if heads is None else select_heads(model, sites, heads)
    if selection is not None and not selection:
        raise HeadwiseError("heads names no heads; give {layer: [heads]}, or None for all")
    device = device_of(model)
    pairs = [Pair(*(to_device(batch, device) for batch in pair)) for pair in model_pairs(clean, corrupted, tokenizer)]
    _check_padding(pairs)
    batches = [pair.clean for pair in pairs]
    chosen = [site for site in sites if selection is None or selection.heads(site) is not None]
    runs = PatchRuns(
        model, what, direction, chosen, selection is not None and what in PER_KV_HEAD, pairs,
        Measure(metric, batches, tokenizer), Positions(positions, batches),
    )  # fmt: skip
    with evaluating(model):
        mean_batches = None
        if mean_of is not None:
            mean_batches = [to_device(batch, device) for batch in model_batches(mean_of, tokenizer)]
            runs.means = mean_activations(runs, mean_batches)
        if method == "gradient":
            return _estimate(runs, sites, selection, steps, sample, seed, memory, progress)
        baselines = [runs.baseline(number) for number in range(len(pairs))]
        _scale(runs, baselines)  # refuses what has no effect before the long part
        file = None
        if work is not None:
            file = SweepFile(work, sweep_identity(runs, positions, mean_batches), baselines)
        targets = _targets(baselines[0], chosen, selection)
        values = sweep(runs, targets, baselines, memory=memory, file=file, progress=progress)
    changes = [
        {target: value.double() - baseline.this.cpu().double() for target, value in of_pair.items()}
        for of_pair, baseline in zip(values, baselines, strict=True)
    ]
    return _effects(runs, sites, baselines, changes, "exact patching", [], {})


def _estimate(
    runs: PatchRuns,
    sites: list[Site],
    selection: HeadSelection | None,
    steps: int,
    sample: int,
    seed: int,
    memory: int,
    progress: Progress | None,
) -> Effects:
    """Effects by method="gradient"."""
    baselines, changes = [], []
    for number in range(len(runs.pairs)):
        estimate = estimate_pair(runs, number, steps)
        baselines.append(estimate.baseline)
        targets = _targets(estimate.baseline, runs.sites, selection)
        changes.append({target: estimate.changes[target.site][:, target.head].double().cpu() for target in targets})
        if progress is not None:
            progress((number + 1) * len(targets), len(runs.pairs) * len(targets))
    _scale(runs, baselines)
    notes, details = [], {}
    if runs.what in ("query", "key"):
        notes.append(SATURATION)
    if steps > 1 and runs.what != "pattern":  # whose difference depends on the run's values
        notes.append(BOTH_CONTEXTS)
    if sample:
        chosen = _draw(list(changes[0]), sample, seed)
        exact = sweep(runs, chosen, [runs.baseline(0)], memory=memory)[0]
        columns = [
            [float((exact[target].double() - baselines[0].this.cpu().double()).mean()) for target in chosen],
            [float(changes[0][target].mean()) for target in chosen],
        ]
        correlation = spearman(np.array(columns[0]), np.array(columns[1]))
        details = {
            "sampled heads": len(chosen),
            "rank correlation with exact patching": None if np.isnan(correlation) else round(correlation, 4),
        }
        notes.append(
            f"Rank correlation with exact patching of {len(chosen)} heads drawn at random: {correlation:.2f}, on "
            f"{_count(len(baselines[0].this), 'prompt')}."
        )
    name = "gradient estimate of patching"
    if steps > 1:
        name += f", integrated over {steps} points between the inputs"
    return _effects(runs, sites, baselines, changes, name, notes, {"steps": steps, **details})


def _targets(baseline: Baseline, sites: Sequence[Site], selection: HeadSelection | None) -> list[Target]:
    """The heads to patch, in the order of the model's layers."""
    targets = []
    for site in sites:
        choice = True if selection is None else selection.heads(site)
        shape = baseline.shapes.get(site)
        if shape is None:
            if selection is None:
                continue
            raise HeadwiseError(f"{site} was not called, so its heads cannot be patched")
        numbers = range(shape.heads) if choice is True or choice is None else sorted(set(choice))
        for head in numbers:
            if head >= shape.heads:
                raise HeadwiseError(f"{site} has no head {head}; its heads are 0 to {shape.heads - 1}")
            targets.append(Target(site, head))
    return targets


def _draw(targets: list[Target], number: int, seed: int) -> list[Target]:
    """A random sample of heads, in their order."""
    places = np.random.default_rng(seed).permutation(len(targets))[:number]
    return [targets[i] for i in sorted(places)]


def _effects(
    runs: PatchRuns,
    sites: Sequence[Site],
    baselines: Sequence[Baseline],
    changes: Sequence[dict[Target, Tensor]],
    method: str,
    notes: list[str],
    details: dict[str, Any],
) -> Effects:
    """Effects from the change of the metric by each patch, per pair {head: (B,)}."""
    sign = 1.0 if runs.direction == "denoise" else -1.0
    shapes = baselines[0].shapes
    layers, examples = [], []
    for site in sites:
        heads = shapes[site].heads if site in shapes else _head_count(runs.model, site)
        if heads is None:
            continue
        missing = torch.full_like(_pooled(runs, [baseline.this for baseline in baselines]), torch.nan)
        columns = []
        for head in range(heads):
            parts = [of_pair[Target(site, head)] for of_pair in changes if Target(site, head) in of_pair]
            columns.append(sign * _pooled(runs, parts) if parts else missing)
        layers.append(EffectLayer(site.kind, site.index, heads))
        examples.append(torch.stack(columns, 1).numpy())
    source, run, verb = PHRASES[runs.direction]
    value = "its mean over a set" if runs.means else f"that of the {source} run"
    noun = "KV head" if not all(shape.per_query_head for shape in shapes.values()) else "head"
    sentence = f"{method}: share of the metric {verb} where a {noun}'s {runs.what} in the {run} run is {value}"
    if runs.positions:
        sentence += f", at {runs.positions.words}"
    means = {
        name: float(_pooled(runs, [getattr(baseline, field) for baseline in baselines]).mean())
        for name, field in zip(("corrupted", "clean")[:: int(sign)], ("this", "other"), strict=True)
    }
    about = EffectsAbout(
        name=f"{runs.what} patching",
        method=sentence,
        metric=runs.measure.words,
        value=means["clean"],
        unit="kv" if noun == "KV head" else "head",
        notes=tuple(notes),
        details={
            "what": runs.what, "direction": runs.direction, "positions": runs.positions.words,
            "metric clean": means["clean"], "metric corrupted": means["corrupted"], **details,
        },
    )  # fmt: skip
    return Effects(layers, examples, about, scale=_scale(runs, baselines))


def _pooled(runs: PatchRuns, rows: Sequence[Tensor]) -> Tensor:
    """(prompts,) from one (B,) per pair; one number where the metric is one number per batch."""
    values = torch.cat([row.cpu().double() for row in rows])
    if runs.measure.per_example:
        return values
    sizes = torch.tensor([batch_size(pair.clean) for pair in runs.pairs], dtype=torch.float64)
    return (values * sizes / sizes.sum()).sum(0, keepdim=True)


def _scale(runs: PatchRuns, baselines: Sequence[Baseline]) -> np.ndarray:
    """(prompts,): clean minus corrupted, what effects are a share of.

    Raises:
        HeadwiseError: if there is no difference.
    """
    this, other = (_pooled(runs, [getattr(x, name) for x in baselines]) for name in ("this", "other"))
    size = float(torch.maximum(this.abs(), other.abs()).mean())
    difference = other - this if runs.direction == "denoise" else this - other
    if abs(float(difference.mean())) <= ROUNDING * torch.finfo(baselines[0].this.dtype).eps * size:
        raise HeadwiseError(
            f"the metric ({runs.measure.words}) is {float(this.mean()):.4g} on the clean and on the corrupted input "
            "alike, so there is nothing to restore; give a corrupted input that changes the answer"
        )
    scale: np.ndarray = difference.numpy()
    return scale


def _head_count(model: nn.Module, site: Site) -> int | None:
    try:
        return query_heads(model, site)
    except UnsupportedError:
        return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _check_padding(pairs: Sequence[Pair]) -> None:
    """Positions are compared one by one, so padding must be in the same places."""
    for pair in pairs:
        for batch in pair:
            check_cacheless(batch)
        clean, corrupted = (named_tensors(batch) for batch in pair)
        for name in ("attention_mask", "decoder_attention_mask"):
            if name in clean and not torch.equal(clean[name].bool(), corrupted[name].bool()):
                raise ShapeError(
                    f"{name} differs between the clean and the corrupted input; pad both on the same side, since "
                    "tokens are compared position by position"
                )


def _check_options(
    what: Any, method: Any, direction: Any, steps: Any, mean_of: Any, sample: Any, memory: Any, work: Any
) -> None:
    for name, value, choices in (
        ("what", what, KINDS), ("method", method, METHODS), ("direction", direction, DIRECTIONS),
    ):  # fmt: skip
        if value not in choices:
            raise HeadwiseError(f"{name} must be {', '.join(map(repr, choices))}, got {brief(value)}")
    for name, value, least in (("steps", steps, 1), ("sample", sample, 0), ("memory", memory, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise HeadwiseError(f"{name} must be a whole number of at least {least}, got {brief(value)}")
    if method == "exact" and steps > 1:
        raise HeadwiseError('steps are of method="gradient"; exact patching has none')
    if method == "gradient" and work is not None:
        raise HeadwiseError('work is of method="exact"; an estimate of all heads takes a few passes and is not resumed')
    if mean_of is not None and what == "pattern":
        raise HeadwiseError("a pattern has no mean over prompts of different lengths; patch the output instead")
    if mean_of is not None and steps > 1:
        raise HeadwiseError("steps go between two inputs, and a mean over a set is of none; use steps=1 with mean_of")
