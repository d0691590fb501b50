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
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point, range_over_starts
from ..model import TEXT_HEADS, TEXT_RECIPE, as_gpt2, attentions, task_of
from ..starts import LEARNING, above, below, describe_mean, describe_need
from ..store import Lab
from ..tasks import HELD_OUT, TEXT
from ..train import TrainedModel, fit, held_out

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
LAB = "the lab's models"
REAL = {"minilm": "1 - cosine", "smollm2": "loss"}
DRAWS = {LAB: 3, "minilm": 10, "smollm2": 3}  # of the texts to score with, and of the heads that go at random
RETRAIN: dict[str, Any] = {"steps": 200, "batch": 8, "rate": 1e-3}
PASSAGE = 240  # characters of a text for the real models


def run(lab: Lab) -> Figures:
    models = [lab.model(heads=TEXT_HEADS, seed=seed, **TEXT_RECIPE) for seed in lab.starts]
    real = {}
    for name in lab.budget.pick(("minilm",), tuple(REAL), tuple(REAL)):
        try:
            real[name] = _real(lab, name)
        except CheckpointError as missing:  # the rest of the claim does not need it
            lab.progress(f"{name} left out: {missing}", 0, 1)
    return {
        "learned": all(model.learned for model in models),
        "small": [_small(lab, model) for model in models],
        "retrained": [_retrained(lab, model) for model in models],
        "real": real,
    }


def _small(lab: Lab, model: TrainedModel) -> Figures:
    """{score: damage at every share} of one lab model; ranked on its training text, measured on held-out text."""
    draws = lab.budget.pick(1, 1, DRAWS[LAB])
    key = {**lab.model_key(model.recipe), "shares": SHARES, "scores": SCORES, "draws": draws}

    def compute() -> Figures:
        measuring = [{"input_ids": batch.inputs} for batch in held_out(task_of(model.recipe), lab.budget.pick(1, 4, 4))]
        return damages(
            lab, as_gpt2(model.decoder.cpu()), [_training_batch(model)], measuring, draws, f"start {model.recipe.seed}"
        )

    return lab.piece("removing", key, compute)


def _training_batch(model: TrainedModel, size: int = 128) -> dict[str, Any]:
    """A batch of the model's training text, to rank its heads with."""
    return {"input_ids": task_of(model.recipe).batch(size, torch.Generator().manual_seed(0)).inputs}


def _real(lab: Lab, name: str) -> Figures:
    """The same for a real model, on held-out passages of the novel."""
    count, draws = lab.budget.pick((4, 1), (16, 1), (16 if name == "smollm2" else 32, DRAWS[name]))
    key = {"name": name, "count": count, "seeds": draws, "shares": SHARES, "scores": SCORES}

    def compute() -> Figures:
        model, tokenize = load(name), tokenizer(name)
        tokenize.pad_token = tokenize.pad_token or tokenize.eos_token
        batches = [dict(tokenize(texts, return_tensors="pt", padding=True)) for texts in passages(count)]
        return damages(lab, model, batches[::2], batches[1::2], draws, name)

    return lab.piece("removing", key, compute)


def passages(count: int, batch: int = 2) -> list[list[str]]:
    """Texts from the part of the novel that nothing was trained on."""
    text = TEXT.read_text(encoding="utf-8")
    text = text[int(len(text) * (1 - HELD_OUT)) :]
    starts = np.linspace(0, len(text) - PASSAGE, count).astype(int)
    texts = [text[start : start + PASSAGE].split(" ", 1)[1].rsplit(" ", 1)[0] for start in starts]
    return [texts[i : i + batch] for i in range(0, count, batch)]


def damages(lab: Lab, model: Any, scoring: list[Any], measuring: list[Any], draws: int, words: str) -> Figures:
    """{score: (draws, shares)}: increase of the loss as a share of the full model's, or 1 - cosine of the embedding."""
    result = curve(
        model, scoring, measuring, scores=SCORES, shares=SHARES, seeds=draws,
        progress=lambda step, total: lab.progress(f"removing heads, {words}", step, total),
    )  # fmt: skip
    if result.full.name != "perplexity":
        return {score: table.tolist() for score, table in result.values.items()}
    full = math.log(result.full.value)
    return {score: (np.log(table) / full - 1).tolist() for score, table in result.values.items()}


def _retrained(lab: Lab, model: TrainedModel) -> Figures:
    retrain = RETRAIN | {"steps": lab.budget.pick(2, RETRAIN["steps"], RETRAIN["steps"])}
    key = {"model": lab.model_key(model.recipe), **retrain}

    def compute() -> Figures:
        task = task_of(model.recipe)
        removed_heads = plan(importance(as_gpt2(model.decoder.cpu()), [_training_batch(model)]), HALF).heads

        def loss_after_training(decoder: Decoder) -> float:
            random = torch.Generator().manual_seed(model.recipe.seed + 1)
            return fit(decoder.to(lab.device).train(), task, decoder.parameters(), random, **retrain)[-1][1]

        intact, half = copy.deepcopy(model.decoder), without(model.decoder, removed_heads)
        return {"intact": loss_after_training(intact), "half": loss_after_training(half)}

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
    largest = 0.0
    for share, damage in zip(SHARES, np.mean(table, 0), strict=True):
        if damage > DAMAGE:
            break
        largest = 1 - share
    return largest


def verdicts(figures: Figures) -> list[Verdict]:
    return [_half(figures), _recovers(figures), _choice_matters(figures)]


def _groups(figures: Figures) -> dict[str, list[float]]:
    """Removable shares: of the lab's models start by start, of the real ones once."""
    groups = {LAB: [removable(damage["michel"]) for damage in figures["small"]]}
    return groups | {name: [removable(damage["michel"])] for name, damage in figures["real"].items()}


def _half(figures: Figures) -> Verdict:
    groups = _groups(figures)
    words = ", ".join(f"{name} {np.mean(shares):.0%}" for name, shares in groups.items())
    because = f"Heads that can go, by michel's score in one step, before damage exceeds 1 %: {words}."
    sure = f"lab: {range_over_starts(groups[LAB])}; real models: one each, exact"
    if not figures["learned"]:
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=LEARNING)
    more = [name for name, shares in groups.items() if above(shares, HALF)]
    less = [name for name, shares in groups.items() if below(shares, HALF)]
    if len(more) + len(less) < len(groups):  # a real model has one share
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=describe_need(groups[LAB], HALF))
    if not less:
        return Verdict(SENTENCES[0], HOLDS, because, sure)
    if not more:
        return Verdict(SENTENCES[0], NOT, because, sure)
    return Verdict(SENTENCES[0], ONLY_IF, because, sure, f"the model has heads to spare, as {' and '.join(more)} do")


def _recovers(figures: Figures) -> Verdict:
    increases = [100 * (losses["half"] / losses["intact"] - 1) for losses in figures["retrained"]]
    because = (
        f"Half of the heads cut out, then {RETRAIN['steps']} steps: the loss is {np.mean(increases):+.2f}% against the "
        "intact model with the same training."
    )
    sure = describe_mean(increases, " %")
    if not figures["learned"]:
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=LEARNING)
    if below(increases, 100 * DAMAGE):
        return Verdict(SENTENCES[1], HOLDS, because, sure)
    if above(increases, 100 * DAMAGE):
        return Verdict(SENTENCES[1], NOT, because, sure)
    return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=describe_need(increases, 100 * DAMAGE, " %"))


def _choice_matters(figures: Figures) -> Verdict:
    """Damage with half of the heads gone, by score less at random: over the lab's starts, over a real model's draws."""
    index = SHARES.index(HALF)
    tables = {LAB: {score: [np.mean(damage[score], 0) for damage in figures["small"]] for score in SCORES}}
    tables |= figures["real"]
    pairs = {name: [[float(row[index]) for row in table[score]] for score in SCORES] for name, table in tables.items()}
    words = "; ".join(f"{name}: {np.mean(a):.1%} against {np.mean(b):.1%}" for name, (a, b) in pairs.items())
    because = f"Damage with half of the heads gone, by michel's score and at random. {words}."
    gains = {name: [100 * (a - b) for a, b in zip(*pair, strict=True)] for name, pair in pairs.items()}
    nouns = {name: "random starts" if name == LAB else "draws of texts and heads" for name in gains}
    sure = "difference in " + "; ".join(
        f"{name}: {describe_mean(values, ' points', noun=nouns[name])}" for name, values in gains.items()
    )
    if not figures["learned"]:
        return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=LEARNING)
    better = [name for name, values in gains.items() if below(values, 0.0)]
    worse = [name for name, values in gains.items() if above(values, 0.0)]
    needs = "; ".join(
        f"{describe_need(values, 0.0, ' points', noun=nouns[name])} in {name}"
        for name, values in gains.items()
        if name not in better + worse
    )
    if needs:
        return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=needs)
    if not worse:
        return Verdict(SENTENCES[2], HOLDS, because, sure)
    if not better:
        return Verdict(SENTENCES[2], NOT, because, sure)
    return Verdict(SENTENCES[2], ONLY_IF, because, sure, f"the model is like {' or '.join(better)}")


def charts(figures: Figures) -> list[Chart]:
    small: dict[str, list[Any]] = {
        score: [
            point(100 * (1 - share), [100 * float(np.mean(damage[score], 0)[i]) for damage in figures["small"]])
            for i, share in enumerate(SHARES)
        ]
        for score in SCORES
    }
    sheet = [Chart("The lab's text models, 16 heads", "heads removed, %", "increase of the loss, %", small)]
    for name, damage in figures["real"].items():
        series: dict[str, list[Any]] = {
            score: [point(100 * (1 - share), [100 * row[i] for row in table]) for i, share in enumerate(SHARES)]
            for score, table in damage.items()
        }
        sheet.append(Chart(name, "heads removed, %", f"increase of {REAL[name]}, %", series))
    return sheet


def tables(figures: Figures) -> list[Table]:
    small = {score: [np.mean(damage[score], 0).tolist() for damage in figures["small"]] for score in SCORES}
    rows = [
        (name, score, *(f"{x:.1%}" for x in np.mean(damage[score], 0)))
        for name, damage in {"the lab's models": small, **figures["real"]}.items()
        for score in SCORES
    ]
    columns = ("model", "score", *(f"{1 - share:.1%} removed" for share in SHARES))
    retrained = [
        (str(i), f"{damage['intact']:.4f}", f"{damage['half']:.4f}", f"{damage['half'] / damage['intact'] - 1:+.2%}")
        for i, damage in enumerate(figures["retrained"])
    ]
    return [
        Table("Damage", columns, rows),
        Table(
            "Half of the heads cut out, trained further", ("start", "intact", "half", "increase of the loss"), retrained
        ),
    ]


CLAIM = Claim(
    8,
    "Most heads can be removed",
    SENTENCES,
    f"""
Heads are ranked by `headwise.importance` (michel: the derivative of the loss by a gate on each head) and removed in one
step to each share, without training; random removal is the baseline. The lab's models are claim 4's text models, 2
layers of {TEXT_HEADS} heads, from several starts; the real ones are the bundled `minilm` (72 heads) and `smollm2` (270
heads), on passages of the novel that the lab's models were not trained on. Heads are never evaluated on the texts that
ranked them. Damage is the increase of the loss, as a share of the loss; for minilm, which has no loss of its own, 1 -
cosine with the full model's embedding. The first sentence holds where more than {HALF:.0%} of the heads can be removed,
share by share, before the mean damage exceeds {DAMAGE:.0%}. Then half of the heads of the lab's models are cut out, and
both they and the intact models are trained for {RETRAIN["steps"]} steps more; brought back is within {DAMAGE:.0%} of
the loss. It matters which heads go if the damage at {HALF:.0%} is smaller by score than at random in every model: over
the lab's starts, and over a real model's draws of the texts to score with and of the heads that go at random. All of
this in every start (or draw), or, where they disagree, by the 95 % interval of their mean.
""",
    run,
    verdicts,
    charts,
    tables,
)
