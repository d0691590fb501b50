"""The native backward pass equals float64 autograd of the specification, in every instruction set, size and layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import attend, head_stats
from headwise.attention import dispatch
from headwise.attention.backends import blockwise_stats, composite
from headwise.attention.backends.native import library
from helpers.attention_cases import (
    FEW,
    LAYOUTS,
    MANY,
    NATIVE,
    AttentionCase,
    array,
    cases,
    forced,
    random_case,
)
from helpers.attention_checks import EMPTY_ROWS, HIDDEN_KEYS
from helpers.gradient_bounds import check_gradients, compute_gradients, gradient_bounds, specified_gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones"),
    pytest.mark.skipif(not NATIVE, reason="the native kernel was not built"),
]
each_path = pytest.mark.parametrize("path", NATIVE)
SIXTEEN_BITS = [torch.float16, torch.bfloat16]


@contextmanager
def native_only(path: str) -> Iterator[None]:
    """Gradients inside are the native kernel's: any other way to compute them fails."""

    def refuse(*arguments, **options):
        raise AssertionError("PyTorch computed these gradients")

    with forced(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(composite, "gradients", refuse)
        patch.setattr(dispatch, "run_in_torch", refuse)
        yield


def output_gradient(case: AttentionCase, dtype: torch.dtype, seed: int = 0) -> np.ndarray:
    """A random gradient of the output, exact in dtype."""
    values = np.random.default_rng(seed).normal(size=(*case.q.shape[:3], case.v.shape[3]))
    return array(torch.from_numpy(values).to(dtype))


def learns_mask(case: AttentionCase) -> bool:
    """Whether the kernel has the gradient of the case's mask."""
    mask = case.options.get("mask")
    return (
        mask is not None
        and mask.dtype.kind == "f"
        and "softcap" not in case.options
        and (mask.shape[-1:] == case.k.shape[2:3])
    )


def check(case: AttentionCase, dtype: torch.dtype, path: str, layout: str = "default", spoil: float = 0.0) -> None:
    """The native gradients are those of the specification. spoil: the value of keys that no query sees."""
    case = case.rounded(dtype)
    case.options.pop("gates", None)  # they are applied outside the kernel
    grad_out = output_gradient(case, dtype)
    names = ("q", "k", "v", *(["sinks"] if "sinks" in case.options else []), *(["mask"] if learns_mask(case) else []))
    case = replace(case, **{name: np.where(case.hidden_keys[..., None], 0.0, getattr(case, name)) for name in "kv"})
    inputs = case.spoil_hidden_keys(spoil).tensors(dtype)
    inputs = replace(inputs, **{name: LAYOUTS[layout](getattr(inputs, name)) for name in "qkv"})
    with native_only(path):
        got = compute_gradients(inputs, LAYOUTS[layout](torch.from_numpy(grad_out).to(dtype)), names)
    check_gradients(case, got, grad_out, dtype, case)


@st.composite
def long_cases(draw: st.DrawFn) -> AttentionCase:
    """Calls of several blocks of rows and keys."""
    call = draw(cases())
    batch, heads, kv = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    queries, keys = draw(st.integers(1, 3) | st.integers(1, 230)), draw(st.integers(1, 500))
    dim, value_dim = draw(st.sampled_from([(16, 16), (33, 7), (64, 40), (1, 65), (72, 23)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = (batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim)
    options = dict(call.options)
    if "mask" in options:
        shape = [n if draw(st.booleans()) else 1 for n in (batch, heads, queries, keys)]
        mask = rng.random(shape) < draw(st.sampled_from([0.03, 0.5, 1.0]))
        options["mask"] = mask if draw(st.booleans()) else np.where(mask, rng.normal(size=shape), -np.inf)
    for name in {"starts", "lengths"} & set(options):
        options[name] = rng.integers(0, keys + 1, size=batch)
    if "offset" in options:
        options["offset"] = rng.integers(-20, keys, size=batch)
    if "window" in options:
        side = st.none() | st.integers(0, keys)
        options["window"] = draw(
            st.tuples(side, side) | st.lists(st.tuples(side, side), min_size=heads, max_size=heads)
        )
    return AttentionCase(*(rng.normal(size=shape) for shape in shapes), options)


# ---- the specification


@each_path
@given(case=cases())
@FEW
def test_native_gradients_are_those_of_the_specification(path, case):
    check(case, torch.float32, path)


@each_path
@given(case=long_cases())
@settings(FEW, max_examples=25)
def test_native_gradients_over_several_blocks_are_those_of_the_specification(path, case):
    check(case, torch.float32, path)


@pytest.mark.full
@each_path
@given(case=cases() | long_cases())
@settings(MANY, max_examples=1000)
def test_native_gradients_of_many_random_calls_are_those_of_the_specification(path, case):
    check(case, torch.float32, path)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@each_path
@given(case=cases() | long_cases())
@settings(FEW, max_examples=25)
def test_native_gradients_in_16_bits_are_those_of_the_specification_within_rounding(path, dtype, case):
    check(case, dtype, path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each_path
@given(case=cases(), value=st.sampled_from([np.nan, np.inf, -np.inf, 3e38]))
@settings(FEW, max_examples=20)
def test_native_gradients_ignore_memory_layout_and_hidden_keys(path, dtype, layout, case, value):
    check(case, dtype, path, layout, value if dtype == torch.float32 else np.nan)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (37, 5)}, {"softcap": 2.0}, {"mask": np.arange(250) % 3 > 0}],
    ids=["alone", "causal", "window", "softcap", "mask"],
)
@each_path
def test_native_gradients_with_alibi_slopes_are_those_of_the_specification(path, options):
    case = random_case(5, queries=211, keys=250)
    check(replace(case, options={"slopes": np.linspace(0.01, 1, 6), **options}), torch.float32, path)


def test_bounds_of_the_gradients_notice_a_single_pair_that_is_hidden():
    case = random_case(7, queries=211, keys=250).rounded(torch.float32)
    grad_out, names = output_gradient(case, torch.float32), ("q", "k", "v")
    mask = np.ones((2, 6, 211, 250), bool)
    mask[1, 4, 100, 17] = False
    want, bounds = specified_gradients(case, grad_out, names), gradient_bounds(case, grad_out, torch.float32)
    other = specified_gradients(replace(case, options={"mask": mask}), grad_out, names)
    for name in names:
        assert float(((other[name] - want[name]).abs() - 2 * bounds[name]).max()) > 0, name


# ---- masks that learn

SHARED = {
    "per query": (2, 6, 211, 250),
    "relative positions of T5": (1, 6, 211, 250),
    "shared by heads": (2, 1, 211, 250),
    "shared by sequences and heads": (211, 250),
    "per key": (250,),
    "per sequence and key": (2, 1, 1, 250),
}


@pytest.mark.parametrize("shape", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_path
def test_native_gradients_of_masks_are_those_of_the_specification(path, dtype, shape):
    rng = np.random.default_rng(3)
    for options in ({}, {"window": (100, 9)}, {"lengths": np.array([250, 61]), "sinks": np.linspace(-1, 1, 6)}):
        mask = np.where(rng.random(shape) < 0.1, -np.inf, rng.normal(size=shape))
        case = replace(random_case(4, queries=211, keys=250), options={"mask": mask, **options})
        assert learns_mask(case)
        check(case, dtype, path)


def test_the_gradient_of_an_expanded_mask_has_its_shape():
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    whole = replace(case, options={"mask": torch.randn(5, 7).expand(2, 6, 5, 7)})
    shared = replace(case, options={"mask": whole.options["mask"][0, 0]})
    with native_only(NATIVE[0]):
        got = compute_gradients(whole, grad_out, ("mask",))["mask"]
        want = compute_gradients(shared, grad_out, ("mask",))["mask"]
    assert got.shape == (2, 6, 5, 7)
    torch.testing.assert_close(got.sum((0, 1)), want)


def test_gradients_of_a_mask_that_the_kernel_lacks_come_from_pytorch():
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    for options in ({"mask": torch.randn(5, 1)}, {"mask": torch.randn(5, 7), "softcap": 2.0}):
        learning = replace(case, options=options)
        with forced(NATIVE[0]):
            got = compute_gradients(learning, grad_out, ("mask",))["mask"]
        with forced("one block of rows"):
            want = compute_gradients(learning, grad_out, ("mask",))["mask"]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ---- rows and keys that take no part


@pytest.mark.parametrize("name", EMPTY_ROWS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@each_path
def test_a_query_with_no_visible_keys_has_no_part_in_any_gradient(path, sinks, name):
    options, empty = EMPTY_ROWS[name]
    options = {**options, **({"sinks": torch.linspace(-1, 1, 6)} if sinks else {})}
    case = replace(random_case().tensors(torch.float32), options=options)
    rows = torch.tensor(empty, dtype=torch.bool).expand(2, 5)[:, None].expand(2, 6, 5)
    grad_out = torch.randn(2, 6, 5, 3)
    with native_only(path):
        want = compute_gradients(case, grad_out.masked_fill(rows[..., None], 0.0))
        spoiled = replace(case, q=case.q.masked_fill(rows[..., None], torch.nan))
        got = compute_gradients(spoiled, grad_out.masked_fill(rows[..., None], torch.inf))
    assert not got["q"][rows].any()
    for key, gradient in got.items():
        assert gradient.equal(want[key])


@pytest.mark.parametrize("name", HIDDEN_KEYS)
@each_path
def test_native_gradients_of_hidden_keys_are_zero(path, name):
    case = replace(random_case(), options=array(HIDDEN_KEYS[name]))
    hidden = torch.from_numpy(case.hidden_keys)
    assert hidden.any()
    tensors = case.spoil_hidden_keys(np.nan).tensors(torch.float32)
    with native_only(path):
        got = compute_gradients(tensors, torch.randn(2, 6, 5, 3))
    assert not got["k"][hidden].any() and not got["v"][hidden].any()
    assert all(x.isfinite().all() and x.any() for x in got.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("place", ["q", "k", "v", "gradient"])
@each_path
def test_numbers_that_single_precision_may_fail_on_are_left_to_pytorch(path, place, value):
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    {"q": case.q, "k": case.k, "v": case.v, "gradient": grad_out}[place][0, 1, 3, 1] = value
    case = replace(case, options={"causal": True})
    with pytest.raises(AssertionError, match="PyTorch computed"), native_only(path):
        compute_gradients(case, grad_out)
    with forced(path):
        got = compute_gradients(case, grad_out)
    with forced("one block of rows"):
        want = compute_gradients(case, grad_out)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], equal_nan=True, rtol=1e-4, atol=1e-5)


# ---- sizes and layouts


@pytest.mark.parametrize("sizes", [(0, 6, 2, 5, 7), (2, 6, 2, 0, 7), (2, 6, 2, 5, 0), (2, 6, 2, 0, 0)], ids=str)
@each_path
def test_native_gradients_of_empty_calls_are_zeros(path, sizes):
    case = random_case(0, *sizes).tensors(torch.float32)
    with native_only(path):
        for name, gradient in compute_gradients(case, torch.randn(*case.q.shape[:3], 3)).items():
            assert gradient.shape == getattr(case, name).shape and not gradient.any()


def test_native_gradients_take_a_gradient_of_any_strides():
    case, one = random_case().tensors(torch.float32), torch.ones(())
    full = torch.randn(2, 6, 5, 3)
    layouts = {
        "expanded": one.expand(2, 6, 5, 3),
        "expanded rows": full[:, :, :1].expand(2, 6, 5, 3),
        "negated": torch._neg_view(full),
        "reversed heads": full.transpose(1, 2).contiguous().transpose(1, 2),
        "every second": torch.randn(2, 6, 10, 6)[:, :, ::2, ::2],
    }
    with native_only(NATIVE[0]):
        for name, grad_out in layouts.items():
            got, want = compute_gradients(case, grad_out), compute_gradients(case, grad_out.clone().contiguous())
            assert all(got[key].equal(want[key]) for key in got), name


def test_native_gradients_take_an_output_that_was_saved_in_another_layout():
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    with native_only(NATIVE[0]):
        want = compute_gradients(case, grad_out)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)
        ):
            got = compute_gradients(case, grad_out)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-6)


def test_tensors_that_hooks_saved_in_another_dtype_are_left_to_pytorch():
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.double())
    with forced(NATIVE[0]):
        want = compute_gradients(case, grad_out)
        with hooks:
            got = compute_gradients(case, grad_out)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient.float(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("q", "v")], ids="".join)
def test_gradients_of_some_tensors_are_those_of_all(names):
    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    with native_only(NATIVE[0]):
        want, got = compute_gradients(case, grad_out), compute_gradients(case, grad_out, names)
    assert all(got[name].equal(want[name]) for name in names)


# ---- threads and modes

THREADED = {
    "many heads": ((2, 12, 12, 200, 300), {"causal": True}),
    "one head": ((1, 1, 1, 700, 700), {}),
    "groups": ((1, 6, 2, 300, 900), {"window": (100, 3)}),
    "few rows": ((1, 2, 1, 3, 3000), {}),
    "a mask that learns": ((3, 4, 2, 200, 500), {"mask": torch.randn(200, 500)}),
}


@pytest.fixture(params=["own", "PyTorch's"])
def _threads(request):
    count = torch.get_num_threads()
    library.borrow_threads(library.library().code, request.param)
    yield
    torch.set_num_threads(count)
    library.borrow_threads(library.library().code)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", THREADED)
def test_native_gradients_are_bitwise_equal_for_any_number_of_threads(name):
    sizes, options = THREADED[name]
    case = replace(random_case(1, *sizes).tensors(torch.float32), options=options)
    grad_out, results, names = torch.randn(*case.q.shape[:3], 3), [], ("q", "k", "v", *({"mask"} & set(options)))
    with native_only(NATIVE[0]):
        for threads in (1, 2, 4, 2):
            torch.set_num_threads(threads)
            results.append(compute_gradients(case, grad_out, names))
    for result in results[1:]:
        assert all(result[key].equal(results[0][key]) for key in result)


def test_second_and_batched_derivatives_do_not_come_from_the_native_backward():
    case = random_case().tensors(torch.float32)
    q = case.q.requires_grad_()
    with forced(NATIVE[0]):
        out = attend(q, case.k, case.v, causal=True)
        several = torch.randn(3, *out.shape)
        (first,) = torch.autograd.grad(out, q, several[0], create_graph=True)
        assert first.requires_grad and torch.autograd.grad(first.sum(), q)[0].any()
        out = attend(q, case.k, case.v, causal=True)
        (batched,) = torch.autograd.grad(out, q, several, retain_graph=True, is_grads_batched=True)
        single = [torch.autograd.grad(out, q, x, retain_graph=True)[0] for x in several]
    torch.testing.assert_close(batched, torch.stack(single), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("name", ["plain", "windows per head", "sinks and gates"])
def test_statistics_while_training_come_from_the_same_pass(path, name, monkeypatch):
    options = {
        "plain": {"causal": True},
        "windows per head": {"window": [(3, 0), (None, 0), (1, 1), (9, 2)], "keep_first": 2},
        "sinks and gates": {"sinks": torch.linspace(-1, 1, 4), "gates": torch.linspace(0.5, 2, 4)},
    }[name]
    q, k, v = torch.randn(2, 4, 30, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 8)
    classes = {"even": torch.arange(80).view(2, 40) % 2 == 0}

    def refuse(*arguments, **keywords):
        raise AssertionError("the statistics were computed apart from the output")

    monkeypatch.setattr(blockwise_stats, "row_sums", refuse)
    with native_only(path):
        want = compute(attend, (q, k, v), options)
        got = compute(lambda *qkv, **rest: head_stats(*qkv, classes=classes, **rest)[0], (q, k, v), options)
        for a, b in zip(got, want, strict=True):
            assert a.equal(b)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        assert head_stats(*leaves, classes=classes, **options)[1] == head_stats(q, k, v, classes=classes, **options)[1]


def compute(function, qkv, options) -> list[torch.Tensor]:
    """The output, and the gradients of its sum of squares."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
