"""What every head really does: the weights that a model's own eager code computes, and statistics from all of them."""

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
def recorded() -> Iterator[list[Call]]:
    """The calls of models under eager attention, with the weights their functions gave."""
    calls: list[Call] = []
    plain = AttentionInterface.get_interface

    def look_up(self: Any, implementation: str, default: Any) -> Any:
        function = plain(self, implementation, default)

        def record(module: nn.Module, query: Tensor, *args: Any, **more: Any) -> Any:
            out, weights = function(module, query, *args, **more)
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

    real (B, Tq): queries that count. exists (B, Tk): keys that are tokens; or first (B,): at which key
    the first token is, below 0 where it is gone. Query i stands at key i + offset.
    """
    a = np.asarray(torch.as_tensor(a).double())
    batch, heads, queries, keys = a.shape
    real = np.ones((batch, queries), bool) if real is None else np.asarray(real, bool)
    exists = np.ones((batch, keys), bool) if exists is None else np.asarray(exists, bool)
    first = exists.argmax(1) if first is None else np.asarray(first)
    first = np.arange(keys) == first[:, None]  # (B, Tk)
    away = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    logs = np.log(a, where=a > 0, out=np.zeros_like(a))
    each = {
        "entropy": -(a * logs).sum(-1),
        "confidence": a.max(-1),
        "first": (a * first[:, None, None]).sum(-1),
    }
    if not cross:
        each["distance"] = (a * abs(away)).sum(-1)
        each |= {name: (a * (away == step)).sum(-1) for name, step in STEPS.items()}
    if sinks:
        each["sink"] = 1 - a.sum(-1)
    for name, keys_in in (classes or {}).items():
        each[f"share:{name}"] = (a * np.asarray(keys_in)[:, None, None]).sum(-1)
    sums = {name: (x * real[:, None]).sum(-1) for name, x in each.items()}
    sums["count"] = np.broadcast_to(real.sum(-1)[:, None], (batch, heads)).astype(float)
    return sums


def assert_same(stats: Any, true: dict[str, np.ndarray], rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Statistics of headwise against the true sums."""
    got = {name: np.asarray(x) for name, x in stats.sums.items()} | {"count": np.asarray(stats.count)}
    assert set(got) == set(true), set(got) ^ set(true)
    for name, expected in true.items():
        np.testing.assert_allclose(got[name], expected, rtol=rtol, atol=atol, err_msg=name)


def added(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Sums of several calls on the same sequences."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}
