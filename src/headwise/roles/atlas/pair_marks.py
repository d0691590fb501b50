"""Which pairs of a query and a key count for which role, as columns of zeros and ones.

A batch's weights (B, H, Tq * Tk) times these columns (B, R, Tq * Tk) are the sums of all roles at once: one product, in
which equal attention is one head more. The same columns, read at each query's strongest key, give the argmax shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .corpus import Tokens
from .roles import CROSS, NEAR, OFFSETS, marks

NEVER = 1 << 40  # more often than any token


@dataclass(frozen=True)
class Marks:
    """The columns for some rows of queries, and what equal attention has on the same."""

    pairs: Tensor  # (B, R, rows, Tk)
    queries: Tensor  # (B, rows) bool: those that count
    counts: Tensor  # (B, R): of queries for which each column has any meaning
    equal: Tensor  # (B, R): sums of equal attention
    wide: Tensor  # (B, 3): sums of equal attention's entropy and largest weight, and the number of queries


def mark(query: Tokens, key: Tokens, visible: Tensor, real: Tensor, first: int, way: str) -> Marks:
    """visible (B, rows, Tk): what each query may look at; real (B, rows): which are tokens; first: the first row."""
    rows, keys = visible.shape[1:]
    device = visible.device
    queries = real & visible.any(-1)
    visible = visible & queries[..., None]
    here = slice(first, first + rows)
    i, j = torch.arange(first, first + rows, device=device)[:, None], torch.arange(keys, device=device)
    own = (i == j) if way != CROSS else torch.zeros(rows, keys, dtype=torch.bool, device=device)
    every = queries.sum(-1)
    pairs = torch.empty(len(visible), len(marks(way)), rows, keys, device=device)
    counts = torch.zeros(len(visible), len(marks(way)), device=device)
    found = _classes(query, key, visible, here, own, way)
    if way != CROSS:
        found |= {name: (j - i) == step for name, step in OFFSETS.items()}
        away = (i - j).abs()
        found |= {"local": (away > 0) & (away <= NEAR), "distance": away}
    for column, name in enumerate(marks(way)):
        torch.mul(found[name], visible, out=pairs[:, column])
        counts[:, column] = pairs[:, column].any(-1).sum(-1) if name in ("rare", "same_word") else every
    seen = visible.sum(-1).clamp(min=1)
    equal = visible / seen[..., None]
    sums = torch.einsum("bqk,brqk->br", equal, pairs)
    wide = torch.stack([seen.log().sum(-1), (queries / seen).sum(-1), every], -1)
    return Marks(pairs, queries, counts, sums, wide)


def _classes(query: Tokens, key: Tokens, visible: Tensor, here: slice, own: Tensor, way: str) -> dict[str, Tensor]:
    """Keys that are something, or something to the query: each broadcastable to (B, rows, Tk)."""
    first = torch.zeros_like(key.real)
    first.scatter_(1, key.real.float().argmax(1, keepdim=True), True)
    counts = key.count.masked_fill(key.special, NEVER)[:, None].expand_as(visible).masked_fill(~visible, NEVER)
    rarest = (counts == counts.amin(-1, keepdim=True)) & (counts < NEVER)
    rarest = rarest & ~(rarest & own).any(-1, keepdim=True)  # what a query is itself it need not look for
    word = query.word[:, here, None]
    same = (word == key.word[:, None]) & (word >= 0)
    if way != CROSS:
        same = same & (query.place[:, here, None] != key.place[:, None])
    return {
        "first": first[:, None],
        "special": key.special[:, None],
        "punctuation": key.punctuation[:, None],
        "delimiter": (key.special | key.punctuation)[:, None],
        "rare": rarest,
        "same_word": same,
    }
