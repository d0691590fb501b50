"""headwise's own modules and stacks, watched and masked: equal to their own weights, stats and gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import Heads, MultiHeadAttention, Shape
from headwise.attention.nn import module as own
from helpers.known_modules import ROUNDING, assert_statistics, spread

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("in_float64")
BATCH, TOKENS, KEYS, WIDTH, HEADS, VOCAB = 3, 7, 5, 24, 4, 31


MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one KV head": {"num_kv_heads": 1, "head_dim": 4},
    "rotary": {"position": headwise.Rotary()},
    "alibi": {"position": headwise.Alibi()},
    "normed": {"qk_norm": "rms", "num_kv_heads": 2},
    "capped": {"softcap": 2.0},
    "sinks": {"sinks": True},
}
CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (2, 0)},
    "kept first": {"causal": True, "window": (1, 0), "keep_first": 2},
    "lengths": {"lengths": torch.tensor([7, 4, 6])},
    "key mask": {"mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5]).bool()[:, None, None]},
    "float mask": {"mask": torch.linspace(-1, 1, TOKENS * TOKENS).view(TOKENS, TOKENS)},
}
REAL = {
    "lengths": torch.arange(TOKENS) < torch.tensor([7, 4, 6])[:, None],
    "key mask": CALLS["key mask"]["mask"][:, 0, 0],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", MODULES)
def test_a_watched_module_gives_its_own_weights_and_statistics(form: str, call: str) -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, **MODULES[form])).eval()
    x, options = torch.randn(BATCH, TOKENS, WIDTH), CALLS[call]
    options = {name: x.double() if name == "mask" and x.is_floating_point() else x for name, x in options.items()}
    with torch.no_grad():
        plain = module(x, **options)
        with headwise.watch(module, weights=True, outputs=True, links=2) as seen:
            out = module(x, **options)
        weights = module.weights(x, **options)
        layer = seen.layers[0]
        assert torch.equal(plain, out)
        assert torch.equal(layer.weights, weights)
        assert torch.equal(layer.links(2).weights, weights.topk(2).values)
        torch.testing.assert_close(module.W_O(layer.outputs.transpose(1, 2).flatten(2)), out)
    assert layer.heads == module.heads and layer.source == "module"
    real = REAL.get(call)
    own_stats = module.stats(x, queries=real, **options)
    assert set(layer.stats) == set(own_stats)
    for name in own_stats:
        torch.testing.assert_close(
            layer.stats.per_sequence(name), own_stats.per_sequence(name), rtol=0, atol=ROUNDING * TOKENS * TOKENS
        )
    assert torch.equal(layer.stats.count, own_stats.count)
    assert not own.observers


def test_cross_attention_has_no_distances_and_takes_its_queries_as_real() -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, kdim=10, vdim=10)).eval()
    x, memory = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, KEYS, 10)
    mask = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    mask[1, ..., 3:] = False
    with headwise.watch(module) as seen:
        module(x, memory, mask=mask)
    assert_statistics(seen.layers[0].stats, module.weights(x, memory, mask=mask), cross=True)


def test_weights_that_the_caller_needs_are_returned_too() -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS))
    x = torch.randn(BATCH, TOKENS, WIDTH)
    plain, weights = module(x, need_weights=True)
    with headwise.watch(module, weights=True) as seen:
        out, own_weights = module(x, need_weights=True)
    assert torch.equal(plain, out) and torch.equal(weights, own_weights)
    assert torch.equal(seen.layers[0].weights, weights)


@pytest.mark.parametrize("form", ["plain", "rotary", "sinks"])
def test_output_and_gradients_in_training_are_those_of_the_module(form: str) -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, dropout=0.3, **MODULES[form])).train()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    gradients = []
    for watched in (False, True):
        torch.manual_seed(3)
        module.zero_grad()
        if watched:
            with headwise.watch(module):
                module(x, causal=True).pow(2).sum().backward()
        else:
            module(x, causal=True).pow(2).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for plain, new in zip(*gradients, strict=True):
        assert torch.equal(plain, new)


def test_single_precision_gives_output_and_statistics_from_one_pass_to_the_bit() -> None:
    torch.set_default_dtype(torch.float32)
    module = spread(MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, position=headwise.Rotary())).eval()
    x = torch.randn(BATCH, 67, WIDTH)
    with torch.no_grad(), headwise.watch(module) as seen:
        out = module(x, causal=True)
    assert torch.equal(module(x, causal=True), out)
    torch.testing.assert_close(seen.layers[0].stats.entropy, module.stats(x, causal=True).entropy, rtol=0, atol=0)


def test_single_precision_training_gives_the_modules_own_gradients() -> None:
    torch.set_default_dtype(torch.float32)
    module = spread(MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2))
    x = torch.randn(BATCH, 67, WIDTH)
    module(x, causal=True).pow(2).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    with headwise.watch(module) as seen:
        module(x, causal=True).pow(2).sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert (seen.layers[0].stats.count == 67).all()


def test_gates_mask_and_mean_replacement_work_before_w_o() -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2)).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with torch.no_grad(), headwise.mask_heads(module, {0: [1, 2]}):
        out = module(x)
    torch.testing.assert_close(out, module(x, gates=torch.tensor([1.0, 0.0, 0.0, 1.0])))
    gates = torch.tensor([[0.5, -1.0, 2.0, 0.0]], requires_grad=True)
    with headwise.mask_heads(module, gates):
        out = module(x)
    torch.testing.assert_close(out, module(x, gates=gates[0]))
    out.sum().backward()
    assert gates.grad is not None and bool((gates.grad != 0).all())


@pytest.mark.parametrize("call", ["lengths", "key mask"])
def test_a_mean_is_over_real_tokens(call: str) -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS)).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with headwise.watch(module, outputs=True) as seen:
        module(x, **CALLS[call])
    mean = seen.layers[0].outputs.transpose(1, 2)[REAL[call]].mean(0)
    with headwise.mask_heads(module, {0: [1]}, value=mean):
        expected = module(x, **CALLS[call])
    with headwise.mask_heads(module, {0: [1]}, value="mean"):
        out = module(x, **CALLS[call])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # means are summed in float32


# ---- caches


def stepwise(seen_layer: Any, weights: Tensor) -> None:
    """The decoding steps of a layer are the rows of the weights of the whole sequence."""
    for row, step in enumerate(seen_layer.all_weights[1:], seen_layer.all_weights[0].shape[2]):
        keys = step.shape[-1]
        torch.testing.assert_close(step[:, :, 0], weights[:, :, row, row + 1 - keys : row + 1], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_decoding_steps_continue_the_statistics_of_the_prompt(cache: str) -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, position=headwise.Rotary())).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    kv = headwise.KVCache() if cache == "growing" else headwise.StaticCache(11)
    with torch.no_grad(), headwise.watch(module, weights=True) as seen:
        for part in (x[:, :4], *x[:, 4:].split(1, 1)):
            module(part, causal=True, cache=kv)
        weights = module.weights(x, causal=True)
    layer = seen.layers[0]
    stepwise(layer, weights)
    assert len(layer.runs) == 1 and layer.prefill is not None and layer.decode is not None
    assert (layer.prefill.count == 4).all() and (layer.decode.count == 3).all()
    assert_statistics(layer.stats, weights)


def test_a_sliding_cache_knows_the_first_token_also_after_it_was_dropped() -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS)).eval()
    x, window = torch.randn(BATCH, TOKENS, WIDTH), 3
    mask = torch.tensor([[1] * 7, [0] + [1] * 6, [0] * 3 + [1] * 4]).bool()
    kv = headwise.SlidingCache(window)
    with torch.no_grad(), headwise.watch(module, weights=True) as seen:
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
            first = max(0, start - (window - 1)) if start else 0
            module(x[:, start:stop], causal=True, cache=kv, mask=mask[:, None, None, first:stop])
        options = {"causal": True, "window": (window - 1, 0), "mask": mask[:, None, None]}
        weights, stats = module.weights(x, **options), module.stats(x, queries=mask, **options)
    layer = seen.layers[0]
    stepwise(layer, weights)
    for name in stats:
        torch.testing.assert_close(layer.stats.per_sequence(name), stats.per_sequence(name), rtol=1e-10, atol=1e-10)


def test_sequences_of_different_lengths_in_one_cache() -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS, position=headwise.Rotary())).eval()
    x, lengths = torch.randn(2, 6, WIDTH), torch.tensor([4, 2])
    kv = headwise.KVCache()
    with torch.no_grad(), headwise.watch(module) as seen:
        module(x[:, :4], causal=True, cache=kv, lengths=lengths)
        module(x[:, 4:5], causal=True, cache=kv)
    one_by_one = []
    for row, count in enumerate(lengths.tolist()):
        sequence = torch.cat([x[row : row + 1, :count], x[row : row + 1, 4:5]], 1)
        one_by_one.append(module.stats(sequence, causal=True))
    expected = one_by_one[0] + one_by_one[1]
    for name in expected:
        torch.testing.assert_close(
            seen.layers[0].stats.per_sequence(name), expected.per_sequence(name), rtol=1e-10, atol=1e-10
        )


def test_the_cache_is_restored_where_a_watched_call_raises() -> None:
    module = spread(MultiHeadAttention(WIDTH, HEADS)).eval()
    kv = headwise.KVCache()
    module(torch.randn(BATCH, 2, WIDTH), cache=kv)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with headwise.watch(module, each=fail), pytest.raises(ZeroDivisionError):
        module(torch.randn(BATCH, 1, WIDTH), cache=kv)
    assert kv.length == 2 and not own.observers


# ---- stacks


def shape(**options: Any) -> Shape:
    return Shape(
        **{"layers": 2, "heads": Heads.split(WIDTH, HEADS, 2), "ffn": 17, "vocab": VOCAB, "max_length": 19} | options
    )


STACKS: dict[str, Any] = {
    "encoder": lambda: headwise.Encoder(shape(pre_norm=False, embedding_norm=True)),
    "decoder": lambda: headwise.Decoder(shape(head="tied")),
    "llama": lambda: headwise.Decoder(
        shape(head="own", positions="rotary", norm="rms", activation="swiglu", qk_norm="rms", qkv_bias=False)
    ),
    "windows": lambda: headwise.Decoder(shape(head="tied", window=(3, None), positions="rotary")),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_watched_stack_gives_the_statistics_of_its_own_stats(name: str) -> None:
    model = spread(STACKS[name]()).eval()
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS))
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if name == "encoder":
        mask[1, 4:] = 0
    else:
        mask[1, :3] = 0  # padding on the left, as before generation
    with torch.no_grad():
        plain = model(ids, mask=mask)
        with headwise.watch(model) as seen:
            out = model(ids, mask=mask)
    assert torch.equal(plain, out)
    assert [(layer.kind, layer.index, layer.name) for layer in seen.layers] == [
        ("self", 0, "blocks.0.attention"),
        ("self", 1, "blocks.1.attention"),
    ]
    for layer, expected in zip(seen.layers, model.stats(ids, mask=mask), strict=True):
        assert torch.equal(layer.stats.count, expected.count)
        for statistic in expected:
            torch.testing.assert_close(
                layer.stats.per_sequence(statistic), expected.per_sequence(statistic), rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("name", ["decoder", "llama", "windows"])
def test_generation_is_watched_token_by_token(name: str) -> None:
    model = spread(STACKS[name]()).eval()
    ids = torch.randint(0, VOCAB, (BATCH, 4))
    plain = model.generate(ids, 3)
    with headwise.watch(model) as seen:
        generated = model.generate(ids, 3)
    assert torch.equal(plain, generated)
    for layer, expected in zip(seen.layers, model.stats(generated[:, :-1]), strict=True):
        assert (layer.prefill.count == 4).all() and (layer.decode.count == 2).all()
        for statistic in expected:
            torch.testing.assert_close(
                layer.stats.per_sequence(statistic), expected.per_sequence(statistic), rtol=1e-9, atol=1e-9
            )


def test_an_encoder_decoder_has_three_kinds_of_attention() -> None:
    model = spread(headwise.Transformer(shape(decoder_layers=3, positions="sinusoidal", max_length=None, head="tied")))
    model.eval()
    source, target = torch.randint(0, VOCAB, (BATCH, KEYS)), torch.randint(0, VOCAB, (BATCH, TOKENS))
    source_mask, target_mask = torch.ones_like(source), torch.ones_like(target)
    source_mask[1, 3:] = 0
    target_mask[2, 5:] = 0
    with torch.no_grad():
        plain = model(source, target, source_mask=source_mask, target_mask=target_mask)
        with headwise.watch(model, weights=True) as seen:
            out = model(source, target, source_mask=source_mask, target_mask=target_mask)
    assert torch.equal(plain, out)
    assert [(layer.kind, layer.index) for layer in seen.layers] == [
        *(("encoder", i) for i in range(2)),
        *(("decoder", i) for i in range(3)),
        *(("cross", i) for i in range(3)),
    ]
    for layer in seen.layers:
        real = (source_mask if layer.kind == "encoder" else target_mask).bool()
        assert_statistics(layer.stats, layer.weights, queries=real, cross=layer.kind == "cross")
    with torch.no_grad(), headwise.watch(model) as seen:
        model.generate(source, 3, bos=1, source_mask=source_mask)
    assert seen["cross", 0].stats.count.shape == (BATCH, HEADS)
    assert (seen["cross", 0].stats.count == 3).all()


def test_own_modules_inside_a_users_model_are_found() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(headwise.TransformerBlock(WIDTH, HEADS) for _ in range(2))
            self.pool = MultiHeadAttention(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.body:
                x = block(x)
            return self.pool(x[:, :1], x)

    model = spread(Classifier()).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with headwise.watch(model) as seen:
        out = model(x)
    assert torch.equal(out, model(x))
    assert [(layer.kind, layer.index, layer.heads.query) for layer in seen.layers] == [
        ("body", 0, HEADS),
        ("body", 1, HEADS),
        ("pool", 0, 2),
    ]
    assert seen.unseen == []


def test_a_layer_that_is_not_called_is_unseen() -> None:
    model = spread(headwise.Decoder(shape(head="tied"))).eval()
    with headwise.watch(model) as seen:
        model.blocks[0](torch.randn(BATCH, TOKENS, WIDTH), causal=True)
    assert [layer.index for layer in seen.layers] == [0] and seen.unseen == ["blocks.1.attention"]


def test_nested_watches_see_the_same_calls_and_exact_takes_the_modules_own_output() -> None:
    torch.set_default_dtype(torch.float32)
    module = spread(MultiHeadAttention(WIDTH, HEADS)).eval()
    x = torch.randn(BATCH, 67, WIDTH)
    plain = module(x, causal=True)
    with headwise.watch(module) as outer:
        with headwise.watch(module, exact=True) as inner:
            out = module(x, causal=True)
        module(x)
    assert torch.equal(plain, out)
    assert len(outer.layers[0].runs) == 2 and len(inner.layers[0].runs) == 1
    first = outer.layers[0].runs[0].all
    torch.testing.assert_close(first.entropy, inner.layers[0].stats.entropy, rtol=1e-6, atol=1e-6)
    assert not own.observers


def test_a_module_that_runs_twice_in_a_pass_is_two_layers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(self.attention(x))

    model = spread(Twice()).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with torch.no_grad(), headwise.watch(model, weights=True) as seen:
        model(x)
        model(x)
    assert [(layer.kind, layer.index, len(layer.runs)) for layer in seen.layers] == [("self", 0, 2), ("self", 1, 2)]
    assert torch.equal(seen.layers[1].weights, model.attention.weights(model.attention(x)))


def test_everything_is_put_back_when_the_body_raises() -> None:
    model = headwise.Decoder(shape(head="tied"))
    for context in (headwise.watch(model), headwise.mask_heads(model, {0: [1]})):
        with pytest.raises(headwise.ShapeError), context:
            model(torch.full((1, 3), VOCAB))
        assert not own.observers and not any(module._forward_pre_hooks for module in model.modules())


def test_a_part_of_a_split_module_is_refused_in_words() -> None:
    class Part(MultiHeadAttention):
        is_split = True

    message = "cannot watch more than statistics of Part: Part .at the top. has some tokens on each rank"
    with pytest.raises(headwise.UnsupportedError, match=message):
        headwise.watch(Part(WIDTH, HEADS), weights=True)
    assert not own.observers
