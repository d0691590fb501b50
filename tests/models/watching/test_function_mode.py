"""The function mode alone: which calls it takes for attention, how it reads them, and what it rejects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.models.watching.attention_calls import FunctionCall, Rejection
from headwise.models.watching.function_mode import FunctionMode
from helpers.known_modules import ROUNDING, spread
from helpers.undeclared_models import DIM, FORMS, HEADS, WIDTH, Form, hidden, merge, split

BATCH, LENGTH = 2, 7


pytestmark = pytest.mark.usefixtures("float64")


class Events:
    """A receiver that keeps everything it is told."""

    def __init__(self) -> None:
        self.calls: list[FunctionCall] = []
        self.outputs: list[Tensor] = []
        self.projections: list[tuple[int, nn.Module, bool, Tensor | None]] = []
        self.rejections: list[Rejection] = []

    def answer(self, call: FunctionCall, run: Callable[[], Tensor]) -> tuple[Tensor, int]:
        self.calls.append(call)
        return run(), len(self.calls) - 1

    def keep_outputs(self, token: int, outputs: Callable[[], Tensor]) -> None:
        self.outputs.append(outputs().detach())

    def project(self, token: int, linear: nn.Module, in_order: bool, outputs: Callable[[], Tensor | None]) -> None:
        self.projections.append((token, linear, in_order, outputs()))

    def reject(self, rejection: Rejection) -> None:
        self.rejections.append(rejection)


def observe(model: nn.Module, *inputs: Any, **options: Any) -> Events:
    """Run a model in the mode; its output must be what it is without the mode, to the bit."""
    torch.manual_seed(1)
    expected = model(*inputs, **options)
    events = Events()
    mode = FunctionMode(events, {module: path for path, module in model.named_modules()})
    handles = [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(lambda m, a, k: mode.begin(m, a, k, False), with_kwargs=True),
            module.register_forward_hook(lambda m, a, o: mode.end(m, False)),
        )
    ]
    torch.manual_seed(1)
    with mode:
        output = model(*inputs, **options)
    for handle in handles:
        handle.remove()
    assert torch.equal(output, expected)
    return events


class Body(nn.Module):
    """A model whose forward is a function of itself and its input."""

    def __init__(self, forward: Callable[..., Tensor], **children: Any) -> None:
        super().__init__()
        self.run = forward
        self.q, self.k, self.v, self.o = (spread(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


# ---- what is taken


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_attention_gives_the_weights_that_loops_give(form: type[Form]) -> None:
    model, x = spread(form()), torch.randn(BATCH, LENGTH, WIDTH)
    events = observe(model, x)
    (call,) = events.calls
    assert call.modules == (model,) and not events.rejections
    assert call.query.shape == call.key.shape == call.value.shape == (BATCH, HEADS, LENGTH, DIM)
    weights = call.weights
    if weights is None:
        scores = call.query @ call.key.mT / math.sqrt(DIM)
        weights = scores.masked_fill(hidden(LENGTH), -torch.inf).softmax(-1) if call.causal else scores.softmax(-1)
    torch.testing.assert_close(weights.detach(), model.weights_by_hand(x), rtol=0, atol=ROUNDING)
    of_head = torch.stack([model.says(x)[..., model.features(head)] for head in range(HEADS)], 1)
    assert torch.equal(call.value, of_head)


@pytest.mark.parametrize("form", FORMS)
def test_the_linear_layer_that_reads_the_heads_is_found_with_its_layout(form: type[Form]) -> None:
    model, x = spread(form()).eval(), torch.randn(BATCH, LENGTH, WIDTH)
    events = observe(model, x)
    ((token, linear, in_order, outputs),) = events.projections
    assert token == 0 and linear is model.blends
    assert in_order is not model.interleaved
    assert outputs is not None and torch.equal(outputs, events.outputs[0])
    if form.__name__ != "InPlace":  # its dropout is always on
        torch.testing.assert_close(outputs, model.outputs_by_hand(x), rtol=0, atol=64 * ROUNDING)


def test_what_gates_do_to_the_heads_is_in_the_outputs_at_the_linear_layer() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(split(model.q(x)), split(model.k(x)), split(model.v(x)))
        return model.o(merge(out * 2))

    events = observe(Body(forward), torch.randn(BATCH, LENGTH, WIDTH))
    assert torch.equal(events.projections[0][3], 2 * events.outputs[0])


def test_a_linear_layer_after_the_residual_connection_is_not_the_one_that_reads_the_heads() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        return model.o(merge(F.scaled_dot_product_attention(split(model.q(x)), split(x), split(x))) + x)

    events = observe(Body(forward), torch.randn(BATCH, LENGTH, WIDTH))
    assert len(events.calls) == 1 and not events.projections


def test_single_heads_on_three_axes_are_one_head() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        return model.o((model.q(x) @ model.k(x).transpose(1, 2)).softmax(-1) @ model.v(x))

    model, x = Body(forward), torch.randn(BATCH, LENGTH, WIDTH)
    (call,) = observe(model, x).calls
    assert call.weights is not None
    assert torch.equal(call.weights, (model.q(x) @ model.k(x).mT).softmax(-1)[:, None])
    assert call.query.shape == (BATCH, 1, LENGTH, WIDTH)


def test_tokens_first_are_told_from_sequences() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:  # x: (T, B, WIDTH), as fairseq has it
        q, k, v = (y.view(LENGTH, BATCH * HEADS, DIM).transpose(0, 1) for y in (model.q(x), model.k(x), model.v(x)))
        return model.o(torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).transpose(0, 1).reshape(LENGTH, BATCH, WIDTH))

    model, x = Body(forward), torch.randn(LENGTH, BATCH, WIDTH)
    events = observe(model, x)
    (call,) = events.calls
    q, k = (split(y.transpose(0, 1)) for y in (model.q(x), model.k(x)))
    assert torch.equal(call.query, q) and torch.equal(call.key, k)
    assert events.projections[0][2]
    assert torch.equal(events.projections[0][3], events.outputs[0])


def test_rotary_embeddings_in_both_writings_keep_the_heads() -> None:
    angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1]))

    def rotate_half(y: Tensor) -> Tensor:
        left, right, rest = y[..., :2], y[..., 2:4], y[..., 4:]
        turned = torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)
        return torch.cat((turned, rest), -1)

    def rotate_complex(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y[..., :4].contiguous().view(*y.shape[:-1], 2, 2))
        return torch.cat(
            (torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3), y[..., 4:]), -1
        )

    for rotate in (rotate_half, rotate_complex):

        def forward(model: Body, x: Tensor, rotate: Callable[[Tensor], Tensor] = rotate) -> Tensor:
            q, k = (rotate(split(y)).transpose(0, 1) for y in (model.q(x), model.k(x)))  # (H, B, T, D)
            weights = (q @ k.mT).softmax(-1)
            return model.o(merge((weights @ split(model.v(x)).transpose(0, 1)).transpose(0, 1)))

        (call,) = observe(Body(forward), torch.randn(BATCH, LENGTH, WIDTH)).calls
        assert call.query.shape == (BATCH, HEADS, LENGTH, DIM)


def test_projections_by_einsum_and_by_convolution_are_known() -> None:
    weight = nn.Parameter(torch.randn(HEADS, WIDTH, DIM))

    def by_einsum(model: Body, x: Tensor) -> Tensor:
        q = torch.einsum("btc,hcd->hbtd", x, model.weight)  # type: ignore[arg-type]
        return ((q @ q.mT).softmax(-1) @ q).sum()

    def by_convolution(model: Body, x: Tensor) -> Tensor:
        q, k, v = model.qkv(x.mT).view(BATCH, 3, HEADS, DIM, LENGTH).transpose(-2, -1).unbind(1)  # type: ignore[operator]
        return ((q @ k.mT).softmax(-1) @ v).sum()

    for body in (Body(by_einsum, weight=weight), Body(by_convolution, qkv=nn.Conv1d(WIDTH, 3 * WIDTH, 1))):
        (call,) = observe(body, torch.randn(BATCH, LENGTH, WIDTH)).calls
        assert call.query.shape == (BATCH, HEADS, LENGTH, DIM)


def test_keys_and_values_that_all_heads_share_stay_one_head() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        k, v = model.one(x), model.other(x)  # type: ignore[operator]
        weights = torch.einsum("bhid,bjd->bhij", split(model.q(x)), k).softmax(-1)
        return merge(torch.einsum("bhij,bjd->bhid", weights, v))

    (call,) = observe(
        Body(forward, one=nn.Linear(WIDTH, DIM), other=nn.Linear(WIDTH, DIM)), torch.randn(BATCH, LENGTH, WIDTH)
    ).calls
    assert call.query.shape == (BATCH, HEADS, LENGTH, DIM)
    assert call.key.shape == call.value.shape == (BATCH, 1, LENGTH, DIM)


def test_a_row_whose_keys_are_all_hidden_has_zeros() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        scores = (split(model.q(x)) @ split(model.k(x)).mT).masked_fill(torch.arange(LENGTH)[:, None] == 2, -torch.inf)
        return model.o(merge(scores.softmax(-1).nan_to_num(0.0) @ split(model.v(x))))

    (call,) = observe(Body(forward), torch.randn(BATCH, LENGTH, WIDTH)).calls
    assert call.weights is not None
    assert torch.equal(call.weights.sum(-1)[:, :, 2], torch.zeros(BATCH, HEADS))
    assert not call.weights.isnan().any()


def test_weights_are_those_before_dropout() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        weights = (split(model.q(x)) @ split(model.k(x)).mT).softmax(-1)
        return merge(F.dropout(weights, 0.5) @ split(model.v(x)))

    model, x = Body(forward), torch.randn(BATCH, LENGTH, WIDTH)
    (call,) = observe(model, x).calls
    assert torch.equal(call.weights, (split(model.q(x)) @ split(model.k(x)).mT).softmax(-1))


# ---- PyTorch's fused function

MASKS: dict[str, Tensor] = {
    "one row for all": torch.tensor([[True, False, True, True, True]]),
    "by query and key": torch.ones(LENGTH, 5).tril(1).bool(),
    "by sequence": torch.tensor([[True] * 5, [False, True, True, True, False]])[:, None, None],
    "by head, added": torch.linspace(-3, 3, HEADS * LENGTH * 5, dtype=torch.float64).view(1, HEADS, LENGTH, 5),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_the_fused_function_get_four_axes(mask: str) -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        q, k, v = split(model.q(x)), split(model.k(x))[:, :, :5], split(model.v(x))[:, :, :5]
        return merge(F.scaled_dot_product_attention(q, k, v, attn_mask=MASKS[mask], scale=0.7))

    (call,) = observe(Body(forward), torch.randn(BATCH, LENGTH, WIDTH)).calls
    assert call.mask is not None and call.mask.dim() == 4 and call.scale == 0.7 and not call.causal
    full = (BATCH, HEADS, LENGTH, 5)
    assert torch.equal(call.mask.expand(full), MASKS[mask].expand(full))


def test_grouped_heads_broadcast_batches_and_dropout_of_the_fused_function() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        q = split(torch.cat((model.q(x), model.k(x)), -1).view(BATCH * 2, LENGTH, WIDTH))
        k = q[:1, :1].expand(4, 1, LENGTH, DIM)
        return F.scaled_dot_product_attention(q, k, k, dropout_p=0.25, enable_gqa=True).sum()

    (call,) = observe(Body(forward), torch.randn(BATCH, LENGTH, WIDTH)).calls
    assert call.query.shape == (4, HEADS, LENGTH, DIM)
    assert call.key.shape == call.value.shape == (4, 1, LENGTH, DIM)
    assert call.dropout == 0.25


# ---- what is not taken


def test_other_softmaxes_are_not_attention() -> None:
    def forward(model: Body, x: Tensor) -> Tensor:
        routed = (x @ model.gate).softmax(-1)  # type: ignore[operator]
        experts = torch.einsum("btc,eco->bteo", x, model.experts)  # type: ignore[arg-type]
        x = torch.einsum("bte,bteo->bto", routed, experts)
        gates = model.q(x).softmax(-1)
        return F.log_softmax(model.o(x * gates), -1)

    body = Body(forward, gate=nn.Parameter(torch.randn(WIDTH, 4)), experts=nn.Parameter(torch.randn(4, WIDTH, WIDTH)))
    events = observe(body, torch.randn(BATCH, LENGTH, WIDTH))
    assert not events.calls and not events.rejections


def _fused(model: Body, x: Tensor) -> Tensor:
    q = split(model.q(x))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]


REJECTED: dict[str, tuple[Callable[[Body, Tensor], Tensor], str]] = {
    "the rows are features": (
        lambda model, x: ((split(model.q(x)).mT @ split(model.k(x))).softmax(-1) @ split(model.v(x)).mT),
        r"the rows of its axes \(2, 3, 5, 7\) are features and not tokens",
    ),
    "heads that talk after the softmax": (
        lambda model, x: torch.einsum("hg,bgij->bhij", torch.eye(HEADS), _weights(model, x)) @ split(model.v(x)),
        "it multiplies its weights in a form that is not known",
    ),
    "heads that talk before the softmax": (
        lambda model, x: (
            model.talk(_scores(model, x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ split(model.v(x))  # type: ignore[operator]
        ),
        r"it rearranges its scores before the softmax \(permute\)",
    ),
    "weights times a gate": (
        lambda model, x: (_weights(model, x) * 0.5) @ split(model.v(x)),
        r"it changes its weights between softmax and values \(mul\)",
    ),
    "a column for a sink": (
        lambda model, x: F.pad(_scores(model, x), (1, 0)).softmax(-1)[..., 1:] @ split(model.v(x)),
        "its softmax is not over a product of two tensors that was seen|it rearranges its weights",
    ),
    "a joined column": (
        lambda model, x: torch.cat((_scores(model, x), torch.zeros(BATCH, HEADS, LENGTH, 1)), -1).softmax(-1)[..., :-1]
        @ split(model.v(x)),
        "it joins its scores with others before the softmax",
    ),
    "another axis": (
        lambda model, x: _scores(model, x).softmax(1) @ split(model.v(x)),
        "its softmax over a product of two tensors is over axis 1, not the last",
    ),
    "no values": (
        lambda model, x: _weights(model, x),
        "its softmax over a product of two tensors is not multiplied by values",
    ),
    "a fused operator": (_fused, "_flash_attention_for_cpu is a fused operator that shows no weights"),
    "sequences and heads of unknown axes": (
        lambda model, x: (x @ torch.ones(BATCH, WIDTH, 4)).softmax(-1) @ torch.ones(BATCH, 4, 2),
        r"which of its axes \(2, 7, 15\) are sequences and which are heads cannot be told",
    ),
    "heads cut out of the wrong axes": (
        lambda model, x: F.scaled_dot_product_attention(*[model.q(x).view(BATCH, HEADS, LENGTH, DIM)] * 3),
        r"(sequences and heads are mixed in|the rows of) its axes \(2, 3, 7, 5\)",
    ),
    "scores that no product gave": (
        lambda model, x: (
            (split(model.q(x))[:, :, :, None] * split(model.k(x))[:, :, None]).sum(-1).softmax(-1) @ split(model.v(x))
        ),
        "its softmax is not over a product of two tensors that was seen",
    ),
}  # fmt: skip


def _scores(model: Body, x: Tensor) -> Tensor:
    return split(model.q(x)) @ split(model.k(x)).mT


def _weights(model: Body, x: Tensor) -> Tensor:
    return _scores(model, x).softmax(-1)


@pytest.mark.parametrize("case", REJECTED)
def test_what_looks_like_attention_and_is_not_understood_is_rejected_by_name(case: str) -> None:
    forward, reason = REJECTED[case]
    inner = Body(forward, talk=nn.Linear(HEADS, HEADS))
    model = Body(lambda outer, x: outer.inner(x), inner=inner)  # type: ignore[operator]
    events = observe(model, torch.randn(BATCH, LENGTH, WIDTH))
    assert not events.calls
    (rejection,) = set(events.rejections)
    assert (rejection.name, rejection.module) == ("inner", "Body")
    assert re.search(reason, rejection.reason), rejection.reason


def test_multi_head_attention_forward_is_seen_call_by_call() -> None:
    def forward(model: Body, x: Tensor, need_weights: bool) -> Tensor:
        inside: Any = model.inside
        return F.multi_head_attention_forward(
            x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), WIDTH, HEADS, inside.in_proj_weight,
            inside.in_proj_bias, None, None, False, 0.0, inside.out_proj.weight, inside.out_proj.bias,
            need_weights=need_weights,
        )[0]  # fmt: skip

    inside, x = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)), torch.randn(BATCH, LENGTH, WIDTH)
    expected = inside(x, x, x, average_attn_weights=False)[1]
    for need_weights in (False, True):
        body = Body(lambda model, x, need=need_weights: forward(model, x, need), inside=inside)
        (call,) = observe(body, x).calls
        weights = (call.query @ call.key.mT / math.sqrt(DIM)).softmax(-1) if call.weights is None else call.weights
        torch.testing.assert_close(weights, expected, rtol=0, atol=ROUNDING)
