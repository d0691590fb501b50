"""Bootstrap counts, intervals and rank correlation."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.resampling import bootstrap_counts, interval, poisson_counts, spearman


def identities(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2**64, count, np.uint64)


def test_bootstrap_counts_draw_as_many_units_as_there_are() -> None:
    counts = bootstrap_counts(11, 4000)
    assert counts.shape == (4000, 11)
    assert (counts.sum(1) == 11).all()
    assert abs(counts.mean(0) - 1).max() < 0.1


def test_bootstrap_counts_are_numpys_multinomial_draws_of_that_seed() -> None:
    """Saved figures were measured with these numbers."""
    expected = np.random.default_rng(5).multinomial(7, np.full(7, 1 / 7), 13)
    np.testing.assert_array_equal(bootstrap_counts(7, 13, 5), expected)


def test_bootstrap_counts_go_on_with_a_generator_where_it_stands() -> None:
    generator = np.random.default_rng(5)
    parts = [bootstrap_counts(7, 5, generator), bootstrap_counts(7, 8, generator)]
    np.testing.assert_array_equal(np.concatenate(parts), bootstrap_counts(7, 13, 5))


def test_bootstrap_interval_of_a_mean_is_about_two_standard_errors_wide() -> None:
    values = np.random.default_rng(1).normal(size=(400, 3))
    low, high = interval(bootstrap_counts(400) / 400 @ values)
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std(0) / 20, rtol=0.1)
    assert (low < values.mean(0)).all() and (values.mean(0) < high).all()


def test_interval_takes_other_percentiles() -> None:
    np.testing.assert_allclose(interval(np.arange(101.0), (5, 50)), [5, 50])


def test_poisson_counts_have_mean_and_variance_one_and_no_correlation() -> None:
    counts = poisson_counts(identities(3000), 50)
    assert counts.shape == (3000, 51) and (counts[:, 0] == 1).all()
    assert abs(counts[:, 1:].mean() - 1) < 0.01 and abs(counts[:, 1:].var() - 1) < 0.02
    assert abs((counts[:, 1:] == 0).mean() - np.exp(-1)) < 0.005
    assert abs(np.corrcoef(counts[:, 1], counts[:, 2])[0, 1]) < 0.06


def test_poisson_counts_depend_on_the_text_alone() -> None:
    texts = identities(97)
    np.testing.assert_array_equal(poisson_counts(texts[::-1], 50), poisson_counts(texts, 50)[::-1])


def test_poisson_counts_are_the_same_on_every_machine() -> None:
    """Else parts measured on two machines would not merge."""
    assert poisson_counts(np.array([0, 1], np.uint64), 8)[:, 1:].tolist() == [
        [2, 1, 0, 3, 0, 0, 0, 2],
        [1, 2, 3, 1, 1, 2, 2, 1],
    ]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2, 3], [10.0, 20, 5], -0.5),
        ([1.0, 1, 2], [3.0, 3, 4], 1),  # ties share their mean rank
        ([1.0, 2, 3, 4], [1.0, 8, 27, 64], 1),  # ranks, not values
        ([2.0, 1], [5.0, 7], -1),
    ],
)
def test_spearman_correlates_ranks(a: list[float], b: list[float], expected: float) -> None:
    assert spearman(np.array(a), np.array(b)) == pytest.approx(expected)


def test_spearman_of_a_constant_is_not_a_number() -> None:
    assert np.isnan(spearman(np.ones(3), np.arange(3.0)))
