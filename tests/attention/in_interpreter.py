"""The Triton kernel equals the reference in every option, size and layout.

test_triton.py runs this file in a process of its own: whether Triton interprets its kernels on the CPU is settled
when it is first imported.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import attend, explain, head_stats, reference
from headwise.attention import dispatch
from headwise.attention.backends.native import library
from headwise.attention.backends.protocol import ExtraOutputs
from headwise.attention.backends.triton import launch
from headwise.attention.call import build_call
from helpers.attention_cases import (
    FEW,
    LAYOUTS,
    TRITON,
    array,
    cases,
    cases_with_stats,
    forced,
    nonfinite_cases,
    random_case,
)
from helpers.attention_checks import (
    ADJUSTMENTS,
    EMPTY_ROWS,
    OTHER_OPTIONS,
    check_attend,
    check_max_logit,
    check_nonfinite_logits,
    check_stats,
)

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_triton.py instead"

pytestmark = [
    pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter is NumPy, which warns of every NaN
]
SOME = settings(FEW, max_examples=15)  # a call takes a good part of a second
FEWER = settings(FEW, max_examples=5)


@pytest.fixture(autouse=True, scope="module")
def _kernel():
    with forced(TRITON):
        yield


@given(call=cases() | nonfinite_cases())
@settings(FEW, max_examples=30)
def test_triton_attend_equals_the_reference(call):
    check_attend(call, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(call=cases())
@FEWER
def test_triton_attend_in_16_bits_equals_the_reference_within_rounding(dtype, call):
    check_attend(call, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(call=cases(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
@FEWER
def test_triton_ignores_memory_layout_and_hidden_keys(layout, call, value):
    check_attend(call.spoil_hidden_keys(value), torch.float32, layout)


@given(call=cases_with_stats())
@SOME
def test_triton_head_stats_equal_the_reference(call):
    check_stats(call, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(call=cases_with_stats())
@FEWER
def test_triton_statistics_ignore_hidden_keys(dtype, call):
    check_stats(call.spoil_hidden_keys(np.nan), dtype)


@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_triton_max_logit_is_of_visible_keys_before_softcap_mask_and_sinks(name):
    check_max_logit(name)


@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_triton_max_logit_and_lse_of_nonfinite_keys_are_those_of_the_reference(name, value):
    check_nonfinite_logits(name, value)


@pytest.mark.full
@given(call=cases_with_stats() | nonfinite_cases())
@settings(FEW, max_examples=1000)
def test_triton_equals_the_reference_in_many_random_calls(call):
    check_attend(call, torch.float32)
    if all(np.isfinite(x).all() for x in (call.q, call.k, call.v)):
        check_stats(call, torch.float32)


# batch, heads, KV heads, queries, keys
LARGE = {
    "dense": ((1, 1, 1, 150, 170), {}),
    "causal": ((1, 4, 2, 90, 90), {"causal": True}),
    "a window": ((1, 1, 1, 200, 200), {"window": (40, 7)}),
    "windows per head": (
        (1, 4, 2, 70, 100),
        {"window": [(40, 0), (None, 0), (9, 0), (30, 5)], "keep_first": [4, 0, 1, 60]},
    ),
    "starts": ((2, 2, 2, 70, 100), {"starts": np.array([30, 3]), "window": (9, 0), "keep_first": 4, "causal": True}),
    "windows and first keys per head with left padding": (
        (2, 4, 2, 90, 90),
        {
            "window": [(40, 0), (None, 0), (9, 0), (30, 0)],
            "keep_first": [4, 0, 1, 60],
            "causal": True,
            "starts": np.array([30, 3]),
        },
    ),
    "a chunk": ((1, 2, 2, 70, 200), {"causal": True, "offset": 100}),
    "lengths": ((3, 2, 2, 70, 100), {"lengths": np.array([100, 0, 77])}),
    "decoding": ((2, 8, 2, 1, 300), {"lengths": np.array([299, 150]), "offset": np.array([298, 149])}),
    "a padding mask": ((2, 2, 1, 70, 70), {"causal": True, "mask": np.arange(70) > np.array([[[[9]]], [[[0]]]])}),
}


@pytest.mark.parametrize("name", LARGE)
def test_triton_blocks_of_default_sizes_equal_the_reference(name):
    sizes, options = LARGE[name]
    call = random_case(5, *sizes)
    call.options.update(options)
    call.stats_options["classes"] = {"every third": np.arange(sizes[0] * sizes[4]).reshape(sizes[0], sizes[4]) % 3 == 0}
    with forced("default"), pytest.MonkeyPatch.context() as patch:  # the usual blocks
        patch.setattr(library, "_choice", library.Choice.of(None))
        patch.setattr(launch, "interpreting", True)
        check_stats(call, torch.float32)


def test_sums_are_rescaled_when_the_row_maximum_keeps_rising():
    """Each block's largest score is above all before it, by much."""
    q, k = np.ones((1, 1, 3, 1)), np.linspace(-40, 40, 60).reshape(1, 1, 60, 1)
    call = replace(random_case(), q=q, k=k, v=np.random.default_rng(0).normal(size=(1, 1, 60, 2)))
    call.stats_options["classes"] = {"half": np.arange(60)[None] % 2 == 0}
    check_stats(call, torch.float32)
    check_stats(replace(call, k=k[:, :, ::-1].copy()), torch.float32)


@pytest.mark.parametrize("beside", [name for name in OTHER_OPTIONS if name != "dropout"])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_nan_query_with_no_visible_keys_gets_zeros(name, beside):
    options, empty = EMPTY_ROWS[name]
    options = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    empty = torch.tensor(empty).bool().expand(2, 5)[:, None].expand(2, 6, 5)
    call = random_case().tensors(torch.float32)
    call.q[empty] = torch.nan
    out, stats = head_stats(call.q, call.k, call.v, **options, **OTHER_OPTIONS[beside])
    assert not out[empty].any() and out.isfinite().all()
    assert stats.count.equal((~empty).sum(-1).double())


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_reaches_only_queries_that_see_it(place):
    call = random_case(queries=5, keys=40)
    {"query": call.q[0, 3, 2], "key": call.k[0, 1, -2], "value": call.v[0, 1, -2]}[place][:] = np.nan
    for options in ({"causal": True}, {"lengths": np.array([38, 40])}, {"mask": np.arange(40) < 38}, {}):
        check_attend(replace(call, options=options), torch.float32)


@pytest.mark.parametrize("options", [{}, {"causal": True, "offset": 2}, {"softcap": 2.0, "lengths": np.array([5, 20])}])
def test_alibi_equals_a_float_mask_in_triton(options):
    call, slopes = random_case(queries=19, keys=21), np.array([0.5, 0.1, 0.0, 2.0, 0.3, 1.0])
    away = abs(np.arange(21) - np.arange(19)[:, None] - options.get("offset", 2))
    want = reference.attend(call.q, call.k, call.v, mask=-slopes[:, None, None] * away, **options)
    tensors = replace(call, options={**options, "slopes": slopes}).tensors(torch.float32)
    out = dispatch.attend(
        tensors.q, tensors.k, tensors.v, build_call(tensors.q, tensors.k, tensors.v, **tensors.options)
    )
    np.testing.assert_allclose(array(out), want, rtol=1e-4, atol=2e-5)


def test_log_sum_exp_of_each_row():
    call = random_case(queries=19, keys=21).tensors(torch.float32)
    sinks = torch.linspace(-1, 1, 6)
    built = build_call(call.q, call.k, call.v, sinks=sinks, causal=True, offset=-1)
    lse = launch.run(call.q, call.k, call.v, built, ExtraOutputs(lse=True)).lse
    scores = call.q.double() @ call.k.double().repeat_interleave(3, 1).mT * built.scale
    scores = scores.masked_fill(torch.ones(19, 21).triu(0).bool(), -torch.inf)
    both = torch.cat([scores, sinks.double().view(1, 6, 1, 1).expand(2, 6, 19, 1)], -1)
    torch.testing.assert_close(lse, both.logsumexp(-1).float())
    lse = launch.run(call.q, call.k, call.v, replace(built, sinks=None), ExtraOutputs(lse=True)).lse
    assert (lse[:, :, 0] == -torch.inf).all() and lse[:, :, 1:].isfinite().all()


def test_a_row_masked_by_the_lowest_float_everywhere_still_attends():
    call = random_case(queries=5, keys=20)
    mask = np.full((5, 20), torch.finfo(torch.float32).min)
    mask[1:, 18:] = 0
    check_stats(replace(call, options={"mask": mask}), torch.float32)


@pytest.mark.parametrize("options", [{"offset": 10**12, "causal": True}, {"window": (10**12, 10**12), "causal": True}])
def test_huge_windows_and_offsets_do_not_overflow(options):
    check_attend(replace(random_case(), options=options), torch.float32)


def test_lengths_past_the_last_key_read_nothing_beyond_it():
    """On another device lengths cannot be read, and so not checked."""
    call = random_case().tensors(torch.float32)
    built = build_call(call.q, call.k, call.v, lengths=torch.tensor([7, 3]))
    past = replace(built, visibility=replace(built.visibility, end=torch.tensor([999, 3])))
    out, want = (launch.run(call.q, call.k, call.v, checked).out for checked in (past, built))
    assert out.equal(want)


@pytest.mark.parametrize("count", [8, 9])
def test_up_to_eight_classes_run_in_triton_and_nine_in_torch(count):
    call = random_case()
    rng = np.random.default_rng(0)
    call.stats_options["classes"] = {str(i): rng.random((2, 7)) < 0.5 for i in range(count)}
    check_stats(call, torch.float32)


def test_triton_takes_expanded_keys_and_values():
    call = random_case(kv=1).tensors(torch.float32)
    want = attend(call.q, call.k, call.v)
    k, v = (x.expand(-1, 6, -1, -1) for x in (call.k, call.v))
    torch.testing.assert_close(attend(call.q, k, v), want)


def test_two_runs_are_bitwise_equal():
    call = random_case(queries=9, keys=40).tensors(torch.float32)
    (a, first), (b, again) = (head_stats(call.q, call.k, call.v, causal=True) for _ in range(2))
    assert a.equal(b) and first == again


INSTEAD = {
    "float64": (torch.float64, {}, "the triton kernel computes in float32"),
    "a float64 mask": (torch.float32, {"mask": torch.zeros(7, dtype=torch.float64)}, "takes no float64 mask"),
    "a mask that learns": (torch.float32, {"mask": torch.zeros(7, requires_grad=True)}, "the mask requires a gradient"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_explain_says_why_triton_does_not_take_a_call(name):
    dtype, options, why = INSTEAD[name]
    call = random_case().tensors(dtype)
    assert explain(call.q, call.k, call.v, **options).endswith(f"{why})")
    assert attend(call.q, call.k, call.v, **options).shape == (2, 6, 5, 3)


def test_triton_refuses_heads_that_are_too_wide():
    q = torch.randn(1, 1, 2, launch.WIDEST + 1)
    assert explain(q, q, q).endswith(f"(the triton kernel takes heads up to {launch.WIDEST} wide)")


def test_dropout_in_a_cuda_graph_is_drawn_by_pytorch(monkeypatch):
    call = random_case().tensors(torch.float32)
    monkeypatch.setattr(launch, "_is_capturing", lambda q: True)
    said = explain(call.q, call.k, call.v, dropout=0.1)
    assert said.endswith("(a CUDA graph would drop the same weights in every replay)")
    assert explain(call.q, call.k, call.v).startswith("triton:")


def test_compiled_calls_use_torch_operators_instead_of_triton():
    call = random_case().tensors(torch.float32)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(call.q, call.k, call.v), attend(call.q, call.k, call.v))


def test_the_triton_kernel_is_the_backend_of_these_tests():
    call = random_case().tensors(torch.float32)
    said = explain(call.q, call.k, call.v, causal=True)
    assert said == "triton: one pass on cuda (compared with PyTorch on a small problem first)"
    assert "headwise.attention.backends.triton.kernel" in sys.modules
