"""One query on a long cache: keys and values are read in place, in every dtype, layout and group of heads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from headwise import attend
from helpers.attention_cases import NATIVE, forced

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernel was not built")
each_path = pytest.mark.parametrize("path", NATIVE)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_output_and_bound(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output in float64, and how far one of single precision, rounded to the dtype of q, may be from it.

    A score of D products is off by D + 4 roundings of the sum of their sizes; a weight by twice the largest error of a
    score, as both e and its sum are; a sum over T keys by T + 8 further roundings. shown: (T,), all keys by default.
    """
    dtype, single = q.dtype, 2.0**-24
    q, k, v = q.double(), k.double(), v.double()
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores, sizes = scale * q @ k.mT, scale * q.abs() @ k.abs().mT
    if shown is not None:
        scores, v = scores.masked_fill(~shown, -torch.inf), v.masked_fill(~shown[:, None], 0)
    weights = scores.softmax(-1)
    error = 2 * (q.shape[3] + 4) * single * sizes.amax(-1, keepdim=True) + 2 * (k.shape[2] + 8) * single
    out = weights @ v
    return out, error * (weights @ v.abs()) + torch.finfo(dtype).eps * out.abs() + torch.finfo(dtype).tiny


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None = None) -> None:
    exact, bound = exact_output_and_bound(q, k, v, shown)
    assert ((out.double() - exact).abs() <= bound).all()


@each_path
@each_dtype
@pytest.mark.parametrize("dims", [(5, 24), (24, 40), (33, 48), (40, 33), (64, 72), (128, 128), (100, 16)], ids=str)
def test_decoding_equals_float64_for_every_number_of_rows(path, dtype, dims):
    """Heads of whole, odd and broken vectors; 1 to 12 rows per KV head."""
    k, v = (normal(2, 2, 77, d, dtype=dtype, seed=d) for d in dims)
    with forced(path):
        for group in range(1, 13):
            q = normal(2, 2 * group, 1, dims[0], dtype=dtype, seed=group)
            check(attend(q, k, v), q, k, v)


@each_path
@each_dtype
def test_tokens_side_by_side_give_the_bits_of_heads_side_by_side(path, dtype):
    """Where (B, T, H, D) lies in memory, all heads take turns on every few keys."""
    q = normal(2, 6, 1, 40, dtype=dtype, seed=0)
    k, v = (normal(2, 3100, 3, 40, dtype=dtype, seed=seed).transpose(1, 2) for seed in (1, 2))
    with forced(path):
        out = attend(q, k, v)
        assert out.equal(attend(q, k.contiguous(), v.contiguous()))
    check(out, q, k, v)


@each_path
@each_dtype
def test_heads_that_take_turns_hide_keys_from_each_head_alone(path, dtype):
    """More heads than a thread takes up at once; one of them sees no key of a block, and hidden values are NaN."""
    heads, keys = 19, 2111
    q = normal(1, heads, 1, 24, dtype=dtype, seed=0)
    k, v = (normal(1, keys, heads, d, dtype=dtype, seed=d).transpose(1, 2) for d in (24, 40))
    shown = torch.rand(1, heads, 1, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    shown[:, 3, :, 512:1024] = False
    v[~shown[:, :, 0]] = torch.nan
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with forced(path):
            out = attend(q, k, v, mask=shown)
            assert out.equal(attend(q, k.contiguous(), v.contiguous(), mask=shown))
    finally:
        torch.set_num_threads(threads)
    for head in range(heads):
        check(out[:, [head]], q[:, [head]], k[:, [head]], v[:, [head]], shown[0, head, 0])


@each_path
@HALVES
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("value_dim", [40, 64])
def test_hidden_values_that_are_not_finite_leave_no_trace_in_a_cache_of_16_bits(path, dtype, value, value_dim):
    shown = torch.arange(601) % 3 > 0
    for group in (1, 4, 5):
        q = normal(1, 2 * group, 1, 64, dtype=dtype, seed=group)
        k, v = (normal(1, 2, 601, d, dtype=dtype, seed=d) for d in (64, value_dim))
        v[:, :, ~shown] = value
        with forced(path):
            check(attend(q, k, v, mask=shown[None, None, None]), q, k, v, shown)


@each_path
@HALVES
def test_every_number_of_16_bits_is_read_exactly(path, dtype):
    """A single key has the weight 1, so that the output is its value: normal, subnormal, infinite or NaN."""
    v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 512, 1, 128)
    ones = torch.ones(1, 512, 1, 64, dtype=dtype)
    with forced(path):
        torch.testing.assert_close(attend(ones, ones, v), v, rtol=0, atol=0, equal_nan=True)


@each_path
@HALVES
def test_a_query_with_a_single_1_scores_that_number_of_the_key(path, dtype):
    """Whatever the order in which the numbers of a head are read; the other key has score 0."""
    numbers = torch.linspace(-3, 3, 64).to(dtype)
    for place, second in itertools.product(range(0, 64, 7), (0, 1)):
        q, k = torch.zeros(1, 1, 1, 64, dtype=dtype), torch.zeros(1, 1, 2, 64, dtype=dtype)
        q[..., place], k[:, :, second] = 1, numbers
        v = normal(1, 1, 2, 32, dtype=dtype, seed=place)
        with forced(path):
            check(attend(q, k, v), q, k, v)
