"""head_stats equals the reference on every path without T x T; HeadStats adds up, prints and is saved as JSON."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import HeadStats, attend, head_stats
from headwise.attention.stats import POSITIONAL
from headwise.errors import HeadwiseError
from helpers.attention_cases import FEW, MANY, NATIVE, PATHS, READABLE, cases, cases_with_stats, forced, random_case
from helpers.attention_checks import (
    ADJUSTMENTS,
    LARGE_CALLS_WITH_STATS,
    OUTPUT_TOLERANCE,
    check_max_logit,
    check_nonfinite_logits,
    check_stats,
)


@pytest.mark.parametrize("dtype", OUTPUT_TOLERANCE, ids=str)
@pytest.mark.parametrize("path", PATHS)
@given(call=cases_with_stats())
@FEW
def test_head_stats_equal_the_reference(path, dtype, call):
    with forced(path):
        check_stats(call, dtype)


@pytest.mark.parametrize("path", PATHS)
@given(call=cases_with_stats())
@settings(FEW, max_examples=50)
def test_statistics_ignore_hidden_keys(path, call):
    with forced(path):
        check_stats(call.spoil_hidden_keys(np.nan))


@pytest.mark.full
@pytest.mark.parametrize("path", READABLE)
@given(call=cases_with_stats())
@MANY
def test_head_stats_equal_the_reference_in_many_random_calls(path, call):
    with forced(path):
        check_stats(call)


@pytest.mark.parametrize("name", LARGE_CALLS_WITH_STATS)
def test_statistics_of_large_calls_equal_the_reference(name):
    sizes, options = LARGE_CALLS_WITH_STATS[name]
    call = random_case(5, *sizes)
    call.options.update(options)
    call.stats_options["classes"] = {"every third": np.arange(sizes[0] * sizes[4]).reshape(sizes[0], sizes[4]) % 3 == 0}
    check_stats(call)


@given(call=cases())
@FEW
def test_head_stats_output_equals_attend(call):
    tensors = call.tensors()
    out, _ = head_stats(tensors.q, tensors.k, tensors.v, **tensors.options)
    torch.testing.assert_close(out, attend(tensors.q, tensors.k, tensors.v, **tensors.options), rtol=1e-9, atol=1e-10)


def some(seed: int = 0, batch: int = 2, **options) -> tuple[torch.Tensor, HeadStats]:
    call = random_case(seed, batch=batch, heads=3, kv=3, queries=7).tensors()
    return head_stats(call.q, call.k, call.v, **options)


def test_gradients_flow_through_the_output_alone():
    call = random_case().tensors()
    q, k, v, gates = (x.requires_grad_() for x in (call.q, call.k, call.v, torch.rand(6, dtype=torch.float64)))
    out, stats = head_stats(q, k, v, gates=gates, causal=True)
    got = torch.autograd.grad(out.square().sum(), (q, k, v, gates))
    want = torch.autograd.grad(attend(q, k, v, gates=gates, causal=True).square().sum(), (q, k, v, gates))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
        assert b.any()
    assert not any(x.requires_grad for x in (stats.count, *stats.sums.values()))


@pytest.mark.parametrize("seen", [1, 2, 5, 13])
def test_uniform_attention_has_an_entropy_of_ln_n(seen):
    q, k = torch.zeros(1, 2, 3, 4), torch.randn(1, 2, 13, 4)
    _, stats = head_stats(q, k, k, lengths=torch.tensor([seen]))
    torch.testing.assert_close(stats.entropy, torch.full((2,), math.log(seen), dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(stats.confidence, torch.full((2,), 1 / seen, dtype=torch.float64), rtol=1e-6, atol=0)


def test_attention_to_one_key_has_no_entropy():
    x = 30 * torch.eye(5).expand(1, 2, 5, 5)
    _, stats = head_stats(x, x, x)
    assert (stats.entropy.abs() < 1e-6).all() and (stats.self > 1 - 1e-6).all() and (stats.distance < 1e-6).all()


def test_received_weight_adds_up_to_the_queries():
    stats = some(causal=True, received=True)[1]
    assert stats.received.shape == (2, 3, 7)
    torch.testing.assert_close(stats.received.sum(-1), stats.count)


@pytest.mark.parametrize("dtype", OUTPUT_TOLERANCE, ids=str)
@pytest.mark.parametrize("path", PATHS)
@given(call=cases_with_stats(), spoil=st.booleans())
@settings(FEW, max_examples=50)
def test_received_weight_equals_the_reference(path, dtype, call, spoil):
    with forced(path):
        call = replace(call, stats_options={**call.stats_options, "received": True})
        check_stats(call.spoil_hidden_keys(np.nan) if spoil else call, dtype)


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_max_logit_is_of_visible_keys_and_counted_queries_before_softcap_mask_and_sinks(path, name):
    with forced(path):
        check_max_logit(name)


@pytest.mark.parametrize("path", [*READABLE, *NATIVE])
@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_max_logit_and_lse_of_nonfinite_keys_are_those_of_the_reference(path, name, value):
    with forced(path):
        check_nonfinite_logits(name, value)


def test_a_maximum_over_no_query_is_minus_infinity():
    _, stats = some(queries=torch.zeros(2, 7, dtype=torch.bool))
    assert (stats.max_logit == -torch.inf).all() and stats.entropy.isnan().all()
    _, nothing = some(batch=0)
    assert (nothing.max_logit == -torch.inf).all() and (nothing.total().max_logit == -torch.inf).all()


def test_the_mean_log_sum_exp_includes_the_sink():
    q, k = torch.zeros(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    sinks = torch.tensor([math.log(3.0), -50.0])
    lse = head_stats(q, k, k, sinks=sinks)[1].lse
    torch.testing.assert_close(lse, torch.tensor([8.0, 5.0], dtype=torch.float64).log(), rtol=1e-6, atol=0)


def test_cross_attention_has_no_positional_statistics():
    _, stats = some(cross=True)
    assert not set(POSITIONAL) & set(stats.names) and "entropy" in stats
    with pytest.raises(HeadwiseError, match="no statistic 'distance' here; there are entropy, confidence, first"):
        stats["distance"]
    with pytest.raises(AttributeError, match="no statistic 'self' here; there are entropy, confidence, first"):
        _ = stats.self
    with pytest.raises(HeadwiseError, match="no statistic 'previous' here"):
        stats.per_sequence("previous")


def test_a_class_may_have_the_name_of_a_statistic():
    _, plain = some()
    _, stats = some(classes={"entropy": torch.ones(2, 7, dtype=torch.bool)})
    torch.testing.assert_close(stats.share("entropy"), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(stats.entropy, plain.entropy)
    assert "share:entropy" in stats.names and "share:entropy" in stats
    with pytest.raises(HeadwiseError, match="no statistic 'share:rare' here; there are entropy"):
        stats.share("rare")


def both(kind: str) -> HeadStats:
    """Three heads over two sequences, with 1 and 3 queries that count."""
    sums, count = {"entropy": [[1.0, 2, 3], [3, 6, 9]], "self": [[0.5, 0, 1], [3, 0, 0]]}, [[1.0] * 3, [3.0] * 3]
    make = np.array if kind == "numpy" else lambda x: torch.tensor(x, dtype=torch.float64)
    maxima = {"max_logit": make([[2.0, -5, 4], [1, -3, 7]])}
    return HeadStats({name: make(x) for name, x in sums.items()}, make(count), maxima)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_means_are_over_all_queries_or_per_sequence(kind):
    stats = both(kind)
    np.testing.assert_allclose(stats["entropy"], [1, 2, 3])
    np.testing.assert_allclose(stats.self, [3.5 / 4, 0, 0.25])
    np.testing.assert_allclose(stats.per_sequence("self"), [[0.5, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(stats.max_logit, [2, -3, 7])
    np.testing.assert_array_equal(stats.per_sequence("max_logit"), [[2, -5, 4], [1, -3, 7]])
    assert stats.names == list(stats) == ["entropy", "self", "max_logit"]
    assert {"entropy", "max_logit"} <= set(dir(stats))


@pytest.mark.parametrize("kinds", [("numpy", "numpy"), ("torch", "torch"), ("numpy", "torch"), ("torch", "numpy")])
def test_adding_joins_sequences_and_continuing_joins_queries(kinds):
    a, b = both(kinds[0]), both(kinds[1])
    joined, continued = a + b, a.continued(b)
    assert type(joined.count) is type(continued.count) is type(a.count)
    np.testing.assert_array_equal(joined.count, [[1] * 3, [3] * 3] * 2)
    np.testing.assert_array_equal(joined.sums["self"], [[0.5, 0, 1], [3, 0, 0]] * 2)
    np.testing.assert_array_equal(continued.count, [[2] * 3, [6] * 3])
    np.testing.assert_array_equal(continued.sums["self"], [[1, 0, 2], [6, 0, 0]])
    np.testing.assert_array_equal(joined.maxima["max_logit"], [[2, -5, 4], [1, -3, 7]] * 2)
    b.maxima["max_logit"][:, 1] = 0.0
    np.testing.assert_array_equal(a.continued(b).maxima["max_logit"], [[2, 0, 4], [1, 0, 7]])
    np.testing.assert_array_equal(a.count, [[1] * 3, [3] * 3])  # untouched
    np.testing.assert_array_equal(a.maxima["max_logit"], [[2, -5, 4], [1, -3, 7]])


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    call = random_case(queries=7, batch=3).tensors()
    q, k, v = call.q, call.k, call.v
    _, whole = head_stats(q, k, v, causal=True)
    _, first = head_stats(q[:1], k[:1], v[:1], causal=True)
    _, rest = head_stats(q[1:], k[1:], v[1:], causal=True)
    _, early = head_stats(q[:, :, :4], k, v, causal=True, offset=0)
    _, late = head_stats(q[:, :, 4:], k, v, causal=True)
    for name in whole.names:
        torch.testing.assert_close((first + rest).per_sequence(name), whole.per_sequence(name))
        torch.testing.assert_close(early.continued(late).per_sequence(name), whole.per_sequence(name))
        torch.testing.assert_close((first + rest)[name], whole[name])
        torch.testing.assert_close(whole.total()[name], whole[name])
    assert whole.total().count.shape == (1, 6)


def ones(*names: str, batch: int = 2, heads: int = 3, maxima: tuple[str, ...] = ("max_logit",)) -> HeadStats:
    table = np.ones((batch, heads))
    return HeadStats(dict.fromkeys(names, table), table, dict.fromkeys(maxima, table))


def with_received(stats: HeadStats, keys: int) -> HeadStats:
    """The same statistics, with weights received that are different for every key."""
    shape = (*stats.count.shape, keys)
    return HeadStats(stats.sums, stats.count, stats.maxima, np.arange(math.prod(shape), dtype=float).reshape(shape))


@pytest.mark.parametrize(
    ("join", "other", "words"),
    [
        ("__add__", ones("entropy"), "not of the same kind: only one of them has self"),
        ("__add__", ones("entropy", "self", heads=5), "statistics of 3 and 5 heads cannot be added"),
        ("continued", ones("entropy", "first"), "not of the same kind: only one of them has first, self"),
        ("__add__", ones("entropy", "self", maxima=()), "not of the same kind: only one of them has max_logit"),
        ("continued", with_received(ones("entropy", "self"), 7), "only one of them has received"),
        ("continued", ones("entropy", "self", heads=5), "statistics of 3 and 5 heads cannot be added"),
        ("continued", ones("entropy", "self", batch=4), "4 sequences cannot continue 2; to join two batches add them"),
    ],
)
def test_incompatible_statistics_cannot_be_joined(join, other, words):
    with pytest.raises(HeadwiseError, match=words):
        getattr(both("numpy"), join)(other)


@pytest.mark.parametrize("kinds", [("numpy", "numpy"), ("torch", "torch"), ("numpy", "torch"), ("torch", "numpy")])
def test_received_weight_is_joined_with_zeros_for_keys_that_only_one_has(kinds):
    def of(kind: str, keys: int) -> HeadStats:
        stats = with_received(both("numpy"), keys)
        return stats if kind == "numpy" else stats._map(torch.from_numpy)

    few, many = of(kinds[0], 2), of(kinds[1], 5)
    padded = np.zeros((2, 3, 5))
    padded[..., :2] = few.received
    wide = np.asarray(many.received)
    np.testing.assert_array_equal((few + many).received, np.concatenate([padded, wide]))
    np.testing.assert_array_equal((many + few).received, np.concatenate([wide, padded]))
    np.testing.assert_array_equal(few.continued(many).received, padded + wide)
    np.testing.assert_array_equal(many.continued(few).received, padded + wide)
    assert type(few.continued(many).received) is type((few + many).received) is type(few.received)
    assert (few + many).total().received is None and "received" not in few.names
    assert few == of(kinds[0], 2) and few != both("numpy")


def test_only_statistics_can_be_added():
    with pytest.raises(TypeError, match="unsupported operand"):
        both("numpy") + 1


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("batch", [2, 0])
def test_json_restores_statistics_exactly(batch, received):
    _, stats = some(batch=batch, classes={"rare": torch.ones(batch, 7, dtype=torch.bool)}, received=received)
    text = json.dumps(stats.to_json())
    back = HeadStats.from_json(json.loads(text))
    assert back == stats and stats == back and json.dumps(back.to_json()) == text
    assert back.count.shape == stats.count.shape
    assert repr(back) == repr(stats)
    np.testing.assert_array_equal(back.entropy, stats.entropy)
    np.testing.assert_array_equal(back.max_logit, stats.max_logit)
    assert (None if back.received is None else back.received.shape) == ((batch, 3, 7) if received else None)
    if received:
        np.testing.assert_array_equal(back.received, stats.received)


def test_json_has_null_for_a_maximum_over_no_query():
    counted = torch.tensor([[True] * 7, [False] * 7])
    _, stats = some(queries=counted)
    document = json.loads(json.dumps(stats.to_json(), allow_nan=False))
    assert document["maxima"]["max_logit"][1] == [None] * 3
    back = HeadStats.from_json(document)
    np.testing.assert_array_equal(back.per_sequence("max_logit"), stats.per_sequence("max_logit"))
    assert (back.per_sequence("max_logit")[1] == -np.inf).all() and np.isfinite(back.max_logit).all()


def test_json_without_maxima_is_readable():
    document = ones("entropy").to_json()
    del document["maxima"]
    assert HeadStats.from_json(document).names == ["entropy"]


def test_statistics_are_equal_by_value():
    stats = both("torch")
    assert stats == both("numpy") and stats.numpy() == stats
    assert isinstance(stats.numpy().count, np.ndarray)
    changed = both("torch")
    changed.sums["self"][0, 1] += 1e-9
    assert stats != changed
    assert stats != "stats"
    with pytest.raises(TypeError, match="unhashable"):
        hash(stats)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_copied_statistics_are_equal(kind, again):
    stats = both(kind)
    assert again(stats) == stats and again(stats) is not stats


def test_a_deep_copy_of_statistics_is_independent():
    stats = both("torch")
    twin = copy.deepcopy(stats)
    twin.sums["self"] += 1
    assert twin != stats


def test_statistics_print_as_a_table():
    lines = repr(both("torch")).splitlines()
    assert lines[0] == "HeadStats of 3 heads over 2 sequences, 3 queries at most"
    assert [line.split() for line in lines[1:]] == [
        ["entropy", "1.000", "2.000", "3.000"],
        ["self", "0.875", "0.000", "0.250"],
        ["max_logit", "2.000", "-3.000", "7.000"],
    ]
    wide = HeadStats({"entropy": np.ones((1, 13))}, np.ones((1, 13)))
    assert repr(wide).endswith("1.000 ...")


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


LONG = 4096
LEFT_PADDED = torch.arange(LONG).view(1, 1, 1, LONG) >= 9
SQUARE = {
    "statistics": (head_stats, {}),
    "statistics, causal": (head_stats, {"causal": True}),
    "statistics, causal, padded": (head_stats, {"causal": True, "mask": LEFT_PADDED}),
    "statistics in a window": (head_stats, {"window": (99, 3)}),
    "weight per key": (head_stats, {"received": True, "causal": True}),
    "statistics with sinks": (head_stats, {"sinks": torch.zeros(2), "softcap": 3.0}),
    "statistics with a length": (head_stats, {"lengths": torch.tensor([4000]), "causal": True, "offset": -96}),
    "a window": (attend, {"window": (99, 0)}),
    "a window, padded": (attend, {"window": (99, 0), "mask": LEFT_PADDED}),
    "a window, padded, capped": (attend, {"window": (99, 0), "mask": LEFT_PADDED, "softcap": 3.0}),
    "sinks": (attend, {"sinks": torch.zeros(2)}),
    "softcap, causal": (attend, {"softcap": 3.0, "causal": True}),
}


@pytest.mark.parametrize("name", SQUARE)
def test_no_tensor_of_t_by_t_is_allocated(name):
    function, options = SQUARE[name]
    q, k, v = torch.randn(3, 1, 2, LONG, 8)
    with Largest() as seen, torch.no_grad():
        function(q, k, v, **options)
    assert q.numel() <= seen.most < LONG * LONG / 2


def test_no_tensor_of_t_by_t_is_allocated_in_backward():
    q, k, v = torch.randn(3, 1, 2, LONG, 8).unbind()
    q.requires_grad_()
    with Largest() as seen:
        attend(q, k, v, window=(99, 0), softcap=3.0).sum().backward()
        attend(q, k, v, window=(99, 0)).sum().backward()
    assert q.numel() <= seen.most < LONG * LONG / 2


MEMORY = """
import torch, headwise
from headwise.bench import memory

def run(q, k, v):
    mask = (torch.arange(q.shape[2]) >= 9).view(1, 1, 1, -1)
    return {call}

with torch.no_grad():
    run(*torch.randn(3, 1, 8, 600, 64))  # what is loaded once stays
    q, k, v = torch.randn(3, 1, 8, 16_384, 64)
    print(memory.peak_above(lambda: run(q, k, v)))
"""


@pytest.mark.parametrize(
    "call",
    [
        "headwise.head_stats(q, k, v)",
        "headwise.head_stats(q, k, v, causal=True, mask=mask)",
        "headwise.attend(q, k, v, window=(511, 0))",
        "headwise.attend(q, k, v, window=(511, 0), softcap=5.0, mask=mask)",
    ],
)
def test_at_16384_tokens_and_8_heads_memory_stays_under_1_gb(call):
    """In a process of its own, since the peak of one never falls. One T x T of a head in fp32 would be 1 GiB."""
    run = subprocess.run([sys.executable, "-c", MEMORY.format(call=call)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 16_384 * 8 * 64 * 4 / 2 < int(run.stdout) < 10**9


def test_lazy_statistics_are_computed_once_and_can_be_copied():
    made = []

    def make():
        made.append(1)
        return {"entropy": np.array([[6.0]])}, np.array([[3.0]]), {"max_logit": np.array([[5.0]])}

    stats = HeadStats.lazy(make)
    assert not made and stats.received is None and not made
    assert stats.entropy == 2.0 and stats.max_logit == 5.0 and stats.count == 3.0
    assert stats.sums is stats.sums and made == [1]
    call = random_case().tensors(torch.float32)
    for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        fresh = head_stats(call.q, call.k, call.v)[1]  # not computed yet
        assert again(fresh) == fresh
