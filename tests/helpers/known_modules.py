"""What the tests of watched modules share: random parameters, and statistics against the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.stats import HeadStats, stats_from_weights

ROUNDING = 64 * torch.finfo(torch.float64).eps  # of weights, at most 1, from scores of a few units


def spread(module: nn.Module) -> Any:
    """The module with random parameters, biases included, so that heads differ and attention is far from uniform."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def assert_statistics(stats: HeadStats, weights: Tensor, **options: Any) -> None:
    """Statistics equal those of the weights (B, H, Tq, Tk); options as of stats_from_weights.

    Weights alone do not tell lse and max_logit: of calls that are seen as queries and keys, `stats` has them.
    """
    expected = stats_from_weights(weights, **options)
    assert set(stats) - {"lse", "max_logit"} == set(expected)
    torch.testing.assert_close(stats.count, expected.count)
    for name in expected:
        # a sum over queries and keys of terms of at most a few units, in float64
        torch.testing.assert_close(stats.sums[name], expected.sums[name], rtol=1e-10, atol=1e-10)
