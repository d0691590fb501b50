"""Blocks and stacks: equal to PyTorch's own layers, the same with a cache as without, and clear about bad input."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import headwise
from headwise import Decoder, Encoder, Transformer, TransformerBlock
from headwise.attention.checkpoints.architectures import ARCHITECTURES
from headwise.attention.checkpoints.famous import SAME_SHAPE, famous_shape
from headwise.attention.nn.positions import Rotary
from headwise.attention.nn.stack import FeedForward
from headwise.card.sources import gguf
from headwise.card.sources.presets import FAMOUS
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.heads import Heads
from headwise.models.loading.locate import BUNDLED
from headwise.shapes import PRESETS, Shape

WIDTH, TOKENS, BATCH, VOCAB = 12, 7, 3, 29
SMALL = Shape(layers=2, heads=Heads.split(WIDTH, 3), ffn=17, vocab=VOCAB, max_length=19)
CAUSAL = replace(SMALL, head="tied")
LLAMA = replace(
    SMALL,
    heads=Heads.split(WIDTH, 6, 2, 4),
    activation="swiglu",
    norm="rms",
    qkv_bias=False,
    out_bias=False,
    ffn_bias=False,
    positions="rotary",
    rope={"rope_theta": 500.0},
    head="own",
)
DECODERS = {
    "learned": CAUSAL,
    "sinusoidal": replace(CAUSAL, positions="sinusoidal", activation="relu", pre_norm=False, scale_embeddings=True),
    "none": replace(CAUSAL, positions=None),
    "rotary, grouped": LLAMA,
    "normed queries": replace(LLAMA, qk_norm="rms", rope={"rope_type": "linear", "factor": 2.0}),
    "windows": replace(LLAMA, window=3),
    "a window in one layer": replace(LLAMA, window=(None, 3)),
}
BOTH = replace(SMALL, decoder_layers=3, positions="sinusoidal", pre_norm=False, scale_embeddings=True, head="tied")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def ids(batch: int = BATCH, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, tokens))


def shaken(model: nn.Module) -> nn.Module:
    """Every parameter random, biases and norms too, so that none can be left out unnoticed."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    for name, weight, bias in zip("QKV", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        linear = getattr(ours, f"W_{name}")
        linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
    ours.W_O.load_state_dict(theirs.out_proj.state_dict())


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_block_equals_torch_transformer_layers(pre_norm, activation, cross):
    kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    options = {"dim_feedforward": 17, "activation": activation, "norm_first": pre_norm, "batch_first": True}
    theirs = shaken(kind(WIDTH, 3, dropout=0.0, layer_norm_eps=1e-3, **options))
    ours = TransformerBlock(
        WIDTH, 3, ffn=17, activation=activation, pre_norm=pre_norm, cross=cross, norm_eps=1e-3
    ).eval()
    copy_attention(ours.attention, theirs.self_attn)
    pairs = [(ours.attention_norm, theirs.norm1), (ours.ffn.up, theirs.linear1), (ours.ffn.down, theirs.linear2)]
    if cross:
        copy_attention(ours.cross, theirs.multihead_attn)
        pairs += [(ours.cross_norm, theirs.norm2), (ours.ffn_norm, theirs.norm3)]
    else:
        pairs += [(ours.ffn_norm, theirs.norm2)]
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    x, memory = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, 5, WIDTH)
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
    if cross:
        torch.testing.assert_close(ours(x, memory, causal=True), theirs(x, memory, tgt_mask=hidden), rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(ours(x, causal=True), theirs(x, src_mask=hidden), rtol=0, atol=1e-5)


def test_feed_forward_equals_its_formula():
    x = torch.randn(2, 5, WIDTH)
    plain = FeedForward(WIDTH, 17, "gelu_tanh")
    up = nn.functional.gelu(plain.up(x), approximate="tanh")
    torch.testing.assert_close(plain(x), up @ plain.down.weight.T + plain.down.bias)
    gated = FeedForward(WIDTH, 17, "swiglu", bias=False)
    gate, up = x @ gated.gate.weight.T, x @ gated.up.weight.T
    torch.testing.assert_close(gated(x), (gate * gate.sigmoid() * up) @ gated.down.weight.T)
    assert TransformerBlock(WIDTH, 3).ffn.up.out_features == 4 * WIDTH


def test_stack_dropout_applies_in_training_only():
    block = TransformerBlock(WIDTH, 3, dropout=0.5)
    x = torch.randn(1, 5, WIDTH)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_the_parameters_they_count(name):
    shape = PRESETS[name].shape
    stack = Transformer if shape.decoder_layers else Encoder if shape.pooler else Decoder
    model = stack.from_shape(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == shape.parameters()["total"]


@pytest.mark.parametrize(
    ("stack", "shape"),
    [(Decoder, shape) for shape in DECODERS.values()]
    + [
        (Transformer, BOTH),
        (
            Transformer,
            replace(BOTH, pre_norm=True, positions="learned", qk_norm="rms", embedding_norm=True, head="own"),
        ),
        (
            Encoder,
            replace(SMALL, embedding_width=5, embedding_norm=True, token_types=2, pooler=True, position_offset=2),
        ),
    ],
)
def test_unusual_shapes_build_the_parameters_they_count(stack, shape):
    model = stack(shape, device="meta")
    assert sum(p.numel() for p in model.parameters()) == shape.parameters()["total"]


def test_encoder_ignores_padding():
    encoder = shaken(Encoder(replace(SMALL, token_types=2)))
    x, types = ids(), torch.randint(0, 2, (BATCH, TOKENS))
    mask = torch.arange(TOKENS) < torch.tensor([[7], [4], [2]])
    want = encoder(x, types=types, mask=mask)
    for row, length in enumerate((7, 4, 2)):
        alone = encoder(x[row : row + 1, :length], types=types[row : row + 1, :length])
        torch.testing.assert_close(want[row, :length], alone[0], rtol=0, atol=1e-5)
    for same in (
        {"mask": mask.long()},
        {"lengths": mask.sum(1)},
        {"mask": mask[:, None, None, :].expand(-1, 3, TOKENS, -1)},
    ):
        torch.testing.assert_close(encoder(x, types=types, **same), want)
    assert not torch.allclose(encoder(x, types=types), want)
    assert not torch.allclose(encoder(x, mask=mask), want)  # without types, all are of type 0


def test_pooler_reads_the_first_token():
    encoder = shaken(Encoder(replace(SMALL, pooler=True)))
    hidden = encoder(ids())
    want = torch.tanh(hidden[:, 0] @ encoder.pooler.weight.T + encoder.pooler.bias)
    torch.testing.assert_close(encoder.pool(hidden), want)


@pytest.mark.parametrize("name", ["sinusoidal", "windows", "an encoder"])
def test_stack_stats_equal_those_of_each_layer(name):
    """The same as its definition on the weights; padding does not count."""
    model = shaken(Decoder(DECODERS[name]) if name in DECODERS else Encoder(SMALL))
    x = ids()
    mask = torch.arange(TOKENS) >= torch.tensor([[0], [3], [1]])
    inputs = []
    hooks = [
        b.attention.register_forward_pre_hook(
            lambda _, a, call_options: inputs.append((a, call_options)), with_kwargs=True
        )
        for b in model.blocks
    ]
    with torch.no_grad():
        model(x, mask=mask)
    for hook in hooks:
        hook.remove()
    stats = model.stats(x, mask=mask, classes={"early": torch.arange(TOKENS).expand(BATCH, -1) < 4})
    assert len(stats) == model.shape.layers
    for block, layer, ((query,), call_options) in zip(model.blocks, stats, inputs, strict=True):
        call_options = {key: call_options[key] for key in ("mask", "causal", "window", "positions")}
        weights = block.attention.weights(query, **call_options)  # (B, H, T, T)
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1).transpose(1, 2)[mask].mean(0)
        torch.testing.assert_close(layer.entropy.float(), entropy, rtol=0, atol=1e-4)
        early = weights[..., :4].sum(-1).transpose(1, 2)[mask].mean(0)
        torch.testing.assert_close(layer.share("early").float(), early, rtol=0, atol=1e-4)


def test_roberta_counts_over_tokens_that_are_not_padding():
    encoder = shaken(Encoder(replace(SMALL, position_offset=2)))
    x = torch.randint(2, VOCAB, (2, 5))
    padded = torch.cat((torch.ones(2, 3, dtype=torch.long), x), 1)
    mask = padded != 1
    torch.testing.assert_close(encoder(padded, mask=mask)[:, 3:], encoder(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_is_causal(name):
    decoder = shaken(Decoder(DECODERS[name]))
    x = ids()
    y = x.clone()
    y[:, 4:] = (y[:, 4:] + 1) % VOCAB
    a, b = decoder(x), decoder(y)
    assert a.shape == (BATCH, TOKENS, VOCAB)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert not torch.allclose(a[:, 4:], b[:, 4:])


@pytest.mark.parametrize("room", [None, 13])
@pytest.mark.parametrize("chunks", [(1,) * 13, (5, 1, 4, 3), (2, 11)])
@pytest.mark.parametrize("name", DECODERS)
def test_cached_decoding_of_a_stack_equals_one_call(name, chunks, room):
    decoder = shaken(Decoder(DECODERS[name]))
    x = ids(tokens=13)
    cache = decoder.cache(room)
    steps = [decoder(part, cache=cache) for part in x.split(chunks, 1)]
    assert cache.length == 13
    torch.testing.assert_close(torch.cat(steps, 1), decoder(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_does_not_change_the_output(name):
    decoder = shaken(Decoder(DECODERS[name]))
    x = ids(tokens=13)
    mask = torch.arange(13) >= torch.tensor([[0], [3], [8]])
    cache = decoder.cache(13)
    parts = [decoder(x[:, a:b], mask=mask[:, :b], cache=cache) for a, b in ((0, 6), (6, 12), (12, 13))]
    for got in (decoder(x, mask=mask), torch.cat(parts, 1)):
        for row, start in enumerate((0, 3, 8)):
            alone = decoder(x[row : row + 1, start:])
            torch.testing.assert_close(got[row, start:], alone[0], rtol=0, atol=1e-4)


def test_decoder_takes_lengths_and_positions():
    decoder = shaken(Decoder(LLAMA))
    x = ids()
    got = decoder(x, lengths=torch.tensor([7, 4, 2]))
    torch.testing.assert_close(got[1, :4], decoder(x[1:2, :4])[0], rtol=0, atol=1e-5)
    far = decoder(x, positions=torch.arange(100, 100 + TOKENS))  # only distances count
    torch.testing.assert_close(far, decoder(x), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", DECODERS)
def test_generate_is_greedy(name):
    decoder = shaken(Decoder(DECODERS[name]))
    x = ids(tokens=5)
    want = x
    for _ in range(6):
        want = torch.cat((want, decoder(want)[:, -1:].argmax(-1)), 1)
    assert torch.equal(decoder.generate(x, 6), want)
    padded = torch.cat((torch.zeros(BATCH, 2, dtype=torch.long), x), 1)
    mask = torch.ones_like(padded)
    mask[:, :2] = 0
    for same in (mask, mask.bool()):
        assert torch.equal(decoder.generate(padded, 6, mask=same)[:, 2:], want)
    assert torch.equal(decoder.generate(x, 0), x)


@pytest.mark.parametrize("several", [False, True])
def test_generate_ends_at_eos(several):
    decoder = shaken(Decoder(LLAMA))
    x = ids(tokens=5)
    free = decoder.generate(x, 9)
    eos = int(free[0, 7])
    stop = [eos, VOCAB + 1] if several else eos
    got = decoder.generate(x, 9, eos=stop)
    for row in range(BATCH):
        new = free[row, 5:].tolist()
        end = new.index(eos) + 1 if eos in new else len(new)
        want = new[:end] + [eos] * (got.shape[1] - 5 - end)
        assert got[row, 5:].tolist() == want[: got.shape[1] - 5]
    assert decoder.generate(x[:1], 9, eos=stop).shape[1] <= 8


def test_a_decoder_without_a_head_gives_hidden_states():
    decoder = shaken(Decoder(replace(LLAMA, head=None)))
    assert decoder(ids()).shape == (BATCH, TOKENS, WIDTH)


def test_transformer_shares_its_embeddings():
    model = Transformer(BOTH)
    assert model.decoder.embed.tokens.weight is model.encoder.embed.tokens.weight
    assert model.decoder.logits(torch.eye(WIDTH)[None]).shape == (1, WIDTH, VOCAB)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_transformer_generates_greedily(pre_norm):
    model = shaken(Transformer(replace(BOTH, pre_norm=pre_norm)))
    source, mask = ids(tokens=11), torch.ones(BATCH, 11, dtype=torch.long)
    mask[1, 6:] = 0
    target = ids(tokens=5)
    logits = model(source, target, source_mask=mask)
    assert logits.shape == (BATCH, 5, VOCAB)
    torch.testing.assert_close(logits[1:2], model(source[1:2, :6], target[1:2]), rtol=0, atol=1e-4)
    want = torch.full((BATCH, 1), 2)
    for _ in range(6):
        want = torch.cat((want, model(source, want, source_mask=mask)[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(source, 6, bos=2, source_mask=mask), want)


@pytest.mark.parametrize(
    ("kind", "config", "inputs"), [(Decoder, LLAMA, 1), (Decoder, CAUSAL, 1), (Transformer, BOTH, 2)]
)
def test_every_parameter_gets_a_gradient(kind, config, inputs):
    torch.manual_seed(0)
    model = kind(config).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = ids()
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(*[x] * inputs)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # below 0.5 with any of twelve seeds


@pytest.mark.parametrize("model", [Encoder(SMALL), Decoder(LLAMA), Decoder(DECODERS["sinusoidal"])])
def test_stacks_compile_to_one_graph(model):
    shaken(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x, mask = ids(), torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[0, :2] = False
    torch.testing.assert_close(compiled(x, mask=mask), model(x, mask=mask))


def test_stacks_take_empty_sequences():
    assert Encoder(SMALL)(ids(tokens=0)).shape == (BATCH, 0, WIDTH)
    assert Decoder(CAUSAL)(ids(tokens=0)).shape == (BATCH, 0, VOCAB)


def decode(**options):
    return Decoder(CAUSAL)(ids(), **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: TransformerBlock(WIDTH, 3, activation="tanh"),
            "activation 'tanh' is not known; known are 'relu', 'gelu'",
        ),
        (lambda: TransformerBlock(WIDTH, 3, norm="batch"), "norm 'batch' is not known; known are 'layer', 'rms'"),
        (lambda: TransformerBlock(WIDTH, 3, window=0), "window must be a whole number of at least 1, got 0"),
        (lambda: TransformerBlock(WIDTH, 5), "5 heads do not divide d_model 12"),
        (
            lambda: TransformerBlock(WIDTH, 3)(torch.zeros(1, 2, WIDTH), torch.zeros(1, 2, WIDTH)),
            "one without has no use",
        ),
        (lambda: TransformerBlock(WIDTH, 3, cross=True)(torch.zeros(1, 2, WIDTH)), "cross=True needs memory"),
        (lambda: Encoder(CAUSAL), "an Encoder has no output layer and no sliding window"),
        (lambda: Decoder(replace(SMALL, pooler=True)), "a Decoder has no pooler"),
        (lambda: Transformer(SMALL), "a Transformer needs decoder_layers"),
        (lambda: Encoder.from_shape("bert"), "no shape is called 'bert'; did you mean bert-"),
        (lambda: Encoder(SMALL)(ids() + VOCAB), f"is not in the vocabulary of {VOCAB} tokens"),
        (lambda: Encoder(SMALL)(-1 - ids()), "id -.* is not in the vocabulary"),
        (lambda: Encoder(SMALL)(ids().float()), r"ids must be whole numbers \(B, T\), got torch.float32 \(3, 7\)"),
        (lambda: Encoder(SMALL)(ids()[0]), r"ids must be whole numbers \(B, T\), got torch.int64 \(7,\)"),
        (lambda: Encoder(SMALL)(ids(tokens=20)), "positions 0 to 19 do not fit the model's 0 to 18"),
        (lambda: Encoder(SMALL)(ids(), positions=torch.arange(-1, 6)), "positions -1 to 5 do not fit"),
        (
            lambda: Encoder(SMALL)(ids(), mask=torch.ones(3, 5)),
            r"mask must be \(B, tokens\) = \(3, 7\), or four .*got \(3, 5\)",
        ),
        (lambda: Encoder(SMALL)(ids(), mask=torch.ones(3, 7)), "mask must be True or 1 for a real token.*float32"),
        (lambda: Encoder(SMALL)(ids(), mask=torch.full((3, 7), 2)), "mask must be True or 1 for a real token"),
        (
            lambda: Encoder(SMALL)(ids(), positions=torch.arange(5)),
            r"positions must be .* = \(3, 7\), got torch.int64 \(5,\)",
        ),
        (lambda: Encoder(SMALL)(ids(), positions=torch.rand(7)), "positions must be whole numbers .*torch.float32"),
        (
            lambda: Encoder(SMALL)(ids(), types=torch.zeros_like(ids())),
            "types 0 to 0 do not fit the model, which has 0",
        ),
        (
            lambda: Encoder(SMALL)(ids(), types=torch.zeros(3, 1).long()),
            r"types must be whole numbers \(B, T\) = \(3, 7\)",
        ),
        (lambda: Encoder(SMALL).pool(torch.zeros(1, 1, WIDTH)), "this encoder has no pooler"),
        (lambda: decode(memory=torch.zeros(BATCH, 2, WIDTH)), "one without has no use for it"),
        (lambda: Decoder(BOTH)(ids()), "cross=True needs memory"),
        (lambda: Transformer(BOTH)(ids(), ids(), source_mask=torch.ones(3, 5).bool()), r"mask must be \(B, tokens\)"),
        (
            lambda: Decoder(CAUSAL).generate(ids(), 14),
            "7 tokens and 14 new ones do not fit .* 19 positions; 13 new ones",
        ),
        (
            lambda: Decoder(CAUSAL).generate(ids(tokens=0), 3),
            r"generate needs a first token and a count, got ids \(3, 0\)",
        ),
        (lambda: Decoder(CAUSAL).generate(ids(), -1), "generate needs a first token and a count.* and -1"),
        (lambda: Decoder(replace(CAUSAL, head=None)).generate(ids(), 3), "this decoder has no output layer"),
        (
            lambda: Decoder(CAUSAL).generate(ids(), 3, mask=torch.arange(7).expand(3, 7) < 5),
            "padding must be on the left",
        ),
        (
            lambda: Decoder(CAUSAL).generate(ids(), 3, mask=torch.ones(3, 1, 7, 7)),
            r"mask must be \(B, tokens\) = \(3, 7\), got",
        ),
    ],
)
def test_invalid_stack_arguments_are_refused(call, words):
    with pytest.raises(HeadwiseError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_last_position_can_be_used():
    decoder = Decoder(CAUSAL)
    assert decoder.generate(ids(), 13).shape == (BATCH, 20)  # the twentieth token is never read, so 19 positions do


def test_padding_does_not_use_up_positions():
    decoder = shaken(Decoder(CAUSAL))
    x, mask = ids(tokens=25), torch.arange(25).expand(BATCH, -1) >= 6
    torch.testing.assert_close(decoder(x, mask=mask)[:, 6:], decoder(x[:, 6:]), rtol=0, atol=1e-4)
    assert decoder.generate(x, 1, mask=mask).shape == (BATCH, 26)


def test_rotary_decoders_have_no_length_limit():
    assert Decoder(LLAMA)(ids(tokens=23)).shape == (BATCH, 23, VOCAB)
    assert TransformerBlock(WIDTH, 3, position=Rotary())(torch.zeros(1, 23, WIDTH)).shape == (1, 23, WIDTH)


# --- famous shapes ---


@pytest.mark.parametrize("name", FAMOUS)
def test_famous_shapes_have_the_parameters_of_their_cards_or_are_refused_by_type(name):
    card = headwise.card.read(name)
    model_type = FAMOUS[name]["model_type"]
    if name not in PRESETS and model_type not in (*ARCHITECTURES, *SAME_SHAPE):
        with pytest.raises(UnsupportedError, match=f"^{name} is of type {model_type}, which our stacks cannot build"):
            famous_shape(name)
        return
    shape = famous_shape(name)
    assert shape.parameters()["total"] == card.parameters.total
    assert all(layer.heads == shape.heads for layer in card.attention.layers)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b", "phi3-mini"])
def test_a_decoder_is_built_from_a_famous_name_without_memory(name):
    decoder = Decoder.from_shape(name, device="meta")
    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert count == headwise.card.read(name).parameters.total
    window = {"mistral-7b": 4096, "phi3-mini": 2047}.get(name)
    assert (f"window of {window} keys" in repr(decoder)) == (window is not None)
    assert "positions: rotary" in repr(decoder) and "position=Rotary(base=" in repr(decoder)


def test_llama_3_has_its_own_rotary_frequencies():
    first, second = famous_shape("llama3-8b"), famous_shape("llama3.1-8b")
    assert dict(first.rope) == {"rope_theta": 500_000.0}
    assert dict(second.rope)["factor"] == 8.0 and dict(second.rope)["rope_type"] == "llama3"


def test_the_shape_of_smollm2_has_the_frequencies_of_its_bundled_file():
    header, _ = gguf.read(BUNDLED["smollm2"].path())
    shape = famous_shape("smollm2-135m")
    assert dict(shape.rope) == {"rope_theta": header["llama.rope.freq_base"]}
    assert shape.norm_eps == pytest.approx(header["llama.attention.layer_norm_rms_epsilon"], rel=2**-23)


def test_an_unknown_name_suggests_famous_ones():
    with pytest.raises(UnsupportedError, match=r"no shape is called 'llama3-9b'; did you mean llama3-8b"):
        Decoder.from_shape("llama3-9b")


# --- caches of a stack ---


@pytest.mark.parametrize("name", ["learned", "rotary, grouped"])
def test_caches_of_a_decoder_are_reordered_and_cropped_together(name):
    decoder = shaken(Decoder(DECODERS[name], dtype=torch.float64))
    x, order = ids(), torch.tensor([2, 0, 0])
    cache = decoder.cache()
    decoder(x, cache=cache)
    cache.crop(4)
    cache.reorder(order)
    assert cache.length == 4
    expected = decoder(x[order])[:, 4:]
    torch.testing.assert_close(decoder(x[order, 4:], cache=cache), expected, rtol=0, atol=1e-10)


def test_caches_are_cropped_in_all_layers_or_in_none():
    decoder = shaken(Decoder(DECODERS["a window in one layer"]))
    cache = decoder.cache()
    decoder(ids(), cache=cache)
    with pytest.raises(HeadwiseError, match="a sliding cache of 3 keys cannot be cropped from 7 tokens to 4"):
        cache.crop(4)
    assert [layer.length for layer in cache.layers] == [7, 7]
