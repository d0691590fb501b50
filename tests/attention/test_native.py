"""The native kernel equals the reference in every instruction set, size and layout, also in threads and forks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.forks import fork_at_stages
from campaigns.sanitizers import SANITIZED, VARIANTS
from headwise import attend, explain, head_stats, reference
from headwise.attention import functional, operators, repeated_calls
from headwise.attention.backends.native import library
from headwise.attention.backends.protocol import ExtraOutputs
from headwise.attention.call import StatsRequest, build_call
from headwise.attention.stats import HeadStats
from headwise.errors import MaskError, ShapeError
from helpers.attention_cases import (
    FEW,
    LAYOUTS,
    MANY,
    NATIVE,
    AttentionCase,
    array,
    cases,
    cases_with_stats,
    forced,
    needs_kernel,
    nonfinite_cases,
    random_case,
)
from helpers.attention_checks import (
    EMPTY_ROWS,
    HIDDEN_KEYS,
    LARGE_CALLS,
    LARGE_CALLS_WITH_STATS,
    OTHER_OPTIONS,
    TOLERANCE,
    check_attend,
    check_stats,
    gradients,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones"),
    pytest.mark.skipif(not NATIVE, reason="the native kernel was not built"),
]
each_path = pytest.mark.parametrize("path", NATIVE)


@st.composite
def long_cases(draw: st.DrawFn) -> AttentionCase:
    """Calls of several blocks of rows and keys."""
    call = draw(cases())
    keys, queries = draw(st.integers(200, 700)), draw(st.integers(1, 3) | st.integers(1, 150))
    batch, heads, kv = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dim, value_dim = draw(st.sampled_from([(16, 16), (33, 7), (64, 40), (72, 23)]))
    shapes = (batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    options = dict(call.options)
    if "mask" in options:
        mask = rng.random((draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), queries, keys)) < 0.3
        mask[..., : keys // 2] = draw(st.booleans())
        options["mask"] = mask if draw(st.booleans()) else np.where(mask, rng.normal(size=mask.shape), -np.inf)
    if "lengths" in options:
        options["lengths"] = rng.integers(0, keys + 1, size=batch)
    if "offset" in options:
        options["offset"] = rng.integers(-20, keys, size=batch)
    if "window" in options:
        options["window"] = (draw(st.integers(0, keys)), draw(st.none() | st.integers(0, keys)))
    return AttentionCase(q, k, v, options)


@each_path
@given(call=cases() | nonfinite_cases())
@FEW
def test_native_attend_equals_the_reference(path, call):
    with forced(path):
        check_attend(call, torch.float32)


@each_path
@given(call=long_cases())
@settings(FEW, max_examples=40)
def test_native_attend_and_stats_equal_the_reference_over_several_blocks(path, call):
    with forced(path):
        check_attend(call, torch.float32)
        check_stats(call, torch.float32)


@pytest.mark.parametrize("whose", ["query", "key"])
@each_path
def test_an_infinite_number_in_a_query_or_key_affects_only_its_own_scores(path, whose):
    """Heads that are no whole number of vectors: their last numbers are read together with some that were before."""
    for place in range(23):
        rng = np.random.default_rng(place)
        q, k, v = rng.normal(size=(1, 2, 3, 23)), rng.normal(size=(1, 2, 7, 23)), rng.normal(size=(1, 2, 7, 19))
        if whose == "key":
            q[..., place], k[0, 0, 4, place] = -abs(q[..., place]), np.inf
        else:
            q[0, 0, 1, place], k[..., place] = -np.inf, abs(k[..., place])
        with forced(path):
            check_attend(AttentionCase(q, k, v, {}), torch.float32)


@pytest.mark.full
@each_path
@given(call=cases() | nonfinite_cases() | long_cases())
@MANY
def test_native_attend_equals_the_reference_in_many_random_calls(path, call):
    with forced(path):
        check_attend(call, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_path
@given(call=cases())
@FEW
def test_native_attend_in_16_bits_equals_the_reference_within_rounding(path, dtype, call):
    with forced(path):
        check_attend(call, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each_path
@given(call=cases(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(FEW, max_examples=50)
def test_native_ignores_memory_layout_and_hidden_keys(path, dtype, layout, call, value):
    with forced(path):
        check_attend(call.spoil_hidden_keys(value), dtype, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_path
@given(call=cases_with_stats())
@FEW
def test_native_head_stats_equal_the_reference(path, dtype, call):
    with forced(path):
        check_stats(call, dtype)
        check_stats(call.spoil_hidden_keys(np.nan), dtype)


@pytest.mark.parametrize("name", LARGE_CALLS)
@each_path
def test_native_large_calls_equal_the_reference(path, name):
    sizes, options, _ = LARGE_CALLS[name]
    call = random_case(3, *sizes)
    call.options.update(options)
    tensors = call.tensors(torch.float32)
    with forced(path):
        check_attend(call, torch.float32)
        assert explain(tensors.q, tensors.k, tensors.v, **tensors.options).startswith("native: one pass in")


@pytest.mark.parametrize("name", [*LARGE_CALLS_WITH_STATS, "split keys"])
@each_path
def test_native_statistics_of_large_calls_equal_the_reference(path, name):
    sizes, options = {
        **LARGE_CALLS_WITH_STATS,
        "split keys": ((2, 6, 2, 3, 5000), {"lengths": np.array([4999, 1500])}),
    }[name]
    call = random_case(5, *sizes)
    call.options.update(options)
    call.stats_options["classes"] = {"every third": np.arange(sizes[0] * sizes[4]).reshape(sizes[0], sizes[4]) % 3 == 0}
    with forced(path):
        check_stats(call, torch.float32)


@each_path
@pytest.mark.parametrize("keys", [300, 5000])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_reaches_only_queries_that_see_it(path, keys, place):
    call = random_case(queries=5, keys=keys)
    {"query": call.q[0, 3, 2], "key": call.k[0, 1, -2], "value": call.v[0, 1, -2]}[place][:] = np.nan
    for options in (
        {"causal": True},
        {"lengths": np.array([keys - 2, keys])},
        {"mask": np.arange(keys) < keys - 2},
        {},
    ):
        with forced(path):
            check_attend(replace(call, options=options), torch.float32)


@each_path
@pytest.mark.parametrize("beside", OTHER_OPTIONS)
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_nan_query_with_no_visible_keys_gets_zeros(path, name, beside):
    options, empty = EMPTY_ROWS[name]
    options = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    empty = torch.tensor(empty).bool().expand(2, 5)[:, None].expand(2, 6, 5)
    call = random_case().tensors(torch.float32)
    call.q[empty] = torch.nan
    with forced(path):
        for out in (
            attend(call.q, call.k, call.v, **options, **OTHER_OPTIONS[beside]),
            head_stats(call.q, call.k, call.v, **options, **OTHER_OPTIONS[beside])[0],
        ):
            assert not out[empty].any() and out.isfinite().all()


@each_path
@given(call=cases())
@FEW
def test_native_gradients_equal_those_of_blockwise_attention(path, call):
    exact, tensors = call.tensors(), call.tensors(torch.float32)
    with forced("one block of rows"):
        want = gradients(attend, (exact.q, exact.k, exact.v), **exact.options)
    with forced(path):
        got = gradients(attend, (tensors.q, tensors.k, tensors.v), **tensors.options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(array(a), array(b), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("name", HIDDEN_KEYS)
def test_gradients_ignore_nan_in_hidden_keys(name):
    call = replace(random_case(), options=array(HIDDEN_KEYS[name])).spoil_hidden_keys(np.nan).tensors(torch.float32)
    xs = call.q, call.k, call.v
    with forced(NATIVE[0]):
        got, want = (gradients(attend, x, **call.options) for x in (xs, [x.nan_to_num(0.0) for x in xs]))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@each_path
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["dense", "causal"])
def test_native_gradients_of_large_calls(path, options):
    call = random_case(batch=2, heads=3, kv=3, queries=300, keys=300).tensors(torch.float32)
    call = replace(call, v=call.k.flip(2) + 1)  # as wide as the keys, for PyTorch's own backward
    with forced("one block of rows"):
        want = gradients(attend, (call.q, call.k, call.v), **options)
    with forced(path):
        got = gradients(attend, (call.q, call.k, call.v), **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def second_derivatives(xs, options):
    q, k, v = (x.clone().requires_grad_() for x in xs)
    (slope,) = torch.autograd.grad(attend(q, k, v, **options).square().sum(), q, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), (q, k, v))


def test_second_derivatives_after_a_native_forward():
    call, options = random_case().tensors(torch.float32), {"softcap": 2.0, "causal": True}
    with forced("one block of rows"):
        want = second_derivatives((call.q, call.k, call.v), options)
    with forced(NATIVE[0]):
        got = second_derivatives((call.q, call.k, call.v), options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@each_path
@given(call=cases() | long_cases(), count=st.integers(1, 16))
@settings(FEW, max_examples=60)
def test_strongest_keys_have_the_largest_weights_of_every_row(path, call, count):
    tensors = call.rounded(torch.float32)
    call, a = tensors.tensors(torch.float32), reference.weights(tensors.q, tensors.k, **tensors.weight_options)
    for way in (path, "default"):
        with forced(way):
            options = {name: value for name, value in call.options.items() if name != "gates"}
            found = functional.strongest_keys(call.q, call.k, count, **options)
        largest = -np.sort(-a, -1)[..., :count]
        np.testing.assert_allclose(found.weights, largest, rtol=1e-4, atol=1e-5)
        there = np.take_along_axis(a, array(found.keys), -1)
        np.testing.assert_allclose(there, largest, rtol=1e-4, atol=1e-5)


# ---- graphs


GRAPHS = {
    "plain": {},
    "causal, a mask": {"causal": True, "mask": torch.arange(35).view(5, 7) % 4 > 0},
    "a window, lengths": {"window": (2, 1), "lengths": torch.tensor([3, 6])},
    "offsets, softcap": {"causal": True, "offset": torch.tensor([-1, 2]), "softcap": 2.0},
    "sinks, gates": {"sinks": torch.linspace(-1, 1, 6), "gates": torch.linspace(0, 1, 6)},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_calls_are_one_node(name):
    call, options = random_case().tensors(torch.float32), GRAPHS[name]
    rare = {"rare": torch.arange(14).view(2, 7) % 3 == 0}
    torch.compiler.reset()
    fast = torch.compile(
        lambda q, k, v: head_stats(q, k, v, classes=rare, **options), fullgraph=True, backend="aot_eager"
    )
    with forced(NATIVE[0]), torch.no_grad():
        (out, stats), (want, expected) = (
            f(call.q, call.k, call.v) for f in (fast, partial(head_stats, classes=rare, **options))
        )
        assert out.equal(want) and stats == expected
        plain = torch.compile(lambda q, k, v: attend(q, k, v, **options), fullgraph=True, backend="aot_eager")
        assert plain(call.q, call.k, call.v).equal(want)
    tensors = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    with forced(NATIVE[0]):  # with gradients too, which are another node
        torch.autograd.grad(plain(*tensors).sum(), tensors)


class Exported(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v, window=(3, 0))


def test_an_exported_graph_takes_any_length():
    call = random_case(queries=11, keys=11).tensors(torch.float32)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with forced(NATIVE[0]), torch.no_grad():
        graph = torch.export.export(Exported(), (call.q, call.k, call.v), dynamic_shapes=[{2: tokens}] * 3)
        assert "headwise.attend" in str(graph.graph)
        for length in (7, 300):
            more = random_case(queries=length, keys=length).tensors(torch.float32)
            want = attend(more.q, more.k, more.v, window=(3, 0))
            assert graph.module()(more.q, more.k, more.v).equal(want)


def test_the_operator_passes_pytorchs_own_checks():
    call = random_case().tensors(torch.float32)
    mask = torch.arange(35).view(1, 1, 5, 7) % 4 > 0
    tensors = (call.q, call.k, call.v, mask, *[None] * 8, torch.tensor(1 << 40))
    for windows in ([], [-1, 0, 0] * 3 + [2, 0, 1] * 3):
        for stats, lse in ((True, False), (False, False), (True, True), (False, True)):
            numbers = (-1, 0, 0, windows, True, 0, operators.ABSENT, 7, 0.5, 0.0, 0.3, stats, lse)
            torch.library.opcheck(torch.ops.headwise.attend.default, (*tensors, *numbers))
        out, _, row_lse = torch.ops.headwise.attend(*tensors, *numbers)
        for of_mask in (False, True):
            inputs = (torch.ones_like(out), out, row_lse, of_mask, False, *tensors[:3], mask.float(), *tensors[4:])
            torch.library.opcheck(torch.ops.headwise.attend_gradients.default, (*inputs, *numbers))


def test_native_attend_under_autocast_and_inference_mode():
    call = random_case(keys=20).tensors(torch.float32)
    with forced(NATIVE[0]):
        want = attend(call.q.bfloat16(), call.k.bfloat16(), call.v.bfloat16())
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            out = attend(call.q, call.k, call.v)
    assert out.dtype == torch.bfloat16 and out.equal(want)


def test_torch_func_transforms_use_torch_operators():
    call = random_case().tensors(torch.float32)
    with forced(NATIVE[0]):
        got = torch.func.grad(lambda q: attend(q, call.k, call.v, causal=True).square().sum())(call.q)
    q = call.q.clone().requires_grad_()
    want = torch.autograd.grad(attend(q, call.k, call.v, causal=True).square().sum(), q)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@each_path
@pytest.mark.parametrize("options", [{"window": (2**60, 2**60)}, {"causal": True, "offset": 2**62}])
def test_windows_and_offsets_of_any_size(path, options):
    with forced(path):
        check_attend(replace(random_case(), options=options), torch.float32)


def test_native_attend_of_negated_views():
    call, z = random_case().tensors(torch.float32), torch.randn(2, 2, 7, 4, dtype=torch.complex64)
    k = z.conj().imag
    assert k.is_neg()
    with forced(NATIVE[0]):
        assert attend(call.q, k, call.v).equal(attend(call.q, k.clone(), call.v))


@pytest.mark.parametrize("name", NATIVE)
def test_exponentials_of_whole_and_half_numbers_are_exact(name):
    """Scores are powers of two here, and halves are where rounding could go either way."""
    x = np.arange(-130, 1, 0.5)
    q, k, v = np.ones((1, 1, 14, 1)), x[None, None, :, None], np.eye(len(x))[None, None]
    for last in range(len(x) - 5, len(x)):
        tensors = [torch.tensor(y, dtype=torch.float32) for y in (q, k[:, :, : last + 1], v[:, :, : last + 1])]
        with forced(name):
            got = attend(*tensors, scale=math.log(2))
        want = 2.0 ** (x[: last + 1] - x[last])
        want /= want.sum()
        np.testing.assert_allclose(got[0, 0, :, : last + 1], np.tile(want, (14, 1)), rtol=1e-6, atol=2e-38)


# ---- scores that overflow


OVERFLOWS = {  # what to multiply the queries and keys of a head by, in float32
    "some scores": lambda rng, q, k: (q * 1e20, k * np.where(rng.random(k.shape[:3]) < 0.3, 1e20, 1e15)[..., None]),
    "all of them": lambda rng, q, k: (q * 1e30, k * 1e30),
    "far below": lambda rng, q, k: (abs(q) * 1e20, -abs(k) * 1e20),
    "a part of the sum": lambda rng, q, k: (  # 1e40 and -1e40, beside which float64 still tells 1e32 from 0
        np.concatenate([np.full_like(q, 1e20), q * 1e16], -1),
        np.concatenate([np.where(np.arange(k.shape[3]) % 2, 1e20, -1e20) + k * 0, k * 1e16], -1),
    ),
}
OPTIONS = {
    "plain": lambda rng, size: {},
    "causal": lambda rng, size: {"causal": True},
    "softcap": lambda rng, size: {"softcap": 3.0},
    "sinks and gates": lambda rng, size: {"sinks": rng.normal(size=size[1]), "gates": rng.normal(size=size[1])},
    "bool mask": lambda rng, size: {"mask": rng.random(size) < 0.7},
    "float mask": lambda rng, size: {"mask": np.where(rng.random(size) < 0.7, rng.normal(size=size), -np.inf)},
    "lowest number": lambda rng, size: {"mask": np.where(rng.random(size) < 0.5, 0.0, np.finfo(np.float32).min)},
}


def from_limited_scores(call: AttentionCase) -> tuple[np.ndarray, HeadStats]:
    """The specification, which gets the scores as a mask: in float64, and no further from 0 than 1e38."""
    options, group = dict(call.options), call.q.shape[1] // call.k.shape[1]
    scores = np.clip(call.q @ call.k.repeat(group, 1).swapaxes(-1, -2) * call.q.shape[3] ** -0.5, -1e38, 1e38)
    if cap := options.pop("softcap", None):
        scores = cap * np.tanh(scores / cap)
    mask = options.pop("mask", np.ones((1, 1, 1, 1), bool))
    options["mask"] = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    out, stats = reference.head_stats(call.q * 0, call.k * 0, call.v, **options, **call.stats_options)
    largest = reference.head_stats(call.q, call.k, call.v, **call.options, **call.stats_options)[1].maxima["max_logit"]
    stats.maxima["max_logit"] = np.where(largest == -np.inf, largest, np.clip(largest, -1e38, 1e38))
    return out, stats


@each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", OVERFLOWS)
def test_native_scores_that_overflow_equal_the_reference(path, name, option, dtype):
    for seed, queries, keys in ((0, 5, 7), (1, 71, 23), (2, 1, 2053)):  # few rows, blocks of rows, parts of the keys
        rng, call = np.random.default_rng(seed), random_case(seed, queries=queries, keys=keys)
        q, k = OVERFLOWS[name](rng, call.q, call.k)
        options, classes = OPTIONS[option](rng, (2, 6, queries, keys)), {"some": rng.random((2, keys)) < 0.5}
        call = AttentionCase(q, k, call.v, options, {"classes": classes}).rounded(dtype)
        want, stats = from_limited_scores(call)
        tensors = call.tensors(dtype)
        with forced(path):
            out, got = head_stats(tensors.q, tensors.k, tensors.v, **tensors.options, **tensors.stats_options)
            plain = attend(tensors.q, tensors.k, tensors.v, **tensors.options)
        assert plain.equal(out)
        np.testing.assert_allclose(array(out), want, **TOLERANCE[dtype])
        for number in stats.names:
            np.testing.assert_allclose(got[number], stats[number], rtol=1e-4, atol=1e-5, err_msg=number)


@each_path
def test_strongest_keys_and_log_sum_exp_of_scores_that_overflow(path):
    """Every score of the first row is above the limit, of the second below its negative; the third is ordinary."""
    q = torch.tensor([1e25, -1e25, 1e-25]).reshape(1, 1, 3, 1)
    k = torch.tensor([1e20, 1e25, 2e25, 3e20, 4e25, 2e20, 5e20]).reshape(1, 1, 7, 1)
    v = torch.eye(7)[None, None]
    extra = ExtraOutputs(StatsRequest(), lse=True, strongest=5)
    with forced(path):
        out, _, lse, strongest, *_ = library.run(q, k, v, build_call(q, k, v, scale=1.0), extra)
    np.testing.assert_allclose(out[0, 0, 0], np.ones(7) / 7, rtol=1e-6)
    np.testing.assert_allclose(out[0, 0, 1], np.ones(7) / 7, rtol=1e-6)
    assert strongest.keys[0, 0, :2].tolist() == [[0, 1, 2, 3, 4]] * 2 and strongest.keys[0, 0, 2, 0] == 4
    np.testing.assert_allclose(strongest.weights[0, 0, :2], 1 / 7, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, :2], [1e38, -1e38], rtol=1e-6)
    assert lse.isfinite().all()


# ---- repeated calls: what was validated once holds for other numbers, not for other modes


def test_repeated_calls_share_a_template_and_no_numbers():
    repeated_calls.clear()
    with forced(NATIVE[0]):
        for seed in (1, 2):
            for options in ({}, {"causal": True}, {"window": (2, 1)}, {"scale": 0.3}, {"softcap": 2.0}):
                check_stats(replace(random_case(seed), options=options), torch.float32)
        assert len(repeated_calls._templates) == 5
        call = random_case(3, keys=11).tensors(torch.float32)
        head_stats(call.q, call.k, call.v)
        assert len(repeated_calls._templates) == 6


def test_repeated_calls_read_their_own_mask():
    call = random_case()
    rng = np.random.default_rng(0)
    with forced(NATIVE[0]):
        for shape in ((2, 1, 1, 7), (2, 1, 5, 7)):
            for _ in range(2):
                check_stats(replace(call, options={"mask": rng.random(shape) < 0.6}), torch.float32)


def test_the_number_of_templates_is_limited(monkeypatch):
    repeated_calls.clear()
    monkeypatch.setattr(repeated_calls, "MAX_TEMPLATES", 3)
    with forced(NATIVE[0]):
        for keys in (5, 7, 11, 13):
            call = random_case(keys=keys).tensors(torch.float32)
            attend(call.q, call.k, call.v)
    assert len(repeated_calls._templates) == 1


def test_repeated_calls_still_learn_cast_and_validate():
    call = random_case().tensors(torch.float32)
    q, k, v = call.q, call.k, call.v
    with forced(NATIVE[0]):
        for _ in range(3):  # seen, remembered, recognised
            want = attend(q, k, v, window=(1, 0))
        assert attend(q.clone().requires_grad_(), k, v, window=(1, 0)).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert attend(q, k, v, window=(1, 0)).dtype == torch.bfloat16
        for wrong in ((True, 0), [1.5, 0], (-1, 0)):
            with pytest.raises(MaskError, match="window"):
                attend(q, k, v, window=wrong)
        with pytest.raises(MaskError, match="queries must be True/False"):
            head_stats(q, k, v, window=(1, 0), queries=torch.ones(2, 6, dtype=torch.bool))
    with forced("off"):
        torch.testing.assert_close(attend(q, k, v, window=(1, 0)), want)
        assert "sdpa" in explain(q, k, v)


CHANGES = {
    "nothing": lambda x: x.clone(),
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a step between columns": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a negated view": lambda x: torch._neg_view(-x),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "half": lambda x: x.half(),
    "a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("guards", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_tensor_is_not_mistaken_for_a_repeated_call(change, guards, monkeypatch):
    if not guards:
        monkeypatch.setattr(repeated_calls, "TensorGuards", None)
    repeated_calls.clear()
    call = random_case().tensors(torch.float32)
    with forced(NATIVE[0]):
        for masked in ({}, {"mask": torch.rand(2, 1, 5, 7) < 0.7}):
            for _ in range(3):
                attend(call.q, call.k, call.v, **masked)
            assert len(repeated_calls._latest) == (1 + len(masked) if guards else 0)
            other = random_case(5).tensors(torch.float32)
            q, k, v = (CHANGES[change](x) for x in (other.q, other.k, other.v))
            want = torch.nn.functional.scaled_dot_product_attention(
                *(x.float().repeat_interleave(n, 1) for x, n in ((q, 1), (k, 3), (v, 3))), attn_mask=masked.get("mask")
            ).nan_to_num()
            got = attend(q, k, v, **masked)
            torch.testing.assert_close(got.float(), want, atol=2e-3 if change == "half" else 1e-5, rtol=1e-4)
            assert got.requires_grad == (change == "a gradient")


def test_repeated_calls_with_one_tensor_as_q_k_and_v():
    repeated_calls.clear()
    x = torch.randn(1, 2, 9, 16)
    with forced(NATIVE[0]):
        want = attend(x, x.clone(), x.clone())
        for _ in range(3):
            torch.testing.assert_close(attend(x, x, x), want)


def test_transforms_modes_and_new_shapes_after_repeated_calls():
    call = random_case().tensors(torch.float32)
    q, k, v = call.q, call.k, call.v
    with forced(NATIVE[0]):
        for _ in range(3):
            want = attend(q, k, v)
        several = torch.func.vmap(lambda x: attend(x, k, v))(torch.stack([q, q]))
        torch.testing.assert_close(several, torch.stack([want, want]))
        slope = torch.func.grad(lambda x: attend(x, k, v).sum())(q)
        assert slope.shape == q.shape and slope.abs().sum() > 0
        with torch.inference_mode():
            assert attend(q, k, v).equal(want) and attend(q.clone(), k, v).equal(want)
        assert attend(q, k[:, :, :5], v[:, :, :5]).shape == want.shape
        with pytest.raises(ShapeError):
            attend(q, k[:, :, :5], v)
        with pytest.raises(ShapeError, match="q must be a tensor, got ndarray"):
            attend(q.numpy(), k, v)


# ---- the C tests: plain loops in double precision, tensors that end at pages which may not be touched


@pytest.fixture(scope="module")
def build_driver(tmp_path_factory):
    """Builds a variant's driver, once for all that only run it elsewhere."""
    folder, done = tmp_path_factory.mktemp("drivers"), {}

    def build(variant):
        key = variant.compiler, variant.flags
        if key not in done:
            driver = folder / str(len(done))
            done[key] = driver, variant.build(driver)
        return done[key]

    return build


@pytest.mark.parametrize("calls", [20, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != SANITIZED])  # that one is a campaign
def test_random_calls_of_the_c_driver_pass(name, calls, build_driver):
    variant = VARIANTS[name]
    missing = variant.missing()
    if missing:
        pytest.skip(f"{missing} is not installed")
    driver, built = build_driver(variant)
    if "fsanitize" in variant.flags and built.returncode:
        pytest.skip(f"cc has no sanitizers here: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    wrong = variant.run(driver, calls, seed=1)
    assert wrong is None, wrong


# ---- threads and processes


@pytest.fixture(params=["own", "PyTorch's"])
def _threads(request):
    count = torch.get_num_threads()
    library.borrow_threads(library.library().code, request.param)
    yield
    torch.set_num_threads(count)
    library.borrow_threads(library.library().code)


THREADED = {
    "many heads": ((2, 6, 3, 300, 300), {"causal": True}),
    "one head": ((1, 1, 1, 700, 700), {}),
    "split keys": ((1, 4, 2, 2, 9000), {}),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", THREADED)
def test_results_are_bitwise_equal_for_any_number_of_threads(name):
    sizes, options = THREADED[name]
    call = random_case(1, *sizes).tensors(torch.float32)
    with forced(NATIVE[0]):
        results = []
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            results.append(head_stats(call.q, call.k, call.v, **options))
    for out, stats in results[1:]:
        assert out.equal(results[0][0]) and stats == results[0][1]


@pytest.mark.usefixtures("_threads")
def test_python_threads_may_call_concurrently():
    call = random_case(2, 2, 6, 3, 200, 600).tensors(torch.float32)
    with forced(NATIVE[0]):
        want, wrong = attend(call.q, call.k, call.v), []

        def many() -> None:
            wrong.extend(i for i in range(30) if not attend(call.q, call.k, call.v).equal(want))

        threads = [threading.Thread(target=many) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


RUN = """
import os, sys, torch, headwise
from headwise.attention.backends.native import library as native
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 500, 64)
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN + code], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("whose", ["own", ""])
def test_a_forked_child_has_threads_of_its_own(whose):
    code = """
torch.set_num_threads(3)
def again():  # bytes: PyTorch's own comparison would wait in the child for threads that are gone
    return headwise.attend(q, k, v).numpy().tobytes()
want = again()
child = os.fork()
if child == 0:
    os._exit(0 if all(again() == want for _ in range(5)) else 1)
assert again() == want
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code, HEADWISE_THREADS=whose) == "0"


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("order", [("parallel", "import"), ("import", "parallel", "call")], ids=" ".join)
def test_forked_children_compute_whenever_the_parent_forks(order):
    """Before and after the kernel is loaded, PyTorch's threads run and the kernel is first called."""
    assert fork_at_stages(2, 1, 2, list(order), "") == (2 + 2 * len(order), [])


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_torch_threads_are_used_unless_the_process_was_forked():
    code = """
borrowed = native.borrow_threads(native.library().code)
child = os.fork()
if child == 0:
    os._exit(native.borrow_threads(native.library().code))
print(borrowed, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    gnu_openmp = any((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    stat = Path("/proc/self/stat")  # a sandbox may hide the flags
    flags = stat.exists() and stat.read_text().rpartition(")")[2].split()[6] != "0"
    assert run(code, HEADWISE_THREADS="") == f"{gnu_openmp and flags} 0"


def test_the_kernel_does_not_flush_subnormal_numbers():
    """-ffast-math at link time would flush them in the whole process."""
    code = """
headwise.attend(q, k, v)
tiny = torch.tensor([1e-40])
import numpy
print((tiny * 0.5 > 0).item(), float(numpy.float32(1e-40) * numpy.float32(0.5)) > 0)
"""
    assert run(code) == "True True"


@pytest.mark.parametrize("wanted", ["off", "plain", "nonsense"])
def test_headwise_kernel_chooses_the_instruction_set(wanted):
    said = run("print(headwise.explain(q, k, v))", HEADWISE_KERNEL=wanted)
    words = {"off": "(HEADWISE_KERNEL=off)", "plain": "native: one pass in plain C", "nonsense": "is none of"}
    assert words[wanted] in said


AGAIN = """
native.library.cache_clear()
native._choice = native.Choice.of(None)
print(headwise.explain(q, k, v))
"""


def test_a_binary_older_than_its_source_is_not_used():
    said = run(f"native._source_hash = lambda: 'other'\n{AGAIN}", HEADWISE_KERNEL="")
    assert said.startswith("sdpa") and "stale" in said and "reinstall" in said


def test_without_a_binary_pytorch_computes(tmp_path):
    said = run(f"native.FOLDER = native.Path({str(tmp_path)!r})\n{AGAIN}", HEADWISE_KERNEL="")
    assert said.startswith("sdpa") and "was not built" in said


LEAK = """
import random, resource
def call():
    batch, kv, group, dim = (random.randint(1, 3) for _ in range(4))
    queries, keys = random.randint(0, 40), random.randint(0, 90)
    q = torch.randn(batch, kv * group, queries, 16 * dim)
    k, v = torch.randn(2, batch, kv, keys, 16 * dim)
    headwise.head_stats(q, k, v, causal=random.random() < 0.5)
for _ in range(500):
    call()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(10_000):
    call()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_random_calls_do_not_leak_memory():
    assert int(run(LEAK)) < 8 << 10  # KiB


def test_native_error_is_that_of_single_precision():
    """Against float64: far closer than the tolerances above ask for."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 400, 64)).astype(np.float32) for _ in range(3))
    want, stats = reference.head_stats(q, k, v, causal=True)
    for path in NATIVE:
        with forced(path):
            out, got = head_stats(*map(torch.from_numpy, (q, k, v)), causal=True)
        assert abs(array(out) - want).max() < 3e-6
        for name in stats.names:
            np.testing.assert_allclose(got[name], stats[name], rtol=2e-6, atol=1e-7, err_msg=name)
    assert TOLERANCE[torch.float32]["atol"] > 3e-6
