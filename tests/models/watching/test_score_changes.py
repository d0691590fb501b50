"""max_logit and lse of hand-written attention, from the model's own scores before whatever it does to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from headwise.models.watching import Layer
from helpers.known_modules import spread
from helpers.undeclared_models import DIM, FORMS, HEADS, WIDTH, Form, Stack, hidden, merge, split

BATCH, LENGTH = 2, 7
CLOSE = {"rtol": 1e-13, "atol": 1e-13}  # a few products of DIM terms in float64
SCALE = 1 / math.sqrt(DIM)
PAST = ~hidden(LENGTH)
BIAS = torch.linspace(-3, 2, HEADS * LENGTH * LENGTH, dtype=torch.float64).view(HEADS, LENGTH, LENGTH)
TEMPERATURE = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).view(HEADS, 1, 1)

pytestmark = pytest.mark.usefixtures("float64")


class Changed(Form):
    """Attention whose scores pass through a function on their way to the softmax."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merge(self.change(split(q) @ split(k).mT).softmax(-1) @ split(v))

    def product(self, x: Tensor) -> Tensor:
        """(B, HEADS, T, T)."""
        return (split(self.asks(x)) @ split(self.offers(x)).mT).detach()


def watched(model: nn.Module, x: Tensor, **options: Any) -> Layer:
    with headwise.watch(model, **options) as seen:
        model(x)
    (layer,) = seen.layers
    return layer


def tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def assert_rows(layer: Layer, logits: Tensor, scores: Tensor) -> None:
    """logits: scale * q.k, -inf at hidden keys; scores: what the softmax gets."""
    torch.testing.assert_close(layer.stats.maxima["max_logit"], logits.flatten(2).amax(-1), **CLOSE)
    torch.testing.assert_close(layer.stats.sums["lse"], scores.logsumexp(-1).sum(-1), rtol=1e-12, atol=1e-12)
    assert not layer.absent


def add_in_place(x: Tensor) -> Tensor:
    x += BIAS
    return x


def fill_in_place(x: Tensor) -> Tensor:
    x /= math.sqrt(DIM)
    x[:, :, ~PAST] = -torch.inf
    return x


def fill_with_little(x: Tensor) -> Tensor:
    return (x * SCALE).masked_fill(~PAST, -3.0)


def overwrite_afterwards(x: Tensor) -> Tensor:
    scores = x * SCALE
    changed = scores + BIAS
    scores.zero_()
    return changed


added_mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~PAST, -torch.inf)
# what is done to q.k -> the scale and the keys that remain visible
KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], Any, Tensor | None]] = {
    "nothing": (lambda x: x, 1, None),
    "scaled": (lambda x: x * SCALE, SCALE, None),
    "divided": (lambda x: x / math.sqrt(DIM), SCALE, None),
    "divided by a tensor": (lambda x: x / torch.tensor(DIM).sqrt(), SCALE, None),
    "a temperature for each head": (lambda x: x * TEMPERATURE, TEMPERATURE, None),
    "filled": (lambda x: (x * SCALE).masked_fill(~PAST, -torch.inf), SCALE, PAST),
    "filled before scaling": (lambda x: x.masked_fill(~PAST, -1e9) * SCALE, SCALE, PAST),
    "filled with a number that hides nothing": (fill_with_little, SCALE, None),
    "where": (lambda x: torch.where(PAST, x * SCALE, -torch.inf), SCALE, PAST),
    "where with a tensor": (lambda x: torch.where(~PAST, torch.full_like(x, -1e30), x), 1, PAST),
    "a mask added": (lambda x: x * SCALE + added_mask, SCALE, PAST),
    "a mask subtracted": (lambda x: x * SCALE - 1e9 * (~PAST), SCALE, PAST),
    "a mask multiplied and added": (lambda x: x * PAST - 1e9 * (~PAST), 1, PAST),
    "overwritten": (fill_in_place, SCALE, PAST),
    "a bias": (lambda x: x * SCALE + BIAS, SCALE, None),
    "a bias on the left": (lambda x: BIAS + x * SCALE, SCALE, None),
    "a bias before scaling": (lambda x: (x + BIAS) * SCALE, SCALE, None),
    "a bias in place": (add_in_place, 1, None),
    "a bias and a mask": (lambda x: (x * SCALE + BIAS).masked_fill(~PAST, -torch.inf), SCALE, PAST),
    "a bias with hidden keys": (lambda x: x * SCALE + (BIAS + added_mask), SCALE, PAST),
    "a softcap": (lambda x: 2 * torch.tanh(x * SCALE / 2), SCALE, None),
    "a softcap and a mask": (lambda x: ((x * SCALE / 2).tanh() * 2).masked_fill(~PAST, -torch.inf), SCALE, PAST),
    "bounds": (lambda x: (x * SCALE).clamp(-1, 1), SCALE, None),
    "a cast": (lambda x: (x * SCALE).to(torch.float64).contiguous(), SCALE, None),
}


@pytest.mark.parametrize("no_gradients", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", KNOWN)
def test_max_logit_and_lse_are_those_of_the_models_own_scores(change: str, no_gradients: Any) -> None:
    function, scale, visible = KNOWN[change]
    model, x = spread(Stack(lambda: Changed(function), 1)), tokens()
    with no_gradients():
        layer = watched(model, x)
        product = model.steps[0].product(x)
    logits = product * scale
    logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
    assert_rows(layer, logits, function(product.clone()))


def test_only_real_queries_count_for_max_logit() -> None:
    model, x = (
        spread(Stack(lambda: Changed(lambda y: y.masked_fill(torch.arange(LENGTH)[:, None] == 2, -torch.inf)), 1)),
        tokens(),
    )
    model.steps[0].asks.weight.data[:] *= 3
    with torch.no_grad():
        layer = watched(model, x)
        product = model.steps[0].product(x)
    rows = torch.arange(LENGTH) != 2
    assert_rows(layer, product[:, :, rows], product[:, :, rows])
    assert layer.stats.count.tolist() == [[LENGTH - 1] * HEADS] * BATCH


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention_has_max_logit_and_lse(form: type[Form]) -> None:
    model, x = spread(Stack(form, 1)).eval(), tokens()
    with torch.no_grad():
        layer = watched(model, x)
        step = model.steps[0]
        q, k = (
            torch.stack([y[..., step.features(head)] for head in range(HEADS)], 1)
            for y in (step.asks(x), step.offers(x))
        )
    scores = q @ k.mT * SCALE
    scores = scores.masked_fill(hidden(LENGTH), -torch.inf) if step.causal else scores
    assert_rows(layer, scores, scores)


class Bloom(Form):
    """A bias that is part of the product."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (split(y).reshape(-1, x.shape[1], DIM) for y in (q, k, v))
        scores = torch.baddbmm(BIAS.repeat(len(x), 1, 1), q, k.mT, beta=0.5, alpha=SCALE)
        weights = scores.view(len(x), HEADS, *scores.shape[1:]).softmax(-1)
        return merge((weights.view_as(scores) @ v).view(len(x), HEADS, -1, DIM))


def test_a_bias_inside_of_the_product_is_not_part_of_max_logit() -> None:
    model, x = spread(Stack(Bloom, 1)), tokens()
    layer = watched(model, x)
    step = model.steps[0]
    product = (split(step.asks(x)) @ split(step.offers(x)).mT * SCALE).detach()
    assert_rows(layer, product, product + BIAS / 2)


# ---- what is not known

UNKNOWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "exp": (lambda x: x.clamp(max=2).exp(), "its scores pass through exp before the softmax"),
    "a product with itself": (lambda x: x * x, "its scores pass through mul before the softmax"),
    "a scale for each key": (lambda x: x * (BIAS + 4), "its scores pass through mul before the softmax"),
    "a scale below 0 after a bias": (lambda x: (x + BIAS) * -1, "its scores pass through mul before the softmax"),
    "overwritten afterwards": (overwrite_afterwards, "it overwrites its scores before the softmax"),
    "two products": (lambda x: x + x.clone() * BIAS.exp(), r"it joins two products of tensors \(add\)"),
}


@pytest.mark.parametrize("change", UNKNOWN)
def test_what_is_not_recoverable_is_absent_with_a_reason(change: str) -> None:
    function, reason = UNKNOWN[change]
    model = spread(Stack(lambda: Changed(function), 1))
    with torch.no_grad():
        layer = watched(model, tokens())
    assert "max_logit" not in layer.stats
    assert layer.absent["max_logit"] == reason.replace("\\", "")
    assert layer.stats.entropy.isfinite().all()


def test_numbers_added_to_whole_rows_leave_max_logit_and_not_lse() -> None:
    model, x = spread(Stack(lambda: Changed(lambda y: y - y.amax(-1, keepdim=True)), 1)), tokens()
    layer = watched(model, x)
    assert layer.absent == {"lse": "it adds to whole rows of its scores"} and "lse" not in layer.stats
    logits = model.steps[0].product(x).flatten(2).amax(-1)
    torch.testing.assert_close(layer.stats.maxima["max_logit"], logits, **CLOSE)


def test_keys_that_are_hidden_after_the_softmax_make_both_unknown() -> None:
    class Late(Changed):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return merge((split(q) @ split(k).mT).softmax(-1).masked_fill(~PAST, 0.0) @ split(v))

    layer = watched(spread(Stack(lambda: Late(lambda y: y), 1)), tokens())
    assert layer.absent == dict.fromkeys(("max_logit", "lse"), "it hides keys after the softmax")


def test_rows_that_are_zeroed_after_the_softmax_leave_both_known() -> None:
    class Zeroed(Changed):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = (split(q) @ split(k).mT).masked_fill(torch.arange(LENGTH)[:, None] == 2, -torch.inf)
            return merge(scores.softmax(-1).nan_to_num(0.0) @ split(v))

    model, x = spread(Stack(lambda: Zeroed(lambda y: y), 1)), tokens()
    product = model.steps[0].product(x)[:, :, torch.arange(LENGTH) != 2]
    assert_rows(watched(model, x), product, product)


def test_weights_that_meet_two_values_have_max_logit_once_with_a_bias() -> None:
    class Two(Form):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = (split(q) @ split(k).mT + BIAS).softmax(-1)
            others = F.dropout(weights, 0.5)
            return merge(weights @ split(v) + others @ split(k))

    with headwise.watch(spread(Stack(Two, 1))) as seen:
        seen.model(tokens())
    first, second = seen.layers
    assert not first.absent
    assert second.absent["max_logit"] == "its weights are multiplied by values more than once"
