"""Statistics of full weights in PyTorch equal their definition in NumPy, in float64, for blocks of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwise.attention import weight_stats
from headwise.attention.stats import stats_from_weights

BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7
CLOSE = {"rtol": 1e-13, "atol": 1e-13}  # sums of a few hundred terms of at most a few units
GENERATOR = np.random.default_rng(0)


def random_weights(dtype: type = float) -> np.ndarray:
    """Weights with hidden keys (left padding in one sequence) and a query with no visible key."""
    scores = GENERATOR.normal(size=(BATCH, HEADS, QUERIES, KEYS)) * 3
    scores[1, :, :, :2] = -np.inf
    scores[0, 1, 3] = -np.inf
    e = np.exp(scores)
    return (e / np.maximum(e.sum(-1, keepdims=True), 1e-300)).astype(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cross": {"cross": True},
    "offset": {"offset": 2},
    "offsets": {"offset": np.array([2, -1])},
    "queries": {"queries": np.arange(BATCH * QUERIES).reshape(BATCH, QUERIES) % 3 > 0},
    "classes": {"classes": {name: GENERATOR.random((BATCH, KEYS)) > 0.5 for name in ("a", "b")}},
    "sinks": {"sinks": True},
    "visible": {"visible": GENERATOR.random((BATCH, HEADS, QUERIES, KEYS)) > 0.3},
    "first": {"first": np.arange(KEYS)[None].repeat(BATCH, 0) == np.array([[1], [4]])},
    "no first key": {"first": np.zeros((BATCH, KEYS), bool)},
    "logits": {"logits": GENERATOR.normal(size=(BATCH, HEADS, QUERIES, KEYS))},
    "largest logits": {"logits": GENERATOR.normal(size=(BATCH, HEADS, QUERIES))},
    "lse": {"lse": GENERATOR.normal(size=(BATCH, HEADS, QUERIES))},
    "received": {"received": True},
}


def as_tensor(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_tensor(x) for name, x in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def assert_equal_to_the_definition(weights: np.ndarray, options: dict[str, Any]) -> None:
    expected = stats_from_weights(weights, **options)
    stats = stats_from_weights(torch.from_numpy(weights), **as_tensor(options)).numpy()
    assert stats.names == expected.names
    np.testing.assert_array_equal(stats.count, expected.count)
    for name in expected.sums:
        np.testing.assert_allclose(stats.sums[name], expected.sums[name], err_msg=name, **CLOSE)
    for name in expected.maxima:
        np.testing.assert_array_equal(stats.maxima[name], expected.maxima[name])
    assert (stats.received is None) == (expected.received is None)
    if expected.received is not None:
        np.testing.assert_allclose(stats.received, expected.received, **CLOSE)


@pytest.mark.parametrize("block", [1, 2 * KEYS, QUERIES * KEYS, HEADS * QUERIES * KEYS, 1 << 18])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_gives_what_the_definition_gives(option: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stats, "BLOCK", block)
    assert_equal_to_the_definition(random_weights(), OPTIONS[option])


def test_all_options_together_in_single_precision_are_summed_in_double() -> None:
    together = {name: value for option in ("offsets", "queries", "classes", "sinks", "logits", "lse", "received")
                for name, value in OPTIONS[option].items()}  # fmt: skip
    assert_equal_to_the_definition(random_weights(np.float32), together)


@pytest.mark.parametrize("shape", [(2, 3, 5, 0), (2, 3, 0, 7), (0, 3, 5, 7)])
def test_no_keys_no_queries_and_no_sequences_give_no_counts(shape: tuple[int, ...]) -> None:
    assert_equal_to_the_definition(np.zeros(shape), {"logits": np.zeros(shape)})


def test_rows_of_nan_count_and_are_not_hidden() -> None:
    weights = random_weights()
    weights[0, 0, 1] = np.nan
    stats = stats_from_weights(torch.from_numpy(weights))
    assert stats.count[0, 0] == QUERIES
    assert stats.entropy.isnan().tolist() == [True, False, False]
    assert_equal_to_the_definition(weights, {})
