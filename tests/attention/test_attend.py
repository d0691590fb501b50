"""attend and weights equal the reference: every option, dtype, memory layout and path, in random calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise import attend, explain, head_stats, reference, weights
from headwise.attention.backends import sdpa
from headwise.attention.call import AttentionCall
from helpers.attention_cases import (
    FEW,
    LAYOUTS,
    MANY,
    PATHS,
    READABLE,
    array,
    cases,
    forced,
    nonfinite_cases,
    random_case,
)
from helpers.attention_checks import LARGE_CALLS, TOLERANCE, check_attend, check_weights

# a random mask of one number may round to one
pytestmark = pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones")


@pytest.mark.parametrize("path", PATHS)
@given(call=cases())
@FEW
def test_attend_equals_the_reference(path, call):
    with forced(path):
        check_attend(call)


@pytest.mark.parametrize("path", PATHS)
@given(call=cases())
@FEW
def test_weights_equal_the_reference(path, call):
    with forced(path):
        check_weights(call, {})


@given(call=cases(), data=st.data())
@FEW
def test_weights_of_selected_rows_and_heads_equal_the_reference(call, data):
    chosen = {}
    for name, count in (("rows", call.q.shape[2]), ("heads", call.q.shape[1])):
        some = st.none() | st.slices(count)
        if count:
            one = st.integers(-count, count - 1)
            some |= one | st.lists(one, max_size=4)
        chosen[name] = data.draw(some, label=name)
    check_weights(call, chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["default", "many calls of the kernel", "many blocks of rows"])
@given(call=cases())
@FEW
def test_other_dtypes_equal_the_reference_within_rounding(path, dtype, call):
    with forced(path):
        check_attend(call, dtype)
        check_weights(call, {}, dtype)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "default"])
@pytest.mark.parametrize("path", ["default", "many calls of the kernel", "many blocks of rows"])
@given(call=cases())
@FEW
def test_results_do_not_depend_on_memory_layout(path, layout, call):
    with forced(path):
        check_attend(call, layout=layout)
        check_weights(call, {}, layout=layout)


@pytest.mark.parametrize("path", READABLE)
@given(call=nonfinite_cases())
@FEW
def test_nan_and_infinities_reach_only_queries_that_see_them(path, call):
    with forced(path):
        check_attend(call)
        check_weights(call, {})


@pytest.mark.parametrize("path", PATHS)
@given(call=cases(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
@FEW
def test_hidden_keys_may_hold_anything(path, call, value):
    """Also where values cannot be read: there, NaN that some queries see may reach others, but hidden NaN may not."""
    call = call.spoil_hidden_keys(value)
    with forced(path):
        check_attend(call)
        check_weights(call, {})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_key_that_one_head_reaches_and_the_mask_shows_to_another_is_hidden(path, kind):
    call = random_case(heads=2, kv=1, queries=1, keys=3)
    shown = np.ones((1, 2, 1, 3), bool)
    shown[0, 1, 0, 0] = False  # to head 0 alone, whose window ends before key 0
    mask = shown if kind == "bool" else np.where(shown, 0.0, -np.inf)
    call.options.update(window=[(1, 0), (2, 0)], mask=mask, offset=2)
    call.k[:, :, 0] = call.v[:, :, 0] = np.nan
    with forced(path):
        check_attend(call)
        check_weights(call, {})


@pytest.mark.full
@pytest.mark.parametrize("path", READABLE)
@given(call=cases() | nonfinite_cases())
@MANY
def test_attend_and_weights_equal_the_reference_in_many_random_calls(path, call):
    with forced(path):
        check_attend(call)
        check_weights(call, {})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("tokens", [5, 20])
def test_scale_may_be_zero_or_negative(path, scale, tokens):
    """PyTorch's causal kernel scales its -inf, too, which then hide nothing or are NaN."""
    call = random_case(queries=tokens, keys=tokens)
    call.options.update(scale=scale, causal=True)
    with forced(path):
        check_attend(call)


UNLIMITED = {
    "both sides": {"window": (sys.maxsize, sys.maxsize)},
    "one side": {"window": (2**70, 1)},
    "of one head": {"window": [(sys.maxsize, sys.maxsize), (1, 0), (0, 1), (None, 0)]},
    "first keys": {"window": (0, 0), "keep_first": 2**63},
    "offset past all keys": {"causal": True, "offset": 2**63},
    "offset before all keys": {"causal": True, "offset": -(2**70)},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", UNLIMITED)
def test_numbers_further_than_any_key_may_be_of_any_size(path, name):
    def near(option):
        if isinstance(option, (tuple, list)):
            return type(option)(near(item) for item in option)
        return option if isinstance(option, bool) or option is None else max(-100, min(option, 100))

    case = random_case(heads=4, queries=5, keys=7)
    q, k, v = (torch.tensor(x) for x in (case.q, case.k, case.v))
    options, plain = UNLIMITED[name], {key: near(value) for key, value in UNLIMITED[name].items()}
    with forced(path):
        for function in (attend, lambda *qkv, **o: weights(*qkv[:2], **o), lambda *qkv, **o: head_stats(*qkv, **o)[0]):
            torch.testing.assert_close(function(q, k, v, **options), function(q, k, v, **plain))
    want = reference.attend(case.q, case.k, case.v, **plain)
    np.testing.assert_allclose(reference.attend(case.q, case.k, case.v, **options), want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["offset", "starts", "lengths"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_positions_may_be_narrow_integers(path, name, dtype):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64) for n in (7, 131))
    for numbers in ([1, 2], [120, 126]):
        positions, options = torch.tensor(numbers), {"causal": True, "window": (3, 0), "keep_first": 2}
        with forced(path):
            for function in (weights, lambda q, k, **o: attend(q, k, k, **o)):
                want = function(q, k, **{name: positions}, **options)
                torch.testing.assert_close(function(q, k, **{name: positions.to(dtype)}, **options), want)


@pytest.mark.parametrize("path", READABLE)
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_zero_weight_on_an_infinite_value_is_nan_where_visible(path, hides, value):
    call = random_case(queries=5, keys=20)
    call.v[0, 1, 3, 2] = value
    call.options["mask"] = np.where(np.arange(20) == 3, -1e5, 0.0)  # seen with a weight of zero
    if hides:
        call.options["causal"], call.options["offset"] = True, 1  # and not by everyone
    expected = reference.attend(call.q, call.k, call.v, **call.options)
    assert np.isnan(expected[0, 3:, 2:, 2]).all() and np.isnan(expected[:, :, 0]).sum() == (0 if hides else 3)
    with forced(path):
        check_attend(call)


@pytest.mark.parametrize("path", ["default", "many blocks of rows"])
@pytest.mark.parametrize(("dtype", "low"), [(torch.float16, -1e5), (torch.bfloat16, torch.finfo(torch.float32).min)])
def test_a_float_mask_may_be_wider_than_the_inputs(path, dtype, low):
    """What their dtype cannot hold is still not -inf: a row that is low all over looks everywhere."""
    call = random_case(queries=17, keys=17).rounded(dtype)
    mask = np.where(np.tril(np.ones((17, 17), bool)), 0.0, low)
    mask[3] = low
    tensors = call.tensors(dtype)
    with forced(path):
        out = attend(tensors.q, tensors.k, tensors.v, mask=torch.from_numpy(mask).float())
    expected = reference.attend(call.q, call.k, call.v, mask=mask)
    np.testing.assert_allclose(array(out), expected, **TOLERANCE[dtype])


def test_inputs_are_not_modified():
    call = random_case(queries=7)
    call.options.update(causal=True, softcap=2.0, sinks=np.ones(6), gates=np.ones(6), mask=np.zeros((7, 7)) - 1)
    tensors = call.tensors()
    attend(tensors.q, tensors.k, tensors.v, **tensors.options)
    weights(tensors.q, tensors.k, **tensors.weight_options)
    head_stats(tensors.q, tensors.k, tensors.v, **tensors.options)
    for name in "qkv":
        np.testing.assert_array_equal(getattr(tensors, name), getattr(call, name))
    for name in ("sinks", "gates", "mask"):
        np.testing.assert_array_equal(tensors.options[name], call.options[name])


@pytest.mark.parametrize("name", LARGE_CALLS)
def test_large_calls_take_the_expected_path_and_equal_the_reference(name):
    (batch, heads, kv, queries, keys), options, path = LARGE_CALLS[name]
    call = random_case(3, batch, heads, kv, queries, keys)
    call.options.update(options)
    tensors = call.tensors(torch.float32)
    with forced("default"):
        check_attend(call, torch.float32)
        check_weights(call, {"rows": slice(0, queries, 97)}, torch.float32)
        assert path in explain(tensors.q, tensors.k, tensors.v, **tensors.options)


@given(call=cases())
@FEW
def test_meta_tensors_give_the_output_shapes(call):
    tensors = call.tensors(torch.float32)
    q, k, v = (x.to("meta") for x in (tensors.q, tensors.k, tensors.v))
    options = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in tensors.options.items()}
    batch, heads, queries, _ = q.shape
    out = attend(q, k, v, **options)
    assert out.device.type == "meta" and out.shape == (batch, heads, queries, v.shape[3])
    options.pop("gates", None)
    assert weights(q, k, **options).shape == (batch, heads, queries, k.shape[2])
    out, stats = head_stats(q, k, v, **options)
    assert out.shape == (batch, heads, queries, v.shape[3]) and stats.entropy.shape == (heads,)


class TensorOnOtherDevice(torch.Tensor):
    """A tensor that says it is on a device other than the CPU."""

    device = SimpleNamespace(type="elsewhere")


def sdpa_with_nan_in_fully_masked_rows(q, k, v, mask=None, dropout=0.0, causal=False, *, scale, enable_gqa=False):
    """PyTorch's kernel as some devices have it."""
    assert not (dropout or causal or enable_gqa)
    s = (q @ k.mT * scale).as_subclass(torch.Tensor)
    s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    return s.softmax(-1) @ v


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("rows", ["each its own", "all alike"])
def test_fully_masked_rows_are_zero_whatever_a_devices_kernel_returns(monkeypatch, kind, rows):
    call = random_case(heads=3, kv=3)
    mask = np.random.default_rng(1).random((2, 3, 5, 7)) < 0.5
    mask[:, :, [0, 3]] = False
    mask = mask[:, :, :1] if rows == "all alike" else mask
    call.options["mask"] = mask if kind == "bool" else np.where(mask, 0.25, -np.inf)
    tensors = call.tensors()
    leaves = [x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    q, k, v = (x.as_subclass(TensorOnOtherDevice) for x in leaves)
    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", sdpa_with_nan_in_fully_masked_rows)
    out = sdpa._kernel(q, k, v, tensors.options["mask"], AttentionCall(None, 0.5)).as_subclass(torch.Tensor)
    expected = reference.attend(call.q, call.k, call.v, **call.options)
    np.testing.assert_allclose(array(out), expected, **TOLERANCE[torch.float64])
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))
