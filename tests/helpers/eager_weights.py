"""The ground truth: weights that a model's own eager code computes, and statistics computed from all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

STEPS = {"previous": -1, "next": 1, "self": 0}


class Call:
    """One call of an attention function by a module."""

    def __init__(self, module: nn.Module, queries: int, weights: Tensor, output: Tensor) -> None:
        self.module = module
        self.queries = queries
        self.weights = weights.detach()  # (B, H, Tq, Tk)
        self.output = output.detach().transpose(1, 2)  # (B, H, Tq, Dv)


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Inside, a list of the attention calls of models under eager attention, with their weights."""
    calls: list[Call] = []
    get_interface = AttentionInterface.get_interface

    def look_up(self: Any, implementation: str, default: Any) -> Any:
        function = get_interface(self, implementation, default)

        def record(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
            out, weights = function(module, query, *args, **options)
            calls.append(Call(module, query.shape[2], weights, out.reshape(*out.shape[:2], query.shape[1], -1)))
            return out, weights

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionInterface, "get_interface", look_up)
        yield calls


def statistics(
    a: Any,
    real: Any = None,
    *,
    exists: Any = None,
    first: Any = None,
    offset: int = 0,
    cross: bool = False,
    sinks: bool = False,
    classes: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Sums over real queries, (B, H) each, and "count", from weights (B, H, Tq, Tk).

    real (B, Tq): queries that are tokens. exists (B, Tk): keys that are tokens; or first (B,): the key of the first
    token, below 0 where a cache has dropped it. Query i is at the position of key i + offset.
    """
    a = np.asarray(torch.as_tensor(a).double())
    batch, heads, queries, keys = a.shape
    real = np.ones((batch, queries), bool) if real is None else np.asarray(real, bool)
    exists = np.ones((batch, keys), bool) if exists is None else np.asarray(exists, bool)
    first = exists.argmax(1) if first is None else np.asarray(first)
    first = np.arange(keys) == first[:, None]  # (B, Tk)
    distance = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    logs = np.log(a, where=a > 0, out=np.zeros_like(a))
    per_query = {
        "entropy": -(a * logs).sum(-1),
        "confidence": a.max(-1),
        "first": (a * first[:, None, None]).sum(-1),
    }
    if not cross:
        per_query["distance"] = (a * abs(distance)).sum(-1)
        per_query |= {name: (a * (distance == step)).sum(-1) for name, step in STEPS.items()}
    if sinks:
        per_query["sink"] = 1 - a.sum(-1)
    for name, keys_in in (classes or {}).items():
        per_query[f"share:{name}"] = (a * np.asarray(keys_in)[:, None, None]).sum(-1)
    sums = {name: (x * real[:, None]).sum(-1) for name, x in per_query.items()}
    sums["count"] = np.broadcast_to(real.sum(-1)[:, None], (batch, heads)).astype(float)
    return sums


def assert_same(stats: Any, true: dict[str, np.ndarray], rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Compare headwise's statistics with the true sums. Weights do not tell the log-sum-exp."""
    actual = {name: np.asarray(x) for name, x in stats.sums.items()} | {"count": np.asarray(stats.count)}
    assert set(actual) ^ set(true) <= {"lse"}, set(actual) ^ set(true)
    for name, expected in true.items():
        if name not in actual:
            continue
        np.testing.assert_allclose(actual[name], expected, rtol=rtol, atol=atol, err_msg=name)


def add_statistics(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Sums of several calls on the same sequences."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}
