"""Whatever records, counts or profiles operators sees attention as one, and what it recorded serves other inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import headwise
from headwise.attention.nn.kv_cache import KVCache
from headwise.errors import ShapeError, UnsupportedError
from helpers.attention_cases import needs_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "offset": {"offset": 1, "causal": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"sinks": torch.tensor([0.1, -0.3, 0.5, 0.7])},
    "gates": {"gates": torch.tensor([0.1, -0.3, 0.5, 0.7])},
}
DTYPES = [torch.float32, torch.float64]  # the native kernel, and PyTorch's
TRACERS: dict[str, Callable[..., Any]] = {
    "jit": lambda f, given: torch.jit.trace(f, given),
    "real": lambda f, given: make_fx(f, tracing_mode="real")(*given),
    "fake": lambda f, given: make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*given),
    "symbolic": lambda f, given: make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given),
}


def inputs(batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 3)
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def call_options(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {key: x.to(dtype) if isinstance(x, Tensor) else x for key, x in OPTIONS[name].items()}


@pytest.mark.parametrize(
    ("tracer", "name"), [(x, name) for x in TRACERS for name in (OPTIONS if x in ("jit", "real") else ["sinks"])]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_recorded_attend_serves_inputs_of_other_sizes(tracer: str, name: str, dtype: torch.dtype) -> None:
    options = call_options(name, dtype)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attend(q, k, v, **options)

    first, other = inputs(2, 5, 7, dtype), inputs(3, 11, 13, dtype, seed=1)
    for _ in range(3):  # the path of calls like an earlier one must notice as well
        attended(*first)
    graph = TRACERS[tracer](attended, tuple(first))
    torch.testing.assert_close(graph(*first), attended(*first))
    torch.testing.assert_close(graph(*other), attended(*other))


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recorded_statistics_serve_inputs_of_other_sizes(tracer: str, dtype: torch.dtype) -> None:
    def measured(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        odd = torch.arange(k.shape[2]).expand(k.shape[0], -1) % 2 == 1
        stats = headwise.head_stats(q, k, v, causal=True, classes={"odd": odd})[1]
        return torch.stack([*(stats.per_sequence(name) for name in sorted(stats)), stats.count])

    first, other = inputs(2, 5, 7, dtype), inputs(3, 11, 13, dtype, seed=1)
    graph = TRACERS[tracer](measured, tuple(first))
    torch.testing.assert_close(graph(*first), measured(*first))
    if tracer in ("jit", "symbolic"):  # the classes' own sizes are numbers in the others
        torch.testing.assert_close(graph(*other), measured(*other))


@pytest.mark.parametrize(
    ("tracer", "name"),
    [*(("jit", name) for name in OPTIONS if name != "gates"), ("symbolic", "causal")],
)
def test_recorded_weights_serve_inputs_of_other_sizes(tracer: str, name: str) -> None:
    options = call_options(name, torch.float64)

    def looked(q: Tensor, k: Tensor) -> Tensor:
        return headwise.weights(q, k, **options)

    first, other = inputs(2, 5, 7, torch.float64)[:2], inputs(3, 11, 13, torch.float64, seed=1)[:2]
    graph = TRACERS[tracer](looked, tuple(first))
    torch.testing.assert_close(graph(*other), looked(*other))


def test_recorded_lengths_and_masks_are_read_at_each_run() -> None:
    q, k, v = inputs(2, 5, 7)
    graph = torch.jit.trace(lambda q, k, v, n: headwise.attend(q, k, v, lengths=n), (q, k, v, torch.tensor([7, 7])))
    lengths = torch.tensor([3, 6])
    torch.testing.assert_close(graph(q, k, v, lengths), headwise.attend(q, k, v, lengths=lengths))
    masks = [(torch.arange(7) < n[:, None])[:, None, None] for n in (torch.tensor([7, 7]), lengths)]
    graph = torch.jit.trace(lambda q, k, v, mask: headwise.attend(q, k, v, mask=mask), (q, k, v, masks[0]))
    torch.testing.assert_close(graph(q, k, v, masks[1]), headwise.attend(q, k, v, mask=masks[1]))


def test_a_recorded_graph_validates_its_inputs() -> None:
    q, k, v = inputs(2, 5, 7)
    graph = make_fx(lambda q, k, v, n: headwise.attend(q, k, v, lengths=n))(q, k, v, torch.tensor([3, 7]))
    with pytest.raises(headwise.errors.MaskError, match="lengths must lie between 0 and the 7 keys there are, got 9"):
        graph(q, k, v, torch.tensor([3, 9]))
    with pytest.raises(ShapeError, match="k has 2 heads x 6 keys and v has 2 heads x 7"):
        graph(q, k[:, :, :6], v, torch.tensor([3, 6]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_traced_module_has_the_gradients_of_the_module(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = headwise.MultiHeadAttention(24, 6, 2, position=headwise.Rotary(), sinks=True).to(dtype)
    first, other = torch.randn(2, 5, 24, dtype=dtype), torch.randn(3, 7, 24, dtype=dtype)
    traced = torch.jit.trace(module, (first,))

    def gradients(of: Any) -> list[Tensor]:
        return list(torch.autograd.grad(of(other).square().sum(), list(module.parameters())))

    torch.testing.assert_close(traced(other), module(other))
    for got, want in zip(gradients(traced), gradients(module), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_make_fx_records_a_gradient_through_attend() -> None:
    def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.detach().requires_grad_()
        return torch.autograd.grad(headwise.attend(q, k, v, causal=True).square().sum(), q)[0]

    given = inputs(2, 5, 7)
    graph = make_fx(gradient)(*given)
    torch.testing.assert_close(graph(*inputs(2, 5, 7, seed=1)), gradient(*inputs(2, 5, 7, seed=1)))


def test_a_traced_decoding_step_with_a_cache() -> None:
    torch.manual_seed(0)
    module = headwise.MultiHeadAttention(24, 6, 2, position=headwise.Rotary()).eval().requires_grad_(False)

    def decoded(prompt: Tensor, token: Tensor) -> Tensor:
        cache = KVCache()
        module(prompt, causal=True, cache=cache)
        out: Tensor = module(token, causal=True, cache=cache)
        return out

    given = torch.randn(2, 5, 24), torch.randn(2, 1, 24)
    graph = torch.jit.trace(decoded, given)
    other = torch.randn(3, 11, 24), torch.randn(3, 1, 24)
    torch.testing.assert_close(graph(*given), decoded(*given))
    torch.testing.assert_close(graph(*other), decoded(*other))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@needs_kernel
@pytest.mark.parametrize("mode", [Operators, Functions])
def test_dispatch_and_function_modes_see_the_operator(mode: Any) -> None:
    q, k, v = inputs(2, 5, 7)
    for _ in range(3):
        want, statistics = headwise.head_stats(q, k, v)
    with mode() as seen:
        got = headwise.attend(q, k, v)
        measured = headwise.head_stats(q, k, v)[1]
    assert sum("headwise" in name for name in seen.names) == 2
    torch.testing.assert_close(got, want)
    assert measured == statistics


@needs_kernel
def test_flops_are_counted_as_those_of_pytorch_attention() -> None:
    q, k, v = inputs(2, 5, 7)
    pairs = 2 * 2 * 4 * 5 * 7 * (8 + 3)  # a multiplication and an addition per pair and number, hidden or not
    for _ in range(3):
        headwise.attend(q, k, v, causal=True)
    with FlopCounterMode(display=False) as forward:
        headwise.attend(q, k, v, causal=True)
    assert forward.get_total_flops() == pairs
    with FlopCounterMode(display=False) as both:
        headwise.attend(q.requires_grad_(), k, v).sum().backward()
    # forward; the scores again, and the gradients of both products with respect to their two factors
    assert both.get_total_flops() == pairs + 2 * 2 * 4 * 5 * 7 * (3 * 8 + 2 * 3)


@needs_kernel
def test_the_profiler_sees_the_operator() -> None:
    given = inputs(2, 5, 7)
    for _ in range(3):
        headwise.attend(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        headwise.attend(*given)
    assert [event.count for event in profile.key_averages() if event.key == "headwise::attend"] == [1]


def test_symbolic_trace_is_refused_with_advice() -> None:
    with pytest.raises(ShapeError, match=r"q is a torch.fx.Proxy, .*; use torch.export, make_fx or torch.jit.trace"):
        torch.fx.symbolic_trace(lambda q, k, v: headwise.attend(q, k, v))
    with pytest.raises(ShapeError, match=r"query is a torch.fx.Proxy"):
        torch.fx.symbolic_trace(headwise.MultiHeadAttention(24, 6))


def test_a_default_device_does_not_count_as_recording() -> None:
    given = inputs(2, 5, 7)
    want = headwise.head_stats(*given)
    with torch.device("meta"):
        for _ in range(3):
            out, stats = headwise.head_stats(*given)
            torch.testing.assert_close(out, want[0])
            assert stats == want[1]
        torch.testing.assert_close(headwise.weights(*given[:2], causal=True).sum(-1), torch.ones(2, 4, 5, device="cpu"))


@pytest.mark.parametrize("kind", [headwise.KVCache, lambda: headwise.StaticCache(11), lambda: headwise.SlidingCache(5)])
def test_a_step_after_a_cache_that_was_filled_before_is_not_recorded(kind: Callable[[], Any]) -> None:
    """A recorded step would repeat its position: wrong from the next token on."""
    layer, x = headwise.MultiHeadAttention(12, 3).eval(), torch.randn(1, 4, 12)
    with torch.no_grad():
        cache = kind()
        layer(x, causal=True, cache=cache)

        def step(token: Tensor) -> Tensor:
            out: Tensor = layer(token, causal=True, cache=cache)
            return out

        for record in (lambda: torch.jit.trace(step, x[:, :1]), lambda: make_fx(step)(x[:, :1])):
            with pytest.raises(UnsupportedError, match="this cache holds 4 tokens, and .* would repeat this one step"):
                record()
