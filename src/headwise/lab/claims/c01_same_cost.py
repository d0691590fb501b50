"""Claim 1: splitting into h heads leaves parameters and compute the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...attention.nn.module import MultiHeadAttention
from ...attention.nn.stack import Encoder
from ...card import read
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..races import device_name, ratios, seconds
from ..store import Lab

# the thresholds, written before the full run
SAME_TIME = 1.25  # times the fastest: at most this, in every race, counts as the same time
USUAL = (32, 128)  # the d_k that published models have
LITTLE = 0.1  # the share of a layer's multiply-adds up to which a term may be left out

SENTENCES = (
    "Splitting into h heads leaves the parameters the same: 4 d_model^2 per layer, 2,359,296 for BERT-base.",
    "Splitting into h heads leaves the compute the same.",
    "Splitting into h heads leaves the time the same.",
    "Attention takes d^2 operations per token.",
    "In BERT-base, attention is 28 of 110 million parameters.",
)
WIDTH = 768
HEADS = tuple(h for h in range(1, WIDTH + 1) if WIDTH % h == 0)
CONTEXT = 512  # BERT-base's
USUAL_HEADS = 12
WEIGHTS = 28_311_552  # 12 x 4 x 768^2


def run(lab: Lab) -> Figures:
    head_counts = lab.budget.pick((1, 12, 768), HEADS, HEADS)
    timed_counts = lab.budget.pick((1, 12), (1, 3, 12, 48, 192, 768), (1, 2, 3, 6, 12, 24, 48, 96, 192, 384, 768))
    tokens = lab.budget.pick((16,), (128,), (128, 512))
    return {
        "parameters": {h: _parameters(h) for h in head_counts},
        "flops": {h: _flops(h, CONTEXT) for h in head_counts},
        "terms": {t: _flops(USUAL_HEADS, t) for t in (16, 128, 512, 1536, 4096, 16384)},
        "seconds": {
            f"{way}, {t} tokens": seconds(
                lab,
                "heads-time",
                {"way": way, "tokens": t, "heads": timed_counts},
                _contestants(way, t, timed_counts, lab.device),
            )
            for way, sizes in (("headwise", tokens), ("textbook", tokens[:1]))
            for t in sizes
        },
        "where": device_name(lab.device),
        "bert": _bert(),
    }


def _parameters(heads: int) -> dict[str, int]:
    attention = MultiHeadAttention(WIDTH, heads, device="meta")
    counts = {name: p.numel() for name, p in attention.named_parameters()}
    return {kind: sum(n for name, n in counts.items() if name.endswith(kind)) for kind in ("weight", "bias")}


def _flops(heads: int, tokens: int) -> dict[str, int]:
    """Multiply-adds of one layer, as PyTorch's counter sees the textbook's operations, and the exponentials."""
    attention = MultiHeadAttention(WIDTH, heads, device="meta")
    x = torch.empty(1, tokens, WIDTH, device="meta")
    with FlopCounterMode(display=False) as whole:
        textbook(attention, x)
    with FlopCounterMode(display=False) as linear:
        for layer in (attention.W_Q, attention.W_K, attention.W_V, attention.W_O):
            layer(x)
    projections, total = linear.get_total_flops() // 2, whole.get_total_flops() // 2
    return {"projections": projections, "attention": total - projections, "exponentials": heads * tokens * tokens}


def textbook(attention: MultiHeadAttention, x: Tensor) -> Tensor:
    """Project, split, softmax(Q K^T / sqrt(d_k)) V with the T x T weights stored, join, project."""
    h, d = attention.heads.query, attention.heads.dim
    q, k, v = (W(x).unflatten(-1, (h, d)).transpose(1, 2) for W in (attention.W_Q, attention.W_K, attention.W_V))
    weights = (q @ k.mT / math.sqrt(d)).softmax(-1)  # (B, h, T, T)
    out: Tensor = attention.W_O((weights @ v).transpose(1, 2).flatten(2))
    return out


def _contestants(way: str, tokens: int, heads: tuple[int, ...], device: str) -> Any:
    def make() -> dict[str, Any]:
        x = torch.randn(1, tokens, WIDTH, device=device, generator=torch.Generator(device).manual_seed(0))
        layers = {h: MultiHeadAttention(WIDTH, h, device=device) for h in heads}
        forward = textbook if way == "textbook" else MultiHeadAttention.__call__
        return {str(h): lambda layer=layer: forward(layer, x) for h, layer in layers.items()}

    return make


def _bert() -> Figures:
    """BERT-base's parameters by part: from its card, and counted in the model built on the meta device."""
    names = {"attention": ".attention.", "ffn": ".ffn.", "embeddings": "embed."}
    counts = dict.fromkeys((*names, "rest"), 0)
    weights = 0
    for name, p in Encoder.from_shape("bert-base", device="meta").named_parameters():
        part = next((part for part, key in names.items() if key in name and "norm" not in name), "rest")
        counts[part] += p.numel()
        weights += p.numel() if part == "attention" and name.endswith("weight") else 0
    card = read("bert-base").parameters
    return {"card": card.to_json(), "built": counts, "weights": weights}


def verdicts(figures: Figures) -> list[Verdict]:
    judges = (_same_parameters, _same_compute, _same_time, _squares, _of_bert)
    return [judge(figures) for judge in judges]


def _same_parameters(figures: Figures) -> Verdict:
    counts = figures["parameters"].values()
    same = all(count["weight"] == 4 * WIDTH**2 for count in counts)
    because = (
        f"All {len(counts)} numbers of heads that divide {WIDTH} give {4 * WIDTH**2:,} weights, and with biases "
        f"{4 * WIDTH:,} more. It follows from h · d_k = d_model, which is a habit and not a law: models that set d_k "
        "separately (Qwen 3, Gemma) have more or fewer."
    )
    return Verdict(SENTENCES[0], HOLDS if same else NOT, because, "exact")


def _same_compute(figures: Figures) -> Verdict:
    flops = figures["flops"]
    same = len({(count["projections"], count["attention"]) for count in flops.values()}) == 1
    most_exponentials, fewest_exponentials = (flops[str(h)]["exponentials"] for h in (WIDTH, 1))
    because = (
        f"At {CONTEXT} tokens every number of heads takes {flops['12']['projections']:,} multiply-adds in the "
        f"projections and {flops['12']['attention']:,} in scores and weighted values. But each head has its "
        f"own softmax: {fewest_exponentials:,} exponentials with one head, {most_exponentials:,} with {WIDTH}."
    )
    if not same:
        return Verdict(SENTENCES[1], NOT, because, "exact")
    return Verdict(SENTENCES[1], ONLY_IF, because, "exact", "one counts multiply-adds and leaves out the softmax")


def slower(figures: Figures, case: str) -> dict[int, list[float]]:
    """{heads: time as a multiple of the fastest number of heads, race by race}."""
    races = figures["seconds"][case]
    fastest = min(races[0], key=lambda h: float(np.mean([race[h] for race in races])))
    return {int(h): ratios(races, h, fastest) for h in races[0]}


def _same_time(figures: Figures) -> Verdict:
    slowdowns = {case: slower(figures, case) for case in figures["seconds"]}
    worst = {case: max(times, key=lambda h: min(times[h])) for case, times in slowdowns.items()}
    because = "Against the fastest number of heads: " + "; ".join(
        f"{case}, {worst[case]} heads take {np.mean(times[worst[case]]):.2f} times as long and "
        f"{USUAL_HEADS} heads {np.mean(times[USUAL_HEADS]):.2f}"
        for case, times in slowdowns.items()
    ) + "."  # fmt: skip
    races = len(next(iter(figures["seconds"].values())))
    sure = f"{races} races of all against all on {figures['where']}, interleaved"
    low, high = USUAL
    usual = [slowdown for times in slowdowns.values() for h, slowdown in times.items() if low <= WIDTH // h <= high]
    unusual = [
        slowdown for times in slowdowns.values() for h, slowdown in times.items() if not low <= WIDTH // h <= high
    ]
    if all(max(slowdown) <= SAME_TIME for slowdown in usual + unusual):
        return Verdict(SENTENCES[2], HOLDS, because, sure)
    if any(min(slowdown) > SAME_TIME for slowdown in usual):
        return Verdict(SENTENCES[2], NOT, because, sure)
    if all(max(slowdown) <= SAME_TIME for slowdown in usual) and any(min(slowdown) > SAME_TIME for slowdown in unusual):
        return Verdict(SENTENCES[2], ONLY_IF, because, sure, _widths(slowdowns))
    needs = f"more races, on a machine with nothing else to do: these disagree about {SAME_TIME:g} times"
    return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=needs)


def _widths(slowdowns: dict[str, dict[int, list[float]]]) -> str:
    """The range of d_k that takes the same time in every case, in words; it includes all of USUAL."""
    slow = {WIDTH // h for times in slowdowns.values() for h, slowdown in times.items() if max(slowdown) > SAME_TIME}
    same = sorted({WIDTH // h for times in slowdowns.values() for h in times} - slow)
    least = min(d for d in same if not any(d < x < USUAL[0] for x in slow))
    slow_wide = min((x for x in slow if x > USUAL[1]), default=None)
    return f"d_k is at least {least}" if slow_wide is None else f"d_k is at least {least} and less than {slow_wide}"


def _squares(figures: Figures) -> Verdict:
    shares = {int(t): c["attention"] / (c["attention"] + c["projections"]) for t, c in figures["terms"].items()}
    because = (
        "A token takes 4 d_model^2 multiply-adds in the projections and 2 T d_model in scores and weighted values, so "
        f"2 T^2 d_model for the whole text. That second term is {shares[128]:.0%} of a layer at 128 tokens, "
        f"{shares[512]:.0%} at 512, half at T = 2 d_model = {2 * WIDTH:,}, and {shares[16384]:.0%} at 16,384."
    )
    if shares[CONTEXT] > LITTLE:
        return Verdict(SENTENCES[3], ONLY_IF, because, "exact", "the text is much shorter than 2 d_model tokens")
    return Verdict(SENTENCES[3], HOLDS, because, "exact")


def _of_bert(figures: Figures) -> Verdict:
    card, built = figures["bert"]["card"], figures["bert"]["built"]
    because = (
        f"{figures['bert']['weights']:,} weights and {card['attention'] - figures['bert']['weights']:,} biases of "
        f"{card['total']:,}: {card['attention'] / card['total']:.1%}. The feed-forward layers have {card['ffn']:,} "
        f"({card['ffn'] / card['total']:.1%}), the embeddings {card['embeddings']:,} "
        f"({card['embeddings'] / card['total']:.1%}). The card and the model built on the meta device agree."
    )
    agree = all(card[part] == built[part] for part in ("attention", "ffn", "embeddings"))
    right = agree and figures["bert"]["weights"] == WEIGHTS and sum(built.values()) == card["total"]
    return Verdict(SENTENCES[4], HOLDS if right else NOT, because, "exact")


def charts(figures: Figures) -> list[Chart]:
    times = {
        case: [point(h, slowdowns) for h, slowdowns in sorted(slower(figures, case).items())]
        for case in figures["seconds"]
    }
    terms = {
        term: [point(int(t), [count[term]]) for t, count in figures["terms"].items()]
        for term in ("projections", "attention")
    }
    softmax = {"all heads": [point(int(h), [count["exponentials"]]) for h, count in figures["flops"].items()]}
    card = figures["bert"]["card"]
    parts = [point(part, [card[part] / 1e6]) for part in ("attention", "ffn", "embeddings", "other", "norms")]
    return [
        Chart(f"Time of a layer of width {WIDTH}", "heads", "times the fastest", times, log_x=True, log_y=True),
        Chart("Multiply-adds of a layer, 12 heads", "tokens", "multiply-adds", terms, log_x=True, log_y=True),
        Chart(f"Softmax at {CONTEXT} tokens", "heads", "exponentials", softmax, log_x=True, log_y=True),
        Chart("BERT-base", "", "million parameters", {"parameters": parts}),
    ]


def tables(figures: Figures) -> list[Table]:
    cases = list(figures["seconds"])
    heads = figures["seconds"][cases[0]][0]
    times = {h: [1000 * np.mean([race[h] for race in figures["seconds"][case]]) for case in cases] for h in heads}
    rows = [(h, str(WIDTH // int(h)), *(f"{ms:.2f}" for ms in milliseconds)) for h, milliseconds in times.items()]
    terms = [
        (f"{int(t):,}", f"{c['projections']:.3g}", f"{c['attention']:.3g}", f"{c['attention'] / c['projections']:.2f}")
        for t, c in figures["terms"].items()
    ]
    return [
        Table("Milliseconds per layer, batch 1", ("heads", "d_k", *cases), rows),
        Table("Multiply-adds, 12 heads", ("tokens", "projections", "scores and values", "ratio"), terms),
    ]


CLAIM = Claim(
    1,
    "More heads, the same cost",
    SENTENCES,
    f"""
Layers of width {WIDTH} with every number of heads that divides it are built on the meta device and counted.
Multiply-adds are what PyTorch's FlopCounterMode sees in the textbook's operations (a multiply-add is one, not two).
Times are those of headwise's module, and of a textbook implementation that stores the T x T weights, batch 1, fp32,
without gradients, in the processor time of one thread, which other load on the machine changes little. Every race times
all numbers of heads in turns and keeps the best of its rounds; it is repeated. A number of heads takes **the same
time** if it needs at most {SAME_TIME} times that of the fastest, in every race, and **longer** if it needs more in
every race. The sentence on time **holds only if** the heads with d_k from {USUAL[0]} to {USUAL[1]} all take the same
time while some other takes longer, and **does not hold** if one of them takes longer. “d^2 operations” **holds** if the
other term is at most {LITTLE:.0%} of a layer at BERT-base's {CONTEXT} tokens. The parameters of BERT-base are read from
its card and counted in the model built on the meta device.
""",
    run,
    verdicts,
    charts,
    tables,
)
