"""Forward-mode derivatives and second derivatives of attention, with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import headwise
from helpers.attention_cases import LAYOUTS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
MADE = torch.Generator().manual_seed(3)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "starts": {"starts": torch.tensor([1, 3])},
    "bool mask": {"mask": torch.rand(2, 1, 3, 5, generator=MADE) > 0.4},
    "float mask": {"mask": torch.randn(3, 5, generator=MADE, dtype=torch.float64)},
    "lengths": {"lengths": torch.tensor([0, 4])},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"sinks": torch.randn(4, generator=MADE, dtype=torch.float64)},
    "gates": {"gates": torch.randn(4, generator=MADE, dtype=torch.float64)},
}
GROUPS = {"grouped": 2, "a KV head per head": 4}


def inputs(seed: int = 0, kv: int = 2, width: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 4, 3, 3), (2, kv, 5, 3), (2, kv, 5, width)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def single(options: dict[str, Any]) -> dict[str, Any]:
    return {key: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in options.items()}


CALLS = {
    "attend": lambda tensors, options: headwise.attend(*tensors, **options),
    "head_stats": lambda tensors, options: headwise.head_stats(*tensors, **options)[0],
    "weights": lambda tensors, options: headwise.weights(
        *tensors[:2], **{name: x for name, x in options.items() if name != "gates"}
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_tangents_equal_finite_differences(call: str, name: str) -> None:
    def output(*tensors: Tensor) -> Tensor:
        return CALLS[call](tensors, OPTIONS[name])

    point, direction, step = inputs(), inputs(1), 1e-6
    ahead, behind = (output(*(x + t * d for x, d in zip(point, direction, strict=True))) for t in (step, -step))
    want = (ahead - behind) / (2 * step)
    assert float(want.abs().max()) > 1e-2
    got = torch.func.jvp(output, tuple(point), tuple(direction))[1]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        out = output(*(forward_ad.make_dual(x, d) for x, d in zip(point, direction, strict=True)))
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_works_after_repeated_plain_calls(call: str) -> None:
    def output(*tensors: Tensor) -> Tensor:
        return CALLS[call](tensors, {})

    point, direction = inputs(), inputs(1)
    want = torch.func.jvp(output, tuple(point), tuple(direction))[1]
    point, direction = ([x.float() for x in some] for some in (point, direction))
    for _ in range(3):  # a call of the native kernel that was seen before
        output(*point)
    with forward_ad.dual_level():
        out = output(*(forward_ad.make_dual(x, d) for x, d in zip(point, direction, strict=True)))
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, want.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap"])
@pytest.mark.parametrize("call", ["attend", "head_stats"])
def test_tangents_go_through_compiled_code(call: str, name: str) -> None:
    def output(*given: Tensor) -> Tensor:
        return CALLS[call](given, single(OPTIONS[name]))

    def tangent(point: list[Tensor], direction: list[Tensor]) -> Tensor:
        return torch.func.jvp(output, tuple(point), tuple(direction))[1]

    torch.compiler.reset()
    point, direction = ([x.float() for x in inputs(seed)] for seed in (0, 1))
    want = tangent(inputs(), inputs(1)).float()  # of what is compiled nowhere, in double precision
    scale = float(want.abs().max())
    assert scale > 1e-2
    inside = torch.compile(tangent, backend="aot_eager", fullgraph=True)(point, direction)
    torch.testing.assert_close(inside, want, rtol=0, atol=1e-5 * scale)
    compiled = torch.compile(output, backend="aot_eager", fullgraph=True)
    compiled(*point)  # without tangents first
    with forward_ad.dual_level():
        got = compiled(*(forward_ad.make_dual(x, t) for x, t in zip(point, direction, strict=True)))
        outside = forward_ad.unpack_dual(got).tangent
    assert outside is not None
    torch.testing.assert_close(outside, want, rtol=0, atol=1e-5 * scale)
    torch.compiler.reset()


def test_a_frozen_module_has_tangents_and_statistics_have_none() -> None:
    torch.manual_seed(0)
    module = headwise.MultiHeadAttention(16, 4, 2, position=headwise.Rotary()).double().eval().requires_grad_(False)
    x, direction, step = torch.randn(2, 5, 16).double(), torch.randn(2, 5, 16).double(), 1e-6
    want = (module(x + step * direction) - module(x - step * direction)) / (2 * step)
    torch.testing.assert_close(torch.func.jvp(module, (x,), (direction,))[1], want, rtol=1e-6, atol=1e-7)
    plain = module.stats(x)
    with forward_ad.dual_level():
        stats = module.stats(forward_ad.make_dual(x, direction))
        assert forward_ad.unpack_dual(stats.sums["entropy"]).tangent is None
        torch.testing.assert_close(stats.entropy, plain.entropy)


def test_forward_mode_through_sinks_and_gates_alone() -> None:
    q, k, v = inputs()
    for name in ("sinks", "gates"):
        at, direction, step = OPTIONS[name][name], torch.randn(4, dtype=torch.float64), 1e-6

        def output(x: Tensor, name: str = name) -> Tensor:
            options: dict[str, Any] = {name: x}
            return headwise.attend(q, k, v, **options)

        want = (output(at + step * direction) - output(at - step * direction)) / (2 * step)
        torch.testing.assert_close(torch.func.jvp(output, (at,), (direction,))[1], want, rtol=1e-6, atol=1e-7)


def test_torch_func_hessian_equals_reverse_mode() -> None:
    q, k, v = inputs()

    def loss(q: Tensor) -> Tensor:
        return headwise.attend(q, k, v, causal=True).square().sum()

    want = torch.autograd.functional.hessian(loss, q)
    torch.testing.assert_close(torch.func.hessian(loss)(q), want)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(q), want)
    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(loss))(q), want)


@pytest.mark.parametrize("kv", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives_pass_gradgradcheck(name: str, kv: int) -> None:
    tensors = [x.requires_grad_() for x in inputs(kv=kv, width=2)]
    learned = [
        x.clone().requires_grad_() for x in OPTIONS[name].values() if isinstance(x, Tensor) and x.is_floating_point()
    ]

    def output(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        options = dict(OPTIONS[name])
        if more:
            options[next(iter(options))] = more[0]
        return headwise.attend(q, k, v, **options)

    assert torch.autograd.gradgradcheck(output, (*tensors, *learned), fast_mode=True)
    assert torch.autograd.gradgradcheck(output, tensors, fast_mode=True)  # PyTorch's fused kernel, where it fits


@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives_after_a_native_forward(name: str) -> None:
    def second(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        tensors = [x.clone().requires_grad_() for x in tensors]
        out = headwise.attend(*tensors, **options)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return list(torch.autograd.grad(torch.stack([x.sin().sum() for x in first]).sum(), tensors))

    want = second(inputs(), OPTIONS[name])
    got = second([x.float() for x in inputs()], single(OPTIONS[name]))
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


RELATED_INPUTS = {
    "one tensor": lambda x: (x, x, x),
    "keys are values": lambda x: (x.sin(), x, x),
    "queries are keys": lambda x: (x, x, x.sin()),
    "queries are computed from the keys": lambda x: (2 * x, x, x.sin()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("related", RELATED_INPUTS.values(), ids=RELATED_INPUTS)
def test_derivatives_of_related_inputs_count_each_of_them_once(related: Any, causal: bool, dtype: torch.dtype) -> None:
    at = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / 7**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    def derivatives(attend: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(attend(*related(x)).square().sum(), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.sin().sum(), x)]

    want = derivatives(by_definition, at)
    got = derivatives(lambda *qkv: headwise.attend(*qkv, causal=causal), at.to(dtype))
    rounding = 1e-10 if dtype == torch.float64 else 1e-3
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=rounding * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_inputs_in_any_layout(causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(2, 3, 7, 5, generator=generator, dtype=torch.float64) for _ in range(4)]

    def gradients(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> list[Tensor]:
        learned = [x.requires_grad_() for x in (q, k, v)]
        return list(torch.autograd.grad(headwise.attend(*learned, causal=causal), learned, slope))

    want = gradients(*tensors)
    for lay in LAYOUTS.values():
        got = gradients(*(lay(x.detach().to(dtype)).detach() for x in tensors))
        for ours, exact in zip(got, want, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    one = torch.ones((), dtype=dtype).expand(2, 3, 7, 5)  # the gradient that a sum hands back
    plain = [x.detach().to(dtype) for x in tensors[:3]]
    torch.testing.assert_close(gradients(*plain, one), gradients(*plain, one.contiguous()))
