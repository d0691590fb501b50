"""Which pairs of a query and a key count for which score, as columns of zeros and ones.

A batch's weights (B, H, Tq * Tk) times these columns (B, R, Tq * Tk) are the sums of all scores at once: one product,
in which uniform attention is one head more. The same columns, read at each query's strongest key, give the argmax
shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import HeadwiseError
from ...role_definitions import CROSS, Pairs, RoleScore, Tokens, pair_scores


@dataclass(frozen=True)
class PairColumns:
    """The columns of some rows of queries, and the sums of uniform attention over the same. R scores."""

    pairs: Tensor  # (B, R, rows, Tk)
    queries: Tensor  # (B, rows) bool: those that count
    counts: Tensor  # (B, R): queries that each score is a mean over
    equal: Tensor  # (B, R): sums of uniform attention
    equal_rows: Tensor  # (B, 3): sums of uniform attention's entropy and largest weight, and the number of queries


def pair_columns(query: Tokens, key: Tokens, visible: Tensor, real: Tensor, first: int, way: str) -> PairColumns:
    """The columns of all scores for some rows of queries.

    Args:
        query: (B, Tq), all rows.
        key: (B, Tk).
        visible: (B, rows, Tk), the keys that each query may attend to.
        real: (B, rows), the queries that are no padding.
        first: number of the first row.
        way: of attention, which decides the scores that are measured.
    """
    rows, keys = visible.shape[1:]
    queries = real & visible.any(-1)
    visible = visible & queries[..., None]
    scores = pair_scores(way)
    pairs = torch.empty(len(visible), len(scores), rows, keys, device=visible.device)
    counts = torch.zeros(len(visible), len(scores), device=visible.device)
    query_count = queries.sum(-1)
    argument = Pairs(query.rows(first, first + rows), key, visible, _offsets(first, rows, visible, way))
    for column, score in enumerate(scores):
        torch.mul(_select_pairs(score, argument), visible, out=pairs[:, column])
        counts[:, column] = pairs[:, column].any(-1).sum(-1) if score.where_present else query_count
    visible_count = visible.sum(-1).clamp(min=1)
    equal = visible / visible_count[..., None]
    sums = torch.einsum("bqk,brqk->br", equal, pairs)
    equal_rows = torch.stack([visible_count.log().sum(-1), (queries / visible_count).sum(-1), query_count], -1)
    return PairColumns(pairs, queries, counts, sums, equal_rows)


def _offsets(first: int, rows: int, visible: Tensor, way: str) -> Tensor | None:
    """(rows, Tk): position of the key minus that of the query."""
    if way == CROSS:
        return None
    queries = torch.arange(first, first + rows, device=visible.device)
    return torch.arange(visible.shape[-1], device=visible.device) - queries[:, None]


def _select_pairs(score: RoleScore, pairs: Pairs) -> Tensor:
    assert score.function is not None
    selected = score.function(pairs)
    try:
        return selected.expand(pairs.visible.shape)
    except (RuntimeError, AttributeError):
        got = tuple(selected.shape) if isinstance(selected, Tensor) else type(selected).__name__
        raise HeadwiseError(
            f"the function of {score.name!r} must give a tensor that broadcasts to (batch, queries, keys) "
            f"{tuple(pairs.visible.shape)}, got {got}"
        ) from None
