"""Claim 2: one fused projection against h small ones, all heads in one call against a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.functional import attend
from ...timing.interleaved_race import verify
from ..claim import HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..races import device_name, ratios, seconds
from ..store import Lab

# the thresholds, written before the full run
MUCH = 2.0  # times as fast: “much faster”
BEATS = 1.1  # times as fast: “beats”

SENTENCES = (
    "One fused projection is much faster than h small ones.",
    "W_Q, W_K and W_V in one matrix are much faster than three.",
    "All heads in one batched call beat a loop over heads.",
)
WIDTH = 768
LARGEST = 2**25  # weights that the textbook may hold at once
Case = tuple[int, int, int]  # heads, tokens, batch


def run(lab: Lab) -> Figures:
    heads = lab.budget.pick((4,), (2, 12, 64), (2, 12, 64))
    tokens = lab.budget.pick((5,), (16, 128), (16, 128, 512))
    batches = lab.budget.pick((1,), (1, 8), (1, 8))
    cases = [(h, t, b) for h in heads for t in tokens for b in batches]
    results = []
    for index, case in enumerate(cases):
        lab.progress("fused against naive", index, len(cases))
        key = {"heads": case[0], "tokens": case[1], "batch": case[2], "width": WIDTH}
        races = seconds(lab, "fused", key, partial(contestants, case, lab.device))
        results.append({**key, "races": races})
    return {"where": device_name(lab.device), "cases": results}


def contestants(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """Both halves of a layer in all variants, on the same inputs, after a check that the variants agree."""
    h, tokens, batch = case
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, tokens, WIDTH, device=device, generator=random)
    whole = torch.randn(3 * WIDTH, WIDTH, device=device, generator=random) / math.sqrt(WIDTH)
    three = [part.clone() for part in whole.chunk(3)]
    small = [part.clone() for part in whole.chunk(3 * h)]
    q, k, v = F.linear(x, whole).unflatten(-1, (3, h, -1)).permute(2, 0, 3, 1, 4)  # (B, h, T, d_k) each
    projections: dict[str, Callable[[], Any]] = {
        "one": lambda: F.linear(x, whole),
        "three": lambda: [F.linear(x, part) for part in three],
        "small": lambda: [F.linear(x, part) for part in small],
    }
    attention: dict[str, Callable[[], Any]] = {
        "call": lambda: attend(q, k, v).transpose(1, 2).flatten(2),
        "loop": lambda: torch.cat([attend(*_head(i, q, k, v))[:, 0] for i in range(h)], -1),
    }
    if batch * h * tokens * tokens <= LARGEST:
        attention["textbook call"] = lambda: textbook(q, k, v).transpose(1, 2).flatten(2)
        attention["textbook loop"] = lambda: torch.cat([textbook(q[:, i], k[:, i], v[:, i]) for i in range(h)], -1)
    joined = {
        "three": lambda: torch.cat(projections["three"](), -1),
        "small": lambda: torch.cat(projections["small"](), -1),
    }
    verify(projections["one"], joined)
    verify(attention["call"], attention)
    return projections | attention


def _head(i: int, *tensors: Tensor) -> list[Tensor]:
    return [t[:, i : i + 1] for t in tensors]


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def verdicts(figures: Figures) -> list[Verdict]:
    cases = [{**case, "where": figures["where"]} for case in figures["cases"]]
    small = [_ratio(case, "small", "one") for case in cases]
    three = [_ratio(case, "three", "one") for case in cases]
    loops = [_ratio(case, "loop", "call") for case in cases]
    loops += [_ratio(case, "textbook loop", "textbook call") for case in cases if "textbook loop" in case["races"][0]]
    return [
        _judge(SENTENCES[0], small, MUCH, "a small projection", lambda case: _rows(case) * WIDTH**2 // case["heads"]),
        _judge(SENTENCES[1], three, MUCH, "one of the three", lambda case: _rows(case) * WIDTH**2),
        _judge(SENTENCES[2], loops, BEATS, "a head's scores", lambda c: _rows(c) * c["tokens"] * WIDTH // c["heads"]),
    ]


def _rows(case: Figures) -> int:
    return int(case["batch"] * case["tokens"])


def _ratio(case: Figures, slow: str, fast: str) -> Figures:
    return {**case, "ratio": ratios(case["races"], slow, fast), "way": slow}


def _judge(sentence: str, cases: list[Figures], threshold: float, part: str, work: Callable[[Figures], int]) -> Verdict:
    """Holds if true in every case and race, does not if in none; otherwise only up to some size of the parts."""
    faster_cases = [case for case in cases if min(case["ratio"]) >= threshold]
    best, worst = (pick(cases, key=lambda case: float(np.mean(case["ratio"]))) for pick in (max, min))
    because = (
        f"From {np.mean(worst['ratio']):.2f} times as fast ({_words(worst)}) to {np.mean(best['ratio']):.2f} times "
        f"({_words(best)}); at least {threshold:g} times in {len(faster_cases)} of {len(cases)} cases."
    )
    races = len(cases[0]["races"])
    sure = f"{races} races per case on {cases[0]['where']}, interleaved; a case counts where every race agrees"
    if len(faster_cases) == len(cases):
        return Verdict(sentence, HOLDS, because, sure)
    if not faster_cases:
        return Verdict(sentence, NOT, because, sure)
    smallest_failure = min(work(case) for case in cases if case not in faster_cases)
    below = [work(case) for case in faster_cases if work(case) < smallest_failure]
    rule = (
        f"the parts are small: up to {max(below):.1e} multiply-adds in {part}"
        if below
        else f"the sizes suit it: {', '.join(_words(case) for case in faster_cases[:3])}"
    )
    return Verdict(sentence, ONLY_IF, because, sure, rule)


def _words(case: Figures) -> str:
    way = ", textbook" if case["way"].startswith("textbook") else ""
    return f"{case['heads']} heads, {case['tokens']} tokens, batch {case['batch']}{way}"


def charts(figures: Figures) -> list[Chart]:
    def lines(slow: str, fast: str) -> dict[str, list[Any]]:
        points_by_heads: dict[str, list[Any]] = {}
        for case in figures["cases"]:
            if slow in case["races"][0]:
                name = f"{case['heads']} heads"
                points_by_heads.setdefault(name, []).append(
                    (case["batch"] * case["tokens"], ratios(case["races"], slow, fast))
                )
        return {
            name: [point(x, values) for x, values in _by_tokens(points)] for name, points in points_by_heads.items()
        }

    return [
        Chart(title, "tokens in the batch", "times as fast", lines(slow, fast), log_x=True, log_y=True)
        for title, slow, fast in (
            ("One projection against 3 h small ones", "small", "one"),
            ("One projection against three", "three", "one"),
            ("One call against a loop, attend", "loop", "call"),
            ("One call against a loop, textbook", "textbook loop", "textbook call"),
        )
        if lines(slow, fast)
    ]


def _by_tokens(points: list[tuple[int, list[float]]]) -> list[tuple[int, list[float]]]:
    """Cases with equally many tokens in all, whatever the batch size, as one point."""
    return [(x, [r for y, values in points if y == x for r in values]) for x in sorted({x for x, _ in points})]


def tables(figures: Figures) -> list[Table]:
    pairs = (("small", "one"), ("three", "one"), ("loop", "call"), ("textbook loop", "textbook call"))
    rows = [
        (
            str(case["heads"]),
            str(case["tokens"]),
            str(case["batch"]),
            *(_mean_ratio(case["races"], *pair) for pair in pairs),
        )
        for case in figures["cases"]
    ]
    columns = ("heads", "tokens", "batch", "1 projection for 3 h", "1 for 3", "1 call for h", "1 call for h, textbook")
    return [Table("Times as fast, mean over the races", columns, rows)]


def _mean_ratio(races: list[Any], slow: str, fast: str) -> str:
    return f"{np.mean(ratios(races, slow, fast)):.2f}" if slow in races[0] else "–"


CLAIM = Claim(
    2,
    "Fused against naive",
    SENTENCES,
    f"""
One layer of width {WIDTH}, fp32, without gradients, on the same random inputs for every variant, in the processor time
of one thread, which other load on the machine changes little. (With several threads, a loop has fewer heads at a time
to distribute.) Projections: one product with the 3 d_model columns of all heads and all of Q, K, V; three products; 3 h
products, one for each head. Attention: all heads in one call, with the copy that lays them side by side; or a loop over
heads and a concatenation; each with headwise's `attend` and with the textbook's softmax(Q K^T / sqrt(d_k)) V, which is
left out where its weights would not fit. All variants are checked for equal results before anything is timed. Every
race times all variants in turns and keeps the best of its rounds; it is repeated, and a case counts only where every
race agrees. **Much faster** means at least {MUCH:g} times, **beats** at least {BEATS:g} times. A sentence **holds** if
that is so in every case, and **does not hold** if in none; if it is so in some, it **holds only if** the parts are
small, with the size up to which all cases agree.
""",
    run,
    verdicts,
    charts,
    tables,
)
