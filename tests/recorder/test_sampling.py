"""Similar heads and small outputs, from a few rows of weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from headwise.recorder import sampling
from headwise.recorder.sampling import Samples, sample


@dataclass
class Call:
    """An attention call with given weights (B, H, Tq, Tk) and values (B, Hkv, Tk, Dv)."""

    all_weights: Tensor
    v: Tensor
    requested: list[list[int]] = field(default_factory=list)

    @property
    def q(self) -> Tensor:
        return self.all_weights[..., :1]

    def weights(self, rows: list[int], heads: None) -> Tensor:
        self.requested.append(rows)
        return self.all_weights[:, :, rows]


def random_call(batch: int = 2, heads: int = 6, kv_heads: int = 3, length: int = 19, seed: int = 0) -> Call:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, heads, length, length, generator=random, dtype=torch.float64)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return Call(weights, torch.randn(batch, kv_heads, length, 5, generator=random, dtype=torch.float64))


def rounding(call: Call) -> float:
    """Sums of so many products in float32, relative to their size."""
    return call.all_weights.shape[-1] * call.v.shape[-1] * torch.finfo(torch.float32).eps


def test_rows_are_evenly_spaced_and_end_with_the_last() -> None:
    call = random_call()
    sample(call, None)
    assert call.requested == [[1, 3, 6, 8, 10, 13, 15, 18]]


def test_large_calls_are_looked_at_in_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call()
    monkeypatch.setattr(sampling, "MAX_WEIGHTS", 2 * 6 * 19 * 3)
    sample(call, None)
    monkeypatch.setattr(sampling, "MAX_WEIGHTS", 5)
    sample(call, None)
    assert call.requested == [[5, 11, 18], [18]]


def test_norms_are_those_of_the_outputs_with_grouped_heads() -> None:
    call = random_call()
    samples = sample(call, None)
    outputs = (call.all_weights @ call.v.repeat_interleave(2, 1))[:, :, call.requested[0]]  # (B, H, rows, Dv)
    norms = outputs.square().sum(-1).mean((0, 2)).sqrt()
    torch.testing.assert_close(samples.outputs(), norms / norms.mean(), rtol=rounding(call), atol=0.0)


def test_correlations_are_those_of_the_weights_without_the_first_key() -> None:
    call = random_call(batch=1, kv_heads=6)
    samples = sample(call, None)
    parts = []
    for row in call.requested[0]:
        weights = call.all_weights[0, :, row, 1 : row + 1]  # (H, visible keys but the first)
        parts.append(weights - weights.mean(-1, keepdim=True))
    directions = torch.nn.functional.normalize(torch.cat(parts, 1))
    correlations = directions @ directions.mT
    correlations.fill_diagonal_(-1)
    largest, which = samples.twins()
    torch.testing.assert_close(largest, correlations.amax(1), rtol=0.0, atol=rounding(call))
    assert which.tolist() == correlations.argmax(1).tolist()


def test_heads_that_share_only_the_first_token_are_no_twins() -> None:
    weights = torch.tensor([[[[0.9, 0.1, 0.0, 0.0]], [[0.9, 0.0, 0.1, 0.0]], [[0.9, 0.09, 0.005, 0.005]]]])
    largest, which = sample(Call(weights, torch.randn(1, 3, 4, 2)), None).twins()
    assert largest[0] > 0.99 and which[0] == 2 and which[2] == 0
    assert largest[1] < 0.1


def test_padding_is_left_out() -> None:
    call = random_call()
    real = torch.ones(2, 19, dtype=torch.bool)
    real[0, 7:] = False
    padded = sample(call, real)
    changed = Call(call.all_weights.clone(), call.v)
    changed.all_weights[0, :, 7:] = 1 / 19
    again = sample(changed, real)
    assert int(padded.queries) == 3 + 8
    assert torch.equal(padded.products, again.products) and torch.equal(padded.squares, again.squares)


def test_samples_of_two_calls_add_up() -> None:
    first, second = (sample(random_call(seed=seed), None) for seed in (1, 2))
    both = first + second
    assert isinstance(both, Samples) and int(both.queries) == 32
    torch.testing.assert_close(both.squares, first.squares + second.squares)
    torch.testing.assert_close(both.products, first.products + second.products)
