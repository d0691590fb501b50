"""What the tests of watched modules share: random parameters, and statistics against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from headwise.attention.stats import HeadStats, stats_from_weights

ROUNDING = 64 * torch.finfo(torch.float64).eps  # of weights, at most 1, from scores of a few units


def spread(module: nn.Module) -> Any:
    """The module with random parameters, biases included, so that heads differ and attention is far from uniform."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def assert_statistics(stats: HeadStats, weights: Tensor, **options: Any) -> None:
    """Statistics equal those of the weights (B, H, Tq, Tk) by the definition, in NumPy; options as of it.

    Weights alone do not tell lse and max_logit: of calls that are seen as queries and keys, `stats` has them.
    """
    expected = stats_from_weights(array(weights), **tree_map_only(Tensor, array, options))
    assert set(stats) - {"lse", "max_logit"} == set(expected)
    np.testing.assert_array_equal(array(stats.count), expected.count)
    for name in expected:
        # a sum over queries and keys of terms of at most a few units, in float64
        np.testing.assert_allclose(array(stats.sums[name]), expected.sums[name], rtol=1e-10, atol=1e-10, err_msg=name)


def array(x: Tensor) -> np.ndarray:
    """A tensor's values."""
    values: np.ndarray = x.detach().cpu().numpy()
    return values
