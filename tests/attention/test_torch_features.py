"""Attention together with other features of PyTorch gives the same numbers, or is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.attention import dispatch, functional
from headwise.attention.call import build_call
from headwise.errors import UnsupportedError


def inputs(seed: int = 0, tokens: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, tokens, 5, generator=generator) for heads in (6, 3, 3)]


def negated(x: Tensor) -> Tensor:
    """The same numbers in a view that PyTorch negates as it reads them."""
    return torch._neg_view(-x)


def test_negated_views_give_the_same_output() -> None:
    q, k, v = inputs()
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(6, generator=generator)
    mask = torch.randn(7, 7, generator=generator)
    for options in ({"sinks": numbers}, {"gates": numbers}, {"mask": mask}, {"slopes": numbers.abs()}):
        want = dispatch.attend(q, k, v, build_call(q, k, v, **options))
        flipped: dict[str, Any] = {name: negated(x) for name, x in options.items()}
        got = dispatch.attend(*map(negated, (q, k, v)), build_call(q, k, v, **flipped))
        torch.testing.assert_close(got, want)
    imaginary = torch.complex(q, -q).conj().imag  # which is one of these views
    torch.testing.assert_close(headwise.attend(imaginary, k, v), headwise.attend(q, k, v))


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "sinks", "gates"])
def test_tensors_of_zeros_without_memory_are_zeros(name: str) -> None:
    shapes = {"mask": (2, 1, 7, 7), "bias": (7, 7), "sinks": (6,), "gates": (6,)}
    tensors: dict[str, Any] = dict(zip("qkv", inputs(), strict=True))
    shape = shapes.get(name) or tensors[name].shape
    dtype = torch.bool if name == "mask" else torch.float32
    argument = "mask" if name == "bias" else name
    for _ in range(3):  # repeated calls take a path of their own
        got = headwise.head_stats(**{**tensors, argument: torch._efficientzerotensor(shape, dtype=dtype)})
        want = headwise.head_stats(**{**tensors, argument: torch.zeros(shape, dtype=dtype)})
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1].entropy, want[1].entropy, equal_nan=True)


def test_a_gradient_of_zeros_without_memory_gives_zeros() -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    out = headwise.attend(*tensors, causal=True)
    for x in torch.autograd.grad(out, tensors, torch._efficientzerotensor(out.shape)):
        assert not x.any()


def test_vmap_takes_attend_and_refuses_statistics() -> None:
    q, k, v = inputs()

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attend(q[None], k[None], v[None], causal=True)[0]

    torch.testing.assert_close(torch.func.vmap(attended)(q, k, v), headwise.attend(q, k, v, causal=True))
    with pytest.raises(UnsupportedError, match="inside torch.func.vmap; give head_stats the whole batch"):
        torch.func.vmap(lambda q, k, v: headwise.head_stats(q[None], k[None], v[None])[0][0])(q, k, v)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_vmap_over_a_mask_of_no_queries(dtype: torch.dtype) -> None:
    q, k, v = (x.double() for x in inputs())
    masks = torch.ones(3, 0, 7, dtype=dtype)

    def attended(mask: Tensor) -> Tensor:
        return headwise.attend(q[:, :, :0], k, v, mask=mask, causal=True, softcap=5.0)

    assert torch.func.vmap(attended)(masks).shape == (3, *q.shape[:2], 0, v.shape[3])


@pytest.mark.parametrize("name", ["sinks", "mask", "lengths", "starts", "offset"])
def test_vmap_over_an_option_alone_gives_each_call_its_own(name: str) -> None:
    q, k, v = (x.double() for x in inputs())
    made = torch.Generator().manual_seed(2)
    several = {
        "sinks": torch.randn(3, 6, generator=made),
        "mask": torch.randn(3, 2, 1, 7, 7, generator=made),
        "lengths": torch.tensor([[7, 3], [1, 5], [0, 6]]),
        "starts": torch.tensor([[0, 3], [1, 5], [7, 6]]),
        "offset": torch.tensor([[0, 3], [1, -5], [7, 6]]),
    }[name]
    fixed: dict[str, Any] = {"causal": True, "window": (3, 0), "keep_first": 1, "softcap": 5.0}

    def attended(option: Tensor) -> Tensor:
        return headwise.attend(q, k, v, **fixed, **{name: option})

    def weighed(option: Tensor) -> Tensor:
        return headwise.weights(q, k, **fixed, **{name: option})

    for function in (attended, weighed):
        want = torch.stack([function(option) for option in several])
        torch.testing.assert_close(torch.func.vmap(function)(several), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_statistics_without_values_can_be_traced() -> None:
    q, k, _ = inputs()

    def entropy(q: Tensor, k: Tensor) -> Tensor:
        found: Tensor = functional.head_stats_without_values(q, k, causal=True).sums["entropy"]
        return found

    graph = torch.jit.trace(entropy, (q, k))
    other = inputs(1, tokens=11)[:2]
    torch.testing.assert_close(graph(*other), entropy(*other))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_same_under_checkpointing(reentrant: bool) -> None:
    ours, plain = ([x.requires_grad_() for x in inputs()] for _ in range(2))
    checkpoint(lambda *x: headwise.attend(*x, causal=True), *ours, use_reentrant=reentrant).square().sum().backward()
    headwise.attend(*plain, causal=True).square().sum().backward()
    for got, want in zip(ours, plain, strict=True):
        assert got.grad is not None and want.grad is not None
        torch.testing.assert_close(got.grad, want.grad)


PATHS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "kernel": (torch.float32, {}),
    "PyTorch's kernel": (torch.float64, {}),
    "blocks of rows": (torch.float64, {"softcap": 2.0}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["lengths", "starts", "offset"])
def test_gradients_are_those_of_the_positions_at_the_time_of_the_call(name: str, path: str) -> None:
    dtype, options = PATHS[path]
    tensors = [x.to(dtype).requires_grad_() for x in inputs()]
    positions = torch.tensor([2, 5])
    out = headwise.attend(*tensors, causal=True, **{name: positions}, **options)
    want = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    positions.fill_(1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), want, rtol=0, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["k", "mask", "bias", "sinks"])
def test_tensors_changed_before_backward_are_pytorchs_error_or_do_not_matter(name: str, path: str) -> None:
    dtype, options = PATHS[path]
    q, k, v = (x.to(dtype) for x in inputs())
    bias = torch.arange(7, dtype=dtype) / 7
    given = {"mask": {"mask": bias > 0.5}, "bias": {"mask": bias}, "sinks": {"sinks": bias[:6]}}.get(name, {})
    changed = k if name == "k" else next(iter(given.values()))
    out = headwise.attend(q.requires_grad_(), k, v, **given, **options)
    want = torch.autograd.grad(out.sum(), q, retain_graph=True)
    changed.zero_()
    try:
        got = torch.autograd.grad(out.sum(), q)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017  # a copy is as good
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_inference_tensors_work_outside_inference_mode() -> None:
    want = headwise.attend(*inputs(), causal=True)
    with torch.inference_mode():
        tensors = inputs()
        torch.testing.assert_close(headwise.attend(*tensors, causal=True), want)
    torch.testing.assert_close(headwise.attend(*tensors, causal=True), want)


def test_threads_that_call_at_once_get_their_own_results() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for tokens in (2, 3, 5, 7, 11, 13, 17, 19) * 3:
            tensors = inputs(number, tokens)
            exact = [x.double() for x in tensors]
            out, stats = headwise.head_stats(*tensors, causal=True)
            want, exact_stats = headwise.head_stats(*exact, causal=True)
            close = torch.allclose(out.double(), want, atol=1e-5)
            if not (close and torch.allclose(stats.entropy, exact_stats.entropy.double(), atol=1e-4)):
                wrong.append(tokens)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
