"""Calls of no sequence, no query or no key give empty results or zeros, in every entry point."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise
from headwise.attention import functional

SIZES = {"no sequence": (0, 5, 7), "no query": (2, 0, 7), "no key": (2, 5, 0), "nothing": (0, 0, 0)}


def options_of(batch: int, queries: int, keys: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (2, 1)},
        "first keys": {"window": (2, 1), "keep_first": 3, "starts": torch.zeros(batch, dtype=torch.long)},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.randn(6, dtype=dtype)},
        "lengths": {"lengths": torch.zeros(batch, dtype=torch.long)},
        "offset": {"offset": torch.arange(batch), "causal": True},
        "bool mask": {"mask": torch.ones(1, 1, 1, keys, dtype=torch.bool)},
        "float mask": {"mask": torch.zeros(1, 1, queries, keys, dtype=dtype)},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_entry_point_takes_empty_calls(size: str, dtype: torch.dtype) -> None:
    batch, queries, keys = SIZES[size]
    for name, options in options_of(batch, queries, keys, dtype).items():
        q, k, v = (
            torch.randn(batch, heads, tokens, width, dtype=dtype)
            for heads, tokens, width in ((6, queries, 4), (2, keys, 4), (2, keys, 3))
        )
        want = torch.zeros(batch, 6, queries, 3, dtype=dtype)
        for _ in range(3):  # the third call is one that looks like an earlier one
            assert torch.equal(headwise.attend(q, k, v, **options), want), name
            out, stats = headwise.head_stats(q, k, v, **options)
            assert torch.equal(out, want), name
            assert stats.count.shape == (batch, 6) and not stats.count.any(), name
            assert stats["entropy"].isnan().all() and "6 heads" in repr(stats), name
        counted: dict[str, Any] = {"queries": torch.ones(batch, queries, dtype=torch.bool)}
        classes = {"odd": torch.ones(batch, keys, dtype=torch.bool)}
        assert headwise.head_stats(q, k, v, classes=classes, **counted, **options)[1].count.shape == (batch, 6)
        assert functional.head_stats_without_values(q, k, **options).count.shape == (batch, 6)
        assert headwise.weights(q, k, **options).shape == (batch, 6, queries, keys)
        assert headwise.explain(q, k, v, **options)
        headwise.attend(q.requires_grad_(), k, v, **options).sum().backward()
        assert q.grad is not None and not q.grad.any(), name
