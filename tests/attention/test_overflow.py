"""Scores that overflow what they are computed in: finite queries and keys have finite weights, on every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwise import attend, head_stats, reference, weights
from helpers.attention_cases import NATIVE, READABLE, forced

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": torch.arange(7) % 3 != 0},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}
# by what queries and keys are multiplied: scores of +-1e40 in float32, +-1e320 in float64
LARGE = {torch.float32: 1e20, torch.bfloat16: 1e20, torch.float64: 1e160}
SIGNS = {"every score too large": 1.0, "every score too low": -1.0}


def call(dtype: torch.dtype, sign: float, mixed: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q = torch.rand(2, 4, 5, 8, generator=generator, dtype=torch.float64) + 1
    k = torch.rand(2, 2, 7, 8, generator=generator, dtype=torch.float64) + 1
    v = torch.randn(2, 2, 7, 3, generator=generator, dtype=torch.float64)
    if mixed:  # only some keys are large, and exactly one of them the largest
        k = k * torch.tensor([1e-18, 1e-20, 1.0, 1e-19, -1.0, 1e-17, -1e-3], dtype=torch.float64)[:, None]
    return [(q * LARGE[dtype]).to(dtype), (sign * k * LARGE[dtype]).to(dtype), v.to(dtype)]


def options_for(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in OPTIONS[name].items()
    }


def arrays(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    return [x.double().numpy() for x in tensors]


def alike(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same with keys that score alike, which makes the specification's weights equal as well."""
    q, k, v = tensors
    return [q, k[:, :, :1].expand_as(k).contiguous(), v]


def check(tensors: list[torch.Tensor], options: dict[str, Any]) -> None:
    plain = {
        key: x.double().numpy() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in options.items()
    }
    plain = {key: x.numpy() if isinstance(x, torch.Tensor) else x for key, x in plain.items()}
    want, stats = reference.head_stats(*arrays(tensors), **plain)
    assert np.isfinite(want).all()
    bound = {"rtol": 2e-2, "atol": 2e-2} if tensors[0].dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    want = torch.from_numpy(want)
    torch.testing.assert_close(attend(*tensors, **options).double(), want, **bound)
    out, measured = head_stats(*tensors, **options)
    torch.testing.assert_close(out.double(), want, **bound)
    for name in ("entropy", "confidence", "first"):
        torch.testing.assert_close(measured[name].double(), torch.from_numpy(stats[name]), rtol=1e-3, atol=1e-4)
    exact = torch.from_numpy(reference.weights(*arrays(tensors)[:2], **plain))
    torch.testing.assert_close(weights(*tensors[:2], **options).double(), exact, **bound)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", LARGE, ids=str)
@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
def test_scores_that_overflow_equal_the_reference(path: str, dtype: torch.dtype, name: str) -> None:
    with forced(path):
        for sign in SIGNS.values():
            check(alike(call(dtype, sign)), options_for(name, dtype))
            check(call(dtype, sign, mixed=True), options_for(name, dtype))


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
def test_a_sum_whose_parts_overflow_with_both_signs(path: str) -> None:
    q, k, v = call(torch.float32, 1.0)
    k = k * torch.tensor([1, -1] * 4)  # the products cancel to a score that float32 can hold, or nearly
    q[..., 1::2] = q[..., ::2]
    k[..., 1::2] = -k[..., ::2]
    with forced(path):
        check([q, k, v], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_overflowing_scores_are_finite(dtype: torch.dtype) -> None:
    for sign in SIGNS.values():
        tensors = [x.requires_grad_() for x in alike(call(dtype, sign))]
        attend(*tensors).sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def test_infinite_inputs_propagate() -> None:
    q, k, v = call(torch.float32, 1.0)
    k[0, 0, 2, 1] = torch.inf
    assert attend(q, k, v)[0, :2].isnan().all()
    assert attend(q, k, v)[1].isfinite().all()
