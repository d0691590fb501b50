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


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
def test_a_float_mask_that_overflows_with_the_scores(path: str) -> None:
    mask = torch.zeros(5, 7)
    mask[1], mask[2, 3], mask[3, 2:4] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min, -torch.inf
    with forced(path):
        for sign in SIGNS.values():
            check(alike(call(torch.float32, sign)), {"mask": mask * 1.0})
        mask[1], mask[2, 3] = 0, 3e38
        check(alike(call(torch.float32, 1.0)), {"mask": mask})


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -3e38, 3e38])
def test_lse_of_rows_whose_mask_is_too_large_for_units_of_log2(lowest: float, path: str) -> None:
    made = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, tokens, 8, generator=made) for heads, tokens in ((4, 5), (2, 1031), (2, 1031)))
    mask, sinks = torch.zeros(5, 1031), torch.randn(4, generator=made)
    mask[1], mask[2, 3:], mask[3, 0] = lowest, lowest, lowest
    for options in ({}, {"sinks": sinks}, {"causal": True, "window": (2, 0), "keep_first": 3}):
        with forced(path):
            lse = head_stats(q, k, v, mask=mask, **options)[1].lse
        plain = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        want = reference.head_stats(q.numpy(), k.numpy(), v.numpy(), mask=mask.numpy(), **plain)[1].lse
        np.testing.assert_allclose(lse, want, rtol=1e-5)


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
def test_queries_that_overflow_with_the_scale_have_finite_scores(path: str) -> None:
    q, k, v = call(torch.float32, 1.0)
    tensors = [q * 1e5, k * 1e-38 * 1e-20, v]  # scores of about 50, of queries of 3e38 to 6e38 where they are scaled
    with forced(path):
        check(tensors, {"scale": 3e13})
        learned = [x.requires_grad_() for x in tensors]
        attend(*learned, scale=3e13).sum().backward()
    for x in (learned[0], learned[2]):  # the gradient of keys is too large for float32
        assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_overflowing_scores_are_finite(dtype: torch.dtype) -> None:
    for sign in SIGNS.values():
        tensors = [x.requires_grad_() for x in alike(call(dtype, sign))]
        attend(*tensors).sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
@pytest.mark.parametrize("largest", [1e2, 1e5, 1e10])
def test_gradients_of_large_scores_are_those_of_double_precision(largest: float, path: str) -> None:
    made = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, 11, 8, generator=made) for heads in (4, 2, 2))
    k[:, :, 5] = k[:, :, 3]  # two keys that share the weight, so that there is a gradient
    q, k = q * largest**0.5, k * largest**0.5
    single = [x.clone().requires_grad_() for x in (q, k, v)]
    double = [x.double().requires_grad_() for x in (q, k, v)]
    with forced(path):
        attend(*single).sum().backward()
    attend(*double).sum().backward()
    assert float(double[1].grad.abs().max()) > largest**0.5 / 10
    weighed = 8 * float(v.abs().max())  # the largest gradient of a weight; scores have it times a weight
    of_scores = 1e-5 * weighed * 8**-0.5
    bounds = of_scores * float(k.abs().max()), 22 * of_scores * float(q.abs().max()), 22e-5
    for got, want, bound in zip(single, double, bounds, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
@pytest.mark.parametrize("hidden", [-1e5, -1e9, torch.finfo(torch.float32).min])
def test_gradients_of_queries_that_a_float_mask_hides_everything_from(
    hidden: float, path: str, dtype: torch.dtype
) -> None:
    made = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, 143, 8, generator=made, dtype=dtype) for heads in (4, 2, 2))
    mask = torch.zeros(2, 1, 143, 143)
    mask[1, :, :5] = mask[0, :, 135:] = hidden  # whole rows: their weights are those of rounded scores
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(2, 4, 143, 8, generator=made, dtype=dtype)
    with forced(path):
        attend(*leaves, mask=mask).backward(grad)
    double = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in double[1:])
    scores = double[0] @ keys.mT * 8**-0.5
    # both round a score to the precision of its sum with the mask before the softmax
    rounded = (scores.detach().to(dtype) + mask).double() - mask.double()
    weights = (scores + (rounded - scores).detach()).softmax(-1)
    (weights @ values).backward(grad.double())
    for got, want in zip(leaves, double, strict=True):
        # 2 * 143 terms per key, of which each has a relative error of a few roundings of the score
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=0, atol=286 * 2e-5)


def test_infinite_inputs_propagate() -> None:
    q, k, v = call(torch.float32, 1.0)
    k[0, 0, 2, 1] = torch.inf
    assert attend(q, k, v)[0, :2].isnan().all()
    assert attend(q, k, v)[1].isfinite().all()
