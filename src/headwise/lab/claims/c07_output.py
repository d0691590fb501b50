"""Claim 7: W_O, where heads meet: what it mixes, what its absence costs, what it can make up for."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.nn.blocks import TransformerBlock
from ...attention.nn.stack import Decoder
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point, range_over_starts
from ..model import TEXT_HEADS, TEXT_RECIPE, attentions, task_of
from ..starts import LEARNING, above, below, describe_mean, describe_need
from ..store import Lab
from ..train import TrainedModel, fit, quality

# the thresholds, written before the full run
WORSE = 0.01  # of the loss; more without W_O, in every start, is worse
MUCH = 0.5  # of the damage; at least this much recovered, in every start, is making up for it
LITTLE = 0.2  # at most this much, in every start, is not
NOTHING = 1e-12  # of a gradient in float64

SENTENCES = (
    "W_O is the only place where heads meet.",
    "Without W_O the heads' results are never combined, and a model gets clearly worse.",
    "W_O weighs the heads, say 40 % of the first expert, 30 % of the second.",
    "W_O can make up for a head that has collapsed to looking everywhere alike.",
)
RETRAIN: dict[str, Any] = {"steps": 200, "batch": 8, "rate": 1e-3}
WIDTH, HEADS, TOKENS = 24, 4, 7  # of the exact part


def run(lab: Lab) -> Figures:
    models = [lab.model(heads=TEXT_HEADS, seed=seed, **TEXT_RECIPE) for seed in lab.starts]
    without = [lab.model(heads=TEXT_HEADS, seed=seed, mix=False, **TEXT_RECIPE) for seed in lab.starts]
    return {
        "gradients": gradients(lab.seed),
        "scalars": scalars(lab.seed),
        "ranks": [ranks(model.decoder) for model in models],
        "loss": [model.loss for model in models],
        "loss_without": [model.loss for model in without],
        "learned": all(model.learned for model in models),
        "collapsed": [_collapse_record(lab, model) for model in models],
    }


def _block(seed: int, mix: bool) -> TransformerBlock:
    torch.manual_seed(seed)
    block = TransformerBlock(WIDTH, HEADS, dtype=torch.float64)
    if not mix:
        block.attention.W_O = nn.Identity()  # type: ignore[assignment]
    return block


def gradients(seed: int) -> Figures:
    """How much head 1 can change head 0's dimensions: at W_O's input, at its output, and after the block.

    The largest entry of the derivative by head 1's part of W_V, with W_O and without it.
    """
    slopes = {}
    with torch.random.fork_rng(devices=[]):
        for mix in (True, False):
            block = _block(seed, mix)
            x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
            activations: dict[str, Tensor] = {}
            block.attention.W_O.register_forward_hook(
                lambda _, inputs, output, activations=activations: activations.update(before=inputs[0], after=output)
            )
            activations["end"] = block(x)
            slopes["with W_O" if mix else "without"] = {
                place: _largest(activations[place][..., : WIDTH // HEADS], block.attention.W_V.weight, WIDTH // HEADS)
                for place in ("before", "after", "end")
            }
    return slopes


def _largest(activations: Tensor, weight: Tensor, dim: int) -> float:
    """The largest derivative of these activations by the second head's rows of a weight."""
    slopes = [
        torch.autograd.grad(number, weight, retain_graph=True)[0][dim : 2 * dim].abs().max()
        for number in activations.flatten()
    ]
    return float(torch.stack(slopes).max())


def scalars(seed: int) -> float:
    """One gate per head before W_O equals the same factors in W_V: the largest difference between the two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gated = _block(seed, True).attention
        folded = copy.deepcopy(gated)
        shares = torch.rand(HEADS, dtype=torch.float64)
        x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            rows = shares.repeat_interleave(WIDTH // HEADS)
            folded.W_V.weight.mul_(rows[:, None])
            folded.W_V.bias.mul_(rows)
            return float((gated(x, gates=shares) - folded(x)).abs().max())


def ranks(model: Decoder) -> float:
    """The mean effective rank of a head's part of W_O: exp of the entropy of its squared singular values."""
    counts = []
    for attention in attentions(model):
        parts = attention.W_O.weight.detach().double().unflatten(1, (attention.heads.query, -1)).transpose(0, 1)
        energy = torch.linalg.svdvals(parts) ** 2  # (heads, d_k)
        share = energy / energy.sum(1, keepdim=True)
        counts.append((-(share * share.log()).sum(1)).exp())
    return float(torch.cat(counts).mean())


def collapse(model: Decoder, layer: int, head: int) -> Decoder:
    """A copy with one head that attends uniformly: zero queries have equal scores for all keys."""
    collapsed_model = copy.deepcopy(model)
    linear = attentions(collapsed_model)[layer].W_Q
    dim = collapsed_model.shape.heads.dim
    with torch.no_grad():
        linear.weight[head * dim : (head + 1) * dim] = 0
        linear.bias[head * dim : (head + 1) * dim] = 0
    return collapsed_model


def _collapse_record(lab: Lab, model: TrainedModel) -> Figures:
    retrain = RETRAIN | {"steps": lab.budget.pick(2, RETRAIN["steps"], RETRAIN["steps"])}
    return lab.piece(
        "collapsed", {"model": lab.model_key(model.recipe), **retrain}, lambda: measure_collapse(model, lab, retrain)
    )


def measure_collapse(model: TrainedModel, lab: Lab, retrain: dict[str, Any]) -> Figures:
    """The head whose collapse costs most, chosen on one batch; then only W_O of its layer is trained."""
    task, decoder = task_of(model.recipe), model.decoder
    places = [(layer, head) for layer in range(len(decoder.blocks)) for head in range(model.recipe.heads)]
    damage = {}
    for index, place in enumerate(places):
        damage[place] = quality(collapse(decoder, *place), task, 1)[0]
        lab.progress(f"collapsing heads, start {model.recipe.seed}", index + 1, len(places))
    layer, head = max(damage, key=damage.__getitem__)

    def retrained_loss(start: Decoder) -> float:
        model_copy = copy.deepcopy(start).train()
        random = torch.Generator().manual_seed(model.recipe.seed + 1)
        return fit(model_copy, task, attentions(model_copy)[layer].W_O.parameters(), random, **retrain)[-1][1]

    collapsed_decoder = collapse(decoder, layer, head)
    return {
        "layer": layer,
        "head": head,
        "intact": model.loss,
        "collapsed": quality(collapsed_decoder, task)[0],
        "retrained": retrained_loss(collapsed_decoder),
        "intact_retrained": retrained_loss(decoder),  # the gain by more training of W_O in any case
    }


def recovered_share(row: Figures) -> float:
    """The share of the damage that is gone; the intact model's gain by the same training is not counted."""
    damage = row["collapsed"] - row["intact"]
    return 1 - (row["retrained"] - row["intact_retrained"]) / damage if damage else 0.0


def verdicts(figures: Figures) -> list[Verdict]:
    return [_meet(figures), _without(figures), _weighs(figures), _makes_up(figures)]


def _meet(figures: Figures) -> Verdict:
    with_output, without_output = figures["gradients"]["with W_O"], figures["gradients"]["without"]
    because = (
        f"The largest derivative of head 0's dimensions by head 1's W_V is {with_output['before']:.1g} before W_O and "
        f"{with_output['after']:.2g} after it. But without W_O it is {without_output['after']:.1g} after the "
        f"attention and {without_output['end']:.2g} at the end of the block: the norm and the feed-forward layer mix "
        "all heads too."
    )
    only_there = with_output["before"] <= NOTHING < with_output["after"] and without_output["after"] <= NOTHING
    if not only_there:
        return Verdict(SENTENCES[0], NOT, because, "exact, by gradients in float64")
    if without_output["end"] > NOTHING:
        only_if = "one looks at the attention layer alone; the feed-forward layer after it mixes heads as well"
        return Verdict(SENTENCES[0], ONLY_IF, because, "exact, by gradients in float64", only_if)
    return Verdict(SENTENCES[0], HOLDS, because, "exact, by gradients in float64")


def _without(figures: Figures) -> Verdict:
    increases = [100 * (b / a - 1) for a, b in zip(figures["loss"], figures["loss_without"], strict=True)]
    because = f"Trained without W_O, the loss is {np.mean(increases):+.2f}% against the twin with it."
    sure = describe_mean(increases, " %")
    if not figures["learned"]:
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=LEARNING)
    if above(increases, 100 * WORSE):
        return Verdict(SENTENCES[1], HOLDS, because, sure)
    if below(increases, 100 * WORSE):
        return Verdict(SENTENCES[1], NOT, because, sure)
    return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=describe_need(increases, 100 * WORSE, " %"))


def _weighs(figures: Figures) -> Verdict:
    because = (
        f"W_O has a matrix for every head. One number per head in its place could be moved into W_V (difference "
        f"{figures['scalars']:.1g}), so it would add nothing. In the trained models a head's part of W_O uses "
        f"{np.mean(figures['ranks']):.1f} directions of its {64 // TEXT_HEADS}."
    )
    refuted = figures["scalars"] <= NOTHING and min(figures["ranks"]) > 1.5
    sure = f"exact; {range_over_starts(figures['ranks'])}"
    if refuted:
        return Verdict(SENTENCES[2], NOT, because, sure)
    needs = "trained models whose parts of W_O use more than one direction"
    return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=needs)


def _makes_up(figures: Figures) -> Verdict:
    shares = [recovered_share(row) for row in figures["collapsed"]]
    damage = [row["collapsed"] / row["intact"] - 1 for row in figures["collapsed"]]
    because = (
        f"The head that hurts most when it collapses costs {np.mean(damage):.1%} of the loss; after training W_O of "
        f"its layer alone, {np.mean(shares):.0%} of that is gone (against the intact model with the same training)."
    )
    percent = [100 * x for x in shares]
    sure = describe_mean(percent, " %")
    if not figures["learned"] or min(damage) <= 0:
        needs = "models that learn their task and in which a collapsed head does damage"
        return Verdict(SENTENCES[3], CANNOT_TELL, because, sure, needs=needs)
    if above(percent, 100 * MUCH):
        return Verdict(SENTENCES[3], HOLDS, because, sure)
    if below(percent, 100 * LITTLE):
        return Verdict(SENTENCES[3], NOT, because, sure)
    if below(percent, 100 * MUCH):
        return Verdict(SENTENCES[3], ONLY_IF, because, sure, "a part of the damage is enough")
    return Verdict(SENTENCES[3], CANNOT_TELL, because, sure, needs=describe_need(percent, 100 * MUCH, " %"))


def charts(figures: Figures) -> list[Chart]:
    loss = {"text": [point("with W_O", figures["loss"]), point("without", figures["loss_without"])]}
    names = {"intact": "intact", "collapsed": "one head collapsed", "retrained": "W_O retrained"}
    names["intact_retrained"] = "intact, W_O retrained"
    stages = {"loss": [point(words, [row[key] for row in figures["collapsed"]]) for key, words in names.items()]}
    return [
        Chart("Trained with W_O and without", "", "loss on held-out data (nats)", loss),
        Chart("A collapsed head, and W_O trained again", "", "loss on held-out data (nats)", stages),
    ]


def tables(figures: Figures) -> list[Table]:
    gradient = [
        (name, *(f"{row[place]:.2g}" for place in ("before", "after", "end")))
        for name, row in figures["gradients"].items()
    ]
    starts = [
        (str(i), f"{a:.4f}", f"{b:.4f}", f"{row['layer']}.{row['head']}", f"{row['collapsed']:.4f}",
         f"{row['retrained']:.4f}", f"{row['intact_retrained']:.4f}", f"{recovered_share(row):.0%}")
        for i, (a, b, row) in enumerate(
            zip(figures["loss"], figures["loss_without"], figures["collapsed"], strict=True)
        )
    ]  # fmt: skip
    columns = ("start", "with W_O", "without", "head", "collapsed", "retrained", "intact, retrained", "recovered")
    return [
        Table(
            "Derivative of head 0's dimensions by head 1's W_V",
            ("", "before W_O", "after W_O", "after the block"),
            gradient,
        ),
        Table("Loss, start by start", columns, starts),
    ]


CLAIM = Claim(
    7,
    "W_O, where heads meet",
    SENTENCES,
    f"""
Exact part, in float64: in a block of {HEADS} heads, the derivative of head 0's dimensions by head 1's part of W_V,
before W_O, after it, and at the end of the block; the same with W_O replaced by the identity. One gate per head before
W_O is compared with the same factors multiplied into W_V. Trained part: claim 4's text model with {TEXT_HEADS} heads,
and a twin whose heads' outputs go straight to the residual stream; worse is more than {WORSE:.0%} of the loss. Then in
each trained model the head whose collapse costs most is made to attend uniformly (its queries are zero), and only W_O
of its layer is trained for {RETRAIN["steps"]} steps. At least {MUCH:.0%} of the damage gone is making up for it, at
most {LITTLE:.0%} is not. All of this in every start, or, where the starts disagree, by the 95 % interval of their mean.
""",
    run,
    verdicts,
    charts,
    tables,
)
