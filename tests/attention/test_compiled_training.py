"""Compiled and profiled training goes through the native kernel, forward and backward, as uncompiled training does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise import MultiHeadAttention, attend, head_stats
from headwise.attention import dispatch, operators
from headwise.attention.backends import composite
from helpers.attention_cases import NATIVE, forced, random_case

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernel was not built")
UNIT = torch.finfo(torch.float32).eps
HEADS, QUERIES, KEYS = 6, 5, 7
OPTIONS = {
    "plain": {},
    "causal, a mask of booleans": {"causal": True, "mask": torch.arange(35).view(5, 7) % 4 > 0},
    "a row with no visible keys": {"mask": torch.arange(5).view(5, 1).expand(5, 7) != 2},
    "a window, lengths, starts": {"window": (2, 1), "lengths": torch.tensor([3, 6]), "starts": torch.tensor([1, 0])},
    "windows per head": {"causal": True, "window": [(1, 0), (None, 0), (3, 0)] * 2, "keep_first": [0, 1, 2] * 2},
    "offsets, softcap, scale": {"causal": True, "offset": torch.tensor([-1, 2]), "softcap": 2.0, "scale": 0.7},
}
LEARNED = {
    "a float mask": lambda: {"mask": torch.linspace(-1, 1, 6 * 5 * 7).view(1, 6, 5, 7)},
    "sinks": lambda: {"sinks": torch.linspace(-1, 1, HEADS)},
    "gates, one of them 0": lambda: {"gates": torch.linspace(0, 1, HEADS)},
    "gates per sequence, sinks": lambda: {
        "gates": torch.linspace(-1, 1, 2 * HEADS).view(2, HEADS),
        "sinks": torch.linspace(-1, 1, HEADS),
    },
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextmanager
def native_only() -> Iterator[None]:
    """Inside, attention and its gradients are the native kernel's: PyTorch's operators for them fail."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("PyTorch computed this")

    with forced(NATIVE[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(composite, "gradients", refuse)
        patch.setattr(dispatch, "run_in_torch", refuse)
        yield


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    case = random_case(queries=QUERIES, keys=KEYS).tensors(dtype)
    return [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]


def output_and_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out = function(*tensors)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, tensors, grad)


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_training_equals_eager_training_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, **OPTIONS[name])

    with native_only():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert_equal(output_and_gradients(compiled, leaves(dtype)), output_and_gradients(run, leaves(dtype)))


@pytest.mark.parametrize("name", LEARNED)
def test_compiled_gradients_of_masks_sinks_and_gates_equal_eager_ones(name: str) -> None:
    options = LEARNED[name]()

    def run(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return attend(q, k, v, **dict(zip(options, learned, strict=True)))

    tensors = [*leaves(), *(x.requires_grad_() for x in options.values())]
    with native_only():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        got, want = output_and_gradients(compiled, tensors), output_and_gradients(run, tensors)
    if "gates" not in options:
        assert_equal(got, want)
    # PyTorch sums the gradients of gates, over 2 x 5 x 3 products at most, in an order of its own
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=30 * UNIT * float(want[0].detach().abs().max() * 30))


def test_compiled_training_takes_other_sizes_without_a_new_graph() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True)

    with native_only():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
        for queries in (5, 11, 3):
            case = random_case(queries=queries, keys=13).tensors(torch.float32)
            tensors = [x.requires_grad_() for x in (case.q, case.k, case.v)]
            with torch._dynamo.config.patch(error_on_recompile=queries != 5):
                assert_equal(output_and_gradients(compiled, tensors), output_and_gradients(run, tensors))


@pytest.mark.parametrize("kv", [6, 2])
def test_compiled_training_by_pytorchs_kernel_takes_any_sizes(kv: int) -> None:
    """Head counts are symbols there, too, and a comparison of symbols is no bool that PyTorch's kernel takes."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    case = random_case(kv=kv, queries=53, keys=29).tensors(torch.float64)  # the native kernel takes no float64
    tensors = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    for x, y in zip(output_and_gradients(compiled, tensors), output_and_gradients(run, tensors), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_compiled_dropout_drops_the_same_weights_in_forward_and_backward() -> None:
    case = random_case(queries=31, keys=37).tensors(torch.float32)
    tensors = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    with native_only():
        run = torch.compile(lambda q, k, v: attend(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager")
        torch.manual_seed(3)
        out = run(*tensors)
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape)
        of_v = torch.autograd.grad(out, tensors[2], grad)[0]
        assert not run(*tensors).equal(out)
        torch.manual_seed(3)
        assert run(*tensors).equal(out)
    # the output is linear in v, so that both sums are the same if and only if the same weights were dropped
    forward, backward = out.detach().double() * grad, of_v.double() * tensors[2].detach().double()
    rounding = 37 * UNIT * float(forward.abs().sum() + backward.abs().sum())
    assert abs(float(forward.sum() - backward.sum())) <= rounding


def test_inductor_trains_a_module_with_dropout_through_the_kernel() -> None:
    torch.manual_seed(0)
    module, x = MultiHeadAttention(24, 6, 2, dropout=0.3), torch.randn(2, 11, 24)
    with native_only():
        compiled = torch.compile(module, fullgraph=True)
        first, second = compiled(x, causal=True), compiled(x, causal=True)
        assert not first.equal(second)
        first.square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())
        module.eval()
        torch.testing.assert_close(compiled(x, causal=True), module(x, causal=True), rtol=0, atol=32 * UNIT)


def test_statistics_in_a_compiled_training_step_come_with_the_output() -> None:
    tensors = leaves()
    with native_only():
        run = torch.compile(lambda q, k, v: head_stats(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
        (out, stats), (want, expected) = run(*tensors), head_stats(*tensors, causal=True)
        assert out.equal(want) and stats == expected
        assert_equal(
            torch.autograd.grad(out.square().sum(), tensors), torch.autograd.grad(want.square().sum(), tensors)
        )


SPECIAL = {  # gradients of these are not the kernel's, but PyTorch's
    "scores beyond single precision": lambda q, k, v: (q * 300, k * 300, v),
    "NaN in a query": lambda q, k, v: (q.index_fill(2, torch.tensor(1), torch.nan), k, v),
    "inf in a value": lambda q, k, v: (q, k, v.index_fill(2, torch.tensor(3), torch.inf)),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_the_kernel_declines_has_the_gradients_of_eager_code(name: str) -> None:
    tensors = [x.detach().requires_grad_() for x in SPECIAL[name](*(x.detach() for x in leaves()))]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True)

    with forced(NATIVE[0]):
        want = output_and_gradients(run, tensors)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        got = output_and_gradients(compiled, tensors)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            profiled = output_and_gradients(run, tensors)
    for results in (got, profiled):
        for x, y in zip(results, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("missing", [False, True])
def test_a_version_of_pytorch_without_the_private_name_trains_too(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "HAS_BACKWARD", not missing)
    tensors = leaves()
    with forced(NATIVE[0]):
        want = output_and_gradients(attend, tensors)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            got = output_and_gradients(attend, tensors)
        loss = attend(*tensors).square().sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            later = torch.autograd.grad(loss, tensors)
        assert all(x.isfinite().all() for x in later)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=100 * UNIT * float(y.detach().abs().max()))


TRANSFORMS = {
    "grad": lambda loss: torch.func.grad(loss),
    "vmap": lambda loss: torch.func.vmap(loss),
    "per-sample gradients": lambda loss: torch.func.vmap(torch.func.grad(loss)),
    "jacrev": lambda loss: torch.func.jacrev(loss),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_inside_compiled_code(name: str) -> None:
    q, k, v = (x.detach() for x in leaves())
    run = TRANSFORMS[name](lambda x: attend(x[None], k[:1], v[:1], causal=True).square().sum())
    argument = q[0] if name in ("grad", "jacrev") else q
    k, v = k.double(), v.double()
    want = run(argument.double())
    k, v = k.float(), v.float()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(argument)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=100 * UNIT * float(want.abs().max()))


def test_profiled_training_uses_the_kernel_and_shows_it() -> None:
    tensors = leaves()
    with native_only():
        want = output_and_gradients(attend, tensors)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            got = output_and_gradients(attend, tensors)
        assert_equal(got, want)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["headwise::attend"] == counts["headwise::attend_gradients"] == 1


def test_a_backward_pass_that_alone_is_profiled_uses_the_kernel() -> None:
    tensors = leaves()
    with native_only():
        want = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
        loss = attend(*tensors).square().sum()
        with FlopCounterMode(display=False) as counter:
            got = torch.autograd.grad(loss, tensors)
        assert_equal(got, want)
    # q k^T again, and the gradients of both products with respect to their two factors
    assert counter.get_total_flops() == 2 * 2 * HEADS * QUERIES * KEYS * (3 * 4 + 2 * 3)


def test_second_derivatives_of_profiled_calls_go_through_pytorch() -> None:
    tensors = leaves(torch.float64)
    singles = [x.detach().float().requires_grad_() for x in tensors]

    def penalty(xs: list[Tensor]) -> tuple[Tensor, ...]:
        [of_q] = torch.autograd.grad(attend(*xs).square().sum(), xs[:1], create_graph=True)
        return torch.autograd.grad(of_q.square().sum(), xs)

    want = penalty(tensors)
    with forced(NATIVE[0]), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        got = penalty(singles)
    for x, y in zip(got, want, strict=True):
        bound = 100 * UNIT * float(y.abs().max())  # rounding of about a hundred operations, relative to the largest
        torch.testing.assert_close(x.double(), y, rtol=0, atol=bound)
