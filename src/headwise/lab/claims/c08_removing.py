"""Claim 8: how many heads can be removed, in the lab's models and in real ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch

from ...attention.nn.stack import Decoder
from ...errors import CheckpointError
from ...models.loading.loader import load, tokenizer
from ...prune.curve import curve
from ...prune.importance import importance
from ...prune.plan import plan
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point, starts_seen
from ..model import TEXT_HEADS, TEXT_RECIPE, as_gpt2, attentions, task_of
from ..store import Lab
from ..tasks import HELD_OUT, TEXT
from ..train import Trained, fit, held_out

# the thresholds, written before the full run
DAMAGE = 0.01  # of the loss, or of the cosine with the full model's embedding
HALF = 0.5  # of the heads

SENTENCES = (
    "More than half of the heads can be removed for less than 1 % of quality (Michel et al. 2019).",
    "After removing half of the heads, a little training brings the quality back.",
    "It matters which heads go: chosen by importance, more can go than at random.",
)
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)  # of the heads that are retained
SCORES = ("michel", "random")
REAL = {"minilm": "1 - cosine", "smollm2": "loss"}
RETRAIN: dict[str, Any] = {"steps": 200, "batch": 8, "rate": 1e-3}
PASSAGE = 240  # characters of a text for the real models


def run(lab: Lab) -> Figures:
    models = [lab.trained(heads=TEXT_HEADS, seed=seed, **TEXT_RECIPE) for seed in lab.starts]
    real = {}
    for name in lab.budget.pick(("minilm",), tuple(REAL), tuple(REAL)):
        try:
            real[name] = _real(lab, name)
        except CheckpointError as missing:  # the rest of the claim does not need it
            lab.progress(f"{name} left out: {missing}", 0, 1)
    return {
        "learned": all(trained.learned for trained in models),
        "small": [_small(lab, trained) for trained in models],
        "retrained": [_retrained(lab, trained) for trained in models],
        "real": real,
    }


def _small(lab: Lab, trained: Trained) -> Figures:
    """{score: damage at every share} of one lab model; ranked on its training text, measured on held-out text."""
    key = {**lab.made_of(trained.recipe), "shares": SHARES, "scores": SCORES}

    def compute() -> Figures:
        measuring = [
            {"input_ids": batch.inputs} for batch in held_out(task_of(trained.recipe), lab.budget.pick(1, 4, 4))
        ]
        return damages(
            lab, as_gpt2(trained.model.cpu()), [_known(trained)], measuring, 1, f"start {trained.recipe.seed}"
        )

    return lab.piece("removing", key, compute)


def _known(trained: Trained, size: int = 128) -> dict[str, Any]:
    """A batch of the model's training text, to rank its heads with."""
    return {"input_ids": task_of(trained.recipe).batch(size, torch.Generator().manual_seed(0)).inputs}


def _real(lab: Lab, name: str) -> Figures:
    """The same for a real model, on held-out passages of the novel."""
    count, seeds = lab.budget.pick((4, 1), (16, 1), (16, 1) if name == "smollm2" else (32, 3))
    key = {"name": name, "count": count, "seeds": seeds, "shares": SHARES, "scores": SCORES}

    def compute() -> Figures:
        model, words = load(name), tokenizer(name)
        words.pad_token = words.pad_token or words.eos_token
        batches = [dict(words(some, return_tensors="pt", padding=True)) for some in passages(count)]
        return damages(lab, model, batches[::2], batches[1::2], seeds, name)

    return lab.piece("removing", key, compute)


def passages(count: int, batch: int = 2) -> list[list[str]]:
    """Texts from the part of the novel that nothing was trained on."""
    text = TEXT.read_text(encoding="utf-8")
    text = text[int(len(text) * (1 - HELD_OUT)) :]
    starts = np.linspace(0, len(text) - PASSAGE, count).astype(int)
    texts = [text[start : start + PASSAGE].split(" ", 1)[1].rsplit(" ", 1)[0] for start in starts]
    return [texts[i : i + batch] for i in range(0, count, batch)]


def damages(lab: Lab, model: Any, scoring: list[Any], measuring: list[Any], seeds: int, words: str) -> Figures:
    """{score: (seeds, shares)}: increase of the loss as a share of the full model's, or 1 - cosine of the embedding."""
    measured = curve(
        model, scoring, measuring, scores=SCORES, shares=SHARES, seeds=seeds,
        progress=lambda done, total: lab.progress(f"removing heads, {words}", done, total),
    )  # fmt: skip
    if measured.full.name != "perplexity":
        return {score: table.tolist() for score, table in measured.values.items()}
    full = math.log(measured.full.value)
    return {score: (np.log(table) / full - 1).tolist() for score, table in measured.values.items()}


def _retrained(lab: Lab, trained: Trained) -> Figures:
    retrain = RETRAIN | {"steps": lab.budget.pick(2, RETRAIN["steps"], RETRAIN["steps"])}
    key = {"model": lab.made_of(trained.recipe), **retrain}

    def compute() -> Figures:
        task = task_of(trained.recipe)
        chosen = plan(importance(as_gpt2(trained.model.cpu()), [_known(trained)]), HALF).heads

        def further(model: Decoder) -> float:
            random = torch.Generator().manual_seed(trained.recipe.seed + 1)
            return fit(model.to(lab.device).train(), task, model.parameters(), random, **retrain)[-1][1]

        intact, half = copy.deepcopy(trained.model), without(trained.model, chosen)
        return {"intact": further(intact), "half": further(half)}

    return lab.piece("retrained", key, compute)


def without(model: Decoder, heads: dict[Any, Any]) -> Decoder:
    """A smaller copy with these heads cut out of the projections."""
    smaller = copy.deepcopy(model)
    for key, numbers in heads.items():
        layer = key[1] if isinstance(key, tuple) else key
        smaller.blocks[layer].attention = attentions(model)[layer].prune_heads(numbers)
    return smaller


def removable(table: list[list[float]]) -> float:
    """The largest share of heads that can be removed before the mean damage exceeds 1 %."""
    removed = 0.0
    for share, damage in zip(SHARES, np.mean(table, 0), strict=True):
        if damage > DAMAGE:
            break
        removed = 1 - share
    return removed


def verdicts(figures: Figures) -> list[Verdict]:
    return [_half(figures), _back(figures), _which(figures)]


def _groups(figures: Figures) -> dict[str, list[float]]:
    """Removable shares: of the lab's models start by start, of the real ones once."""
    groups = {"the lab's models": [removable(one["michel"]) for one in figures["small"]]}
    return groups | {name: [removable(one["michel"])] for name, one in figures["real"].items()}


def _half(figures: Figures) -> Verdict:
    groups = _groups(figures)
    words = ", ".join(f"{name} {np.mean(each):.0%}" for name, each in groups.items())
    because = f"Heads that can go, by michel's score in one step, before damage passes 1 %: {words}."
    sure = f"lab: {starts_seen(groups['the lab' + chr(39) + 's models'])}; real models: one each, exact"
    yes = [name for name, each in groups.items() if min(each) > HALF]
    no = [name for name, each in groups.items() if max(each) <= HALF]
    if not figures["learned"] or len(yes) + len(no) < len(groups):
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure)
    if not no:
        return Verdict(SENTENCES[0], HOLDS, because, sure)
    if not yes:
        return Verdict(SENTENCES[0], NOT, because, sure)
    return Verdict(SENTENCES[0], ONLY_IF, because, sure, f"the model has heads to spare, as {' and '.join(yes)} do")


def _back(figures: Figures) -> Verdict:
    each = [one["half"] / one["intact"] - 1 for one in figures["retrained"]]
    because = (
        f"Half of the heads cut out, then {RETRAIN['steps']} steps: the loss is {np.mean(each):+.2%} against the "
        "intact model with the same training."
    )
    sure = starts_seen([100 * x for x in each], " %")
    if not figures["learned"]:
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure)
    if max(each) <= DAMAGE:
        return Verdict(SENTENCES[1], HOLDS, because, sure)
    return Verdict(SENTENCES[1], NOT if min(each) > DAMAGE else CANNOT_TELL, because, sure)


def _which(figures: Figures) -> Verdict:
    """Damage with half of the heads gone, by score and at random; the lab's starts and every real model must agree."""
    at = SHARES.index(HALF)
    kinds = {f"start {i}": one for i, one in enumerate(figures["small"])} | figures["real"]
    pairs = {name: tuple(float(np.mean(one[s], 0)[at]) for s in SCORES) for name, one in kinds.items()}
    small = np.mean([pair for name, pair in pairs.items() if name.startswith("start")], 0)
    shown = {"the lab's models": tuple(small)} | {name: pairs[name] for name in figures["real"]}
    words = "; ".join(f"{name}: {a:.1%} against {b:.1%}" for name, (a, b) in shown.items())
    because = f"Damage with half of the heads gone, by michel's score and at random. {words}."
    better = [name for name, (score, chance) in pairs.items() if score < chance]
    sure = f"better in {len(better)} of {len(pairs)} models"
    if not figures["learned"]:
        return Verdict(SENTENCES[2], CANNOT_TELL, because, sure)
    if len(better) == len(pairs):
        return Verdict(SENTENCES[2], HOLDS, because, sure)
    return Verdict(SENTENCES[2], NOT if not better else CANNOT_TELL, because, sure)


def charts(figures: Figures) -> list[Chart]:
    small: dict[str, list[Any]] = {
        score: [
            point(100 * (1 - share), [100 * float(np.mean(one[score], 0)[i]) for one in figures["small"]])
            for i, share in enumerate(SHARES)
        ]
        for score in SCORES
    }
    sheet = [Chart("The lab's text models, 16 heads", "heads removed, %", "loss more, %", small)]
    for name, one in figures["real"].items():
        series: dict[str, list[Any]] = {
            score: [point(100 * (1 - share), [100 * row[i] for row in table]) for i, share in enumerate(SHARES)]
            for score, table in one.items()
        }
        sheet.append(Chart(name, "heads removed, %", f"{REAL[name]} more, %", series))
    return sheet


def tables(figures: Figures) -> list[Table]:
    small = {score: [np.mean(one[score], 0).tolist() for one in figures["small"]] for score in SCORES}
    rows = [
        (name, score, *(f"{x:.1%}" for x in np.mean(one[score], 0)))
        for name, one in {"the lab's models": small, **figures["real"]}.items()
        for score in SCORES
    ]
    head = ("model", "score", *(f"{1 - share:.1%} gone" for share in SHARES))
    back = [
        (str(i), f"{one['intact']:.4f}", f"{one['half']:.4f}", f"{one['half'] / one['intact'] - 1:+.2%}")
        for i, one in enumerate(figures["retrained"])
    ]
    return [
        Table("Damage", head, rows),
        Table("Half of the heads cut out, trained further", ("start", "intact", "half", "loss more"), back),
    ]


CLAIM = Claim(
    8,
    "Most heads can be removed",
    SENTENCES,
    f"""
Heads are ranked by `headwise.importance` (michel: the derivative of the loss by a gate on each head) and removed in one
step to each share, without training; random removal is the baseline. The lab's models are claim 4's text models, 2
layers of {TEXT_HEADS} heads, from several starts; the real ones are the embedded `minilm` (72 heads) and `smollm2` (270
heads), on passages of the novel that the lab's models were not trained on. Heads are never evaluated on the texts that
ranked them. Damage is the increase of the loss, as a share of the loss; for minilm, which has no loss of its own, 1 -
cosine with the full model's embedding. The first sentence holds where more than {HALF:.0%} of the heads can be removed,
share by share, before the mean damage exceeds {DAMAGE:.0%}. Then half of the heads of the lab's models are cut out, and
both they and the intact models are trained for {RETRAIN["steps"]} steps more; brought back is within {DAMAGE:.0%} of
the loss in every start.
""",
    run,
    verdicts,
    charts,
    tables,
)
