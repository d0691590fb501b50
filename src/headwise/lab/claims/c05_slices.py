"""Claim 5: each head sees only its slice of the embedding. Gradients show what it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention.functional import attend
from ...attention.nn.module import MultiHeadAttention
from ...attention.nn.stack import Encoder
from ...models.loading.loader import load, tokenizer
from ..claim import HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..store import Lab

# the thresholds, written before the full run
WHOLE = 1.0  # the share of the embedding's numbers that must have a gradient, in every head
NOTHING = 0.0  # the largest gradient outside a head's slice of Q, K and V

SENTENCES = (
    "Each head sees only its own slice of the embedding: head 0 dimensions 0 to 63, head 1 dimensions 64 to 127, and "
    "so on.",
    "Each head works on its own slice of the projected queries, keys and values.",
)
WIDTH, HEADS, TOKENS = 768, 12, 17  # BERT-base's
TEXT = "The animal didn't cross the street because it was too tired."


def run(lab: Lab) -> Figures:
    untrained = [_untrained(seed) for seed in lab.starts]
    return {"untrained": untrained, "minilm": _minilm(lab.seed)}


def slice_gradients(attention: MultiHeadAttention, x: Tensor, head: int, random: torch.Generator) -> dict[str, float]:
    """What one head's output depends on: gradients of a random projection of it. x (1, T, d_model)."""
    x = x.detach().clone().requires_grad_()
    whole = [linear(x) for linear in (attention.W_Q, attention.W_K, attention.W_V)]  # (1, T, d_model) each
    h, d = attention.heads.query, attention.heads.dim
    q, k, v = (t.unflatten(-1, (h, d)).transpose(1, 2) for t in whole)  # (1, h, T, d_k)
    out = attend(q, k, v)[0, head]  # (T, d_k)
    mix = torch.randn(out.shape, generator=random)
    into_x, *into_projected = torch.autograd.grad((out * mix).sum(), [x, *whole])
    energy = into_x[0].square().sum(0)  # (d_model,)
    columns = slice(head * d, (head + 1) * d)
    outside = [torch.cat((g[..., : columns.start], g[..., columns.stop :]), -1).abs().max() for g in into_projected]
    return {
        "reached": (energy > 0).float().mean().item(),
        "own_share": (energy[columns].sum() / energy.sum()).item(),
        "outside": max(float(x) for x in outside),
        "inside": min(float(g[..., columns].abs().max()) for g in into_projected),
    }


def _untrained(seed: int) -> list[dict[str, float]]:
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(1, TOKENS, WIDTH, generator=random)
    return [slice_gradients(attention, x, head, random) for head in range(HEADS)]


def _minilm(seed: int) -> list[list[dict[str, float]]]:
    """Layer by layer, head by head, on a sentence."""
    random = torch.Generator().manual_seed(seed)
    encoder = Encoder.from_pretrained(load("minilm").name_or_path)
    ids = tokenizer("minilm")(TEXT, return_tensors="pt")["input_ids"]
    layers = []
    x = encoder.embed(ids, torch.arange(ids.shape[1]))
    for block in encoder.blocks:
        attention: Any = block.attention
        layers.append([slice_gradients(attention, x, head, random) for head in range(attention.heads.query)])
        x = block(x).detach()
    return layers


def verdicts(figures: Figures) -> list[Verdict]:
    fresh = [head for start in figures["untrained"] for head in start]
    pretrained = [head for layer in figures["minilm"] for head in layer]
    heads = fresh + pretrained
    starts = len(figures["untrained"])
    sure = f"exact: gradients of {len(pretrained)} trained heads, and of {HEADS} heads in {starts} starts"
    shares = [head["own_share"] for head in pretrained]
    reached = min(head["reached"] for head in heads)
    sees = (
        f"The gradient of one head's output reaches {reached:.0%} of the embedding's numbers, in every head. Of its "
        f"energy, {np.mean([head['own_share'] for head in fresh]):.1%} falls into the slice that the sentence names in "
        f"untrained heads, and {min(shares):.1%} to {max(shares):.1%} in MiniLM's; a twelfth is {1 / HEADS:.1%}."
    )
    outside, inside = max(head["outside"] for head in heads), min(head["inside"] for head in heads)
    works = (
        f"In the projected vectors the largest gradient outside the head's own d_k numbers is {outside:g}; inside, at "
        f"least {inside:.2g}. A head is a slice of the result of a projection, never of what is projected."
    )
    first = NOT if reached >= WHOLE else HOLDS if all(head["own_share"] == 1 for head in heads) else ONLY_IF
    second = HOLDS if outside <= NOTHING < inside else NOT
    rule = "the projection has zeros elsewhere" if first == ONLY_IF else ""
    return [Verdict(SENTENCES[0], first, sees, sure, rule), Verdict(SENTENCES[1], second, works, sure)]


def charts(figures: Figures) -> list[Chart]:
    def by_head(rows: list[list[dict[str, float]]]) -> list[Any]:
        return [point(head, [row[head]["own_share"] for row in rows]) for head in range(HEADS)]

    series = {
        "MiniLM, over its layers": by_head(figures["minilm"]),
        "untrained, over the starts": by_head(figures["untrained"]),
        "as the sentence claims": [point(head, [1.0]) for head in range(HEADS)],
    }
    return [Chart("Gradient in the slice a head is said to see", "head", "share of the gradient's energy", series)]


def tables(figures: Figures) -> list[Table]:
    rows = [
        (name, f"{min(h['reached'] for h in heads):.0%}", _range([h["own_share"] for h in heads]))
        for name, heads in {
            "untrained": [columns for start in figures["untrained"] for columns in start],
            **{f"MiniLM, layer {i}": layer for i, layer in enumerate(figures["minilm"])},
        }.items()
    ]
    header = ("heads of", "numbers of the embedding reached", "gradient in the head's “own” slice")
    return [Table("What a head's output depends on", header, rows)]


def _range(shares: list[float]) -> str:
    return f"{min(shares):.1%} to {max(shares):.1%}"


CLAIM = Claim(
    5,
    "Each head sees a slice of the embedding",
    SENTENCES,
    f"""
Take the output of one head, before W_O, mix its numbers at random, and ask for the gradient with respect to the
embedding and to the projected queries, keys and values. What has a gradient is seen. Done for an untrained layer of
BERT-base's size on random tokens, and for every head of all-MiniLM-L6-v2 on “{TEXT}”, with the real inputs of each
layer. The first sentence **does not hold** if every number of the embedding has a gradient in every head, and
**holds** if none outside the slice has. The second **holds** if the gradient outside the head's slice of Q, K and V
is exactly zero and inside it is not.
""",
    run,
    verdicts,
    charts,
    tables,
)
