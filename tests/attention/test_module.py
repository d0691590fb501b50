"""MultiHeadAttention: the specification's outputs with the same weights, every option, every way to run a module."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from headwise import Alibi, Heads, MultiHeadAttention, Rotary, attend, head_stats, reference
from headwise.errors import HeadwiseError, MaskError, ShapeError, UnsupportedError

BATCH, TOKENS, KEYS, WIDTH = 3, 7, 11, 20
OPTIONS = {
    "plain": {},
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "bias": False},
    "multi-query": {"num_heads": 5, "num_kv_heads": 1, "out_bias": False},
    "rotary": {"position": Rotary(base=100.0), "num_kv_heads": 2, "head_dim": 6},
    "neighbours turned": {"position": Rotary(dim=2, interleaved=True), "head_dim": 6},
    "alibi": {"position": Alibi(), "num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
    "rms": {"qk_norm": "rms", "head_dim": 7},
    "layer norm": {"qk_norm": "layer", "bias": False},
    "softcap": {"softcap": 1.5, "num_kv_heads": 2},
    "sinks": {"sinks": True, "num_kv_heads": 1},
    "all of it": {
        "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "position": Rotary(), "qk_norm": "rms", "softcap": 3.0,
        "sinks": True, "out_bias": False,
    },
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def made(d_model: int = WIDTH, num_heads: int = 4, *, dtype: torch.dtype = torch.float64, **options):
    """A module in eval mode with every parameter random, biases, norms and sinks too."""
    module = MultiHeadAttention(d_model, num_heads, **options, dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def tokens(batch: int = BATCH, count: int = TOKENS, width: int = WIDTH, **options) -> torch.Tensor:
    return torch.randn(batch, count, width, **{"dtype": torch.float64, **options})


def close(got, want, atol: float = 1e-10) -> None:
    got, want = (torch.as_tensor(x).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol, check_dtype=False)


def plain(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else x


def spec(module: MultiHeadAttention) -> reference.MultiHeadAttention:
    """The specification's module with these weights."""
    h = module.heads
    twin = reference.MultiHeadAttention(h.width, h.query, h.kv, head_dim=h.dim)
    for name in "QKVO":
        linear = getattr(module, f"W_{name}")
        setattr(twin, f"W_{name}", plain(linear.weight.double()).T)
        setattr(twin, f"b_{name}", None if linear.bias is None else plain(linear.bias.double()))
    return twin


def by_hand(module, query, key=None, value=None, *, norm=None, turn=None, **call_options):
    """(output, weights) out of the specification's parts, with queries and keys normed and turned as given."""
    twin = spec(module)
    q, k, v = (torch.from_numpy(x.copy()) for x in twin.project(*map(plain, (query, key, value))))
    if norm is not None:
        q, k = norm(q, module.q_norm), norm(k, module.k_norm)
    if turn is not None:
        q, k = turn(q), turn(k)
    call_options = {name: plain(x) for name, x in call_options.items()}
    a = reference.weights(plain(q), plain(k), **{name: x for name, x in call_options.items() if name != "gates"})
    return twin.join(reference.attend(plain(q), plain(k), plain(v), **call_options)), a


def rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def layer(x, norm):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


@st.composite
def calls(draw):
    """A module of any sizes and a call of it: (constructor's options, inputs, forward's options)."""
    size = st.integers(1, 6)
    kv, group, dim, batch, queries = (draw(size) for _ in range(5))
    whole = draw(st.booleans())  # heads that fill the width exactly, or a head_dim
    width = kv * group * dim if whole else draw(size) + 1
    cross = draw(st.sampled_from(["self", "key", "key and value"]))
    keys = queries if cross == "self" else draw(size)
    made = {"d_model": width, "num_heads": kv * group, "num_kv_heads": kv, "head_dim": None if whole else dim}
    made |= {"bias": draw(st.booleans()), "out_bias": draw(st.sampled_from([None, True, False]))}
    if cross != "self":
        made["kdim"] = draw(size)
        made["vdim"] = made["kdim"] if cross == "key" else draw(size)
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def randn(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    inputs = [randn(batch, queries, width)]
    if cross != "self":
        inputs.append(randn(batch, keys, made["kdim"]))
    if cross == "key and value":
        inputs.append(randn(batch, keys, made["vdim"]))
    call_options = {"causal": draw(st.booleans())}
    shape = [draw(st.sampled_from([n, 1])) for n in (batch, kv * group, queries)] + [keys]
    match draw(st.sampled_from(["none", "bool", "float"])):
        case "bool":
            call_options["mask"] = randn(*shape) > -0.5
        case "float":
            call_options["mask"] = torch.where(randn(*shape) > -1, randn(*shape), -torch.inf)
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 4)
        pair = st.tuples(side, side)
        call_options["window"] = draw(pair | st.lists(pair, min_size=kv * group, max_size=kv * group))
        call_options["keep_first"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        call_options["lengths"] = torch.randint(0, keys + 1, (batch,), generator=gen)
    if draw(st.booleans()):
        call_options["gates"] = randn(*draw(st.sampled_from([(kv * group,), (batch, kv * group)])))
    return made, inputs, call_options


@settings(deadline=None, max_examples=150)
@given(calls())
def test_module_equals_the_reference(call):
    options, inputs, call_options = call
    module = made(**options)
    out, a = module(*inputs, **call_options, need_weights=True)
    want, want_a = by_hand(module, *inputs, **call_options)
    close(out, want)
    close(a, want_a)
    close(module(*inputs, **call_options), want)
    close(out, spec(module)(*map(plain, inputs), **{name: plain(x) for name, x in call_options.items()}))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 7)], ids=["one query", "a batch of one query", "seven queries"])
def test_repeated_calls_of_a_module_equal_the_reference(shape):
    """From the third call on, the native kernel reads the projections as the linear layers wrote them."""
    options = {"d_model": 24, "num_heads": 6, "num_kv_heads": 2, "bias": True}
    module = made(**options).float()
    want = made(**options)
    want.load_state_dict(module.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(*shape, 24, generator=generator)
            for call_options in ({}, {"causal": True, "window": (2, 0)}, {"window": [(1, 0)] * 5 + [(3, 1)]}):
                close(module(x, **call_options).double(), want(x.double(), **call_options), 1e-5)


def test_a_subclass_that_projects_otherwise_is_called():
    class Doubled(MultiHeadAttention):
        def project(self, *inputs, **options):
            projected = super().project(*inputs, **options)
            return projected._replace(v=2 * projected.v)

    plain, doubled = MultiHeadAttention(8, 2, bias=False), Doubled(8, 2, bias=False)
    doubled.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 8)
    close(doubled(x), 2 * plain(x), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_option
def test_module_in_lower_precision_equals_float64_within_rounding(options, dtype):
    exact = made(**options)
    low = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(low.state_dict())  # the same rounded weights
    x = tokens().to(dtype)
    out, a = low(x, causal=True, need_weights=True)
    want, want_a = exact(x.double(), causal=True, need_weights=True)
    assert (out.dtype, a.dtype) == (dtype, dtype)
    close(out.double(), want, {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype])
    close(a.double(), want_a, {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype])


@pytest.mark.parametrize("training", [True, False])
def test_output_and_weight_shapes_of_classic_configurations(training):
    attention = MultiHeadAttention(128, 8).train(training)
    assert attention(torch.randn(2, 10, 128)).shape == (2, 10, 128)
    attention = MultiHeadAttention(256, 8).train(training)
    query, memory = torch.randn(4, 15, 256), torch.randn(4, 20, 256)
    out, a = attention(query, memory, memory, need_weights=True)
    assert (out.shape, a.shape) == ((4, 15, 256), (4, 8, 15, 20))
    close(a.sum(-1), torch.ones(4, 8, 15), 1e-5)
    assert a.min() >= 0
    assert attention.weights(query, memory).shape == (4, 8, 15, 20)


@pytest.mark.parametrize(
    ("options", "weights", "biases"),
    [
        ({}, 2_359_296, 3_072),
        ({"bias": False}, 2_359_296, 0),
        ({"bias": False, "out_bias": True}, 2_359_296, 768),
        ({"out_bias": False}, 2_359_296, 2_304),
        ({"num_kv_heads": 4}, 2 * 768 * 768 + 2 * 768 * 256, 2 * 768 + 2 * 256),
        ({"num_kv_heads": 1, "head_dim": 32}, 2 * 768 * 384 + 2 * 768 * 32, 384 + 2 * 32 + 768),
        ({"kdim": 100, "vdim": 70}, 2 * 768 * 768 + 768 * 170, 3_072),
        ({"sinks": True, "qk_norm": "rms"}, 2_359_296, 3_072 + 12 + 2 * 64),
        ({"qk_norm": "layer"}, 2_359_296, 3_072 + 4 * 64),
        ({"position": Rotary()}, 2_359_296, 3_072),
    ],
)
def test_module_has_the_expected_parameter_count(options, weights, biases):
    module = MultiHeadAttention(768, 12, **options, device="meta")
    assert sum(p.numel() for p in module.parameters() if p.dim() == 2) == weights
    assert sum(p.numel() for p in module.parameters() if p.dim() == 1) == biases


@every_option
def test_state_dict_has_the_literatures_names(options):
    module = made(**options)
    names = {f"W_{name}.weight" for name in "QKVO"}
    names |= {f"W_{name}.bias" for name in "QKV" if options.get("bias", True)}
    names |= {"W_O.bias"} if options.get("out_bias", options.get("bias", True)) else set()
    norms = {"rms": ["weight"], "layer": ["weight", "bias"], None: []}[options.get("qk_norm")]
    names |= {f"{which}_norm.{leaf}" for which in "qk" for leaf in norms}
    names |= {"sinks"} if options.get("sinks") else set()
    assert set(module.state_dict()) == names
    h = module.heads
    assert module.W_Q.weight.shape == (h.query * h.dim, WIDTH)
    assert module.W_K.weight.shape == module.W_V.weight.shape == (h.kv * h.dim, WIDTH)
    assert module.W_O.weight.shape == (WIDTH, h.query * h.dim)


@every_option
def test_copied_and_reloaded_modules_give_the_same_output(options):
    """By state_dict, deepcopy, pickle, torch.save, and built on the meta device first."""
    module, x = made(**options), tokens()
    want = module(x, causal=True)
    loaded = made(**options)
    assert not torch.allclose(loaded(x, causal=True), want)
    loaded.load_state_dict(module.state_dict())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (
        loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)
    ):  # fmt: skip
        close(twin(x, causal=True), want, 0)
    h = module.heads
    assert copy.deepcopy(module).heads == h == Heads(WIDTH, h.query, h.kv, h.dim)


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@every_option
def test_module_on_meta_can_be_materialised(options, assign):
    """Built without memory, then filled from a state_dict."""
    module, x = made(**options), tokens()
    module_on_meta = MultiHeadAttention(WIDTH, **{"num_heads": 4, **options}, device="meta", dtype=torch.float64)
    empty = module_on_meta if assign else module_on_meta.to_empty(device="cpu")
    for held in (*empty.parameters(), *empty.buffers()):
        if not assign:
            held.data.fill_(17.0)  # what to_empty leaves is anything
    empty.load_state_dict(module.state_dict(), assign=assign)
    close(empty.eval()(x, causal=True), module(x, causal=True), 0)


@every_option
def test_module_on_meta_gives_shapes(options):
    module = MultiHeadAttention(WIDTH, **{"num_heads": 4, **options}, device="meta")
    out, a = module(torch.empty(BATCH, TOKENS, WIDTH, device="meta"), causal=True, need_weights=True)
    assert out.device.type == a.device.type == "meta"
    assert (out.shape, a.shape) == ((BATCH, TOKENS, WIDTH), (BATCH, module.heads.query, TOKENS, TOKENS))


def test_reset_parameters_initialises_like_a_new_module():
    """Also where memory held anything before, as after to_empty."""
    module = MultiHeadAttention(WIDTH, 4, qk_norm="layer", sinks=True, position=Alibi(), device="meta")
    module = module.to_empty(device="cpu")
    for held in (*module.parameters(), *module.buffers()):
        held.data.fill_(17.0)
    torch.manual_seed(1)
    module.reset_parameters()
    torch.manual_seed(1)
    fresh = MultiHeadAttention(WIDTH, 4, qk_norm="layer", sinks=True, position=Alibi())
    fresh.reset_parameters()
    torch.manual_seed(1)
    fresh.reset_parameters()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    close(module(x), fresh(x), 0)


def test_load_state_dict_is_strict():
    module = made()
    state = module.state_dict()
    with pytest.raises(RuntimeError, match="Missing key.*W_O.bias"):
        made().load_state_dict({name: x for name, x in state.items() if name != "W_O.bias"})
    with pytest.raises(RuntimeError, match="Unexpected key.*sinks"):
        made().load_state_dict({**state, "sinks": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="size mismatch for W_K.weight"):
        made(num_kv_heads=2).load_state_dict(state)


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(base=50.0, interleaved=True), Rotary(dim=2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rotary_module_equals_rotated_queries_and_keys(rotary, kv_heads):
    module, x = made(num_kv_heads=kv_heads, head_dim=6, position=rotary), tokens()
    places = torch.tensor([0, 1, 2, 5, 9, 4, 30])
    each = torch.stack([places, places + 3, torch.arange(TOKENS)])  # (B, T)
    for positions in (None, places, each):
        at = torch.arange(TOKENS) if positions is None else positions
        want, a = by_hand(module, x, turn=lambda y, at=at: rotary(y, at), causal=True)
        close(module(x, causal=True, positions=positions), want)
        close(module.weights(x, causal=True, positions=positions), a)
    moved = module.weights(x, positions=places + 1000)
    close(moved, module.weights(x, positions=places), 1e-4)  # angles are fp32
    assert (moved - module.weights(x, positions=2 * places)).abs().max() > 0.01
    assert (moved - module.weights(x)).abs().max() > 0.01


def test_rotary_cross_attention_counts_key_positions_from_zero():
    """Queries and keys each count from 0."""
    module, x, memory = made(position=Rotary(base=50.0), head_dim=6), tokens(), tokens(count=KEYS)
    q, k, v = (torch.from_numpy(y.copy()) for y in spec(module).project(plain(x), plain(memory)))
    q, k = module.position(q, torch.arange(TOKENS)), module.position(k, torch.arange(KEYS))
    close(module(x, memory), spec(module).join(reference.attend(plain(q), plain(k), plain(v))))
    q = module.position(torch.from_numpy(spec(module).project(plain(x))[0].copy()), torch.arange(TOKENS) + 5)
    want = spec(module).join(reference.attend(plain(q), plain(k), plain(v)))
    close(module(x, memory, positions=torch.arange(TOKENS) + 5), want)


@pytest.mark.parametrize("slopes", [None, (0.5, 0.1, 0.0, 2.0, 0.3, 1.0)])
@pytest.mark.parametrize(
    "call_options", [{}, {"causal": True}, {"window": (2, 1)}, {"lengths": torch.tensor([7, 2, 5])}]
)
def test_alibi_module_equals_a_float_mask(slopes, call_options):
    alibi = Alibi(slopes)
    module, x = made(30, 6, num_kv_heads=3, position=alibi), tokens(width=30)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    bias = -torch.tensor(alibi.for_heads(6), dtype=torch.float64)[:, None, None] * (i - j).abs()
    want, a = by_hand(module, x, mask=bias, **call_options)
    close(module(x, **call_options), want)
    close(module.weights(x, **call_options), a)
    close(module.weights(x, heads=[4, 1], rows=[5], **call_options), a[:, [4, 1]][:, :, [5]])
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.4
    want, _ = by_hand(module, x, mask=torch.where(hidden, bias, -torch.inf), **call_options)
    close(module(x, mask=hidden, **call_options), want)
    extra = tokens(TOKENS, TOKENS, 1)[..., 0]
    close(module(x, mask=extra, **call_options), by_hand(module, x, mask=bias + extra, **call_options)[0])


def test_alibi_bias_is_not_rounded_to_the_input_dtype():
    """The slopes are numbers of the position, not weights: a cast of the module leaves them exact."""
    module = MultiHeadAttention(24, 6, position=Alibi()).bfloat16()
    far = torch.arange(2001) < 30  # only keys 1970 to 2000 tokens away may be seen
    x = torch.zeros(1, 2001, 24, dtype=torch.bfloat16)
    i = torch.arange(30, dtype=torch.float64)
    want = torch.softmax(torch.tensor(Alibi().for_heads(6))[:, None].double() * i, -1)
    got = module.weights(x, mask=far, rows=2000)[0, :, 0, :30]
    close(got.double(), want, 0.01)


@pytest.mark.parametrize(("kind", "formula"), [("rms", rms), ("layer", layer)])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_qk_norm_normalises_queries_and_keys(kind, formula, eps):
    module, x = made(num_kv_heads=2, head_dim=7, qk_norm=kind), tokens()
    assert module.q_norm.eps == module.k_norm.eps == 1e-6
    module.q_norm.eps = module.k_norm.eps = eps
    close(module(x, causal=True), by_hand(module, x, norm=formula, causal=True)[0])
    module = made(num_kv_heads=2, head_dim=6, qk_norm=kind, position=Rotary(base=9.0))
    turned = by_hand(module, x, norm=formula, turn=lambda y: module.position(y, torch.arange(TOKENS)))
    close(module(x), turned[0])  # normed, then turned


@pytest.mark.parametrize("options", [{"softcap": 0.7}, {"sinks": True}, {"softcap": 2.0, "sinks": True}])
@pytest.mark.parametrize("call_options", [{}, {"causal": True}, {"mask": torch.eye(TOKENS).bool()}])
def test_module_with_softcap_and_sinks_equals_the_reference(options, call_options):
    module, x = made(num_kv_heads=2, **options), tokens()
    given = {"softcap": options.get("softcap"), "sinks": module.sinks}
    out, a = module(x, **call_options, need_weights=True)
    want, want_a = by_hand(module, x, **given, **call_options)
    close(out, want)
    close(a, want_a)
    total = a.sum(-1)
    assert (total < 1).all() if "sinks" in options else torch.allclose(total, torch.ones_like(total))


def test_module_dropout_applies_in_training_only():
    module, x = made(dropout=0.5), tokens()
    want, a = by_hand(module, x, causal=True)
    close(module(x, causal=True), want)
    module.train()
    one, seen = module(x, causal=True, need_weights=True)
    two = module(x, causal=True)
    assert (one - two).abs().max() > 0.01
    close(seen, a)  # the weights are those before dropout
    close(module.weights(x, causal=True), a)
    runs = torch.stack([module(x, causal=True) for _ in range(400)]).detach()
    away = (runs.mean(0) - torch.as_tensor(want)) / (runs.std(0) / 400**0.5 + 1e-9)  # in standard errors
    assert away.abs().max() < 6
    assert (runs.std(0) > 0.01).all()
    module.dropout = 1.0
    close(module(x), module.W_O.bias.expand(BATCH, TOKENS, -1))
    stats, quiet = module.stats(x), module.eval().stats(x)
    assert stats == quiet


@pytest.mark.parametrize("rows", [None, 2, [5, 0], slice(1, 6, 2), -1])
@pytest.mark.parametrize("heads", [None, 3, [2, 0], slice(1, None), -2])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "sinks": True}, {"position": Rotary(), "head_dim": 4}])
def test_module_weights_of_selected_rows_and_heads(rows, heads, options):
    module, x = made(**options), tokens()
    call_options = {"mask": torch.rand(BATCH, 4, TOKENS, TOKENS) > 0.3, "window": (3, 2)}
    _, whole = module(x, **call_options, need_weights=True)
    pick = [[n] if isinstance(n, int) else slice(None) if n is None else n for n in (heads, rows)]
    close(module.weights(x, rows=rows, heads=heads, **call_options), whole[:, pick[0]][:, :, pick[1]])


def test_module_weights_do_not_project_values():
    module = made(kdim=5, vdim=3)
    x, key, value = tokens(), tokens(count=KEYS, width=5), tokens(count=KEYS, width=3)
    _, a = module(x, key, value, need_weights=True)
    close(module.weights(x, key), a)


@pytest.mark.parametrize(
    ("name", "cross"),
    [(name, cross) for name in OPTIONS for cross in (False, True) if (name, cross) != ("alibi", True)],
)
def test_module_stats_equal_those_of_its_weights(name, cross):
    options = OPTIONS[name]
    module, x = made(**options), tokens()
    inputs = (x, tokens(count=KEYS)) if cross else (x,)
    keys = inputs[-1].shape[1]
    classes = {"some": torch.rand(BATCH, keys) > 0.5}
    queries = torch.rand(BATCH, TOKENS) > 0.3
    call_options = {"lengths": torch.tensor([keys, 2, 5])} if cross else {"causal": True, "window": (4, None)}
    got = module.stats(*inputs, queries=queries, classes=classes, **call_options)
    near = set() if cross else {"distance", "previous", "next", "self"}
    sink = {"sink"} if options.get("sinks") else set()
    assert set(got.names) == {"entropy", "confidence", "first", "share:some", "lse", "max_logit"} | near | sink
    a = plain(module.weights(*inputs, **call_options))
    real = plain(queries)[:, None] & (a.sum(-1) > 0)
    entropy = -np.where(a > 0, a * np.log(np.where(a > 0, a, 1)), 0).sum(-1)
    close(got.entropy, (entropy * real).sum((0, 2)) / real.sum((0, 2)))
    close(
        got.share("some"), ((a * plain(classes["some"])[:, None, None]).sum(-1) * real).sum((0, 2)) / real.sum((0, 2))
    )
    close(got.per_sequence("confidence"), (a.max(-1) * real).sum(-1) / real.sum(-1))
    if not cross:
        away = abs(np.arange(TOKENS) - np.arange(TOKENS)[:, None])
        close(got.distance, ((a * away).sum(-1) * real).sum((0, 2)) / real.sum((0, 2)))
    else:
        with pytest.raises(AttributeError, match="no statistic 'distance' here; there are entropy, "):
            _ = got.distance


@pytest.mark.parametrize("cross", [False, True])
def test_module_stats_equal_head_stats_of_its_projections(cross):
    module, x = made(num_kv_heads=2, softcap=2.0, sinks=True), tokens()
    inputs = (x, tokens(count=KEYS)) if cross else (x,)
    q, k, v = (torch.from_numpy(y.copy()) for y in spec(module).project(*map(plain, inputs)))
    call_options = {"causal": not cross, "lengths": torch.tensor([7, 2, 5])}
    call_options["received"] = True
    out, want = head_stats(q, k, v, cross=cross, softcap=2.0, sinks=module.sinks.detach(), **call_options)
    got = module.stats(*inputs, **call_options)
    assert got.names == want.names
    for name in got.names:
        close(got[name], want[name])
    close(got.received, want.received)
    assert call_options.pop("received")
    assert not any(x.requires_grad for x in got.sums.values())
    close(module(*inputs, **call_options), spec(module).join(plain(out)))


def test_module_output_for_a_query_with_no_visible_keys_is_the_output_bias():
    """Its output is W_O's bias, its weights are zeros, and no gradient is NaN, in training and in eval."""
    module, x = made(num_kv_heads=2, dropout=0.1), tokens().requires_grad_()
    mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[1, :, 4] = False
    for training in (True, False):
        out, a = module.train(training)(x, mask=mask, need_weights=True)
        close(out[1, 4], module.W_O.bias)
        close(a[1, :, 4], torch.zeros(4, TOKENS))
        grads = torch.autograd.grad(out.sum() + a.square().sum(), [x, *module.parameters()])
        assert all(g.isfinite().all() for g in grads)


@every_option
def test_gradients_reach_every_parameter(options):
    module, x = made(**options).train(), tokens().requires_grad_()
    gates = torch.ones(module.heads.query, dtype=torch.float64, requires_grad=True)
    (module(x, causal=True, gates=gates) ** 2).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if name not in ("W_K.bias", "k_norm.bias"):  # they may move all scores of a row alike
            assert parameter.grad.abs().max() > 1e-9, name
    assert (x.grad.abs().sum(-1) > 0).all() and (gates.grad != 0).all()


def test_module_passes_gradcheck():
    module = made(6, 3, num_kv_heads=1, head_dim=2, softcap=2.0, sinks=True, qk_norm="rms", position=Rotary())
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x, *values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(module, given, (x,), {"causal": True, "window": (2, 0)})

    x = tokens(2, 5, 6).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *parameters), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@every_option
def test_module_under_autocast(options, training, dtype):
    module, x = made(**options, dtype=torch.float32).train(training), tokens().float()
    with torch.autocast("cpu", dtype):
        out, a = module(x, causal=True, need_weights=True)
        stats = module.stats(x, causal=True)
    assert out.dtype == dtype
    want, want_a = module(x, causal=True, need_weights=True)
    close(out.float(), want, 0.2 if dtype is torch.bfloat16 else 0.03)
    close(a.float(), want_a, 0.05 if dtype is torch.bfloat16 else 0.01)
    close(stats.entropy, module.stats(x, causal=True).entropy, 0.05)
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


def test_module_in_inference_mode_and_frozen():
    module, x = made(position=Rotary(), head_dim=4), tokens()
    with torch.inference_mode():
        quiet = module(x, causal=True)
    assert quiet.is_inference()
    close(quiet.clone(), module(x, causal=True))
    out = module.requires_grad_(False)(x.requires_grad_())
    assert out.requires_grad
    out.sum().backward()  # what inference mode kept of the rotation serves gradients too
    assert x.grad.isfinite().all()


def test_tensors_of_a_transform_do_not_enter_caches():
    module, x = made(position=Rotary(base=1234.5), head_dim=4).requires_grad_(False), tokens()

    def gradient(x):
        return torch.func.grad(lambda y: module(y).sin().sum())(x)

    torch.func.grad(lambda y: gradient(y).sum())(x)  # the first call with these positions
    at = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(module(at).sin().sum(), at)
    close(gradient(x), want)


def test_fake_tensors_do_not_enter_caches():
    """Tools that run a model without numbers must not change what it does afterwards."""
    module, x = made(position=Rotary(base=31.0), head_dim=4), tokens()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        module(fake.from_tensor(x), causal=True)
    out = module(x, causal=True)
    assert type(out) is torch.Tensor
    same = Rotary(base=31.0, scaling={"rope_type": "linear", "factor": 1.0})
    close(out, by_hand(module, x, turn=lambda y: same(y, torch.arange(TOKENS)), causal=True)[0])


@pytest.fixture
def _fresh_compiler():
    """Recompilations of other tests do not count."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("call_options", [{"causal": True}, {"window": (3, 1), "lengths": torch.tensor([7, 2, 5])}])
@pytest.mark.parametrize("name", ["plain", "grouped", "alibi", "all of it"])
def test_compiled_module_equals_eager(name, call_options):
    module = made(**OPTIONS[name])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for count in (TOKENS, 13):
        x = tokens(count=count).requires_grad_()
        out, want = compiled(x, **call_options), module(x, **call_options)
        close(out, want)
        close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, want)))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["plain", "all of it"])
def test_a_module_compiled_with_dynamic_shapes_equals_eager(name):
    module = made(**OPTIONS[name])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (TOKENS, 13):
        x = tokens(count=count)
        close(compiled(x, causal=True), module(x, causal=True))


@pytest.mark.usefixtures("_fresh_compiler")
def test_numbers_are_symbols_in_graphs_with_dynamic_shapes():
    q, k = (torch.randn(2, heads, 7, 8, dtype=torch.float64) for heads in (4, 2))

    def attended(q, k, scale, softcap, window, keep_first):
        options = {"scale": scale, "softcap": softcap, "window": (window, 0), "keep_first": keep_first}
        return attend(q, k, k, **options)

    compiled = torch.compile(attended, fullgraph=True, dynamic=True, backend="aot_eager")
    for numbers in ((0.3, 5.0, 3, 1), (-0.7, 2.5, 1, 2)):
        close(compiled(q, k, *numbers), attended(q, k, *numbers))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_cross_attention_returns_weights():
    module, x, memory = made(num_kv_heads=2, kdim=5, vdim=5), tokens(), tokens(count=KEYS, width=5)
    mask = torch.rand(BATCH, 1, 1, KEYS) > 0.3
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        compiled(x, memory, mask=mask, need_weights=True), module(x, memory, mask=mask, need_weights=True), strict=True
    ):
        close(got, want)


@pytest.mark.parametrize("name", ["plain", "grouped", "alibi", "all of it"])
def test_export_with_any_number_of_tokens(name):
    module = made(**OPTIONS[name], dtype=torch.float32)
    count = torch.export.Dim("tokens", min=2, max=512)
    shapes = {"query": {1: count}, "causal": None}
    program = torch.export.export(
        module, (torch.randn(2, 9, WIDTH),), {"causal": True}, dynamic_shapes=shapes, strict=False
    )
    for other in (2, 9, 31, 300):
        x = torch.randn(2, other, WIDTH)
        close(program.module()(x, causal=True), module(x, causal=True), 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2, "position": Rotary()},
        {"position": Alibi(), "softcap": 5.0},
        {"qk_norm": "rms", "sinks": True, "dropout": 0.1},
    ],
)
def test_module_learns_a_small_task(options):
    """Every token must find the one token that is marked and tell its value: 20 steps make it better."""
    attention = MultiHeadAttention(16, 4, **options)
    readout = nn.Linear(16, 5)
    optimizer = torch.optim.Adam([*attention.parameters(), *readout.parameters()], lr=0.03)
    losses = []
    for _ in range(20):
        values, marked = torch.randint(0, 5, (32, 9)), torch.randint(0, 9, (32,))
        x = F.pad(F.one_hot(values, 5).float(), (0, 11))
        x[torch.arange(32), marked, 15] = 3.0
        y = values[torch.arange(32), marked][:, None].expand(-1, 9)
        loss = F.cross_entropy(readout(attention(x)).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def test_a_new_module_has_glorot_weights_and_zero_biases():
    """Glorot's weights, zero biases; the repr says what kind it is."""
    module = MultiHeadAttention(64, 8, 2, sinks=True)
    bound = (6 / (64 + 64)) ** 0.5
    assert module.training
    assert 0.9 * bound < module.W_Q.weight.abs().max() <= bound
    assert all((linear.bias == 0).all() for linear in (module.W_Q, module.W_K, module.W_V, module.W_O))
    assert (module.sinks == 0).all()
    assert "GQA: d_model=64, 8 query and 2 key/value heads of 8" in repr(module) and "position" not in repr(module)
    rotary = MultiHeadAttention(64, 8, position=Rotary(base=500.0), softcap=3.0)
    assert "heads of 8, position=Rotary(base=500.0, dim=None, interleaved=False, scaling=None), softcap=3.0" in repr(
        rotary
    )
    assert module.head_numbers == tuple(range(8))


def test_projections_may_be_replaced_by_other_layers():
    """W_Q, W_K, W_V and W_O may be replaced, say by layers that keep 8-bit weights, as quantization does."""

    class Rounded(nn.Module):
        def __init__(self, given: nn.Linear):
            super().__init__()
            self.in_features, self.out_features, self.scale = given.in_features, given.out_features, 1 / 64
            self.weight = nn.Parameter((given.weight / self.scale).round().to(torch.int8), requires_grad=False)
            self.bias = given.bias

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)

    module, x = made(num_kv_heads=2), tokens()
    rounded = copy.deepcopy(module)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        setattr(rounded, name, Rounded(getattr(module, name)))
        getattr(module, name).weight.data = getattr(rounded, name).weight.double() / 64
    close(rounded(x, causal=True), module(x, causal=True))


def test_projections_may_be_sequences_of_layers():
    module, x = made(num_kv_heads=2), tokens()
    want = module(x, causal=True), module.weights(x, causal=True)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        setattr(module, name, nn.Sequential(getattr(module, name), nn.Identity()))
    close(module(x, causal=True), want[0])
    close(module.weights(x, causal=True), want[1])
    with pytest.raises(ShapeError, match="query must be"):
        module(x[..., 1:])


def test_module_takes_empty_inputs():
    module = made(num_kv_heads=2)
    out, a = module(tokens(count=0), need_weights=True)
    assert (out.shape, a.shape) == ((BATCH, 0, WIDTH), (BATCH, 4, 0, 0))
    assert module(tokens(batch=0)).shape == (0, TOKENS, WIDTH)
    out, a = module(tokens(), tokens(count=0), need_weights=True)
    assert a.shape == (BATCH, 4, TOKENS, 0)
    close(out, module.W_O.bias.expand(BATCH, TOKENS, -1))


def test_head_dim_need_not_divide_the_width():
    with pytest.raises(ShapeError, match="10 heads do not divide d_model 768 .* 8, 12 and 16 do, or give head_dim"):
        MultiHeadAttention(768, 10)
    module = MultiHeadAttention(768, 10, head_dim=64, device="meta")
    assert module.heads == Heads(768, 10, 10, 64)
    assert module.W_O.weight.shape == (768, 640)


X = torch.zeros(BATCH, TOKENS, WIDTH)
MEMORY = torch.zeros(BATCH, KEYS, WIDTH)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ShapeError, {"num_heads": 3}, "3 heads do not divide d_model 20"),
        (ShapeError, {"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        (ShapeError, {"num_kv_heads": 3}, "3 key/value heads do not divide 4 query heads; 2 and 4 would"),
        (ShapeError, {"head_dim": -1}, "dim must be a whole number of at least 1, got -1"),
        (ShapeError, {"kdim": 0}, "kdim must be a whole number of at least 1, got 0"),
        (ShapeError, {"vdim": 2.5}, "vdim must be a whole number of at least 1, got 2.5"),
        (ShapeError, {"dropout": 1.5}, "dropout must lie between 0 and 1, got 1.5"),
        (ShapeError, {"dropout": float("nan")}, "dropout must lie between 0 and 1, got nan"),
        (ShapeError, {"softcap": 0.0}, "softcap must be a number above 0, or None for none, got 0.0"),
        (
            UnsupportedError,
            {"position": "rotary"},
            r"position must be Rotary\(...\), Alibi\(...\) or None, got 'rotary'",
        ),
        (UnsupportedError, {"position": Rotary}, r"position must be Rotary\(...\)"),
        (UnsupportedError, {"qk_norm": "l2"}, "qk_norm must be None, 'layer' or 'rms', got 'l2'"),
        (ShapeError, {"position": Alibi((0.5, 0.25))}, "Alibi has 2 slopes and the layer 4 heads; give one per head"),
        (ShapeError, {"position": Rotary(dim=8)}, "cannot rotate 8 of 5 head dimensions"),
        (ShapeError, {"position": Rotary()}, "cannot rotate 5 of 5 head dimensions"),
    ],
)
def test_invalid_constructor_arguments_are_refused(kind, options, words):
    with pytest.raises(HeadwiseError, match=words) as caught:
        MultiHeadAttention(WIDTH, **{"num_heads": 4, **options})
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "inputs", "call_options", "words"),
    [
        (ShapeError, {}, (X[0],), {}, r"query must be \(B, T, 20\), got \(7, 20\); add a batch axis: query\[None\]"),
        (ShapeError, {}, (X[..., :5],), {}, r"query must be \(B, T, 20\), got \(3, 7, 5\)$"),
        (ShapeError, {}, (X[None],), {}, r"query must be \(B, T, 20\), got \(1, 3, 7, 20\)$"),
        (ShapeError, {"kdim": 5}, (X, X), {}, r"key must be \(B, T, 5\), got \(3, 7, 20\)"),
        (ShapeError, {}, (X, MEMORY[0]), {}, r"key must be .*; add a batch axis: key\[None\]"),
        (ShapeError, {}, (X, MEMORY, MEMORY[..., 0]), {}, r"value must be \(B, T, 20\), got \(3, 11\)"),
        (ShapeError, {}, (X, None, X), {}, "a value was given without its key; give both"),
        (ShapeError, {"kdim": 5}, (X,), {}, "keys of this module are 5 wide and queries 20: give a key"),
        (ShapeError, {"vdim": 5}, (X, MEMORY), {}, "values of this module are 5 wide and keys 20: give a value"),
        (ShapeError, {}, (X, MEMORY, MEMORY[:, :4]), {}, "each key needs a value"),
        (ShapeError, {}, (X, MEMORY[:2]), {}, "query has 3 sequences and key 2"),
        (ShapeError, {}, (X.double(),), {}, "float64.*float32|float32.*float64"),
        (ShapeError, {}, (X, MEMORY.half()), {}, "float16.*float32|float32.*float16"),
        (ShapeError, {}, (X.long(),), {}, "int64"),
        (ShapeError, {}, (X.to("meta"),), {}, "meta"),
        (ShapeError, {}, (X.numpy(),), {}, "query must be .* tensor|tensor.*ndarray"),
        (MaskError, {}, (X,), {"mask": torch.ones(BATCH, TOKENS).bool()}, r"give mask\[:, None, None, :\]"),
        (MaskError, {}, (X,), {"mask": torch.ones(TOKENS, 5).bool()}, r"mask \(7, 5\) does not broadcast to"),
        (MaskError, {}, (X,), {"mask": torch.ones(TOKENS, TOKENS).int()}, "mask must be bool .* got torch.int32"),
        (MaskError, {}, (X,), {"mask": np.ones((TOKENS, TOKENS))}, "mask must be a tensor, got ndarray"),
        (MaskError, {}, (X,), {"window": (-1, 0)}, "window's left side must be .* at least 0, got -1"),
        (MaskError, {}, (X,), {"window": 3}, r"window must be a pair \(left, right\)"),
        (MaskError, {}, (X,), {"lengths": torch.tensor([7, 8, 1])}, "between 0 and the 7 keys there are, got 8"),
        (MaskError, {}, (X,), {"lengths": [7, 2, 1]}, "lengths must be a tensor"),
        (MaskError, {}, (X,), {"lengths": torch.tensor([7, 2])}, "lengths must be 3 whole numbers"),
        (ShapeError, {}, (X,), {"gates": torch.ones(3)}, r"gates must be .* shape \(4,\) or \(3, 4\), got \(3,\)"),
        (ShapeError, {}, (X,), {"gates": [1, 0, 1, 1]}, "gates must be a tensor|gates .* list"),
        (ShapeError, {"position": Rotary(), "head_dim": 4}, (X,), {"positions": torch.arange(5)}, "positions"),
        (ShapeError, {"position": Rotary(), "head_dim": 4}, (X,), {"positions": torch.zeros(2, 7).long()}, "positions"),
        (ShapeError, {"position": Rotary(), "head_dim": 4}, (X,), {"positions": torch.rand(7)}, "positions"),
        (ShapeError, {"position": Rotary(), "head_dim": 4}, (X,), {"positions": [0] * 7}, "positions"),
        (UnsupportedError, {"position": Alibi()}, (X, MEMORY), {}, "Alibi is about distances within one sequence"),
    ],
)
def test_invalid_forward_arguments_are_refused(kind, options, inputs, call_options, words):
    module = MultiHeadAttention(WIDTH, 4, **options)
    with pytest.raises(HeadwiseError, match=words) as caught:
        module(*inputs, **call_options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_module_warns_of_a_float_mask_of_zeros_and_ones():
    with pytest.warns(UserWarning, match="mask of zeros and ones is added to the scores; .* give mask.bool()"):
        made()(tokens(), mask=torch.eye(TOKENS, dtype=torch.float64))
