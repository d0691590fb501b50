"""Models that declare nothing, watched and masked: against weights by hand, whatever else the model contains."""

from __future__ import annotations

import copy
import gc
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

import headwise
from headwise.attention import functional
from headwise.attention.stats import stats_from_weights
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models.hooks import has_hooks
from headwise.models.watching import eager
from helpers.known_modules import ROUNDING, assert_statistics, spread
from helpers.model_families import BY_NAME, OFF, build
from helpers.model_inputs import inputs
from helpers.undeclared_models import (
    DIM,
    FORMS,
    HEADS,
    WIDTH,
    Einsum,
    Form,
    HeadsFirst,
    NanoGPTFlash,
    NanoGPTManual,
    Stack,
    inputs_of_layers,
    merge,
    split,
)

BATCH, LENGTH = 2, 7
DETERMINISTIC = [form for form in FORMS if form.__name__ != "InPlace"]  # its dropout is always on


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    yield
    assert _len_torch_function_stack() == 0


def tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


# ---- statistics, weights, links, outputs


@pytest.mark.parametrize("form", DETERMINISTIC)
def test_everything_recorded_of_undeclared_attention_equals_weights_by_hand(form: type[Form]) -> None:
    model, x = spread(Stack(form)).eval(), tokens()
    expected = model(x)
    with headwise.watch(model, weights=True, outputs=True, links=2) as seen:
        output = model(x)
    assert torch.equal(output, expected)
    assert [(layer.key, layer.name, layer.source) for layer in seen.layers] == [
        (("self", 0), "steps.0", "function"), (("self", 1), "steps.1", "function"),
    ]  # fmt: skip
    assert not seen.rejected and not seen.unseen
    for layer, x_in in zip(seen.layers, inputs_of_layers(model, list(model.steps), x), strict=True):
        step: Any = model.get_submodule(layer.name)
        weights = step.weights_by_hand(x_in)
        torch.testing.assert_close(layer.weights.detach(), weights, rtol=0, atol=ROUNDING)
        assert_statistics(layer.stats, weights)
        top = weights.topk(2, -1)
        torch.testing.assert_close(layer.links(2).weights, top.values, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(layer.outputs, step.outputs_by_hand(x_in), rtol=0, atol=64 * ROUNDING)
        assert layer.heads == headwise.Heads(WIDTH, HEADS, HEADS, DIM)


def test_training_with_dropout_records_the_weights_before_it() -> None:
    model, x = spread(Stack(NanoGPTManual, 1)).train(), tokens()
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    with headwise.watch(model, weights=True) as seen:
        output = model(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    torch.testing.assert_close(seen.layers[0].weights, model.steps[0].weights_by_hand(x), rtol=0, atol=ROUNDING)
    assert not seen.layers[0].weights.requires_grad


def test_weights_that_the_model_overwrites_afterwards_are_kept() -> None:
    class Overwriting(Einsum):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = (split(q) @ split(k).mT / math.sqrt(DIM)).softmax(-1)
            out = merge(weights @ split(v))
            weights.zero_()
            return out

    model, x = spread(Stack(Overwriting, 1)), tokens()
    with headwise.watch(model, weights=True) as seen, torch.no_grad():
        model(x)
    torch.testing.assert_close(seen.layers[0].weights, model.steps[0].weights_by_hand(x), rtol=0, atol=ROUNDING)


def test_a_window_over_several_blocks_of_queries_has_one_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Windowed(Einsum):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = split(q) @ split(k).mT
            near = torch.ones(scores.shape[-2:]).tril().triu(-1).bool()  # a query's own key and the one before it
            return merge(scores.masked_fill(~near, -torch.inf).softmax(-1) @ split(v))

    monkeypatch.setattr(eager, "ROWS", 3)
    model, x = spread(Stack(Windowed, 1)), tokens()
    with headwise.watch(model, weights=True) as seen:
        model(x)
    assert_statistics(seen.layers[0].stats, seen.layers[0].weights)


def test_gradients_are_those_of_the_unwatched_model() -> None:
    model, x = spread(Stack(Einsum)), tokens()
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with headwise.watch(model):
        output = model(x)
    output.square().sum().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True))


class Uneven(nn.Module):
    """PyTorch's fused function on queries and keys of different numbers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.asks, self.offers, self.says, self.blends = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.options = options

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = split(self.asks(x)), split(self.offers(memory)), split(self.says(memory))
        return self.blends(merge(F.scaled_dot_product_attention(q, k, v, **self.options)))


@pytest.mark.parametrize("keys", [4, LENGTH, 11])
@pytest.mark.parametrize("queries", [1, LENGTH])
def test_causal_calls_of_the_fused_function_count_from_the_first_key(queries: int, keys: int) -> None:
    model, x, memory = spread(Uneven(is_causal=True)), torch.randn(2, queries, WIDTH), torch.randn(2, keys, WIDTH)
    with headwise.watch(model, weights=True) as seen:
        model(x, memory)
    scores = split(model.asks(x)) @ split(model.offers(memory)).mT / math.sqrt(DIM)
    visible = torch.arange(keys) <= torch.arange(queries)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).detach()
    torch.testing.assert_close(seen.layers[0].weights, weights, rtol=0, atol=ROUNDING)
    assert_statistics(seen.layers[0].stats, weights, offset=0)


MASKS = {
    "bool": torch.ones(LENGTH, 11).tril(3).bool(),
    "added": torch.linspace(-2, 2, 3 * LENGTH * 11, dtype=torch.float64).view(3, LENGTH, 11),
    "a hidden row": torch.arange(LENGTH)[:, None] != torch.full((1, 11), 2),
    "the smallest number": torch.zeros(LENGTH, 11, dtype=torch.float64).masked_fill(
        torch.ones(LENGTH, 11).triu(4).bool(), torch.finfo(torch.float64).min
    ),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masked_calls_of_the_fused_function_equal_the_softmax(mask: str) -> None:
    model, x, memory = spread(Uneven(attn_mask=MASKS[mask], scale=0.3)), tokens(), torch.randn(BATCH, 11, WIDTH)
    with headwise.watch(model, weights=True) as seen:
        model(x, memory)
    scores = split(model.asks(x)) @ split(model.offers(memory)).mT * 0.3
    added = MASKS[mask]
    if added.dtype == torch.bool:
        added = torch.zeros(added.shape).masked_fill(~added, -torch.inf)
    weights = (scores + added).softmax(-1).nan_to_num(0).detach()
    torch.testing.assert_close(seen.layers[0].weights, weights, rtol=0, atol=ROUNDING)
    assert_statistics(seen.layers[0].stats, weights, cross=True)  # other numbers of queries and keys


def test_long_fused_calls_get_output_and_statistics_from_one_pass_unless_exact() -> None:
    length = 768
    model, x = spread(Stack(NanoGPTFlash, 1)), torch.randn(1, length, WIDTH, dtype=torch.float32) / 4
    model = model.float().eval()
    with torch.no_grad():
        expected = model(x)
        with headwise.watch(model) as seen:
            output = model(x)
        with headwise.watch(model, exact=True) as exact:
            assert torch.equal(model(x), expected)
    torch.testing.assert_close(output, expected)
    weights = model.double().steps[0]
    q, k = split(weights.asks(x.double())), split(weights.offers(x.double()))
    rows = (q @ k.mT / math.sqrt(DIM)).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    expected_stats = stats_from_weights(rows)
    for stats in (seen.layers[0].stats, exact.layers[0].stats):
        # scores of a few units, rounded to float32
        torch.testing.assert_close(stats.entropy, expected_stats.entropy, rtol=1e-4, atol=1e-4)


class Cached(nn.Module):
    """Self-attention with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.offers, self.says, self.blends = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        new = [split(self.offers(x)), split(self.says(x))]
        self.past = [torch.cat(pair, 2) for pair in zip(self.past, new, strict=True)] if self.past else new
        k, v = self.past
        scores = split(self.asks(x)) @ k.mT / math.sqrt(DIM)
        first = k.shape[2] - x.shape[1]
        hidden = torch.arange(k.shape[2]) > first + torch.arange(x.shape[1])[:, None]
        return self.blends(merge(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v))


def test_steps_that_grow_a_cache_continue_the_sequences() -> None:
    model, x = spread(Cached()), tokens()
    with headwise.watch(model, weights=True) as seen, torch.no_grad():
        model(x[:, :4])
        for i in range(4, LENGTH):
            model(x[:, i : i + 1])
    layer = seen.layers[0]
    with headwise.watch(model, weights=True) as whole, torch.no_grad():
        model.past = []
        model(x)
    assert [tuple(weights.shape[2:]) for weights in layer.all_weights] == [(4, 4), (1, 5), (1, 6), (1, 7)]
    torch.testing.assert_close(layer.all_weights[-1], whole.layers[0].weights[:, :, -1:], rtol=0, atol=ROUNDING)
    assert layer.prefill is not None and layer.decode is not None
    assert layer.stats.count.tolist() == [[LENGTH] * HEADS] * BATCH
    for name in whole.layers[0].stats:
        torch.testing.assert_close(layer.stats[name], whole.layers[0].stats[name], rtol=0, atol=1e3 * ROUNDING)


class OwnFunction(Form):
    """headwise.attend in a class of the user's."""

    causal = True

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merge(headwise.attend(split(q), split(k), split(v), causal=True, gates=torch.ones(HEADS)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls_of_headwise_attend_in_other_classes_are_seen_once(dtype: torch.dtype) -> None:
    model, x = spread(Stack(OwnFunction)).to(dtype), tokens().to(dtype)
    expected = model(x)
    with headwise.watch(model, weights=True) as outer, headwise.watch(model, weights=True) as seen:
        assert torch.equal(model(x), expected)
        headwise.attend(*torch.randn(3, 1, 2, 5, 4))  # of no model
    close = ROUNDING if dtype == torch.float64 else 64 * torch.finfo(dtype).eps
    for layers in (seen.layers, outer.layers):
        assert [layer.name for layer in layers] == ["steps.0", "steps.1"] and len(layers[0].all_weights) == 1
        torch.testing.assert_close(
            layers[0].weights.detach(), model.steps[0].weights_by_hand(x).to(dtype), rtol=0, atol=close
        )
    assert functional.observer is None
    with headwise.mask_heads(model, {0: [1]}):
        assert not torch.equal(model(x), expected)


# ---- layers


class Twice(nn.Module):
    """One form of attention that runs three times, and a module that attends twice per call."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Einsum()
        self.pair = Double()

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.shared(self.shared(self.shared(x))))


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.asks, self.offers, self.blends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.asks(x)), split(self.offers(x))
        first = F.scaled_dot_product_attention(q, k, k)
        return self.blends(merge(first + F.scaled_dot_product_attention(k, q, first)))


def test_calls_of_one_module_are_told_apart() -> None:
    model, x = spread(Twice()), tokens() / 8
    for _ in range(2):  # the second time the layers are known
        with headwise.watch(model, weights=True) as seen:
            model(x)
        assert [layer.name for layer in seen.layers] == ["shared"] * 3 + ["pair"] * 2
        assert [layer.key for layer in seen.layers] == [
            ("self", 0), ("self", 1), ("self", 2), ("self", 3), ("self.2", 0),
        ]  # fmt: skip
        second = model.shared(x).detach()
        torch.testing.assert_close(
            seen.layers[1].weights.detach(), model.shared.weights_by_hand(second), rtol=0, atol=ROUNDING
        )
    with pytest.raises(UnsupportedError, match=r"W_O of Double \(at pair\) .* attends more than once per call"):
        headwise.mask_heads(model, {"pair": [0]})


def test_a_module_that_two_layers_share_is_two_layers() -> None:
    form = Einsum()
    model, x = spread(Stack(lambda: form, 2)), tokens()
    with headwise.watch(model) as seen:
        model(x)
    assert [layer.key for layer in seen.layers] == [("self", 0), ("self", 1)]
    with headwise.mask_heads(model, {1: [0]}):
        masked = model(x)
    first = x + form(x)
    outputs = form.outputs_by_hand(first).clone()
    outputs[:, 0] = 0
    expected = model.classes(first + form.blends(merge(outputs))).softmax(-1)
    torch.testing.assert_close(masked, expected, rtol=0, atol=64 * ROUNDING)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(Einsum(), nn.LayerNorm(WIDTH), Einsum())
        self.right = nn.ModuleList([HeadsFirst()])

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right[0](x)


def test_towers_have_their_own_kinds_and_numbers() -> None:
    model, x = spread(Towers()), tokens()
    for _ in range(2):
        with headwise.watch(model, weights=True) as seen:
            model(x)
        assert [layer.key for layer in seen.layers] == [("left", 0), ("left", 2), ("right", 0)]
        torch.testing.assert_close(
            seen["right", 0].weights.detach(), model.right[0].weights_by_hand(x), rtol=0, atol=ROUNDING
        )


def test_layers_are_chosen_by_number_once_the_model_has_run() -> None:
    model, x = spread(Stack(Einsum)), tokens()
    for request in ({"weights": 1}, {"outputs": {0: [2]}}, {"classes": {"first": torch.ones(BATCH, LENGTH).bool()}}):
        with pytest.raises(HeadwiseError, match="known once the model has run inside headwise.watch"):
            headwise.watch(model, **request)
    with pytest.raises(HeadwiseError, match="no attention layer was found in Stack; .* inside headwise.watch"):
        headwise.mask_heads(model, {0: [1]})
    with headwise.watch(model):
        model(x)
    with headwise.watch(model, weights={1: [2]}, outputs=0, classes={"all": torch.ones(BATCH, LENGTH).bool()}) as seen:
        model(x)
    weights: Any = seen.layers[1].weights
    assert weights.heads == [2] and not seen.layers[0].all_weights
    assert seen.layers[0].outputs.shape == (BATCH, HEADS, LENGTH, DIM) and not seen.layers[1].all_outputs
    torch.testing.assert_close(seen.layers[0].stats.share("all"), torch.ones(HEADS), rtol=0, atol=ROUNDING)


def test_another_number_of_heads_in_the_same_place_is_refused() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor, heads: int) -> Tensor:
            q = x.unflatten(-1, (heads, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q)

    model, x = Changing(), tokens()
    with headwise.watch(model):
        model(x, 3)
        with pytest.raises(UnsupportedError, match="attends with 5 heads, and with 3 before"):
            model(x, 5)


# ---- masking


@pytest.mark.parametrize("form", DETERMINISTIC)
def test_masked_heads_of_undeclared_attention_are_zero_before_the_layer_that_reads_them(form: type[Form]) -> None:
    model, x = spread(Stack(form, 1)).eval(), tokens()
    with headwise.watch(model):
        model(x)
    step: Any = model.steps[0]
    if step.interleaved:
        with pytest.raises(UnsupportedError, match=r"W_O of Interleaved \(at steps.0\) .* do not lie head by head"):
            headwise.mask_heads(model, {0: [1]})
        return
    outputs = step.outputs_by_hand(x).clone()
    outputs[:, 1] = 0
    with headwise.mask_heads(model, {0: [1]}):
        masked = model(x)
        with headwise.watch(model, outputs=True) as seen:
            model(x)
    torch.testing.assert_close(
        masked, model.classes(x + step.blends(merge(outputs))).softmax(-1), rtol=0, atol=64 * ROUNDING
    )
    torch.testing.assert_close(seen.layers[0].outputs, outputs, rtol=0, atol=64 * ROUNDING)


def test_attention_without_a_layer_that_reads_its_heads_is_watched_and_not_masked() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asks = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q = split(self.asks(x))
            return x + merge(F.scaled_dot_product_attention(q, q, q))

    model, x = Bare(), tokens()
    with headwise.watch(model, outputs=True) as seen:
        model(x)
    q = split(model.asks(x))
    assert torch.equal(seen.layers[0].outputs, F.scaled_dot_product_attention(q, q, q))
    with pytest.raises(UnsupportedError, match="no linear layer of the model was called with its heads' outputs"):
        headwise.mask_heads(model, {0: [1]})


def test_heads_that_two_linear_layers_read_are_not_masked() -> None:
    class Forked(Einsum):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.mix(x, self.asks(x), self.offers(x), self.says(x))
            return self.blends(heads) * self.other(heads).sigmoid()

    model = Stack(Forked, 1)
    with headwise.watch(model):
        model(tokens())
    with pytest.raises(UnsupportedError, match="several linear layers read its heads' outputs"):
        headwise.mask_heads(model, {0: [1]})


class Wrapped(nn.Module):
    """A linear layer with another one inside, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = WIDTH, WIDTH
        self.base, self.small = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.small(x)


def test_the_outermost_linear_layer_reads_the_heads() -> None:
    model, x = spread(Stack(Einsum, 1)), tokens()
    step: Any = model.steps[0]
    step.blends = spread(Wrapped())
    with headwise.watch(model):
        model(x)
    outputs = step.outputs_by_hand(x)
    outputs[:, 1] = 0
    with headwise.mask_heads(model, {0: [1]}):
        masked = model(x)
    expected = model.classes(x + step.blends(merge(outputs))).softmax(-1)
    torch.testing.assert_close(masked, expected, rtol=0, atol=64 * ROUNDING)


def test_importance_of_undeclared_heads_is_measured() -> None:
    model, x = spread(Stack(Einsum)), tokens()
    with headwise.watch(model):
        model(x)
    scores = headwise.importance(model, [x], score="output")
    assert scores["self"].shape == (2, HEADS)


def test_undeclared_heads_are_pruned_to_zeros_and_not_cut() -> None:
    model, x = spread(Stack(Einsum)), tokens()
    with headwise.watch(model):
        model(x)
    with pytest.raises(UnsupportedError, match="cannot be cut out: no layer of a known name .*; zero=True zeroes them"):
        headwise.prune_heads(model, {0: [1]})
    pruned = headwise.prune_heads(model, {0: [1]}, zero=True)
    with headwise.mask_heads(model, {0: [1]}):
        masked = model(x)
    torch.testing.assert_close(pruned(x), masked, rtol=0, atol=64 * ROUNDING)
    with headwise.mask_heads(pruned, {1: [0]}):  # what is known of a model is known of its pruned copy
        pruned(x)


# ---- several sources, and none


class Mixed(nn.Module):
    """A transformers encoder, PyTorch's own module, headwise's own module, and hand-written attention."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=11, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=8
        )
        self.encoder = BertModel(config)
        self.torch_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.own_attention = headwise.MultiHeadAttention(WIDTH, HEADS)
        self.head = Einsum()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(ids).last_hidden_state
        x = self.torch_attention(x, x, x)[0]
        return self.head(self.own_attention(x))


def test_a_model_of_several_sources_counts_each_call_once() -> None:
    model, ids = spread(Mixed()).double().eval(), torch.randint(0, 11, (BATCH, LENGTH))
    expected = model(ids)
    for _ in range(2):
        with headwise.watch(model, weights=True) as seen:
            output = model(ids)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e3 * ROUNDING)
        assert {layer.name: layer.source for layer in seen.layers} == {
            "encoder.encoder.layer.0.attention.self": "registry",
            "encoder.encoder.layer.1.attention.self": "registry",
            "torch_attention": "module",
            "own_attention": "module",
            "head": "function",
        }
        assert len(seen.layers) == 5 and not seen.rejected
        for layer in seen.layers:
            assert layer.stats.count.tolist() == [[LENGTH] * HEADS] * BATCH
    (x,) = inputs_of_layers(model, [model.head], ids)
    torch.testing.assert_close(seen["head"].weights.detach(), model.head.weights_by_hand(x), rtol=0, atol=16 * ROUNDING)


def test_a_model_without_attention_is_refused_with_what_was_rejected() -> None:
    class Covariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asks = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q = split(self.asks(x)).mT
            return (q @ q.mT).softmax(-1) @ q

    model = nn.ModuleDict({"mixer": Covariance()})
    model.forward = lambda x: model["mixer"](x)  # type: ignore[method-assign]
    with (
        pytest.raises(UnsupportedError, match=r"ran, but .*; Covariance \(at mixer\): the rows .* are features"),
        headwise.watch(model),
    ):
        model(tokens())
    with (
        pytest.raises(UnsupportedError, match=r"Covariance \(at the top\): the rows of its axes"),
        headwise.watch(Covariance()) as seen,
    ):
        seen.model(tokens())


def test_candidates_are_listed_beside_the_layers_that_were_seen() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.asks = Einsum(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q = split(self.asks(self.known(x)))
            return merge((2 * (q @ q.mT).softmax(-1)) @ q)

    model = spread(Partly())
    with headwise.watch(model) as seen:
        model(tokens())
        model(tokens())
    (rejection,) = seen.rejected
    assert str(rejection) == ("Partly (at the top): it changes its weights between softmax and values (mul)")
    assert [layer.name for layer in seen.layers] == ["known"]


class Flexible(Form):
    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merge(flex_attention(split(q), split(k), split(v)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_rejected_by_name_beside_other_layers() -> None:
    model = nn.Sequential(Flexible(), Einsum()).float().eval()
    with headwise.watch(model) as seen, torch.no_grad():
        model(tokens().float())
    assert [layer.name for layer in seen.layers] == ["1"]
    (rejection,) = seen.rejected
    assert (rejection.name, rejection.module) == ("0", "Flexible")
    assert "flex_attention is a fused operator that shows no weights" in rejection.reason


class Landmarks(nn.Module):
    """Weights times weights, as Nystroemformer has them, then attention that must not suffer from it."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.after = nn.Linear(WIDTH, WIDTH), Einsum()

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.asks(x))
        few = q[:, :, :3]
        left, middle, right = ((a @ b.mT).softmax(-1) for a, b in ((q, few), (few, few), (few, q)))
        return self.after(x + merge(left @ (middle @ middle.mT) @ (right @ q)))


def test_weights_of_weights_are_rejected_and_later_layers_seen() -> None:
    model, x = spread(Landmarks()), tokens()
    with headwise.watch(model, weights=True) as seen:
        model(x)
    names = {layer.name for layer in seen.layers}
    assert "after" in names and all("other weights" in rejection.reason for rejection in seen.rejected)
    assert len(seen.rejected) == 1 and seen.rejected[0].name == ""
    (x_in,) = inputs_of_layers(model, [model.after], x)
    torch.testing.assert_close(
        seen["after"].weights.detach(), model.after.weights_by_hand(x_in), rtol=0, atol=16 * ROUNDING
    )


# ---- contexts


def test_nested_watches_each_see_every_call_once() -> None:
    model, x = spread(Stack(NanoGPTManual)).eval(), tokens()
    with headwise.watch(model, weights=True) as outer:
        with headwise.watch(model, weights=True) as inner:
            model(x)
        model(x)
    for seen, calls in ((outer, 2), (inner, 1)):
        assert [len(layer.all_weights) for layer in seen.layers] == [calls, calls]
        assert not seen.rejected
    assert torch.equal(outer.layers[1].all_weights[0], inner.layers[1].weights)


def test_an_exception_in_the_model_puts_everything_back() -> None:
    class Failing(Einsum):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = super().mix(x, q, k, v)
            if len(x) > BATCH:
                raise KeyError("too many")
            return out

    model, x = spread(Stack(Failing)), tokens()
    with pytest.raises(KeyError, match="too many"), headwise.watch(model):
        model(torch.cat((x, x)))
    assert not has_hooks(model) and _len_torch_function_stack() == 0
    with headwise.watch(model) as seen:
        with pytest.raises(KeyError, match="too many"):
            model(torch.cat((x, x)))
        model(x)
    assert len(seen.layers) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_no_mode_behind(error: type[BaseException]) -> None:
    class Interrupted(Einsum):
        def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise error

    model = Stack(Interrupted)
    with pytest.raises(error), headwise.watch(model), headwise.watch(model):
        model(tokens())
    assert _len_torch_function_stack() == 0 and not has_hooks(model)


def test_a_watched_model_may_run_in_another_thread() -> None:
    model, x = spread(Stack(Einsum)), tokens()
    with headwise.watch(model, weights=True) as seen:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    assert [layer.key for layer in seen.layers] == [("self", 0), ("self", 1)]
    torch.testing.assert_close(
        seen.layers[0].weights.detach(), model.steps[0].weights_by_hand(x), rtol=0, atol=ROUNDING
    )


def test_two_threads_may_not_watch_one_undeclared_model() -> None:
    model, problems = Stack(Einsum), []

    def watch_too() -> None:
        try:
            headwise.watch(model).__enter__()
        except HeadwiseError as error:
            problems.append(str(error))

    with headwise.watch(model):
        thread = threading.Thread(target=watch_too)
        thread.start()
        thread.join()
        model(tokens())
    assert len(problems) == 1 and "on the same layers" in problems[0]


def test_gradient_checkpointing_counts_each_call_once() -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = x + checkpoint(step, x, use_reentrant=False)
            return self.classes(x)

    model, x = spread(Checkpointed(Einsum)), tokens().requires_grad_()
    with headwise.watch(model, weights=True) as seen:
        model(x).sum().backward()
    assert [len(layer.all_weights) for layer in seen.layers] == [1, 1]


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (lambda model, x: torch.func.vmap(lambda y: model(y[None])[0])(x), "under torch.func"),
        (lambda model, x: torch.jit.trace(model, (x,), check_trace=False), "while it is traced"),
        (lambda model, x: torch.export.export(model, (x,)), "while it is traced"),
        (lambda model, x: copy.deepcopy(model).to("meta")(x.to("meta")), None),
    ],
    ids=["vmap", "jit.trace", "export", "a copy on the meta device"],
)
def test_tensors_without_values_are_refused_and_copies_are_not_watched(transform: Any, reason: str | None) -> None:
    model, x = Stack(NanoGPTManual).eval(), tokens()
    with headwise.watch(model) as seen:
        if reason is None:
            transform(model, x)
        else:
            with pytest.raises(UnsupportedError, match=f"cannot watch Stack {reason}"):
                transform(model, x)
        model(x)
    assert len(seen.layers) == 2


@pytest.mark.parametrize("form", [NanoGPTFlash, NanoGPTManual])
def test_compiled_code_autocast_and_inference_mode_are_watched(form: type[Form]) -> None:
    model, x = spread(Stack(form)).eval(), tokens()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    runs = (lambda: compiled(x), lambda: torch.inference_mode()(model)(x))
    for run in runs:
        with headwise.watch(model, weights=True) as seen:
            run()
        torch.testing.assert_close(
            seen.layers[0].weights.detach(), model.steps[0].weights_by_hand(x), rtol=0, atol=ROUNDING
        )
    model = model.float()
    with headwise.watch(model) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x.float())
    assert len(seen.layers) == 2


def test_parts_of_a_model_may_be_called_alone() -> None:
    model, x = spread(Stack(Einsum)), tokens()
    with headwise.watch(model) as seen:
        model.steps[1](x)
        model.steps[1](x)
    (layer,) = seen.layers
    assert layer.name == "steps.1" and len(layer.stats.count) == 2 * BATCH


def test_no_tensor_of_a_pass_is_kept_after_it() -> None:
    model, x = spread(Stack(NanoGPTManual)).eval(), torch.randn(11, 13, WIDTH)  # sizes of no other test
    with headwise.watch(model) as seen, torch.no_grad():
        model(x)
        gc.collect()
        shapes = [tuple(y.shape) for y in gc.get_objects() if isinstance(y, Tensor)]
    assert len(seen.layers) == 2
    assert (11, HEADS, 13, 13) not in shapes and (11, HEADS, 13, DIM) not in shapes


# ---- transformers' models that compute their attention themselves

UNSEEN = {  # sparse attention, in products of blocks
    "led": "no attention was seen",
    "longformer": "no attention was seen",
    "longt5": "which of its axes .* cannot be told",
}
PARTLY = {"pegasus_x": "it joins its scores"}  # beside the attention of its global tokens
AVERAGED = ("wavlm", "pegasus_x")  # their attentions are not the weights of each head


@pytest.mark.parametrize("name", [family.name for family in OFF])
def test_transformers_attention_outside_the_registry_gives_the_models_own_weights(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, batch = build(BY_NAME[name], "eager"), inputs(BY_NAME[name], "right")
    if name in UNSEEN:
        with headwise.watch(model), pytest.raises(UnsupportedError, match=UNSEEN[name]):
            model(**batch)
        return
    with torch.no_grad():
        own = model(**batch, output_attentions=True)
        with headwise.watch(model, weights=True) as seen:
            output = model(**batch)
    assert torch.equal(output[0], own[0])
    fields = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    returned = [a for field in fields for a in getattr(own, field, None) or () if isinstance(a, Tensor)]
    for layer in seen.layers:
        if layer.source == "function" and name not in AVERAGED:
            assert any(layer.weights.shape == a.shape and torch.equal(layer.weights, a) for a in returned), layer
    assert any(layer.source == "function" for layer in seen.layers) and len(seen.layers) >= len(returned)
    assert bool(seen.rejected) == (name in PARTLY)
    assert all(re.search(PARTLY[name], rejection.reason) for rejection in seen.rejected)
