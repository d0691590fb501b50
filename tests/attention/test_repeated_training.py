"""Training calls that look like earlier ones skip validation: same gradients, other modes and layouts recognised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise import MultiHeadAttention, attend, reference
from headwise.attention import dispatch, repeated_calls
from headwise.attention.functional import attend_side_by_side
from headwise.errors import ShapeError
from helpers.attention_cases import NATIVE, forced

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernel was not built")
OPTIONS = {
    "dense": {},
    "causal": {"causal": True},
    "a window": {"window": (3, 1)},
    "windows per head": {"window": [(2, 0), (None, 1), (4, None), (0, 0), (1, 1), (None, None)]},
    "the first keys and a window": {"window": (1, 0), "keep_first": 2},
    "softcap": {"softcap": 1.5, "causal": True},
}
BATCH, HEADS, KV_HEADS, DIM = 2, 6, 3, 5


def projections(queries: int, keys: int, seed: int = 0) -> list[Tensor]:
    """q (B, Tq, Hq * D), k and v (B, Tk, Hkv * D), which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    widths = (queries, HEADS * DIM), (keys, KV_HEADS * DIM), (keys, KV_HEADS * DIM)
    return [torch.randn(BATCH, *shape, generator=generator).requires_grad_() for shape in widths]


def separate_heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (-1, DIM)).transpose(1, 2)


def gradients(outputs: Tensor, inputs: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)
    return list(torch.autograd.grad((outputs * weights).sum(), inputs, create_graph=create_graph))


def exact_gradients(inputs: list[Tensor], options: dict) -> list[Tensor]:
    """In float64, through PyTorch's operators."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    out = attend(*map(separate_heads, inputs), **options)
    return gradients(out.transpose(1, 2).flatten(2), inputs)


def is_repeated(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == f"{dispatch.RepeatedOnePass.__name__}Backward"


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for first, second in zip(got, want, strict=True):
        torch.testing.assert_close(first.double(), second.double(), rtol=2e-4, atol=2e-5)


@pytest.fixture(autouse=True)
def native_kernel():
    repeated_calls.clear()
    with forced(NATIVE[0]):
        yield
    repeated_calls.clear()


@pytest.mark.parametrize("sizes", [(7, 7), (5, 11), (1, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_repeated_calls_with_heads_side_by_side_are_exact(name, sizes):
    for seed in range(3):  # seen, remembered, recognised
        inputs = projections(*sizes, seed)
        out = attend_side_by_side(*inputs, DIM, **OPTIONS[name])
        assert is_repeated(out) and out.shape == inputs[0].shape
        close(gradients(out, inputs), exact_gradients(inputs, OPTIONS[name]))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_repeated_calls_of_attend_are_exact(name):
    for seed in range(3):
        inputs = projections(5, 11, seed)
        q, k, v = (separate_heads(x).detach().requires_grad_() for x in inputs)
        out = attend(q, k, v, **OPTIONS[name])
        assert is_repeated(out)
        got = gradients(out.transpose(1, 2).flatten(2), [q, k, v])
        close([x.transpose(1, 2).flatten(2) for x in got], exact_gradients(inputs, OPTIONS[name]))


def test_repeated_training_calls_draw_new_dropout_that_the_seed_determines():
    inputs = projections(7, 7)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append([attend_side_by_side(*inputs, DIM, dropout=0.3) for _ in range(3)])
    assert all(first.equal(second) for first, second in zip(*outputs, strict=True))
    assert not outputs[0][0].equal(outputs[0][1]) and not outputs[0][1].equal(outputs[0][2])
    torch.manual_seed(3)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    want = reference.attend(*(separate_heads(x).detach().numpy() for x in inputs), dropout=0.3, seed=seed)
    torch.testing.assert_close(separate_heads(outputs[0][0]).detach(), torch.from_numpy(want).float())


def test_gradients_of_repeated_calls_use_the_dropout_of_their_own_forward_pass():
    """The output is linear in v: its gradient by v gives the weights that were kept."""
    inputs = projections(7, 7)
    outputs = [attend_side_by_side(*inputs, DIM, dropout=0.3) for _ in range(3)]
    for out in reversed(outputs):
        (of_v,) = torch.autograd.grad(out, inputs[2:], torch.ones_like(out))
        torch.testing.assert_close((of_v * inputs[2]).sum(), out.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", ["training", "inference"])
def test_training_and_inference_calls_are_not_mistaken_for_each_other(first):
    inputs = projections(5, 7)
    with torch.set_grad_enabled(first == "training"):
        attend_side_by_side(*inputs, DIM)
    for _ in range(3):
        assert is_repeated(attend_side_by_side(*inputs, DIM))
        with torch.no_grad():
            assert not attend_side_by_side(*inputs, DIM).requires_grad
        with torch.inference_mode():
            assert not attend_side_by_side(*inputs, DIM).requires_grad
        frozen = [x.detach() for x in inputs]
        assert not attend_side_by_side(*frozen, DIM).requires_grad
        for some in range(3):
            learned = [x.detach().requires_grad_(i == some) for i, x in enumerate(inputs)]
            out = attend_side_by_side(*learned, DIM)
            close(gradients(out, learned[some : some + 1]), exact_gradients(inputs, {})[some : some + 1])
        with torch.autocast("cpu", torch.bfloat16):
            assert attend_side_by_side(*inputs, DIM).dtype == torch.bfloat16


def test_one_tensor_as_q_k_and_v_gets_the_sum_of_its_gradients():
    x = torch.randn(BATCH, 7, HEADS * DIM, requires_grad=True)
    copies = [x.detach().clone().requires_grad_() for _ in range(3)]
    for _ in range(3):
        together = gradients(attend_side_by_side(x, x, x, DIM, causal=True), [x])[0]
        close([together], [sum(gradients(attend_side_by_side(*copies, DIM, causal=True), copies))])


@pytest.mark.parametrize("side_by_side", [True, False])
def test_second_derivatives_of_repeated_calls_are_exact(side_by_side):
    def call(*inputs: Tensor) -> Tensor:
        if side_by_side:
            return attend_side_by_side(*inputs, DIM, causal=True)
        return attend(*map(separate_heads, inputs), causal=True).transpose(1, 2).flatten(2)

    inputs = projections(5, 7)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    seconds = []
    for _ in range(2):
        for tensors in (inputs, exact):
            of_q = gradients(call(*tensors), tensors, create_graph=True)[0]
            seconds.append(gradients(of_q, tensors))
    for got, want in (seconds[:2], seconds[2:]):
        close(got, want)


def test_batched_gradients_of_repeated_calls_are_those_of_single_ones():
    inputs = projections(5, 7)
    batch = torch.randn(3, BATCH, 5, HEADS * DIM)
    for _ in range(2):
        out = attend_side_by_side(*inputs, DIM)
        several = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
        single = [torch.autograd.grad(out, inputs, x, retain_graph=True) for x in batch]
        close(list(several), [torch.stack(x) for x in zip(*single, strict=True)])


def test_tensors_that_hooks_saved_in_another_layout_give_the_same_gradients():
    def other_layout(x: Tensor) -> Tensor:
        return x.detach().transpose(0, 1).contiguous().transpose(0, 1)

    inputs = projections(5, 7)
    for _ in range(2):
        want = gradients(attend_side_by_side(*inputs, DIM), inputs)
        with torch.autograd.graph.saved_tensors_hooks(other_layout, lambda x: x):
            out = attend_side_by_side(*inputs, DIM)
        close(gradients(out, inputs), want)


def test_inputs_changed_in_place_before_the_backward_pass_are_refused():
    inputs = projections(5, 7)
    for _ in range(2):
        q = inputs[0] * 1
        out = attend_side_by_side(q, *inputs[1:], DIM)
        q.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_wrong_training_calls_are_refused_after_right_ones():
    inputs = projections(5, 7)
    q, k, v = (separate_heads(x).detach().requires_grad_() for x in inputs)
    for _ in range(3):
        attend(q, k, v)
    for wrong in (1.5, -0.1, float("nan"), "0.1", None):
        with pytest.raises(ShapeError, match="dropout"):
            attend(q, k, v, dropout=wrong)
    with pytest.raises(ShapeError, match="each key needs a value"):
        attend(q, k, v[:, :, :5])


def test_a_module_trains_through_repeated_calls():
    attention = MultiHeadAttention(HEADS * DIM, HEADS, KV_HEADS)
    exact = MultiHeadAttention(HEADS * DIM, HEADS, KV_HEADS).double()
    exact.load_state_dict({name: x.double() for name, x in attention.state_dict().items()})
    for seed in range(3):
        x = torch.randn(BATCH, 7, HEADS * DIM, generator=torch.Generator().manual_seed(seed))
        got = gradients(attention(x, causal=True), list(attention.parameters()))
        close(got, gradients(exact(x.double(), causal=True), list(exact.parameters())))
