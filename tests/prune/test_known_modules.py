"""Heads of headwise's own modules, of PyTorch's and of declared classes are removed exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import Heads, MultiHeadAttention, Shape
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models.multihead import PrunedMultiheadAttention
from headwise.prune.attention_layers import attention_layers
from headwise.prune.quality import size
from helpers.known_modules import spread

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("in_float64")
BATCH, TOKENS, KEYS, WIDTH, HEADS, VOCAB = 3, 7, 5, 24, 4, 31


def assert_pruned_as_masked(model: nn.Module, heads: Any, run: Callable[[nn.Module], Tensor]) -> Any:
    """The pruned copy gives what the masked model gives; returns it."""
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        with headwise.mask_heads(model, heads):
            masked = run(model)
        smaller = headwise.prune_heads(model, heads)
        zeroed = headwise.prune_heads(model, heads, zero=True)
        assert not torch.allclose(masked, run(model))
        torch.testing.assert_close(run(smaller), masked)
        torch.testing.assert_close(run(zeroed), masked)
    assert sum(x.numel() for x in smaller.parameters()) < sum(x.numel() for x in model.parameters())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    return smaller


OWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "rotary": {"position": headwise.Rotary(), "num_kv_heads": 2},
    "alibi": {"position": headwise.Alibi()},
    "normed": {"qk_norm": "layer"},
    "sinks": {"sinks": True, "softcap": 3.0},
    "without biases": {"bias": False},
}


@pytest.mark.parametrize("form", OWN)
def test_heads_of_an_own_module_are_removed(form: str) -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, **OWN[form])).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    smaller = assert_pruned_as_masked(
        module, {0: [1, 3] if "num_kv_heads" not in OWN[form] else [2, 3]}, lambda m: m(x)
    )
    assert smaller.heads.query == 2 and smaller.headwise_heads == {0: list(smaller.head_numbers)}
    twice = assert_pruned_as_masked(smaller, {0: [1]}, lambda m: m(x))
    assert twice.headwise_heads == {0: [0]}
    with headwise.watch(twice, weights=True) as seen:
        twice(x)
    assert torch.equal(seen.layers[0].weights, twice.weights(x)) and seen.layers[0].heads == twice.heads


def test_uneven_groups_of_an_own_module_are_padded_with_zeros() -> None:
    module = spread(MultiHeadAttention(WIDTH, 6, num_kv_heads=2, sinks=True)).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    smaller = assert_pruned_as_masked(module, {0: [0, 1, 4]}, lambda m: m(x, causal=True))
    assert smaller.headwise_heads == {0: [2, None, 3, 5]} and smaller.heads.kv == 2
    by_method = module.prune_heads([0, 1, 4])
    torch.testing.assert_close(smaller(x), by_method(x))


TORCH: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 10},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("form", TORCH)
def test_heads_of_multihead_attention_are_removed(form: str) -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **TORCH[form])).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    key, value = torch.randn(BATCH, KEYS, module.kdim), torch.randn(BATCH, KEYS, module.vdim)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1, 3:] = True
    for need_weights in (False, True):

        def run(m: nn.Module, need_weights: bool = need_weights) -> Tensor:
            return m(x, key, value, key_padding_mask=padding, need_weights=need_weights)[0]

        smaller = assert_pruned_as_masked(module, {0: [0, 2, 3]}, run)
    assert isinstance(smaller, PrunedMultiheadAttention) and smaller.num_heads == 1 and smaller.embed_dim == WIDTH
    weights = module(x, key, value, average_attn_weights=False)[1]
    own_weights = smaller(x, key, value, average_attn_weights=False)[1]
    torch.testing.assert_close(own_weights, weights[:, 1:2])
    again = copy.deepcopy(smaller)
    assert torch.equal(again(x, key, value)[0], smaller(x, key, value)[0])


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_loses_heads_and_keeps_out_of_the_fast_path(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 10, 0.0, batch_first=True)
    encoder = spread(nn.TransformerEncoder(layer, 2)).train(training)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 4:] = True
    for heads in ({0: [1, 2]}, {1: [0]}, {0: [1], 1: [2, 3]}):
        for arguments in ({}, {"src_key_padding_mask": padding}):

            def run(m: nn.Module, arguments: Any = arguments) -> Tensor:
                return m(x, **arguments)

            assert_pruned_as_masked(encoder, heads, run)


def test_a_pruned_encoder_compiles_to_one_graph() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 10, 0.0, batch_first=True)
    encoder = spread(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    smaller = headwise.prune_heads(encoder, {0: [1, 2], 1: [0]})
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with torch.no_grad():
        compiled = torch.compile(smaller, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), smaller(x))


def test_the_mean_of_a_pruned_layer_is_over_real_tokens() -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    smaller = headwise.prune_heads(module, {0: [0]})
    x, padding = torch.randn(BATCH, TOKENS, WIDTH), torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 4:] = True
    with headwise.watch(smaller, outputs=True) as seen:
        smaller(x, x, x, key_padding_mask=padding)
    mean = seen.layers[0].outputs.transpose(1, 2)[~padding].mean(0)
    with headwise.mask_heads(smaller, {0: [1]}, value=mean):
        expected = smaller(x, x, x, key_padding_mask=padding)[0]
    with headwise.mask_heads(smaller, {0: [1]}, value="mean"):
        out = smaller(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # means are summed in float32


def test_a_transformer_loses_heads_of_every_kind() -> None:
    model = spread(nn.Transformer(WIDTH, HEADS, 2, 2, 10, 0.0)).eval()
    source, target = torch.randn(KEYS, BATCH, WIDTH), torch.randn(TOKENS, BATCH, WIDTH)
    heads = {("encoder", 1): [0, 2], ("decoder", 0): [3], ("cross", 1): [1, 2, 3]}
    smaller = assert_pruned_as_masked(model, heads, lambda m: m(source, target))
    assert smaller.headwise_heads == {("encoder", 1): [1, 3], ("decoder", 0): [0, 1, 2], ("cross", 1): [0]}


@pytest.mark.parametrize("model", ["decoder", "transformer"])
def test_stacks_lose_heads_and_go_on_generating(model: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "heads": Heads.split(WIDTH, HEADS, 2), "ffn": 17, "vocab": VOCAB}
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS))
    if model == "decoder":
        stack = spread(headwise.Decoder(Shape(**sizes, head="tied", positions="rotary", window=(3, None)))).eval()
        smaller = assert_pruned_as_masked(stack, {0: [0, 1], 1: [3]}, lambda m: m(ids))
        masked, generate = {0: [0, 1], 1: [3]}, lambda m: m.generate(ids, 4)
    else:
        shape = Shape(**sizes, head="tied", positions="sinusoidal", decoder_layers=2)
        stack = spread(headwise.Transformer(shape)).eval()
        masked = {("encoder", 0): [0], ("cross", 1): [2, 3]}
        smaller = assert_pruned_as_masked(stack, masked, lambda m: m(ids, ids[:, :3]))
        generate = lambda m: m.generate(ids, 4, bos=1)  # noqa: E731
    with headwise.mask_heads(stack, masked):
        expected = generate(stack)
    assert torch.equal(generate(smaller), expected)


@pytest.mark.parametrize(
    "build", [lambda: MultiHeadAttention(WIDTH, HEADS), lambda: nn.MultiheadAttention(WIDTH, HEADS)]
)
def test_value_biases_and_means_move_into_the_output_bias(build: Any) -> None:
    module = spread(build()).eval()
    x = torch.randn(TOKENS, BATCH, WIDTH)

    def run(m: Any) -> Tensor:
        return m(x) if isinstance(m, MultiHeadAttention) else m(x, x, x)[0]

    bias = module.W_V.bias if isinstance(module, MultiHeadAttention) else module.in_proj_bias.chunk(3)[2]
    constant = bias.detach().unflatten(0, (HEADS, -1))
    with torch.no_grad(), headwise.mask_heads(module, {0: [1, 2]}, value=constant):
        expected = run(module)
    with torch.no_grad():
        torch.testing.assert_close(run(headwise.prune_heads(module, {0: [1, 2]}, compensate="bias")), expected)


def test_appended_keys_have_no_constant_to_move() -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True)).eval()
    smaller = headwise.prune_heads(module, {0: [1]}, compensate="bias")
    assert torch.equal(smaller.out_proj.bias, module.out_proj.bias)


@pytest.mark.parametrize(
    "build", [lambda: MultiHeadAttention(WIDTH, HEADS), lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)]
)
def test_the_cost_of_a_head_is_what_removing_it_saves(build: Any) -> None:
    module = build()
    [layer] = attention_layers(module)
    smaller = headwise.prune_heads(module, {0: [2]})
    saved = sum(p.numel() for p in module.parameters()) - sum(p.numel() for p in smaller.parameters())
    assert layer.head_parameters + layer.kv_parameters == saved
    assert size(module).cache == 0


def test_what_a_module_does_not_have_is_refused_by_name() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    with pytest.raises(HeadwiseError, match="self layer 0: head 4 does not exist"):
        headwise.prune_heads(module, {0: [4]})
    with pytest.raises(HeadwiseError, match="all 4 heads of self layer 0 would go"):
        headwise.prune_heads(module, {0: [0, 1, 2, 3]})
    nn.utils.parametrizations.weight_norm(module.out_proj)
    with pytest.raises(UnsupportedError, match="its weight is parametrized"):
        headwise.prune_heads(module, {0: [0]})
