"""Claim 9: what the division by sqrt(d_k) is for, at the start of training and after it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention.functional import weights
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..model import TEXT_HEADS, TEXT_RECIPE, task_of
from ..starts import LEARNING, above, below, describe_mean, describe_need
from ..store import Lab
from ..train import TrainedModel, held_out

# the thresholds, written before the full run
SATURATED = 0.5  # of the gradient that passes equal weights; less counts as saturated
WORSE = 0.01  # of the loss; more is worse
STILL = 0.5  # of the entropy that the scaled model has; less after training is still saturated

SENTENCES = (
    "Without the division by √d_k, dot products grow with d_k, softmax saturates and its gradients vanish.",
    "So a model without the division trains worse.",
    "Without it, heads are still saturated after training.",
)
TOKENS, ROWS = 64, 4096
SIZES = (1, 4, 16, 64, 256)
HEAD_DIM = 64  # the head size that the first verdict is about
SMALL_STD, WIDTH = 0.02, 768  # how GPT-2 and BERT start, at their width
MOST_STARTS_OF_ONE_HEAD = 5  # of a single head of 64: its losses with and without the division differ by a quarter


def run(lab: Lab) -> Figures:
    starts: dict[str, Figures] = {}
    for name, size in (("unit variance", 1.0), ("weights of std 0.02", SMALL_STD * math.sqrt(WIDTH))):
        for scaled in (True, False):
            words = f"{name}, {'with' if scaled else 'without'} 1/√d_k"
            starts[words] = {str(d): at_start(d, size, scaled, lab.seed) for d in SIZES}
    groups = {}
    for heads in (TEXT_HEADS, 1):
        seeds = lab.starts[:MOST_STARTS_OF_ONE_HEAD] if heads == 1 else lab.starts
        for scaled in (True, False):
            recipe = {"heads": heads, "scale": scaled, **TEXT_RECIPE}
            outcomes = [lab.outcome(seed=seed, **recipe) for seed in seeds]
            groups[f"{heads} {scaled}"] = {
                "heads": heads,
                "d_k": lab.recipe(seed=lab.seed, **recipe).head_dim,
                "scaled": scaled,
                "loss": [row["loss"] for row in outcomes],
                "curves": [row["curve"] for row in outcomes],
                "learned": all(row["learned"] for row in outcomes),
                "entropy": [lab.figure("entropy", entropy, seed=seed, **recipe) for seed in seeds],
            }
    return {"at_start": starts, "trained": groups}


def at_start(dim: int, size: float, scaled: bool, seed: int) -> Figures:
    """Statistics of the softmax over 64 keys for random queries and keys with components of this standard deviation."""
    random = torch.Generator().manual_seed(seed)
    q = size * torch.randn(ROWS // TOKENS, 1, TOKENS, dim, generator=random)
    k = size * torch.randn(ROWS // TOKENS, 1, TOKENS, dim, generator=random)
    scale = dim**-0.5 if scaled else 1.0
    p = weights(q, k, scale=scale).double()
    return {
        "score_std": float((q @ k.transpose(2, 3) * scale).std()),
        "entropy": float((-(p * p.clamp(min=1e-300).log()).sum(-1)).mean()) / math.log(TOKENS),
        "largest": float(p.max(-1).values.mean()),
        "gradient": jacobian_trace(p) / (1 - 1 / TOKENS),
    }


def jacobian_trace(p: Tensor) -> float:
    """The trace of softmax's Jacobian, diag(p) - p p^T, which is sum p (1 - p): 0 for a row with one weight of 1."""
    return float((p * (1 - p)).sum(-1).mean())


@torch.no_grad()
def entropy(model: TrainedModel) -> float:
    """Mean entropy over heads and queries, as a share of the maximum for causal rows."""
    inputs = held_out(task_of(model.recipe), 1)[0].inputs
    device = next(model.decoder.parameters()).device
    means = [stats.entropy.mean() for stats in model.decoder.stats(inputs.to(device))]
    largest = np.log(np.arange(1, inputs.shape[1] + 1)).mean()
    return float(torch.stack([torch.as_tensor(x) for x in means]).mean()) / float(largest)


def verdicts(figures: Figures) -> list[Verdict]:
    return [_saturates(figures), _trains(figures), _after(figures)]


def _saturates(figures: Figures) -> Verdict:
    gradient = {name: sizes[str(HEAD_DIM)]["gradient"] for name, sizes in figures["at_start"].items()}
    unit, small = "unit variance, without 1/√d_k", "weights of std 0.02, without 1/√d_k"
    because = (
        f"Of the gradient that equal weights let through, d_k {HEAD_DIM} without the division leaves "
        f"{gradient[unit]:.0%} when queries and keys have unit variance "
        f"({gradient[unit.replace('without', 'with')]:.0%} with it), and {gradient[small]:.0%} with weights of "
        "standard deviation 0.02 at width 768, as GPT-2 and BERT start. "
        "The spread of the scores grows as √d_k in both."
    )
    sure = f"{ROWS:,} rows of {TOKENS} keys"
    if gradient[unit.replace("without", "with")] < SATURATED:
        needs = "queries and keys that the division keeps from saturating: more of them, or fewer keys"
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=needs)
    if gradient[unit] >= SATURATED:
        return Verdict(SENTENCES[0], NOT, because, sure)
    if gradient[small] >= SATURATED:
        only_if = "queries and keys start with unit variance; with the small weights of GPT-2 and BERT they do not"
        return Verdict(SENTENCES[0], ONLY_IF, because, sure, only_if)
    return Verdict(SENTENCES[0], HOLDS, because, sure)


def _pairs(figures: Figures, key: str) -> dict[int, tuple[list[float], list[float]]]:
    """{d_k: (with, without)} over the starts."""
    groups: dict[int, dict[bool, list[float]]] = {}
    for group in figures["trained"].values():
        groups.setdefault(group["d_k"], {})[group["scaled"]] = group[key]
    return {d: (pair[True], pair[False]) for d, pair in groups.items()}


def _trains(figures: Figures) -> Verdict:
    pairs = _pairs(figures, "loss")
    increases = {d: [100 * (b / a - 1) for a, b in zip(*pair, strict=True)] for d, pair in pairs.items()}
    words = "; ".join(f"d_k {d}: {np.mean(values):+.1f}%" for d, values in increases.items())
    because = f"The loss without the division, against the twin with it: {words}."
    sure = "; ".join(f"d_k {d}: {describe_mean(values, ' %')}" for d, values in increases.items())
    if not all(group["learned"] for group in figures["trained"].values() if group["scaled"]):
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=LEARNING)
    worse = [d for d, values in increases.items() if above(values, 100 * WORSE)]
    fine = [d for d, values in increases.items() if below(values, 100 * WORSE)]
    needs = {d: describe_need(values, 100 * WORSE, " %") for d, values in increases.items()}
    return _by_size(SENTENCES[1], because, sure, worse, fine, needs)


def _after(figures: Figures) -> Verdict:
    pairs = _pairs(figures, "entropy")
    ratios = {d: [b / a for a, b in zip(*pair, strict=True)] for d, pair in pairs.items()}
    words = "; ".join(f"d_k {d}: {np.mean(b):.2f} against {np.mean(a):.2f}" for d, (a, b) in pairs.items())
    because = f"Entropy after training, as a share of what equal weights have, without and with the division: {words}."
    sure = "; ".join(f"d_k {d}: ratio in {describe_mean(values)}" for d, values in ratios.items())
    still = [d for d, values in ratios.items() if below(values, STILL)]
    fine = [d for d, values in ratios.items() if above(values, STILL)]
    needs = {d: describe_need(values, STILL) for d, values in ratios.items()}
    return _by_size(SENTENCES[2], because, sure, still, fine, needs)


def _by_size(sentence: str, because: str, sure: str, yes: list[int], no: list[int], needs: dict[int, str]) -> Verdict:
    """Holds at every d_k, at none, or at some; needs: {d_k: what it would take to tell}."""
    if len(yes) == len(needs):
        return Verdict(sentence, HOLDS, because, sure)
    if len(no) == len(needs):
        return Verdict(sentence, NOT, because, sure)
    if yes and len(yes) + len(no) == len(needs):
        sizes = " or ".join(map(str, yes))
        return Verdict(sentence, ONLY_IF, because, sure, f"d_k is {sizes} (not at {' or '.join(map(str, no))})")
    missing = "; ".join(f"{words} at d_k {d}" for d, words in needs.items() if d not in yes + no)
    return Verdict(sentence, CANNOT_TELL, because, sure, needs=missing)


def charts(figures: Figures) -> list[Chart]:
    gradient: dict[str, list[Any]] = {
        name: [point(int(d), [row["gradient"]]) for d, row in sizes.items()]
        for name, sizes in figures["at_start"].items()
    }
    curves: dict[str, list[Any]] = {}
    for row in figures["trained"].values():
        name = f"d_k {row['d_k']}, {'with' if row['scaled'] else 'without'}"
        steps = [step for step, _ in row["curves"][0]]
        curves[name] = [point(step, [start[i][1] for start in row["curves"]]) for i, step in enumerate(steps)]
    return [
        Chart("At the start", "d_k", "gradient let through (1: equal weights)", gradient, log_x=True),
        Chart("Training on text", "training step", "loss on held-out data (nats)", curves),
    ]


def tables(figures: Figures) -> list[Table]:
    rows = [
        (name, d, f"{row['score_std']:.2f}", f"{row['entropy']:.2f}", f"{row['largest']:.2f}", f"{row['gradient']:.2f}")
        for name, sizes in figures["at_start"].items()
        for d, row in sizes.items()
    ]
    trained = [
        (str(row["d_k"]), "yes" if row["scaled"] else "no", f"{np.mean(row['loss']):.4f}",
         f"{min(row['loss']):.4f} to {max(row['loss']):.4f}", f"{np.mean(row['entropy']):.2f}")
        for row in figures["trained"].values()
    ]  # fmt: skip
    return [
        Table("At the start", ("queries and keys", "d_k", "std of scores", "entropy", "largest", "gradient"), rows),
        Table("After training", ("d_k", "1/√d_k", "loss", "over the starts", "entropy"), trained),
    ]


CLAIM = Claim(
    9,
    "The division by √d_k",
    SENTENCES,
    f"""
At the start: random queries and keys, {TOKENS} keys per row; once with components of unit variance, the assumption of
the 2017 paper, once with those that weights of standard deviation 0.02 give at width {WIDTH}. Entropy is a share of
that of equal weights; the gradient is the trace of softmax's Jacobian, a share of the same. Below {SATURATED:.0%} of
it, at d_k {HEAD_DIM}, counts as saturated. In training: claim 4's text models with heads of 8 and of 64, and their
twins whose queries are √d_k larger, which undoes the division and nothing else. Worse is more than {WORSE:.0%} of the
loss, still saturated less than {STILL:.0%} of the twin's entropy: in every start, or, where the starts disagree, by the
95 % interval of their mean. The models with one head of 64 have {MOST_STARTS_OF_ONE_HEAD} starts at most: their losses
differ by a quarter and more.
""",
    run,
    verdicts,
    charts,
    tables,
)
