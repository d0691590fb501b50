"""replace_attention: PyTorch's modules and models give the same outputs, weights and gradients."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import headwise
from headwise import replace_attention, restore_attention
from headwise.attention.nn import torch_encoder, torch_module
from headwise.attention.nn.torch_module import HeadwiseMultiheadAttention
from headwise.errors import MaskError, ShapeError, UnsupportedError
from helpers.known_modules import spread

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 4
F64 = torch.float64
SIDES = {"one width": {}, "three widths": {"kdim": 10, "vdim": 9}}
LAYOUTS = ("batch first", "tokens first", "no batch")
WEIGHTS = {
    "no weights": {"need_weights": False},
    "averaged": {},
    "per head": {"average_attn_weights": False},
}
either = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pair(**options) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """PyTorch's module, and a copy of it that is replaced."""
    theirs = spread(nn.MultiheadAttention(WIDTH, HEADS, dtype=F64, **{"batch_first": True, **options}))
    return theirs, replace_attention(copy.deepcopy(theirs))


def inputs(module: nn.MultiheadAttention, layout: str = "batch first") -> tuple[torch.Tensor, ...]:
    """query, key and value in a layout."""
    sizes = ((QUERIES, WIDTH), (KEYS, module.kdim), (KEYS, module.vdim))
    xs = [torch.randn(BATCH, tokens, width, dtype=F64) for tokens, width in sizes]
    if layout == "no batch":
        return tuple(x[0] for x in xs)
    return tuple(x if layout == "batch first" else x.transpose(0, 1) for x in xs)


def masks(queries: int = QUERIES, keys: int = KEYS, batched: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """Masks in PyTorch's convention, True hides; every query sees the first key."""
    heads = BATCH * HEADS if batched else HEADS
    flat = torch.rand(queries, keys) > 0.6
    per_head = torch.rand(heads, queries, keys) > 0.6
    padding = torch.arange(keys) >= torch.tensor([[keys], [3], [5]])
    flat[:, 0] = per_head[..., 0] = False
    bias, padding_bias = torch.randn(queries, keys, dtype=F64), torch.randn(BATCH, keys, dtype=F64)
    if not batched:
        padding, padding_bias = padding[1], padding_bias[1]
    return {
        "none": {},
        "bool": {"attn_mask": flat},
        "bool per head": {"attn_mask": per_head},
        "float": {"attn_mask": bias},
        "float per head": {"attn_mask": torch.randn(heads, queries, keys, dtype=F64)},
        "padding": {"key_padding_mask": padding},
        "padding of -inf": {"key_padding_mask": torch.zeros(padding.shape, dtype=F64).masked_fill(padding, -torch.inf)},
        "float padding": {"key_padding_mask": padding_bias},
        "both": {"attn_mask": flat, "key_padding_mask": padding},
        "both float": {"attn_mask": bias, "key_padding_mask": padding_bias},
        "float and bool": {"attn_mask": bias, "key_padding_mask": padding},
        "bool and float": {"attn_mask": per_head, "key_padding_mask": padding_bias},
    }


def close(got, want, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def quietly(module, *args, **options):
    """A call without PyTorch's warning about masks of two types."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        return module(*args, **options)


@either("training", [True, False])
@either("layout", LAYOUTS)
@either("appended", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}])
@either("bias", [True, False])
@either("sides", SIDES.values(), ids=SIDES)
def test_outputs_and_weights_equal_pytorchs(sides, bias, appended, layout, training):
    theirs, ours = pair(bias=bias, batch_first=layout != "tokens first", **appended, **sides)
    theirs.train(training), ours.train(training)
    qkv = inputs(theirs, layout)
    for mask, weights in itertools.product(masks(batched=layout != "no batch").values(), WEIGHTS.values()):
        want, want_weights = quietly(theirs, *qkv, **mask, **weights)
        got, got_weights = ours(*qkv, **mask, **weights)
        close(got, want)
        assert (got_weights is None) == (want_weights is None)
        if want_weights is not None:
            close(got_weights, want_weights)


@either("batch_first", [True, False])
@either("grad", [True, False])
@either("one_tensor", ["all", "query and key", "key and value", "none"])
def test_inputs_that_are_one_tensor_share_a_product_and_give_pytorchs_output(one_tensor, grad, batch_first):
    theirs, ours = pair(batch_first=batch_first)
    theirs.eval(), ours.eval()
    a, b, c = (torch.randn(BATCH, BATCH, WIDTH, dtype=F64) for _ in range(3))
    q, k, v = {"all": (a, a, a), "query and key": (a, a, b), "key and value": (a, b, b), "none": (a, b, c)}[one_tensor]
    with torch.set_grad_enabled(grad):
        close(ours(q, k, v, need_weights=False)[0], theirs(q, k, v, need_weights=False)[0])


def test_a_product_too_large_to_fuse_is_computed_in_three(monkeypatch):
    theirs, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    monkeypatch.setattr(torch_module, "FUSED_BYTES", 3 * x.numel() * 8 - 1)
    products = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch_module.F, "linear", lambda x, w, b: products.append(len(w)) or linear(x, w, b))
    got = ours(x, x, x)[0]
    assert products[:3] == [WIDTH] * 3
    close(got, theirs(x, x, x)[0])


@either("weights", WEIGHTS.values(), ids=WEIGHTS)
@either("mask", list(masks()))
def test_gradients_equal_pytorchs(mask, weights):
    theirs, ours = pair(add_bias_kv=True)
    mask = masks()[mask]
    results = []
    xs = inputs(theirs)
    for module in (theirs, ours):
        qkv = [x.clone().requires_grad_() for x in xs]
        out, a = quietly(module, *qkv, **mask, **weights)
        total = out.pow(2).sum() + (0 if a is None else a.pow(3).sum())
        results.append(torch.autograd.grad(total, [*qkv, *module.parameters()]))
    for got, want in zip(results[1], results[0], strict=True):
        close(got, want, 1e-10)


def test_weights_alone_have_a_second_derivative():
    _, ours = pair()
    x = torch.randn(1, 3, WIDTH, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x, x, x)[1], (x,))


@either("batch_first", [True, False])
def test_gradients_reach_a_learned_float_mask(batch_first):
    theirs, ours = pair(batch_first=batch_first)
    qkv = inputs(theirs, "batch first" if batch_first else "tokens first")
    bias = torch.randn(BATCH * HEADS, QUERIES, KEYS, dtype=F64, requires_grad=True)
    for weights in WEIGHTS.values():
        grads = [
            torch.autograd.grad(m(*qkv, attn_mask=bias, **weights)[0].sin().sum(), bias)[0] for m in (theirs, ours)
        ]
        close(grads[1], grads[0])


# ---- is_causal


def causal_mask(queries: int, keys: int, kind: torch.dtype) -> torch.Tensor:
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return hidden if kind == torch.bool else torch.zeros(queries, keys, dtype=kind).masked_fill(hidden, -torch.inf)


@either("kind", [torch.bool, F64])
@either("keys", [QUERIES, KEYS, 3])
@either("padded", [True, False])
@either("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_a_causal_hint_gives_the_output_of_the_causal_mask(weights, padded, keys, kind):
    theirs, ours = pair()
    query, key = torch.randn(BATCH, QUERIES, WIDTH, dtype=F64), torch.randn(BATCH, keys, WIDTH, dtype=F64)
    padding = torch.arange(keys) >= torch.tensor([[keys], [2], [1]]) if padded else None
    options = {"attn_mask": causal_mask(QUERIES, keys, kind), "key_padding_mask": padding, **weights}
    want, got = quietly(theirs, query, key, key, **options), ours(query, key, key, is_causal=True, **options)
    close(got[0], want[0])
    assert got[1] is None or (got[1] - want[1]).abs().max() < 1e-12


@either("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_a_wrong_causal_hint_does_not_override_the_mask_where_pytorch_reads_it(weights):
    theirs, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    cases = [{"attn_mask": masks(KEYS)["float"]["attn_mask"], **masks(KEYS)["padding"]}]
    if weights.get("need_weights", True):
        cases.append(masks(KEYS)["bool"])
    for mask in cases:
        options = {**mask, **weights, "is_causal": True}
        close(ours(x, x, x, **options)[0], quietly(theirs, x, x, x, **options)[0])


@either("kind", [torch.bool, F64])
def test_a_causal_mask_is_recognised_without_a_hint_and_any_other_is_not(kind, monkeypatch):
    theirs, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    mask = causal_mask(KEYS, KEYS, kind)
    calls = []
    attend = torch_module.functional.attend_side_by_side
    monkeypatch.setattr(
        torch_module.functional, "attend_side_by_side", lambda *xs, **o: calls.append(o["causal"]) or attend(*xs, **o)
    )
    close(ours(x, x, x, attn_mask=mask, need_weights=False)[0], theirs(x, x, x, attn_mask=mask)[0])
    assert calls == [True]
    for place in ((3, 5), (3, 2)):
        other = mask.clone()
        other[place] = (not other[place]) if kind == torch.bool else 0.25
        close(ours(x, x, x, attn_mask=other, need_weights=False)[0], theirs(x, x, x, attn_mask=other)[0])
    assert calls == [True]


def test_a_causal_mask_is_recognised_whatever_the_default_device_is():
    theirs, ours = pair(batch_first=True)
    x, mask = torch.randn(BATCH, 5, WIDTH, dtype=F64), torch.ones(5, 5, dtype=torch.bool).triu(1)
    want = theirs(x, x, x, attn_mask=mask)[0]
    with torch.device("meta"):
        got = ours(x, x, x, attn_mask=mask)[0]
    close(got, want, 1e-10)


def test_a_causal_hint_shows_appended_keys_to_all_queries_as_the_mask_does():
    theirs, ours = pair(add_bias_kv=True)
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    options = {"attn_mask": causal_mask(KEYS, KEYS, torch.bool), "is_causal": True}
    close(ours(x, x, x, need_weights=False, **options)[0], theirs(x, x, x, **options)[0])


def test_a_causal_hint_without_a_mask_is_refused():
    _, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    with pytest.raises(MaskError, match="is_causal=True is a hint about attn_mask, got none"):
        ours(x, x, x, is_causal=True)


# ---- fully masked rows, NaN, dropout


@either("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_a_query_with_no_visible_keys_gets_zeros_before_the_output_projection(weights):
    theirs, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64, requires_grad=True)
    hidden = torch.zeros(KEYS, KEYS, dtype=torch.bool)
    hidden[2] = True
    out, a = ours(x, x, x, attn_mask=hidden, **weights)
    close(out[:, 2], theirs.out_proj.bias.expand(BATCH, -1))
    assert a is None or not a[..., 2, :].any()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
    rest = [i for i in range(KEYS) if i != 2]
    close(out[:, rest], theirs(x, x, x, attn_mask=hidden)[0][:, rest])


@either("weights", WEIGHTS.values(), ids=WEIGHTS)
@either("grad", [True, False])
def test_nan_in_padding_reaches_no_real_query(grad, weights):
    _, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    padding = masks()["padding"]["key_padding_mask"]
    zeros, nans = (x.masked_fill(padding[..., None], fill) for fill in (0.0, torch.nan))
    real = ~padding
    with torch.set_grad_enabled(grad):
        want, want_weights = ours(zeros, zeros, zeros, key_padding_mask=padding, **weights)
        got, got_weights = ours(nans, nans, nans, key_padding_mask=padding, **weights)
    close(got[real], want[real])
    if want_weights is not None:
        a, b = ((w if w.dim() == 4 else w[:, None]).transpose(1, 2)[real] for w in (got_weights, want_weights))
        close(a, b)


@either("average", [True, False])
def test_dropout_drops_the_returned_weights_as_pytorch_does(average):
    theirs, ours = pair(dropout=0.4)
    results = []
    qkv = inputs(theirs)
    for module in (theirs, ours):
        torch.manual_seed(1)
        results.append(module(*qkv, average_attn_weights=average))
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])
    assert (results[0][1] == 0).any() or average
    for module in (theirs, ours):
        module.eval()
    close(ours(*qkv)[0], theirs(*qkv)[0])


def test_dropout_without_weights_keeps_the_mean_and_drops_in_training_alone():
    _, ours = pair(dropout=0.5)
    x = torch.randn(1, KEYS, WIDTH, dtype=F64)
    draws = torch.stack([ours(x, x, x, need_weights=False)[0] for _ in range(2000)])
    expected = ours.eval()(x, x, x, need_weights=False)[0]
    standard_error = draws.std(0) / len(draws) ** 0.5
    assert (standard_error > 0).any()
    assert ((draws.mean(0) - expected).abs() < 6 * standard_error + 1e-12).all()


def test_a_forward_put_on_pytorchs_class_runs_in_its_place(monkeypatch):
    _, ours = pair()
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda self, *args: (self, *args))
    assert ours(x, x, x, need_weights=False) == (ours, x, x, x, None, False, None, True, False)


# ---- errors


def test_inputs_that_do_not_fit_are_refused_in_words():
    _, ours = pair()
    x, wide = torch.randn(BATCH, KEYS, WIDTH, dtype=F64), torch.randn(BATCH, KEYS, WIDTH + 1, dtype=F64)
    for qkv, message in (
        ((x, wide, x), r"key must be \(B, T, 12\), got \(3, 7, 13\)"),
        ((x[0], x, x), r"key must be \(T, 12\), got \(3, 7, 12\)"),
        ((x[None], x, x), r"query must be \(B, T, 12\), got \(1, 3, 7, 12\)"),
        ((x, x, x[:, 1:]), r"key is \(3, 7, 12\) and value \(3, 6, 12\)"),
        ((x, x[1:], x[1:]), "query has 3 sequences and key 2"),
    ):
        with pytest.raises(ShapeError, match=message):
            ours(*qkv)
    for mask, message in (
        ({"attn_mask": torch.zeros(KEYS, KEYS + 1)}, r"attn_mask must be \(7, 7\) or .* \(12, 7, 7\), got \(7, 8\)"),
        ({"attn_mask": torch.zeros(KEYS, KEYS, dtype=torch.int64)}, "attn_mask must be bool .* got torch.int64"),
        ({"key_padding_mask": torch.zeros(BATCH, 1)}, r"key_padding_mask must be \(3, 7\), got \(3, 1\)"),
    ):
        with pytest.raises(MaskError, match=message):
            ours(x, x, x, **mask)


# ---- nn.Transformer*


def encoder(**options) -> nn.TransformerEncoder:
    options = {"dropout": 0.0, "batch_first": True, "dtype": F64, **options}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        return spread(nn.TransformerEncoder(layer, 2))


@either("grad", [True, False])
@either("training", [True, False])
@either("norm_first", [True, False])
@either("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoder_gives_the_same_output_in_every_mode(batch_first, norm_first, training, grad):
    theirs = encoder(batch_first=batch_first, norm_first=norm_first).train(training)
    ours = replace_attention(copy.deepcopy(theirs))
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    x = x if batch_first else x.transpose(0, 1)
    padding = masks()["padding"]["key_padding_mask"]
    causal = causal_mask(KEYS, KEYS, F64)
    with torch.set_grad_enabled(grad):
        for options in (
            {},
            {"src_key_padding_mask": padding},
            {"mask": causal},
            {"mask": causal, "is_causal": True},
            {"mask": causal_mask(KEYS, KEYS, torch.bool), "src_key_padding_mask": padding},
        ):
            close(ours(x, **options), theirs(x, **options))


def count_calls(monkeypatch) -> list[torch.Tensor]:
    """The queries of all calls of our module, as they come."""
    calls: list[torch.Tensor] = []
    forward = HeadwiseMultiheadAttention.forward
    monkeypatch.setattr(
        HeadwiseMultiheadAttention, "forward", lambda self, *xs, **o: calls.append(xs[0]) or forward(self, *xs, **o)
    )
    return calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_in_inference_calls_the_module_instead_of_the_fast_path(monkeypatch):
    ours, calls = replace_attention(encoder().eval()), count_calls(monkeypatch)
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    with torch.no_grad():
        monkeypatch.setattr(torch_encoder, "SHORT", KEYS - 1)
        ours(x)
        assert len(calls) == 2
        ours(x, src_key_padding_mask=masks()["padding"]["key_padding_mask"])
    assert [x.is_nested for x in calls] == [False, False, True, True]


@either("norm_first", [True, False])
def test_short_sequences_without_masks_keep_the_fast_path_and_masked_ones_do_not(norm_first, monkeypatch):
    theirs = encoder(norm_first=norm_first).eval()
    ours, calls = replace_attention(copy.deepcopy(theirs)), count_calls(monkeypatch)
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x)) and not calls
        close(ours(x, mask=causal_mask(KEYS, KEYS, F64)), theirs(x, mask=causal_mask(KEYS, KEYS, F64)))
        assert len(calls) == 2
        all_hidden = torch.ones(KEYS, KEYS, dtype=torch.bool)
        assert ours(x, mask=all_hidden).isfinite().all()
        ours.layers[0].self_attn.out_proj.register_forward_hook(lambda *_: None)
        del calls[:]
        close(ours(x), theirs(x))
    assert len(calls) == 1  # of the layer with a hook, which the fast path would skip
    ours.train()(x)
    assert len(calls) == 3


def test_a_layer_of_the_users_own_calls_the_module_for_short_sequences_too(monkeypatch):
    class Layer(nn.TransformerEncoderLayer):
        pass

    layer = Layer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, dtype=F64).eval()
    twin = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, dtype=F64).eval()
    twin.self_attn = layer.self_attn  # one module in both
    model = replace_attention(nn.Sequential(layer, twin))
    assert type(layer) is Layer and type(twin) is nn.TransformerEncoderLayer
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        model(torch.randn(BATCH, KEYS, WIDTH, dtype=F64))
    assert len(calls) == 2


@either("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_of_an_attention_module_alone_keep_out_of_the_fast_path_until_restored(duplicate):
    layer = encoder().layers[0]
    replace_attention(layer.self_attn)
    twin = duplicate(layer)
    assert type(twin) is nn.TransformerEncoderLayer and len(twin.self_attn._forward_pre_hooks) == 1
    restore_attention(twin)
    assert not twin.self_attn._forward_pre_hooks and type(twin.self_attn) is nn.MultiheadAttention


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_where_they_cannot_be_served():
    _, ours = pair()
    x = torch.nested.nested_tensor([torch.randn(n, WIDTH, dtype=F64) for n in (3, 5)])
    with pytest.raises(UnsupportedError, match="give a padded tensor and a key_padding_mask"):
        ours(x, x, x)  # with weights


@either("batch_first", [True, False])
@either("grad", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_whole_transformer_gives_the_same_output(grad, batch_first):
    theirs = nn.Transformer(WIDTH, HEADS, 1, 2, 2 * WIDTH, 0.0, batch_first=batch_first, dtype=F64)
    spread(theirs).train(grad)
    ours = replace_attention(copy.deepcopy(theirs))
    assert sum(isinstance(m, HeadwiseMultiheadAttention) for m in ours.modules()) == 5
    source, target = (torch.randn(BATCH, n, WIDTH, dtype=F64) for n in (KEYS, QUERIES))
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    options = {
        "tgt_mask": causal_mask(QUERIES, QUERIES, F64),
        "src_key_padding_mask": masks()["padding"]["key_padding_mask"],
        "memory_key_padding_mask": masks()["padding"]["key_padding_mask"],
        "tgt_is_causal": True,
    }
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched|The PyTorch API of nested")
        close(ours(source, target, **options), theirs(source, target, **options))


# ---- the usage patterns of other code


class DetrLayer(nn.Module):
    """Queries and keys with positions, values without; weights are computed and dropped."""

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, src, pos, padding):
        q = k = src + pos
        return self.norm(src + self.self_attn(q, k, value=src, attn_mask=None, key_padding_mask=padding)[0])


class ClipBlock(nn.Module):
    """Tokens first, a causal float mask, no weights."""

    def __init__(self, mask):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.mask = mask

    def forward(self, x):
        return x + self.attn(x, x, x, need_weights=False, attn_mask=self.mask.to(x))[0]


class ClipPool(nn.Module):
    """The module's own parameters given to F.multi_head_attention_forward."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x):
        attn = self.attn
        return torch.nn.functional.multi_head_attention_forward(
            x[:1], x, x, attn.embed_dim, attn.num_heads, attn.in_proj_weight, attn.in_proj_bias, attn.bias_k,
            attn.bias_v, attn.add_zero_attn, 0.0, attn.out_proj.weight, attn.out_proj.bias, training=attn.training,
            use_separate_proj_weight=not attn._qkv_same_embed_dim, need_weights=False,
        )[0]  # fmt: skip


def test_code_like_detrs_and_clips_runs_unchanged():
    x, pos = (torch.randn(KEYS, BATCH, WIDTH, dtype=F64) for _ in range(2))
    padding = masks()["padding"]["key_padding_mask"]
    mask = causal_mask(KEYS, KEYS, F64)
    for theirs, args in ((DetrLayer(), (x, pos, padding)), (ClipBlock(mask), (x,)), (ClipPool(), (x,))):
        ours = replace_attention(copy.deepcopy(spread(theirs.double())))
        close(ours(*args), theirs(*args))


# ---- what stays, and back again


def test_only_the_class_changes_and_restoring_changes_it_back():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attention = model.layers[0].self_attn
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    calls = []
    attention.register_forward_hook(lambda module, args, out: calls.append(module))
    assert replace_attention(model) is model
    assert replace_attention(model) is model  # a second time changes nothing
    assert model.layers[0].self_attn is attention
    assert type(attention) is HeadwiseMultiheadAttention
    assert isinstance(attention, nn.MultiheadAttention)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    before = model(x)
    assert calls == [attention]
    before.sum().backward()
    optimizer.step()
    after = model(x)
    assert not torch.equal(after, before)
    assert restore_attention(model) is model
    assert type(attention) is nn.MultiheadAttention
    assert not attention._forward_pre_hooks
    assert len(attention._forward_hooks) == 1
    close(model(x), after)


def test_shared_modules_stay_shared_and_frozen_parameters_frozen():
    shared = nn.MultiheadAttention(WIDTH, HEADS)
    shared.in_proj_weight.requires_grad_(False)
    model = nn.ModuleDict({"a": nn.ModuleList([shared]), "b": nn.ModuleList([shared])})
    replace_attention(model)
    assert model["a"][0] is model["b"][0] is shared
    assert len(shared._forward_pre_hooks) == 1
    assert not shared.in_proj_weight.requires_grad


def test_state_dicts_load_both_ways():
    theirs, ours = pair(add_bias_kv=True, kdim=10)
    other = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, kdim=10, batch_first=True, dtype=F64)
    other.load_state_dict(ours.state_dict())
    qkv = inputs(theirs)
    close(other(*qkv)[0], ours(*qkv)[0])
    fresh = spread(other)
    ours.load_state_dict(fresh.state_dict())
    close(ours(*qkv)[0], fresh(*qkv)[0])


@either("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_are_replaced_too_and_can_be_restored(duplicate):
    model = replace_attention(encoder().eval())
    twin = duplicate(model)
    assert type(twin.layers[1].self_attn) is HeadwiseMultiheadAttention
    assert type(twin.layers[1]) is torch_encoder.HeadwiseTransformerEncoderLayer
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    close(twin(x), model(x))
    restore_attention(twin)
    assert type(twin.layers[1]) is nn.TransformerEncoderLayer
    assert type(model.layers[1].self_attn) is HeadwiseMultiheadAttention


class OwnAttention(nn.MultiheadAttention):
    """A subclass with code of its own."""


def test_subclasses_quantised_and_patched_modules_are_left_and_named():
    patched = nn.MultiheadAttention(WIDTH, HEADS)
    patched.forward = lambda *args: None
    model = nn.ModuleDict(
        {
            "plain": nn.MultiheadAttention(WIDTH, HEADS),
            "own": OwnAttention(WIDTH, HEADS),
            "quantised": torch.ao.nn.quantizable.MultiheadAttention(WIDTH, HEADS),
            "patched": patched,
        }
    )
    with pytest.warns(UserWarning, match="own is a .*OwnAttention.*quantised is a torch.ao.*patched has a forward"):
        replace_attention(model)
    kinds = [type(m).__name__ for m in model.values()]
    assert kinds == ["HeadwiseMultiheadAttention", "OwnAttention", "MultiheadAttention", "MultiheadAttention"]


def test_a_model_without_replaceable_attention_is_refused():
    with pytest.raises(UnsupportedError, match="Linear has no nn.MultiheadAttention that headwise can replace"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="can replace: the module is a .*OwnAttention"):
        replace_attention(OwnAttention(WIDTH, HEADS))
    with pytest.raises(UnsupportedError, match="replace_attention takes a module, got str"):
        replace_attention("model")


# ---- PyTorch's other features


def test_parametrized_and_pruned_weights_are_read_on_every_call():
    theirs, ours = pair()
    qkv = inputs(theirs)
    for module in (theirs, ours):
        parametrize.register_parametrization(module, "in_proj_weight", nn.Tanh(), unsafe=True)
    close(ours(*qkv)[0], theirs(*qkv)[0])
    with pytest.raises(UnsupportedError, match="has become a ParametrizedHeadwiseMultiheadAttention"):
        restore_attention(ours)
    parametrize.remove_parametrizations(ours, "in_proj_weight")
    restore_attention(ours)
    close(ours(*qkv)[0], theirs(*qkv)[0])

    theirs, ours = pair()
    for module in (theirs, ours):
        prune.l1_unstructured(module, "in_proj_weight", amount=0.5)
    assert (ours.in_proj_weight == 0).any()
    for _ in range(2):
        out = ours(*qkv)[0]
        close(out, theirs(*qkv)[0])
        out.sum().backward()
        with torch.no_grad():
            ours.in_proj_weight_orig -= 0.1 * ours.in_proj_weight_orig.grad
            theirs.in_proj_weight_orig.copy_(ours.in_proj_weight_orig)


@either("kind", [torch.bfloat16, torch.float16])
@either("need_weights", [True, False])
def test_autocast_computes_in_its_dtype(need_weights, kind):
    theirs = nn.MultiheadAttention(64, HEADS, batch_first=True)
    ours = replace_attention(copy.deepcopy(theirs))
    x = torch.randn(BATCH, KEYS, 64)
    with torch.autocast("cpu", kind):
        want, got = theirs(x, x, x, need_weights=need_weights), ours(x, x, x, need_weights=need_weights)
    assert got[0].dtype == want[0].dtype == kind
    exact = theirs(x, x, x)[0]
    assert (got[0] - exact).abs().max() <= 4 * (want[0] - exact).abs().max() + torch.finfo(kind).eps


def test_per_sample_gradients_by_torch_func():
    theirs, ours = pair()
    parameters = {name: p.detach() for name, p in theirs.named_parameters()}
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)

    def loss(module):
        return lambda p, x: torch.func.functional_call(module, p, (x, x, x))[0].pow(2).sum()

    got, want = (torch.func.vmap(torch.func.grad(loss(m)), (None, 0))(parameters, x) for m in (ours, theirs))
    for name in want:
        close(got[name], want[name], 1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_exported_and_traced_programs_serve_other_lengths():
    model = replace_attention(encoder().eval())
    x = torch.randn(2, KEYS, WIDTH, dtype=F64)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: tokens},))
    longer = torch.randn(2, 11, WIDTH, dtype=F64)
    close(program.module()(longer), model(longer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # PyTorch's, about its own encoder
        traced = torch.jit.trace(model, (x,))
    close(traced(longer), model(longer))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_jit_script_is_refused_and_works_after_restoring():
    model = replace_attention(encoder().eval())
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    want = model(x)
    with pytest.raises(UnsupportedError, match=r"call headwise.restore_attention\(model\) first"):
        torch.jit.script(model)
    assert type(model.layers[0].self_attn) is HeadwiseMultiheadAttention
    close(torch.jit.script(restore_attention(model))(x), want)


@either("grad", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_compiles_to_one_graph(grad):
    torch._dynamo.reset()
    theirs = encoder().train(grad)
    ours = torch.compile(replace_attention(copy.deepcopy(theirs)), backend="aot_eager", fullgraph=True)
    padding, causal = masks()["padding"]["key_padding_mask"], causal_mask(KEYS, KEYS, F64)
    x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
    with torch.set_grad_enabled(grad):
        for options in ({}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}):
            # PyTorch zeroes padding in eager inference alone
            real = ~padding if "src_key_padding_mask" in options else slice(None)
            close(ours(x, **options)[real], theirs(x, **options)[real])


@either("need_weights", [True, False])
def test_the_module_alone_compiles_to_one_graph(need_weights):
    torch._dynamo.reset()
    theirs, ours = pair(batch_first=False)
    ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    qkv = inputs(theirs, "tokens first")
    for mask in ("none", "both"):
        options = {"need_weights": need_weights, **masks()[mask]}
        close(ours(*qkv, **options)[0], theirs(*qkv, **options)[0])


def test_distributed_data_parallel_trains_a_model_replaced_before_or_after():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        theirs = encoder()
        before, after = copy.deepcopy(theirs), copy.deepcopy(theirs)
        parallel = [nn.parallel.DistributedDataParallel(replace_attention(before))]
        parallel.append(replace_attention(nn.parallel.DistributedDataParallel(after)))
        x = torch.randn(BATCH, KEYS, WIDTH, dtype=F64)
        theirs(x).sin().sum().backward()
        for model in parallel:
            model(x).sin().sum().backward()
            for got, want in zip(model.parameters(), theirs.parameters(), strict=True):
                close(got.grad, want.grad, 1e-10)
    finally:
        torch.distributed.destroy_process_group()


def test_meta_tensors_have_the_shapes_of_pytorchs_outputs():
    with torch.device("meta"):
        ours = replace_attention(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
        x = torch.randn(BATCH, KEYS, WIDTH)
        out, a = ours(x, x, x)
    assert (out.shape, a.shape) == (x.shape, (BATCH, KEYS, KEYS))


def test_public_names_are_exported():
    assert headwise.replace_attention is replace_attention
    assert headwise.restore_attention is restore_attention
