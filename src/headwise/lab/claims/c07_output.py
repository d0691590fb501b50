"""Claim 7: W_O, where heads meet: what it mixes, what its absence costs, what it can make up for."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.nn.blocks import TransformerBlock
from ...attention.nn.stack import Decoder
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point, starts_seen
from ..model import TEXT_HEADS, TEXT_RECIPE, attentions, task_of
from ..store import Lab
from ..train import Trained, fit, quality

# the thresholds, written before the full run
WORSE = 0.01  # of the loss; more without W_O, in every start, is worse
MUCH = 0.5  # of the damage; at least this much returned, in every start, is making up for it
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
    models = [lab.trained(heads=TEXT_HEADS, seed=seed, **TEXT_RECIPE) for seed in lab.starts]
    without = [lab.trained(heads=TEXT_HEADS, seed=seed, mix=False, **TEXT_RECIPE) for seed in lab.starts]
    return {
        "gradients": gradients(lab.seed),
        "scalars": scalars(lab.seed),
        "ranks": [ranks(trained.model) for trained in models],
        "loss": [trained.loss for trained in models],
        "loss_without": [trained.loss for trained in without],
        "learned": all(trained.learned for trained in models),
        "collapsed": [_collapsed(lab, trained) for trained in models],
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
            recorded: dict[str, Tensor] = {}
            block.attention.W_O.register_forward_hook(
                lambda _, inputs, output, recorded=recorded: recorded.update(before=inputs[0], after=output)
            )
            recorded["end"] = block(x)
            slopes["with W_O" if mix else "without"] = {
                place: _largest(recorded[place][..., : WIDTH // HEADS], block.attention.W_V.weight, WIDTH // HEADS)
                for place in ("before", "after", "end")
            }
    return slopes


def _largest(place: Tensor, weight: Tensor, dim: int) -> float:
    """The largest derivative of these numbers by the second head's rows of a weight."""
    slopes = [
        torch.autograd.grad(number, weight, retain_graph=True)[0][dim : 2 * dim].abs().max()
        for number in place.flatten()
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


def _collapsed(lab: Lab, trained: Trained) -> Figures:
    retrain = RETRAIN | {"steps": lab.budget.pick(2, RETRAIN["steps"], RETRAIN["steps"])}
    return lab.piece(
        "collapsed", {"model": lab.made_of(trained.recipe), **retrain}, lambda: collapsed(trained, lab, retrain)
    )


def collapsed(trained: Trained, lab: Lab, retrain: dict[str, Any]) -> Figures:
    """The head whose collapse costs most, chosen on one batch; then only W_O of its layer is trained."""
    task, model = task_of(trained.recipe), trained.model
    places = [(layer, head) for layer in range(len(model.blocks)) for head in range(trained.recipe.heads)]
    damage = {}
    for done, place in enumerate(places):
        damage[place] = quality(collapse(model, *place), task, 1)[0]
        lab.progress(f"collapsing heads, start {trained.recipe.seed}", done + 1, len(places))
    layer, head = max(damage, key=damage.__getitem__)

    def retrained(start: Decoder) -> float:
        model_copy = copy.deepcopy(start).train()
        random = torch.Generator().manual_seed(trained.recipe.seed + 1)
        return fit(model_copy, task, attentions(model_copy)[layer].W_O.parameters(), random, **retrain)[-1][1]

    without = collapse(model, layer, head)
    return {
        "layer": layer,
        "head": head,
        "intact": trained.loss,
        "collapsed": quality(without, task)[0],
        "retrained": retrained(without),
        "intact_retrained": retrained(model),  # what more training of W_O brings anyway
    }


def returned(one: Figures) -> float:
    """The share of the damage that is gone; what the intact model gains by the same training is not counted."""
    damage = one["collapsed"] - one["intact"]
    return 1 - (one["retrained"] - one["intact_retrained"]) / damage if damage else 0.0


def verdicts(figures: Figures) -> list[Verdict]:
    return [_meet(figures), _without(figures), _weighs(figures), _makes_up(figures)]


def _meet(figures: Figures) -> Verdict:
    ours, bare = figures["gradients"]["with W_O"], figures["gradients"]["without"]
    because = (
        f"The largest slope of head 0's place by head 1's W_V is {ours['before']:.1g} before W_O and "
        f"{ours['after']:.2g} after it. But with W_O taken out it is {bare['after']:.1g} behind the "
        f"attention and {bare['end']:.2g} at the end of the block: the norm and the feed-forward layer mix all too."
    )
    only = ours["before"] <= NOTHING < ours["after"] and bare["after"] <= NOTHING
    if not only:
        return Verdict(SENTENCES[0], NOT, because, "exact, by gradients in float64")
    if bare["end"] > NOTHING:
        only_if = "one looks at the attention layer alone; the feed-forward layer behind it mixes heads as well"
        return Verdict(SENTENCES[0], ONLY_IF, because, "exact, by gradients in float64", only_if)
    return Verdict(SENTENCES[0], HOLDS, because, "exact, by gradients in float64")


def _without(figures: Figures) -> Verdict:
    each = [b / a - 1 for a, b in zip(figures["loss"], figures["loss_without"], strict=True)]
    because = f"Trained without W_O, the loss is {np.mean(each):+.2%} against the twin with it."
    sure = starts_seen([100 * x for x in each], " %")
    if not figures["learned"]:
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure)
    if min(each) > WORSE:
        return Verdict(SENTENCES[1], HOLDS, because, sure)
    return Verdict(SENTENCES[1], NOT if max(each) <= WORSE else CANNOT_TELL, because, sure)


def _weighs(figures: Figures) -> Verdict:
    because = (
        f"W_O has a matrix for every head. A number a head in its place could be moved into W_V (difference "
        f"{figures['scalars']:.1g}), so it would add nothing. In the trained models a head's part of W_O uses "
        f"{np.mean(figures['ranks']):.1f} directions of its {64 // TEXT_HEADS}."
    )
    told = figures["scalars"] <= NOTHING and min(figures["ranks"]) > 1.5
    return Verdict(SENTENCES[2], NOT if told else CANNOT_TELL, because, f"exact; {starts_seen(figures['ranks'])}")


def _makes_up(figures: Figures) -> Verdict:
    shares = [returned(one) for one in figures["collapsed"]]
    damage = [one["collapsed"] / one["intact"] - 1 for one in figures["collapsed"]]
    because = (
        f"The head that hurts most when it collapses costs {np.mean(damage):.1%} of the loss; after training W_O of "
        f"its layer alone, {np.mean(shares):.0%} of that is gone (against the intact model with the same training)."
    )
    sure = starts_seen([100 * x for x in shares], " %")
    if not figures["learned"] or min(damage) <= 0:
        return Verdict(SENTENCES[3], CANNOT_TELL, because, sure)
    if min(shares) >= MUCH:
        return Verdict(SENTENCES[3], HOLDS, because, sure)
    if max(shares) <= LITTLE:
        return Verdict(SENTENCES[3], NOT, because, sure)
    if max(shares) < MUCH:
        return Verdict(SENTENCES[3], ONLY_IF, because, sure, "a part of the damage is enough")
    return Verdict(SENTENCES[3], CANNOT_TELL, because, sure)


def charts(figures: Figures) -> list[Chart]:
    loss = {"text": [point("with W_O", figures["loss"]), point("without", figures["loss_without"])]}
    names = {"intact": "intact", "collapsed": "one head collapsed", "retrained": "W_O retrained"}
    names["intact_retrained"] = "intact, W_O retrained"
    back = {"loss": [point(words, [one[key] for one in figures["collapsed"]]) for key, words in names.items()]}
    return [
        Chart("Trained with W_O and without", "", "loss on held-out data (nats)", loss),
        Chart("A collapsed head, and W_O trained again", "", "loss on held-out data (nats)", back),
    ]


def tables(figures: Figures) -> list[Table]:
    gradient = [
        (name, *(f"{one[place]:.2g}" for place in ("before", "after", "end")))
        for name, one in figures["gradients"].items()
    ]
    starts = [
        (str(i), f"{a:.4f}", f"{b:.4f}", f"{one['layer']}.{one['head']}", f"{one['collapsed']:.4f}",
         f"{one['retrained']:.4f}", f"{one['intact_retrained']:.4f}", f"{returned(one):.0%}")
        for i, (a, b, one) in enumerate(
            zip(figures["loss"], figures["loss_without"], figures["collapsed"], strict=True)
        )
    ]  # fmt: skip
    head = ("start", "with W_O", "without", "head", "collapsed", "retrained", "intact, retrained", "returned")
    return [
        Table("Slope of head 0's place by head 1", ("", "before W_O", "after W_O", "after the block"), gradient),
        Table("Loss, start by start", head, starts),
    ]


CLAIM = Claim(
    7,
    "W_O, where heads meet",
    SENTENCES,
    f"""
Exact part, in float64: in a block of {HEADS} heads, the derivative of head 0's dimensions by head 1's part of W_V,
before W_O, after it, and at the end of the block; the same with W_O replaced by the identity. One gate per head before
W_O is compared with the same factors multiplied into W_V. Trained part: claim 4's text model with {TEXT_HEADS} heads,
and a twin whose heads' outputs go straight to the residual stream; worse is more than {WORSE:.0%} of the loss in every
start. Then in each trained model the head whose collapse costs most is made to attend uniformly (its queries are zero),
and only W_O of its layer is trained for {RETRAIN["steps"]} steps. At least {MUCH:.0%} of the damage gone in every start
is making up for it, at most {LITTLE:.0%} is not.
""",
    run,
    verdicts,
    charts,
    tables,
)
