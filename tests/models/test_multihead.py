"""nn.MultiheadAttention and PyTorch's transformer classes, watched and masked: the output is that of PyTorch's code."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.attention.stats import stats_from_weights
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models import multihead
from headwise.models.watching import call_reader
from helpers.attention_cases import needs_kernel
from helpers.known_modules import ROUNDING, assert_statistics, spread

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("in_float64")
BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 7, 5, 12, 4


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def assert_restored() -> None:
    assert nn.MultiheadAttention.forward is multihead._whole_forward
    assert nn.TransformerEncoder.forward is multihead._encoder_forward
    assert torch.backends.mha.get_fastpath_enabled()
    assert not multihead._opened_by and not multihead.observers and not multihead._fastpath


# ---- every option of nn.MultiheadAttention

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 10},
    "a learned key": {"add_bias_kv": True},
    "a zero key": {"add_zero_attn": True},
    "both appended keys": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS = ("none", "causal hint", "causal bool", "bool", "float", "per head")
PADDINGS = ("none", "bool", "float")


def attention_mask(name: str, queries: int, keys: int, batch: int = BATCH) -> dict[str, Any]:
    causal = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    some = torch.rand(queries, keys) < 0.3
    some[:, 0] = False
    per_head = torch.randn(batch * HEADS, queries, keys)
    return {
        "none": {},
        "causal hint": {"attn_mask": causal, "is_causal": True},
        "causal bool": {"attn_mask": causal},
        "bool": {"attn_mask": some},
        "float": {"attn_mask": torch.randn(queries, keys).masked_fill(some, -torch.inf)},
        "per head": {"attn_mask": per_head.masked_fill(some, -torch.inf)},
    }[name]


def key_padding(name: str, keys: int) -> dict[str, Any]:
    hidden = torch.zeros(BATCH, keys, dtype=torch.bool)
    hidden[1, keys - 2 :] = True
    floats = torch.zeros(BATCH, keys).masked_fill(hidden, -torch.inf)
    return {"none": {}, "bool": {"key_padding_mask": hidden}, "float": {"key_padding_mask": floats}}[name]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize(
    ("form", "inputs"),
    [
        (form, inputs)
        for form, inputs in itertools.product(MODULES, ("self", "cross", "separate values"))
        if form != "other widths" or inputs != "self"  # keys of another width are not the queries
    ],
)
def test_watched_multihead_attention_equals_pytorch_to_the_bit(form: str, inputs: str) -> None:
    options = MODULES[form]
    keys = QUERIES if inputs == "self" else KEYS
    for batch_first, mask, padding in itertools.product((True, False), MASKS, PADDINGS):
        module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **options)).eval()
        query = torch.randn(BATCH, QUERIES, WIDTH)
        key = query if inputs == "self" else torch.randn(BATCH, keys, module.kdim)
        same_values = inputs != "separate values" and form != "other widths"
        value = key if same_values else torch.randn(BATCH, keys, module.vdim)
        if not batch_first:
            first = {id(x): x.transpose(0, 1) for x in (query, key, value)}
            query, key, value = first[id(query)], first[id(key)], first[id(value)]
        arguments = {**attention_mask(mask, QUERIES, keys), **key_padding(padding, keys)}
        for need_weights in (False, True):
            call = {**arguments, "need_weights": need_weights, "average_attn_weights": False}
            with torch.no_grad(), fast_path(False):
                plain, plain_weights = module(query, key, value, **call)
            with torch.no_grad(), headwise.watch(module, weights=True, outputs=True, links=2) as seen:
                out, weights = module(query, key, value, **call)
            assert torch.equal(plain, out)
            assert (plain_weights is None) == (weights is None)
            layer = seen.layers[0]
            assert layer.source == "module" and layer.heads.query == HEADS and layer.heads.kv == HEADS
            if weights is not None and plain_weights is not None:
                assert torch.equal(plain_weights, weights)
                torch.testing.assert_close(layer.weights, weights, rtol=0, atol=ROUNDING)
                torch.testing.assert_close(layer.links(2).weights, weights.topk(2).values, rtol=0, atol=ROUNDING)
            mixed = layer.outputs.transpose(1, 2).flatten(2)  # (B, Tq, H * D)
            mixed = module.out_proj(mixed)
            torch.testing.assert_close(mixed if batch_first else mixed.transpose(0, 1), out)
    assert_restored()


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_statistics_of_multihead_attention_are_of_its_own_weights(mask: str, padding: str) -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    arguments = {**attention_mask(mask, QUERIES, QUERIES), **key_padding(padding, QUERIES)}
    with headwise.watch(module) as seen:
        module(x, x, x, need_weights=False, **arguments)
    weights = module(x, x, x, average_attn_weights=False, **arguments)[1]
    real = None if padding == "none" else ~key_padding("bool", QUERIES)["key_padding_mask"]
    assert_statistics(seen.layers[0].stats, weights, queries=real)


def test_statistics_of_attention_to_other_tokens_have_no_distances() -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    query, key = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, WIDTH)
    padding = key_padding("bool", KEYS)
    with headwise.watch(module) as seen:
        module(query, key, key, need_weights=False, **padding)
    weights = module(query, key, key, average_attn_weights=False, **padding)[1]
    assert_statistics(seen.layers[0].stats, weights, cross=True)  # padding of the keys is no padding of the queries


def test_unbatched_inputs_are_one_sequence() -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    x = torch.randn(QUERIES, WIDTH)
    for mask in ("none", "causal hint", "float", "per head"):
        arguments = attention_mask(mask, QUERIES, QUERIES, batch=1)
        for need_weights in (False, True):
            plain, plain_weights = module(x, x, x, need_weights=need_weights, **arguments)
            with headwise.watch(module, weights=True) as seen:
                out, weights = module(x, x, x, need_weights=need_weights, **arguments)
            assert torch.equal(plain, out)
            assert weights is None or torch.equal(weights, plain_weights)
            assert seen.layers[0].weights.shape == (1, HEADS, QUERIES, QUERIES)
            assert seen.layers[0].stats.count.shape == (1, HEADS)


def test_dropout_in_training_draws_the_same_numbers_and_statistics_are_without_it() -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.4, batch_first=True)).train()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    for need_weights in (False, True):
        torch.manual_seed(1)
        plain = module(x, x, x, need_weights=need_weights)[0]
        torch.manual_seed(1)
        with headwise.watch(module) as seen:
            out = module(x, x, x, need_weights=need_weights)[0]
        assert torch.equal(plain, out)
        weights = module.eval()(x, x, x, average_attn_weights=False)[1]
        module.train()
        assert_statistics(seen.layers[0].stats, weights.detach())


def test_gradients_of_a_watched_module_are_those_of_pytorch() -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    x = torch.randn(BATCH, QUERIES, WIDTH)
    module(x, x, x, need_weights=False)[0].pow(2).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    with headwise.watch(module):
        module(x, x, x, need_weights=False)[0].pow(2).sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_query_that_sees_nothing_gets_what_pytorch_gives_and_does_not_count(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_reader, "ONE_PASS", 0)
    torch.set_default_dtype(dtype)
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    hidden = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    hidden[2] = True
    for mask in (hidden, hidden | torch.ones_like(hidden).triu(1)):
        with torch.no_grad(), fast_path(False):
            plain = module(x, x, x, attn_mask=mask, need_weights=False)[0]
        with torch.no_grad(), headwise.watch(module) as seen:
            out = module(x, x, x, attn_mask=mask, need_weights=False)[0]
        assert torch.equal(plain.nan_to_num(7.0), out.nan_to_num(7.0))
        assert (seen.layers[0].stats.count == QUERIES - 1).all()


# ---- PyTorch's layers and stacks


def layer_options(**options: Any) -> dict[str, Any]:
    return {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 10, "dropout": 0.0, **options}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_is_watched_although_it_has_a_fast_path(training: bool, batch_first: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(**layer_options(batch_first=batch_first, norm_first=norm_first))
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    spread(encoder).train(training)
    x = torch.randn(BATCH, QUERIES, WIDTH)
    x = x if batch_first else x.transpose(0, 1)
    padding = key_padding("bool", QUERIES)["key_padding_mask"]
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=padding)
        with fast_path(False):
            plain = encoder(x, src_key_padding_mask=padding)
        with headwise.watch(encoder, weights=True) as seen:
            out = encoder(x, src_key_padding_mask=padding)
    assert torch.equal(plain, out)
    torch.testing.assert_close(fast, out)
    assert [(layer.kind, layer.index, layer.name) for layer in seen.layers] == [
        ("self", 0, "layers.0.self_attn"),
        ("self", 1, "layers.1.self_attn"),
    ]
    for layer in seen.layers:
        assert_statistics(layer.stats, layer.weights, queries=~padding)
    assert_restored()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(WIDTH, dtype=torch.float64)])
@pytest.mark.parametrize("alignment", ["left", "right"])
def test_padding_gives_what_nested_tensors_give(alignment: str, norm: nn.Module | None) -> None:
    layer = nn.TransformerEncoderLayer(**layer_options(batch_first=True))
    encoder = spread(nn.TransformerEncoder(layer, 2, norm)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    padding = key_padding("bool", QUERIES)["key_padding_mask"]
    padding = padding if alignment == "left" else padding.flip(1)  # PyTorch makes nested tensors of the first only
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            plain = encoder(x, src_key_padding_mask=padding)
            with headwise.watch(encoder):
                out = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(out, plain)
        empty = torch.zeros(WIDTH) if norm is None else norm(torch.zeros(WIDTH))
        assert bool((out[1, padding[1]] == empty).all()) == (alignment == "left" and not gradient)


def test_a_transformer_has_encoder_decoder_and_cross_attention() -> None:
    model = spread(nn.Transformer(WIDTH, HEADS, 2, 3, 10, 0.0, batch_first=True)).eval()
    source, target = torch.randn(BATCH, KEYS, WIDTH), torch.randn(BATCH, QUERIES, WIDTH)
    source_padding = key_padding("bool", KEYS)["key_padding_mask"]
    target_padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    target_padding[2, 4:] = True
    arguments = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES),
        "src_key_padding_mask": source_padding,
        "memory_key_padding_mask": source_padding,
        "tgt_key_padding_mask": target_padding.double().masked_fill(target_padding, -torch.inf),
    }
    with torch.no_grad():
        with fast_path(False):
            plain = model(source, target, **arguments)
        with headwise.watch(model, weights=True) as seen:
            out = model(source, target, **arguments)
    assert torch.equal(plain, out)
    assert [(layer.kind, layer.index) for layer in seen.layers] == [
        *(("encoder", i) for i in range(2)),
        *(("decoder", i) for i in range(3)),
        *(("cross", i) for i in range(3)),
    ]
    for layer in seen.layers:
        real = {"encoder": ~source_padding}.get(layer.kind, ~target_padding)
        assert_statistics(layer.stats, layer.weights, queries=real, cross=layer.kind == "cross")
    with pytest.raises(HeadwiseError, match="layer 0 is ambiguous: Transformer has encoder, decoder, cross attention"):
        headwise.watch(model, weights=0)


@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerDecoder])
def test_single_layers_and_a_decoder_are_watched(cls: Any) -> None:
    x, memory = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, WIDTH)
    if cls is nn.TransformerDecoder:
        model = cls(nn.TransformerDecoderLayer(**layer_options(batch_first=True)), 2)
    else:
        model = cls(**layer_options(batch_first=True))
    inputs = (x,) if cls is nn.TransformerEncoderLayer else (x, memory)
    spread(model).eval()
    plain = model(*inputs)
    with headwise.watch(model, weights=True) as seen:
        out = model(*inputs)
    assert torch.equal(plain, out)
    kinds = {layer.kind for layer in seen.layers}
    assert kinds == ({"self"} if cls is nn.TransformerEncoderLayer else {"self", "cross"})


@needs_kernel
def test_long_inputs_get_output_and_statistics_from_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_reader, "ONE_PASS", 0)
    torch.set_default_dtype(torch.float32)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer_options(batch_first=True)), 2)
    spread(encoder).eval()
    x, padding = torch.randn(BATCH, QUERIES, WIDTH), key_padding("bool", QUERIES)["key_padding_mask"]
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    answered: list[Any] = []
    monkeypatch.setattr(multihead, "_attend", lambda call: answered.append(call))
    for arguments in ({}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}, {"mask": causal}):
        with torch.no_grad():
            plain = encoder(x, **arguments)
            with headwise.watch(encoder, weights=True) as seen:
                out = encoder(x, **arguments)
        real = ~padding if "src_key_padding_mask" in arguments else torch.ones(BATCH, QUERIES, dtype=torch.bool)
        # float32: a few layers of sums over 12 and 10 products
        torch.testing.assert_close(plain * real[..., None], out * real[..., None], rtol=1e-4, atol=1e-5)
        for layer in seen.layers:
            expected = stats_from_weights(layer.weights, queries=real)
            torch.testing.assert_close(layer.stats.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
    assert not answered


# ---- what is refused, and what is put back


def test_nested_tensors_are_refused_in_words() -> None:
    layer = nn.TransformerEncoderLayer(**layer_options(batch_first=True)).eval()
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    with (
        torch.no_grad(),
        headwise.watch(layer),
        pytest.raises(UnsupportedError, match="nested tensors, .* give padded tensors with a key_padding_mask"),
    ):
        layer(nested)
    assert_restored()


def test_wrong_arguments_are_refused_as_by_pytorch() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, QUERIES, WIDTH)
    wrong: list[dict[str, Any]] = [
        {"attn_mask": torch.zeros(QUERIES, KEYS)},
        {"attn_mask": torch.zeros(BATCH, QUERIES, QUERIES)},
        {"attn_mask": torch.zeros(QUERIES, QUERIES, dtype=torch.long)},
        {"key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.bool)},
        {"key_padding_mask": torch.zeros(QUERIES, dtype=torch.bool)},
        {"is_causal": True},
    ]
    for arguments in wrong:
        with pytest.raises((AssertionError, RuntimeError)) as plain:
            module(x, x, x, **arguments)
        with headwise.watch(module), pytest.raises(type(plain.value)):
            module(x, x, x, **arguments)
    with headwise.watch(module), pytest.raises((AssertionError, RuntimeError)):
        module(x, x[:, :4], x)
    assert_restored()


def test_a_subclass_that_never_calls_its_base_is_refused() -> None:
    class Other(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    model = nn.Sequential(Other(WIDTH, HEADS))
    message = r"Other \(at 0\) did not compute its attention by its base class's forward"
    with pytest.raises(UnsupportedError, match=message), headwise.watch(model):
        model(torch.randn(BATCH, QUERIES, WIDTH))
    assert_restored()


def test_everything_is_put_back_when_the_body_raises() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer_options(batch_first=True)), 2).eval()
    for context in (headwise.watch(encoder), headwise.mask_heads(encoder, {0: [1]})):
        with pytest.raises(ZeroDivisionError), context:
            1 / torch.backends.mha.get_fastpath_enabled()
        assert_restored()
        assert not any(module._forward_pre_hooks for module in encoder.modules())
    with fast_path(False), headwise.watch(encoder):
        pass
    assert torch.backends.mha.get_fastpath_enabled()


def test_nested_watches_and_masks_see_the_same_calls() -> None:
    encoder = spread(nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer_options(batch_first=True)), 2)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    with headwise.watch(encoder) as alone:
        encoder(x)
    with headwise.watch(encoder) as outer:
        with headwise.watch(encoder) as inner, headwise.mask_heads(encoder, {1: [0]}):
            encoder(x)
        encoder(x)
    for a, b in zip(alone.layers, inner.layers, strict=True):
        assert torch.equal(a.stats.entropy, b.stats.entropy)
    assert len(outer.layers[0].runs) == 2 and len(inner.layers[0].runs) == 1
    assert_restored()


def test_other_models_keep_their_own_forward_meanwhile() -> None:
    watched, other = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval() for _ in range(2))
    x = torch.randn(BATCH, QUERIES, WIDTH)
    with torch.no_grad(), fast_path(False):
        plain = other(x, x, x)[0]
    with torch.no_grad(), headwise.watch(watched) as seen:
        assert torch.equal(plain, other(x, x, x)[0])
    assert not seen.layers


def test_two_threads_watch_their_own_models_and_not_one_together() -> None:
    models = [spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval() for _ in range(2)]
    x = torch.randn(BATCH, QUERIES, WIDTH)
    alone = [model(x, x, x)[0] for model in models]
    both_on, problems = threading.Barrier(2, timeout=60), []

    def work(model: nn.Module, expected: Tensor) -> None:
        try:
            with headwise.watch(model) as seen:
                both_on.wait()
                assert torch.equal(model(x, x, x)[0], expected)
                both_on.wait()
            assert len(seen.layers) == 1 and len(seen.layers[0].runs) == 1
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert_restored()
    with headwise.watch(models[0]):
        refused: list[BaseException] = []

        def enter() -> None:
            try:
                with headwise.watch(models[0]):
                    pass
            except HeadwiseError as error:
                refused.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert "has a headwise.watch on the same layers" in str(refused[0])


# ---- the options of watch, and the modes of PyTorch


def test_rows_heads_classes_and_observers_of_known_modules() -> None:
    encoder = spread(nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer_options(batch_first=True)), 2)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    chosen = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    chosen[:, 2:4] = True
    calls: list[Any] = []
    options: dict[str, Any] = {"weights": {1: [0, 3]}, "rows": [-1, 2], "classes": {"chosen": chosen}}
    with torch.no_grad(), headwise.watch(encoder, each=lambda *call: calls.append(call), **options) as seen:
        encoder(x)
    with torch.no_grad(), headwise.watch(encoder, weights=True) as whole:
        encoder(x)
    weights = whole[1].weights
    assert torch.equal(seen[1].weights[0, 3], weights[0, 3, [QUERIES - 1, 2]])
    share = (weights * chosen[:, None, None]).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen[1].stats.share("chosen"), share)
    assert [layer.index for layer, _, _ in calls] == [0, 1]
    assert torch.equal(calls[1][1].weights(None, None), weights)
    with torch.no_grad(), headwise.watch(encoder, stats=False, weights=0) as without:
        encoder(x)
    with pytest.raises(HeadwiseError, match="no statistics were kept"):
        _ = without[0].stats


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_a_pass_once(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer_options(batch_first=True)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = spread(Checkpointed())
    x = torch.randn(BATCH, QUERIES, WIDTH, requires_grad=True)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with headwise.watch(model) as seen, headwise.mask_heads(model, torch.ones(2, HEADS)):
        model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert [len(layer.runs) for layer in seen.layers] == [1, 1]
    assert (seen.layers[0].stats.count == QUERIES).all()


@pytest.mark.parametrize("mode", ["autocast", "bfloat16", "inference_mode"])
def test_other_precisions_and_modes(mode: str) -> None:
    torch.set_default_dtype(torch.float32)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer_options(batch_first=True)), 2).eval()
    x, padding = torch.randn(BATCH, QUERIES, WIDTH), key_padding("bool", QUERIES)["key_padding_mask"]
    if mode == "bfloat16":
        encoder, x = encoder.bfloat16(), x.bfloat16()
    around = torch.autocast("cpu", dtype=torch.bfloat16) if mode == "autocast" else torch.no_grad()
    around = torch.inference_mode() if mode == "inference_mode" else around
    for arguments in ({}, {"src_key_padding_mask": padding, "mask": torch.zeros(QUERIES, QUERIES, dtype=torch.bool)}):
        with around, fast_path(False):
            plain = encoder(x, **arguments)
        with around, headwise.watch(encoder, weights=True) as seen:
            out = encoder(x, **arguments)
        assert torch.equal(plain, out)
        real = ~padding if arguments else None
        expected = stats_from_weights(seen.layers[1].weights, queries=real)
        close = 1e-4 if mode == "inference_mode" else 5e-2  # weights of 8 bits
        torch.testing.assert_close(seen.layers[1].stats.entropy, expected.entropy, rtol=close, atol=close)


def test_a_layer_that_was_compiled_in_place_is_watched_uncompiled() -> None:
    encoder = spread(nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer_options(batch_first=True)), 2)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    with fast_path(False), torch.no_grad():
        plain = encoder(x)
    encoder.layers[0].compile(backend="eager")
    with torch.no_grad(), headwise.watch(encoder) as seen:
        out = encoder(x)
    assert torch.equal(plain, out) and len(seen.layers) == 2


def test_a_copy_made_inside_the_with_has_no_hooks_that_act() -> None:
    import copy

    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    plain = module(x, x, x)[0]
    with headwise.watch(module) as seen, headwise.mask_heads(module, {0: [1]}):
        duplicate = copy.deepcopy(module)
        out = duplicate(x, x, x)[0]
        module(x, x, x)
    torch.testing.assert_close(out, plain)
    assert len(seen.layers[0].runs) == 1


# ---- masks and gates


@pytest.mark.parametrize("batch_first", [False, True])
def test_masked_heads_give_w_o_zeros(batch_first: bool) -> None:
    module = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)).eval()
    x = torch.randn(BATCH, QUERIES, WIDTH)
    without = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).eval()
    without.load_state_dict(module.state_dict())
    with torch.no_grad():
        without.out_proj.weight.unflatten(1, (HEADS, -1))[:, [1, 3]] = 0
        expected = without(x, x, x)[0]
        with headwise.mask_heads(module, {0: [1, 3]}) as masked:
            out = module(x, x, x)[0]
        torch.testing.assert_close(out, expected)
        assert masked.heads == {("self", 0): [1, 3]}
    gates = torch.tensor([[0.5, 0.0, 1.0, -2.0]], requires_grad=True)
    with headwise.mask_heads(module, gates):
        module(x, x, x)[0].sum().backward()
    assert gates.grad is not None and bool((gates.grad != 0).all())


def test_the_mean_of_a_masked_head_is_over_real_tokens_of_either_layout() -> None:
    batch_first = spread(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).eval()
    time_first = nn.MultiheadAttention(WIDTH, HEADS).eval()
    time_first.load_state_dict(batch_first.state_dict())
    x = torch.randn(BATCH, QUERIES, WIDTH)
    with headwise.mask_heads(batch_first, {0: [2]}, value="mean"):
        a = batch_first(x, x, x)[0]
    with headwise.mask_heads(time_first, {0: [2]}, value="mean"):
        t = x.transpose(0, 1)
        b = time_first(t, t, t)[0]
    torch.testing.assert_close(a, b.transpose(0, 1))


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_mean_leaves_padding_out_also_in_cross_attention(batch_first: bool) -> None:
    layer = spread(nn.TransformerDecoderLayer(**layer_options(batch_first=batch_first))).eval()
    x, memory = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, WIDTH)
    padding = key_padding("bool", QUERIES)["key_padding_mask"]
    x, memory = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    with headwise.watch(layer, outputs=True) as seen:
        layer(x, memory, tgt_key_padding_mask=padding)
    for kind in ("self", "cross"):
        mean = seen[kind, 0].outputs.transpose(1, 2)[~padding].mean(0)  # (H, D)
        with headwise.mask_heads(layer, {(kind, 0): [2]}, value=mean):
            expected = layer(x, memory, tgt_key_padding_mask=padding)
        with headwise.mask_heads(layer, {(kind, 0): [2]}, value="mean"):
            out = layer(x, memory, tgt_key_padding_mask=padding)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # means are summed in float32
