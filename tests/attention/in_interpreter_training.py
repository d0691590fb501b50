"""Gradients and dropout of the Triton kernels equal the specification in every option, size and layout.

test_triton.py runs this file in a process of its own, like in_interpreter.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import attend, explain, head_stats, reference
from headwise.attention import dispatch, dropout
from headwise.attention.backends import blockwise_stats, composite
from headwise.attention.backends.native import library
from headwise.attention.backends.protocol import ExtraOutputs
from headwise.attention.backends.triton import launch
from headwise.attention.call import build_call
from helpers.attention_cases import FEW, LAYOUTS, TRITON, AttentionCase, array, cases, forced, random_case
from helpers.attention_checks import EMPTY_ROWS, HIDDEN_KEYS, TOLERANCE
from helpers.gradient_bounds import check_gradients, compute_gradients

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_triton.py instead"

pytestmark = [
    pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter is NumPy, which warns of every NaN
]
SOME = settings(FEW, max_examples=12)  # a call takes a second
FEWER = settings(FEW, max_examples=4)
SEEDS = st.integers(0, 2**63 - 1)


@contextmanager
def triton_only(small: bool = True) -> Iterator[None]:
    """Outputs and gradients inside are the Triton kernels': any other way to compute them fails."""

    def refuse(*arguments, **options):
        raise AssertionError("PyTorch computed this")

    with forced(TRITON if small else "default"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "interpreting", True)
        if not small:
            patch.setattr(library, "_choice", library.Choice.of(None))
        patch.setattr(composite, "gradients", refuse)
        patch.setattr(dispatch, "run_in_torch", refuse)
        yield


def output_gradient(case: AttentionCase, dtype: torch.dtype) -> np.ndarray:
    """A random gradient of the output, exact in dtype."""
    values = np.random.default_rng(0).normal(size=(*case.q.shape[:3], case.v.shape[3]))
    return array(torch.from_numpy(values).to(dtype))


def check(
    case: AttentionCase, dtype: torch.dtype, layout: str = "default", spoil: float = 0.0, small: bool = True
) -> None:
    """Triton's gradients are those of the specification. spoil: the value of keys that no query sees."""
    case = case.rounded(dtype)
    case.options.pop("gates", None)  # they are applied outside the kernel
    grad_out = output_gradient(case, dtype)
    names = ("q", "k", "v", *(["sinks"] if "sinks" in case.options else []))
    case = replace(case, **{name: np.where(case.hidden_keys[..., None], 0.0, getattr(case, name)) for name in "kv"})
    inputs = case.spoil_hidden_keys(spoil).tensors(dtype)
    inputs = replace(inputs, **{name: LAYOUTS[layout](getattr(inputs, name)) for name in "qkv"})
    with triton_only(small):
        got = compute_gradients(inputs, LAYOUTS[layout](torch.from_numpy(grad_out).to(dtype)), names)
    check_gradients(case, got, grad_out, dtype, case, rounds_weights=True)


def with_dropout(case: AttentionCase, rate: float, seed: int) -> AttentionCase:
    return replace(case, options={**case.options, "dropout": rate, "seed": seed})


# ---- gradients


@given(case=cases())
@SOME
def test_triton_gradients_are_those_of_the_specification(case):
    check(case, torch.float32)


@pytest.mark.full
@given(case=cases(), rate=st.sampled_from([0.0, 0.3]), seed=SEEDS)
@settings(FEW, max_examples=500)
def test_triton_gradients_of_many_random_calls_are_those_of_the_specification(case, rate, seed):
    check(with_dropout(case, rate, seed) if rate else case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(case=cases(), rate=st.sampled_from([0.0, 0.3]), seed=SEEDS)
@FEWER
def test_triton_gradients_in_16_bits_are_those_of_the_specification_within_rounding(dtype, case, rate, seed):
    check(with_dropout(case, rate, seed) if rate else case, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(FEW, max_examples=3)
def test_triton_gradients_ignore_memory_layout_and_hidden_keys(layout, case, value):
    check(case, torch.float32, layout, value)


# batch, heads, KV heads, queries, keys
LARGE = {
    "causal": ((1, 2, 1, 70, 70), {"causal": True}),
    "windows per head": (
        (1, 4, 2, 41, 70),
        {"window": [(40, 0), (None, 0), (9, 0), (30, 5)], "keep_first": [4, 0, 1, 60]},
    ),
    "starts and first keys": (
        (2, 1, 1, 37, 67),
        {"starts": np.array([30, 3]), "window": (9, 0), "keep_first": 4, "causal": True, "softcap": 2.0},
    ),
    "a padding mask": ((2, 2, 1, 37, 67), {"mask": np.arange(67) > np.array([[[[9]]], [[[0]]]])}),
    "dropout": ((1, 1, 1, 37, 150), {"dropout": 0.2, "seed": 2**63 - 12345}),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_gradients_in_blocks_of_default_sizes_are_those_of_the_specification(name, dtype):
    sizes, options = LARGE[name]
    check(replace(random_case(5, *sizes), options=options), dtype, small=False)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}])
def test_triton_gradients_with_alibi_slopes_are_those_of_the_specification(options):
    case = random_case(5, queries=19, keys=21)
    check(replace(case, options={"slopes": np.linspace(0.01, 1, 6), **options}), torch.float32)


@pytest.mark.parametrize("name", EMPTY_ROWS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_query_with_no_visible_keys_has_no_part_in_any_gradient(sinks, name):
    options, empty = EMPTY_ROWS[name]
    options = {**options, **({"sinks": torch.linspace(-1, 1, 6)} if sinks else {})}
    names = ("q", "k", "v", "sinks") if sinks else ("q", "k", "v")
    case = replace(random_case().tensors(torch.float32), options=options)
    rows = torch.tensor(empty, dtype=torch.bool).expand(2, 5)[:, None].expand(2, 6, 5)
    grad_out = torch.randn(2, 6, 5, 3)
    with triton_only():
        want = compute_gradients(case, grad_out.masked_fill(rows[..., None], 0.0), names)
        spoiled = replace(case, q=case.q.masked_fill(rows[..., None], torch.nan))
        got = compute_gradients(spoiled, grad_out.masked_fill(rows[..., None], torch.inf), names)
    assert not got["q"][rows].any()
    for key, gradient in got.items():
        assert gradient.equal(want[key]), key


@pytest.mark.parametrize("name", HIDDEN_KEYS)
def test_triton_gradients_of_hidden_keys_are_zero(name):
    case = replace(random_case(), options=array(HIDDEN_KEYS[name]))
    hidden = torch.from_numpy(case.hidden_keys)
    assert hidden.any()
    tensors = case.spoil_hidden_keys(np.nan).tensors(torch.float32)
    with triton_only():
        got = compute_gradients(tensors, torch.randn(2, 6, 5, 3))
    assert not got["k"][hidden].any() and not got["v"][hidden].any()
    assert all(x.isfinite().all() and x.any() for x in got.values())


@pytest.mark.parametrize("place", ["v", "gradient"])
def test_nan_reaches_the_gradients_of_those_who_attend_to_it(place):
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    {"v": case.v, "gradient": grad_out}[place][0, 1, 3, 1] = torch.nan
    with triton_only():
        got = compute_gradients(replace(case, options={"causal": True}), grad_out)
    if place == "v":
        assert got.pop("v").isfinite().all()  # it depends on no value
    assert all(x[0].isnan().any() and x[1].isfinite().all() for x in got.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e6])
@pytest.mark.parametrize("place", ["q", "k"])
def test_scores_that_single_precision_may_fail_on_are_left_to_pytorch(place, value):
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    {"q": case.q, "k": case.k}[place][0, 1, 3, 1] = value
    case = replace(case, options={"causal": True})
    with pytest.raises(AssertionError, match="PyTorch computed"), triton_only():
        compute_gradients(case, grad_out)
    with forced(TRITON):
        got = compute_gradients(case, grad_out)
    with forced("one block of rows"):
        want = compute_gradients(case, grad_out)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 6, 2, 5, 7), (2, 6, 2, 0, 7), (2, 6, 2, 5, 0), (2, 6, 2, 0, 0)], ids=str)
def test_triton_gradients_of_empty_calls_are_zeros(sizes):
    case = random_case(0, *sizes).tensors(torch.float32)
    with triton_only():
        for name, gradient in compute_gradients(case, torch.randn(*case.q.shape[:3], 3)).items():
            assert gradient.shape == getattr(case, name).shape and not gradient.any()


def test_triton_gradients_take_a_gradient_of_any_strides():
    case, full = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    layouts = {
        "expanded": torch.ones(()).expand(2, 6, 5, 3),
        "expanded rows": full[:, :, :1].expand(2, 6, 5, 3),
        "negated": torch._neg_view(full),
        "every second": torch.randn(2, 6, 10, 6)[:, :, ::2, ::2],
    }
    with triton_only():
        for name, grad_out in layouts.items():
            got, want = compute_gradients(case, grad_out), compute_gradients(case, grad_out.clone().contiguous())
            assert all(got[key].equal(want[key]) for key in got), name


def test_tensors_that_hooks_saved_in_another_dtype_are_left_to_pytorch():
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    with forced(TRITON), torch.autograd.graph.saved_tensors_hooks(lambda x: x, torch.Tensor.double):
        got = compute_gradients(case, grad_out)
    with forced("one block of rows"):
        want = compute_gradients(case, grad_out)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient.float(), want[name], rtol=1e-4, atol=1e-5)


def test_second_derivatives_come_from_pytorch():
    case = random_case().tensors(torch.float32)
    q = case.q.requires_grad_()
    with forced(TRITON):
        out = attend(q, case.k, case.v, causal=True)
        (first,) = torch.autograd.grad(out, q, torch.randn_like(out), create_graph=True)
        assert first.requires_grad and torch.autograd.grad(first.sum(), q)[0].any()


def test_gradients_of_a_mask_come_from_pytorch():
    case, mask, grad_out = random_case().tensors(torch.float32), torch.randn(5, 7), torch.randn(2, 6, 5, 3)
    learning = replace(case, options={"mask": mask})
    with forced(TRITON):
        got = compute_gradients(learning, grad_out, ("q", "mask"))
    with forced("one block of rows"):
        want = compute_gradients(learning, grad_out, ("q", "mask"))
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-5)


def test_two_backward_passes_are_bitwise_equal():
    case = replace(random_case(queries=19, keys=40).tensors(torch.float32), options={"causal": True})
    grad_out = torch.randn(2, 6, 19, 3)
    with triton_only():
        first, again = compute_gradients(case, grad_out), compute_gradients(case, grad_out)
    assert all(first[name].equal(again[name]) for name in first)


def test_statistics_while_training_come_from_the_same_pass(monkeypatch):
    case = random_case(queries=9, keys=20).tensors(torch.float32)

    def refuse(*arguments, **keywords):
        raise AssertionError("the statistics were computed apart from the output")

    monkeypatch.setattr(blockwise_stats, "row_sums", refuse)
    with triton_only():
        q = case.q.clone().requires_grad_()
        out, stats = head_stats(q, case.k, case.v, causal=True)
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert gradient.any() and stats == head_stats(case.q, case.k, case.v, causal=True)[1]


# ---- dropout


@given(case=cases(), rate=st.sampled_from([0.1, 0.6, 1.0]), seed=SEEDS)
@SOME
def test_triton_attend_with_dropout_equals_the_reference(case, rate, seed):
    case = case.rounded(torch.float32)
    tensors = case.tensors(torch.float32)
    call = build_call(tensors.q, tensors.k, tensors.v, dropout=rate, **tensors.options)
    with triton_only():
        out = dispatch.attend(tensors.q, tensors.k, tensors.v, replace(call, seed=seed))
    want = reference.attend(case.q, case.k, case.v, dropout=rate, seed=seed, **case.options)
    np.testing.assert_allclose(array(out), want, **TOLERANCE[torch.float32])


@given(case=cases(), rate=st.sampled_from([0.1, 0.5]), seed=SEEDS)
@SOME
def test_triton_gradients_with_dropout_are_those_of_the_specification(case, rate, seed):
    check(with_dropout(case, rate, seed), torch.float32)


@pytest.mark.parametrize("keys", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", [1, 2**63 - 98765])
def test_the_very_weights_of_the_specification_are_dropped_in_blocks_of_any_size(keys, seed, monkeypatch):
    """Queries are zeros, so that all weights are equal, and values and output gradients are unit vectors."""
    monkeypatch.setattr(launch, "interpreting", True)
    monkeypatch.setattr(launch, "blocks", lambda *arguments: launch.Blocks(16, keys, 4))
    monkeypatch.setattr(launch, "backward_blocks", lambda *arguments: (launch.Blocks(16, keys, 4),) * 2)
    queries, total = 5, 150
    q, k = torch.zeros(2, 3, queries, 1), torch.zeros(2, 3, total, 1)
    retained = torch.from_numpy(dropout.retained(seed, 0.3, 2, 3, queries, total))

    v = torch.eye(total).expand(2, 3, total, total)
    call = replace(build_call(q, k, v, dropout=0.3), seed=seed)
    weights = launch.run(q, k, v, call).out
    assert (weights > 0).equal(retained)

    v, grad_out = torch.zeros(2, 3, total, queries), torch.eye(queries).expand(2, 3, queries, queries)
    call = replace(build_call(q, k, v, dropout=0.3), seed=seed)
    out, _, lse, *_ = launch.run(q, k, v, call, ExtraOutputs(lse=True))
    gradients = launch.backward(grad_out, q, k, v, out, lse, call)
    assert (gradients.v.transpose(-1, -2) > 0).equal(retained)


def test_statistics_are_those_before_dropout():
    case = random_case(queries=9, keys=20).tensors(torch.float32)
    with triton_only():
        out, stats = head_stats(case.q, case.k, case.v, dropout=0.5)
        plain, want = head_stats(case.q, case.k, case.v)
    assert stats == want and not out.equal(plain)


def test_dropout_follows_the_seed_of_pytorch_in_forward_and_backward_passes():
    case = random_case(queries=9, keys=20).tensors(torch.float32)
    results = []
    for path in (TRITON, TRITON, "one block of rows"):
        torch.manual_seed(3)
        with forced(path):
            results.append(compute_gradients(replace(case, options={"dropout": 0.5}), torch.ones(2, 6, 9, 3)))
    for name, gradient in results[0].items():
        assert gradient.equal(results[1][name])
        torch.testing.assert_close(gradient, results[2][name], rtol=1e-4, atol=1e-5)


def test_second_derivatives_use_the_weights_that_the_triton_kernel_retained():
    case = random_case().tensors(torch.float32)
    results = []
    for path in (TRITON, "one block of rows"):
        torch.manual_seed(3)
        q = case.q.clone().requires_grad_()
        with forced(path):
            out = attend(q, case.k, case.v, dropout=0.5)
            (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            results.append((out, first, *torch.autograd.grad(first.square().sum(), q)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_explain_names_the_triton_kernel_for_dropout():
    case = random_case().tensors(torch.float32)
    with forced(TRITON):
        assert explain(case.q, case.k, case.v, dropout=0.1).startswith("triton: one pass on cuda")
