"""Dropout by a generator of our own: the same weights are dropped on every path, in forward and backward passes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from headwise import MultiHeadAttention, attend, explain, head_stats, reference
from headwise.attention import dispatch, dropout
from headwise.attention.call import build_call
from helpers.attention_cases import FEW, NATIVE, PATHS, AttentionCase, array, cases, forced, random_case
from helpers.gradient_bounds import UNIT, check_gradients, compute_gradients

pytestmark = pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones")
each_native = pytest.mark.parametrize("path", NATIVE)
OURS = [*NATIVE, "one block of rows", "many blocks of rows"]
each_path = pytest.mark.parametrize("path", OURS)


def drawn_seed(manual_seed: int) -> int:
    """The seed that the next call of attend draws after torch.manual_seed."""
    torch.manual_seed(manual_seed)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(manual_seed)
    return seed


def weights_after_dropout(rate: float, batch: int, heads: int, queries: int, keys: int, **options) -> torch.Tensor:
    """attend's output where values are unit vectors: the weights, with zeros where they were dropped."""
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, heads, n, 8, generator=rng) for n in (queries, keys))
    return attend(q, k, torch.eye(keys).expand(batch, heads, keys, keys), dropout=rate, **options)


# ---- the generator


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (0xFFFFFFFF, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_generator_gives_the_published_numbers(number, words):
    """Known answers of philox4x32 with 7 rounds from Random123, for keys and counters of equal words."""
    counter = np.array([number])
    halves = dropout.random_halves(number << 32 | number, counter, counter, counter, counter)
    assert [int(low[0]) | int(high[0]) << 16 for low, high in zip(halves[::2], halves[1::2], strict=True)] == list(
        words
    )


def test_every_weight_has_a_number_of_its_own():
    counters = 32
    shape = 3, 2, 5
    axes = (
        np.arange(n).reshape([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate((*shape, counters))
    )
    numbers = np.stack(dropout.random_halves(1, *axes))  # (8, 3, 2, 5, counters)
    flat = numbers.reshape(8 * 3 * 2 * 5, counters)
    assert len({tuple(row) for row in flat}) == len(flat)
    assert len(np.unique(numbers)) > 0.9 * numbers.size  # of 65,536


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.97])
def test_share_of_dropped_weights_is_the_rate(rate):
    retained = dropout.retained(11, rate, 2, 3, 67, 501)
    probability = dropout.threshold(rate) / dropout.RANGE
    assert abs(probability - (1 - rate)) <= 0.5 / dropout.RANGE
    deviation = (probability * (1 - probability) / retained.size) ** 0.5
    assert abs(retained.mean() - probability) < 5 * deviation
    for axis in range(4):  # and so it is in every sequence, head, query and key
        others = tuple(i for i in range(4) if i != axis)
        count = retained.size / retained.shape[axis]
        assert abs(retained.mean(others) - probability).max() < 5.5 * (probability * (1 - probability) / count) ** 0.5


def test_a_weight_is_dropped_whatever_the_sizes_are():
    whole = dropout.retained(5, 0.4, 3, 4, 19, 300)
    for sizes in [(1, 4, 19, 300), (3, 2, 7, 129), (2, 1, 1, 1)]:
        assert (dropout.retained(5, 0.4, *sizes) == whole[tuple(slice(n) for n in sizes)]).all()
    assert (dropout.retained(6, 0.4, 3, 4, 19, 300) != whole).any()
    assert (dropout.retained(5 + (1 << 32), 0.4, 3, 4, 19, 300) != whole).any()


def test_extreme_rates_drop_nothing_or_everything():
    assert dropout.retained(0, 1e-9, 1, 1, 9, 999).all() and dropout.factor(1e-9) == 1
    assert not dropout.retained(0, 1.0, 1, 1, 9, 999).any() and dropout.factor(1.0) == 0
    assert dropout.threshold(1 - 1e-9) == 1 and dropout.factor(1 - 1e-9) == dropout.RANGE


# ---- the same weights on every path


@each_path
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (13, 127), (5, 128), (130, 129), (2, 700), (1, 2500)])
def test_the_very_weights_of_the_specification_are_dropped(path, queries, keys):
    with forced(path):
        seed = drawn_seed(queries)
        got = weights_after_dropout(0.3, 2, 3, queries, keys)
    assert ((got != 0).numpy() == dropout.retained(seed, 0.3, 2, 3, queries, keys)).all()


@each_native
def test_the_number_of_threads_does_not_change_which_weights_are_dropped(path):
    with forced(path):
        outputs = []
        before = torch.get_num_threads()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            outputs.append(weights_after_dropout(0.3, 2, 3, 70, 600, causal=True))
        torch.set_num_threads(before)
    assert outputs[0].equal(outputs[1])


@each_path
@given(case=cases(), rate=st.sampled_from([0.1, 0.6]))
@settings(FEW, max_examples=40)
def test_attend_with_dropout_equals_the_reference(path, case, rate):
    seed = drawn_seed(3)
    dtype = torch.float32 if path in NATIVE else torch.float64
    case = case.rounded(dtype)
    tensors = case.tensors(dtype)
    with forced(path):
        got = attend(tensors.q, tensors.k, tensors.v, dropout=rate, **tensors.options)
    want = reference.attend(case.q, case.k, case.v, dropout=rate, seed=seed, **case.options)
    error = 2e-5 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(array(got), want, rtol=error, atol=error / (1 - rate))


@each_native
def test_scores_that_overflow_are_dropped_alike(path):
    case = random_case(keys=200).tensors(torch.float32)
    case.q[:, :, 1] *= 1e30
    case.k[:, :, 3] *= 1e30
    seed = drawn_seed(4)
    with forced(path):
        got = attend(case.q, case.k, case.v, dropout=0.5)
    want = reference.attend(*(array(x) for x in (case.q, case.k, case.v)), dropout=0.5, seed=seed)
    np.testing.assert_allclose(array(got), want, rtol=1e-5, atol=1e-5)


@each_native
def test_nan_reaches_those_who_attend_even_where_its_weight_is_dropped(path):
    case = random_case().tensors(torch.float32)
    case.v[0, 0, 3] = torch.nan
    with forced(path):
        out = attend(case.q, case.k, case.v, dropout=0.9, window=(0, 0), offset=0)
    assert out[0, :3, 3].isnan().all() and out.isnan().sum() == 3 * 3  # the group of that KV head, 3 wide


# ---- gradients


def with_dropout(case: AttentionCase, rate: float, seed: int) -> AttentionCase:
    options = {name: x for name, x in case.options.items() if name != "gates"}
    return replace(case, options={**options, "dropout": rate, "seed": seed})


def check_native_gradients(case: AttentionCase, path: str) -> None:
    case = case.rounded(torch.float32)
    grad_out = np.random.default_rng(1).normal(size=(*case.q.shape[:3], case.v.shape[3])).astype(np.float32)
    names = ("q", "k", "v", *(["sinks"] if "sinks" in case.options else []))
    case = replace(case, **{name: np.where(case.hidden_keys[..., None], 0.0, getattr(case, name)) for name in "kv"})
    with forced(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch.composite, "gradients", None)  # the kernel computes them
        got = compute_gradients(case.tensors(torch.float32), torch.from_numpy(grad_out), names)
    check_gradients(case, got, grad_out.astype(float), torch.float32, case)


@each_native
@given(case=cases(), rate=st.sampled_from([0.1, 0.5]), seed=st.integers(0, 2**63 - 1))
@settings(FEW, max_examples=40)
def test_native_gradients_with_dropout_are_those_of_the_specification(path, case, rate, seed):
    check_native_gradients(with_dropout(case, rate, seed), path)


@each_native
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": (150, 0), "keep_first": 3}, {"softcap": 2.0}], ids=str
)
def test_native_gradients_of_long_calls_with_dropout_are_those_of_the_specification(path, options):
    rng = np.random.default_rng(0)
    shapes = (2, 4, 211, 33), (2, 2, 397, 33), (2, 2, 397, 20)
    case = AttentionCase(*(rng.normal(size=shape) for shape in shapes), options)
    check_native_gradients(with_dropout(case, 0.2, 99), path)


@each_path
def test_everything_dropped_gives_zeros_and_zero_gradients(path):
    tensors = random_case().tensors(torch.float32 if path in NATIVE else torch.float64)
    leaves = [x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    with forced(path):
        out = attend(*leaves, dropout=1.0)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert not out.any() and not any(x.any() for x in grads)


@each_path
def test_second_derivatives_use_the_same_weights(path):
    tensors = random_case().tensors(torch.float32 if path in NATIVE else torch.float64)
    leaves = [x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]

    def second(path: str) -> list[torch.Tensor]:
        with forced(path):
            torch.manual_seed(8)
            grads = torch.autograd.grad(attend(*leaves, dropout=0.4).square().sum(), leaves, create_graph=True)
            return list(torch.autograd.grad(sum(x.square().sum() for x in grads), leaves))

    for got, want in zip(second(path), second("one block of rows"), strict=True):
        assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())


# ---- PyTorch's modes


@each_path
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_attention_drops_the_same_weights_again(path, reentrant):
    tensors = random_case().tensors(torch.float32)
    leaves = [x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]

    def run(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(x, k, v, dropout=0.4)

    with forced(path):
        torch.manual_seed(2)
        want = torch.autograd.grad(run(*leaves).square().sum(), leaves)
        torch.manual_seed(2)
        out = checkpoint(run, *leaves, use_reentrant=reentrant)
        out.square().sum().backward()
    for x, grad in zip(leaves, want, strict=True):
        assert x.grad.equal(grad)


@contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


@each_native
@pytest.mark.parametrize("observed", [profiled, lambda: FlopCounterMode(display=False)], ids=["profiler", "counter"])
@pytest.mark.parametrize("learning", [False, True])
def test_observing_a_call_does_not_change_which_weights_are_dropped(path, observed, learning):
    tensors = random_case(keys=40).tensors(torch.float32)
    q = tensors.q.requires_grad_(learning)
    results = []
    for context in (nullcontext, observed):
        with forced(path), context():
            torch.manual_seed(6)
            out = attend(q, tensors.k, tensors.v, dropout=0.4)
            stats_out = head_stats(q, tensors.k, tensors.v, dropout=0.4)[0]
        grads = torch.autograd.grad((out + stats_out).square().sum(), q) if learning else ()
        results.append((out, stats_out, *grads))
    for plain, seen in zip(*results, strict=True):
        torch.testing.assert_close(plain, seen)


def test_compiled_attention_draws_anew_in_every_run():
    tensors = random_case(keys=60).tensors(torch.float32)
    run = torch.compile(
        lambda: attend(tensors.q, tensors.k, tensors.v, dropout=0.5), backend="aot_eager", fullgraph=True
    )
    assert not run().equal(run())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_attention_draws_anew_in_every_run():
    tensors = random_case(keys=60).tensors(torch.float32)
    run = torch.jit.trace(lambda q: attend(q, tensors.k, tensors.v, dropout=0.5), (tensors.q,), check_trace=False)
    assert not run(tensors.q).equal(run(tensors.q))


@each_path
def test_statistics_while_training_are_those_before_dropout(path):
    tensors = random_case(keys=40).tensors(torch.float32 if path in NATIVE else torch.float64)
    q = tensors.q.requires_grad_()
    with forced(path):
        want = head_stats(tensors.q.detach(), tensors.k, tensors.v)[1]
        torch.manual_seed(6)
        out, stats = head_stats(q, tensors.k, tensors.v, dropout=0.4)
        torch.manual_seed(6)
        torch.testing.assert_close(out, attend(q, tensors.k, tensors.v, dropout=0.4))
    for name in want.names:
        torch.testing.assert_close(stats[name], want[name], rtol=50 * UNIT, atol=50 * UNIT)


@each_native
def test_dropout_runs_in_the_kernel(path):
    tensors = random_case().tensors(torch.float32)
    with forced(path):
        assert explain(tensors.q, tensors.k, tensors.v, dropout=0.1).startswith("native: one pass in")


def test_modules_train_alike_whichever_backend_draws():
    module = MultiHeadAttention(24, 4, 2, dropout=0.3).train()
    x, outputs = torch.randn(2, 9, 24), []
    for path in OURS:
        with forced(path):
            torch.manual_seed(7)
            outputs.append(module(x, causal=True))
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0])


@pytest.mark.parametrize("path", [name for name in PATHS if name.startswith("unreadable")])
def test_without_a_seed_pytorch_draws(path):
    tensors = random_case().tensors()
    call = build_call(tensors.q, tensors.k, tensors.v, dropout=0.5)
    with forced(path):
        unread = build_call(tensors.q, tensors.k, tensors.v, dropout=0.5)
        assert dispatch.draw_seed(tensors.q, unread).seed is None
        torch.manual_seed(1)
        first = attend(tensors.q, tensors.k, tensors.v, dropout=0.5)
        torch.manual_seed(1)
        assert first.equal(attend(tensors.q, tensors.k, tensors.v, dropout=0.5))
    assert dispatch.draw_seed(tensors.q, call).seed is not None


def test_dropout_of_a_padded_sequence_in_nn_dropout_and_attention_is_one_stream():
    """Other users of PyTorch's generator go on where attention stopped, as with PyTorch's own dropout."""
    tensors, drop = random_case().tensors(torch.float32), nn.Dropout(0.5)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append((attend(tensors.q, tensors.k, tensors.v, dropout=0.5), drop(torch.ones(50))))
    assert runs[0][0].equal(runs[1][0]) and runs[0][1].equal(runs[1][1])
    torch.manual_seed(3)
    assert not drop(torch.ones(50)).equal(runs[0][1])
