"""Claim 10: grouped and multi-query attention, quality against cache at equal training, and decoding speed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from ...attention.nn.stack import Decoder
from ...heads import Heads
from ...shapes import Shape
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..model import TEXT_HEADS, TEXT_RECIPE, attentions, build
from ..starts import LEARNING, above, below, describe_mean, describe_need
from ..store import Lab

# the thresholds, written before the full run
TOLERANCE = 0.01  # of the loss: at or below this, quality is kept; above it, it is not
FASTER = 1.1  # times the speed

SENTENCES = (
    "Grouped-query attention keeps the quality of multi-head attention.",
    "Multi-query attention, a single key/value head, costs quality.",
    "They shrink the KV cache by the number of query heads that share a key/value head.",
    "They decode faster.",
)
KV_HEADS = (8, 4, 2, 1)
GROUPED_KV_HEADS = (4, 2)
# decoding is timed on a larger model with random weights: its speed does not depend on its weights
TIMED = {"layers": 4, "width": 512, "heads": 8, "batch": 8}
ROUNDS, STEPS = 5, 8


def run(lab: Lab) -> Figures:
    quality = {}
    for kv in KV_HEADS:
        options = {} if kv == TEXT_HEADS else {"kv_heads": kv}
        recipe = {"heads": TEXT_HEADS, **options, **TEXT_RECIPE}
        outcomes = [lab.outcome(seed=seed, **recipe) for seed in lab.starts]
        untrained = build(lab.recipe(seed=lab.seed, **recipe))
        quality[kv] = {
            "loss": [row["loss"] for row in outcomes],
            "learned": all(row["learned"] for row in outcomes),
            "parameters": sum(p.numel() for p in untrained.parameters()),
            "cache": cache_bytes(untrained),
        }
    contexts = lab.budget.pick((16,), (128, 1024), (128, 1024, 4096))
    key = {"contexts": contexts, "device": lab.device, **TIMED}
    return {"quality": quality, "speed": lab.piece("decoding", key, lambda: decoding(contexts, lab))}


def cache_bytes(model: Decoder) -> int:
    """Bytes per token in the cache: one key and one value per key/value head and layer."""
    linears = [linear for attention in attentions(model) for linear in (attention.W_K, attention.W_V)]
    return sum(linear.out_features * linear.weight.element_size() for linear in linears)


def decoding(contexts: tuple[int, ...], lab: Lab) -> Figures:
    """Milliseconds per token at each context: the best of interleaved rounds, so that other load affects all alike."""
    milliseconds: Figures = {}
    for context in contexts:
        models = {kv: _timed_model(kv, context + ROUNDS * STEPS + 1, lab.device) for kv in KV_HEADS}
        caches = {kv: _fill_caches(model, context) for kv, model in models.items()}
        best = dict.fromkeys(KV_HEADS, float("inf"))
        rounds = lab.budget.pick(1, ROUNDS, ROUNDS)
        for turn in range(rounds):
            for kv in KV_HEADS:
                best[kv] = min(best[kv], _milliseconds(models[kv], caches[kv], lab.device))
            lab.progress(f"decoding at {context}", turn + 1, rounds)
        milliseconds[str(context)] = {str(kv): ms for kv, ms in best.items()}
    return milliseconds


def _timed_model(kv: int, length: int, device: str) -> Decoder:
    heads = Heads.split(TIMED["width"], TIMED["heads"], kv)
    shape = Shape(layers=TIMED["layers"], heads=heads, ffn=4 * TIMED["width"], vocab=256, max_length=length, head="own")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(shape).to(device).eval()


@torch.no_grad()
def _fill_caches(model: Decoder, context: int) -> Any:
    caches = model.cache(context + ROUNDS * STEPS + 1)
    ids = torch.zeros(TIMED["batch"], context, dtype=torch.long, device=next(model.parameters()).device)
    model.hidden(ids, cache=caches)
    return caches


@torch.no_grad()
def _milliseconds(model: Decoder, caches: Any, device: str) -> float:
    step = torch.zeros(TIMED["batch"], 1, dtype=torch.long, device=device)
    _wait(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        model.hidden(step, cache=caches)
    _wait(device)
    return 1000 * (time.perf_counter() - began) / STEPS


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def verdicts(figures: Figures) -> list[Verdict]:
    return [_grouped(figures), _multi(figures), _cache(figures), _speed(figures)]


def loss_increase(figures: Figures, kv: int) -> list[float]:
    """The increase of the loss over the twin with one key/value head per query head, in percent."""
    quality = figures["quality"]
    return [100 * (b / a - 1) for a, b in zip(quality[str(TEXT_HEADS)]["loss"], quality[str(kv)]["loss"], strict=True)]


def _all_learned(figures: Figures) -> bool:
    return all(row["learned"] for row in figures["quality"].values())


def _grouped(figures: Figures) -> Verdict:
    losses = {kv: loss_increase(figures, kv) for kv in GROUPED_KV_HEADS}
    words = " and ".join(f"{np.mean(increases):+.2f}% with {kv} key/value heads" for kv, increases in losses.items())
    because = f"The loss against {TEXT_HEADS} of them: {words}."
    sure = "; ".join(f"{kv}: {describe_mean(increases, ' %')}" for kv, increases in losses.items())
    if not _all_learned(figures):
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=LEARNING)
    same = [kv for kv, increases in losses.items() if below(increases, 100 * TOLERANCE)]
    worse = [kv for kv, increases in losses.items() if above(increases, 100 * TOLERANCE)]
    needs = "; ".join(
        f"{describe_need(increases, 100 * TOLERANCE, ' %')} with {kv} key/value heads"
        for kv, increases in losses.items()
        if kv not in same + worse
    )
    if needs:
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=needs)
    if not worse:
        return Verdict(SENTENCES[0], HOLDS, because, sure)
    if not same:
        return Verdict(SENTENCES[0], NOT, because, sure)
    return Verdict(SENTENCES[0], ONLY_IF, because, sure, f"at least {min(same)} key/value heads are left")


def _multi(figures: Figures) -> Verdict:
    increases = loss_increase(figures, 1)
    because = f"With one key/value head the loss is {np.mean(increases):+.2f}% against {TEXT_HEADS} of them."
    sure = describe_mean(increases, " %")
    if not _all_learned(figures):
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=LEARNING)
    if above(increases, 100 * TOLERANCE):
        return Verdict(SENTENCES[1], HOLDS, because, sure)
    if below(increases, 100 * TOLERANCE):
        return Verdict(SENTENCES[1], NOT, because, sure)
    return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=describe_need(increases, 100 * TOLERANCE, " %"))


def _cache(figures: Figures) -> Verdict:
    sizes = {int(kv): row["cache"] for kv, row in figures["quality"].items()}
    exact = all(sizes[TEXT_HEADS] * kv == size * TEXT_HEADS for kv, size in sizes.items())
    because = "Bytes per token: " + ", ".join(f"{size:,} with {kv}" for kv, size in sizes.items()) + " key/value heads."
    return Verdict(SENTENCES[2], HOLDS if exact else NOT, because, "exact, counted in the model")


def _speed(figures: Figures) -> Verdict:
    ratios = {int(c): times[str(TIMED["heads"])] / times["1"] for c, times in figures["speed"].items()}
    words = ", ".join(f"{ratio:.2f} times at {context:,} tokens" for context, ratio in ratios.items())
    because = f"One key/value head against {TIMED['heads']}: {words} of context, batch {TIMED['batch']}."
    sure = f"best of {ROUNDS} interleaved rounds of {STEPS} tokens, on one machine"
    fast = [context for context, ratio in ratios.items() if ratio >= FASTER]
    if len(fast) == len(ratios):
        return Verdict(SENTENCES[3], HOLDS, because, sure)
    if not fast:
        return Verdict(SENTENCES[3], NOT, because, sure)
    slow = max(set(ratios) - set(fast))
    if min(fast) < slow:
        needs = "more rounds on a machine with nothing else to do: a shorter context was faster and a longer one not"
        return Verdict(SENTENCES[3], CANNOT_TELL, because, sure, needs=needs)
    return Verdict(
        SENTENCES[3], ONLY_IF, because, sure, f"the context is long (at {slow:,} tokens it makes no difference)"
    )


def charts(figures: Figures) -> list[Chart]:
    quality = figures["quality"]
    loss = {"loss": [point(f"{kv} KV, {row['cache']:,} B", row["loss"]) for kv, row in quality.items()]}
    relative: dict[str, list[Any]] = {
        f"{kv} KV": [point(int(c), [times[str(TIMED["heads"])] / times[kv]]) for c, times in figures["speed"].items()]
        for kv in map(str, KV_HEADS)
    }
    change = {"loss": [point(f"{kv} KV", loss_increase(figures, int(kv))) for kv in quality if kv != "8"]}
    return [
        Chart("Quality against cache, equal training", "KV heads, cache per token", "loss (nats)", loss),
        Chart("The same, against the twin with 8", "KV heads", "increase of the loss, %", change),
        Chart("Decoding speed against 8 KV heads", "context", "times as fast", relative, log_x=True),
    ]


def tables(figures: Figures) -> list[Table]:
    rows = [
        (kv, f"{row['cache']:,}", f"{row['parameters']:,}", f"{np.mean(row['loss']):.4f}",
         f"{min(row['loss']):.4f} to {max(row['loss']):.4f}")
        for kv, row in figures["quality"].items()
    ]  # fmt: skip
    speed = [(f"{int(c):,}", *(f"{times[str(kv)]:.2f}" for kv in KV_HEADS)) for c, times in figures["speed"].items()]
    return [
        Table("Quality", ("KV heads", "cache per token, bytes", "parameters", "loss", "over the starts"), rows),
        Table("Milliseconds per token", ("context", *(f"{kv} KV" for kv in KV_HEADS)), speed),
    ]


CLAIM = Claim(
    10,
    "Grouped and multi-query attention",
    SENTENCES,
    f"""
Claim 4's text model with {TEXT_HEADS} query heads and 8, 4, 2 or 1 key/value heads, trained on the same data for the
same steps; nothing makes up for the parameters that W_K and W_V lose. Quality is kept if the loss is at most
{TOLERANCE:.0%} above the twin's, and lost if it is more than that: in every start, or, where the starts disagree, by
the 95 % interval of their mean. Decoding is timed on a decoder of {TIMED["layers"]} layers, width {TIMED["width"]} and
{TIMED["heads"]} query heads with random weights, batch {TIMED["batch"]}, a filled cache and one new token at a time;
from {FASTER} times the speed on it counts as faster.
""",
    run,
    verdicts,
    charts,
    tables,
)
