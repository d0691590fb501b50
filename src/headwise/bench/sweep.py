"""Forty untuned shapes, each against the fastest sdpa call that computes the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise

from ..timing.interleaved_race import Contestant
from .inputs import random_normal
from .peers import repeat_kv

COUNT, SEED = 40, 20261118
KINDS = ("dense", "causal", "padding", "window", "chunk")
MOST_WORK = 2**34  # floating-point operations of one call: about a tenth of a second
MOST_NUMBERS = 2**25  # in q, k or v
SHORTEST, LONGEST = 17, 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """One call of attention.

    kind: dense (also cross-attention), causal, padding (one bool mask per sequence), window (causal, the last `window`
    keys), chunk (causal, the queries are the last of the keys).
    """

    kind: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    window: int = 0

    @property
    def work(self) -> int:
        return 4 * self.batch * self.heads * self.queries * self.keys * self.dim

    @property
    def title(self) -> str:
        tokens = f"T {self.keys}" if self.queries == self.keys else f"{self.queries} queries on {self.keys} keys"
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads} heads"
        window = f" {self.window}" if self.window else ""
        return f"{self.kind}{window}, batch {self.batch}, {heads}, {tokens}, D {self.dim}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def shapes(count: int = COUNT, seed: int = SEED) -> list[Shape]:
    """The same shapes for the same seed: kinds take turns, lengths climb evenly from 17 to 4,096, the rest is drawn."""
    draw = random.Random(seed)
    bands = math.ceil(count / len(KINDS))
    ratio = (LONGEST / SHORTEST) ** (1 / bands)
    return [
        _small_enough(draw, KINDS[i % len(KINDS)], SHORTEST * ratio ** (i // len(KINDS)), ratio)  # one band of lengths
        for i in range(count)
    ]


def _small_enough(draw: random.Random, kind: str, low: float, ratio: float) -> Shape:
    """Draw until the shape is small enough to run."""
    while True:
        shape = _random_shape(draw, kind, round(low * ratio ** draw.random()))
        if shape.work <= MOST_WORK and shape.batch * shape.heads * shape.keys * shape.dim <= MOST_NUMBERS:
            return shape


def _random_shape(draw: random.Random, kind: str, keys: int) -> Shape:
    heads = draw.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, 20, 24, 25, 32))
    kv_heads = heads if draw.random() < 0.5 else draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    queries = keys
    if kind == "chunk" or (kind == "dense" and draw.random() < 0.4):
        queries = draw.choice((1, 2, 5, max(1, keys // 3), max(1, keys // 2)))
    return Shape(
        kind,
        batch=draw.choice((1, 1, 2, 3, 4, 7, 8, 16, 32)),
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        dim=draw.choice((32, 40, 48, 64, 64, 72, 80, 96, 100, 128, 160, 192, 256)),
        window=draw.randint(max(1, keys // 16), max(2, keys // 3)) if kind == "window" else 0,
    )


def contestants(shape: Shape) -> tuple[dict[str, Contestant], dict[str, Contestant], str]:
    """Ours (attend, head_stats), the sdpa calls that compute the same, and the backend that ours takes."""
    draw = torch.Generator().manual_seed(SEED)
    q, k, v = (
        random_normal(shape.batch, heads, tokens, shape.dim, generator=draw)
        for heads, tokens in ((shape.heads, shape.queries), (shape.kv_heads, shape.keys), (shape.kv_heads, shape.keys))
    )
    mask = _mask(shape, draw)
    options = _attend_options(shape, mask)
    ours: dict[str, Contestant] = {
        "attend": lambda: headwise.attend(q, k, v, **options),
        "head_stats": lambda: headwise.head_stats(q, k, v, **options)[0],
    }
    return ours, _sdpa_calls(shape, q, k, v, mask), headwise.explain(q, k, v, **options)


def _attend_options(shape: Shape, mask: Tensor | None) -> dict[str, Any]:
    """The keyword arguments of `attend` for this kind."""
    options: dict[str, dict[str, Any]] = {
        "dense": {},
        "causal": {"causal": True},
        "padding": {"mask": mask},
        "window": {"causal": True, "window": (shape.window - 1, 0)},
        "chunk": {"causal": True},
    }
    return options[shape.kind]


def _mask(shape: Shape, draw: torch.Generator) -> Tensor | None:
    """The mask that sdpa needs; None where it has a keyword for it."""
    if shape.kind == "padding":
        lengths = torch.randint(1, shape.keys + 1, (shape.batch, 1, 1, 1), generator=draw, device="cpu")
        return torch.arange(shape.keys) < lengths.to(torch.get_default_device())
    square = torch.ones(shape.queries, shape.keys, dtype=torch.bool)
    if shape.kind == "window":
        return square.tril().triu(1 - shape.window)
    return square.tril(shape.keys - shape.queries) if shape.kind == "chunk" else None


def _sdpa_calls(shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> dict[str, Contestant]:
    """Every way to write the call: bool or ready-made float mask, grouped or repeated KV heads."""
    masks: dict[str, Tensor | None] = {"": None}
    if mask is not None:
        masks = {" bool mask": mask, " float mask": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}
    causal = shape.kind == "causal"

    def with_gqa(m: Tensor | None) -> Contestant:
        gqa = shape.heads != shape.kv_heads
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=causal, enable_gqa=gqa)

    def with_repeated_kv(m: Tensor | None) -> Contestant:
        return lambda: F.scaled_dot_product_attention(
            q, repeat_kv(k, shape.heads), repeat_kv(v, shape.heads), attn_mask=m, is_causal=causal
        )

    ways: dict[str, Callable[[Tensor | None], Contestant]] = {"sdpa": with_gqa}
    if shape.heads != shape.kv_heads:
        ways = {"sdpa enable_gqa": with_gqa, "sdpa KV repeated": with_repeated_kv}
    return {way + suffix: make(m) for way, make in ways.items() for suffix, m in masks.items()}
