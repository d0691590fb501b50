"""From and to nn.MultiheadAttention with every option of its constructor, and modules without some of their heads."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from headwise import Alibi, Heads, KVCache, MultiHeadAttention, Rotary, replace_attention
from headwise.errors import HeadwiseError, ShapeError, UnsupportedError
from helpers.known_modules import spread

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 4
SIDES = {"one width": {}, "kdim": {"kdim": 5}, "vdim": {"vdim": 9}, "kdim and vdim": {"kdim": 5, "vdim": 9}}
every_side = pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
either = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def theirs(**options) -> nn.MultiheadAttention:
    options = {"batch_first": True, "dtype": torch.float64, **options}
    return spread(nn.MultiheadAttention(WIDTH, HEADS, **options))


def ours(d_model: int = WIDTH, num_heads: int = HEADS, **options) -> MultiHeadAttention:
    return spread(MultiHeadAttention(d_model, num_heads, **options, dtype=torch.float64))


def inputs(module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(
        torch.randn(BATCH, count, width, dtype=torch.float64)
        for count, width in ((QUERIES, WIDTH), (KEYS, module.kdim), (KEYS, module.vdim))
    )


def close(got, want, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def hidden(dark_rows: bool) -> dict[str, torch.Tensor]:
    """PyTorch's masks: True hides. With dark_rows one sequence is all padding and one query sees nothing."""
    attn_mask = torch.rand(QUERIES, KEYS) > 0.6
    padding = torch.arange(KEYS) >= torch.tensor([[KEYS], [3], [5]])
    attn_mask[:, 0] = False
    if dark_rows:
        padding[1], attn_mask[2] = True, True
    return {"attn_mask": attn_mask, "key_padding_mask": padding}


@either("need_weights", [True, False])
@either("training", [True, False])
@either("batch_first", [True, False])
@either("add_zero_attn", [True, False])
@either("bias", [True, False])
@every_side
def test_from_torch_gives_the_same_output(sides, bias, add_zero_attn, batch_first, training, need_weights):
    given = theirs(bias=bias, add_zero_attn=add_zero_attn, batch_first=batch_first, **sides).train(training)
    mine = MultiHeadAttention.from_torch(given, batch_first=None if batch_first else True)
    assert mine.training == training
    assert mine.heads == Heads.split(WIDTH, HEADS)
    assert (mine.kdim, mine.vdim) == (given.kdim, given.vdim)
    assert (mine.W_Q.bias is None, mine.W_O.bias is None) == (not bias, not bias)
    qkv = inputs(mine)
    for masks in ({}, hidden(dark_rows=add_zero_attn)):
        flipped = [x if batch_first else x.transpose(0, 1) for x in qkv]
        want, want_a = given(*flipped, **masks, need_weights=need_weights)
        want = want if batch_first else want.transpose(0, 1)
        mask = None
        if masks:
            mask = ~masks["attn_mask"] & ~masks["key_padding_mask"][:, None, None, :]
        got = mine(*qkv, mask=mask, need_weights=need_weights)
        if need_weights:
            got, a = got
            close(a.mean(1), want_a[..., :KEYS])  # theirs has a column for the key of zeros
        close(got, want)


@either("kind", ["bool", "float"])
@either("shape", [(QUERIES, KEYS), (BATCH * HEADS, QUERIES, KEYS)])
def test_converted_module_takes_torch_masks_inverted(kind, shape):
    given = theirs(add_zero_attn=len(shape) == 3)
    mine = MultiHeadAttention.from_torch(given)
    attn_mask = torch.rand(shape) > 0.6
    attn_mask[..., 0] = False
    mask = ~attn_mask
    if kind == "float":
        attn_mask = mask = torch.randn(shape, dtype=torch.float64).masked_fill(attn_mask, -torch.inf)
    mask = mask.unflatten(0, (BATCH, HEADS)) if len(shape) == 3 else mask
    qkv = inputs(mine)
    want, want_a = given(*qkv, attn_mask=attn_mask, average_attn_weights=False)
    got, a = mine(*qkv, mask=mask, need_weights=True)
    close(got, want)
    close(a, want_a[..., :KEYS])


def test_converted_causal_self_attention_equals_torch():
    given = theirs()
    mine = MultiHeadAttention.from_torch(given)
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    triangle = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    close(mine(x, causal=True), given(x, x, x, attn_mask=triangle, is_causal=True, need_weights=False)[0])


@every_side
@either("add_zero_attn", [True, False])
def test_converted_module_has_the_gradients_of_torch(sides, add_zero_attn):
    given = theirs(add_zero_attn=add_zero_attn, **sides)
    mine = MultiHeadAttention.from_torch(given)
    qkv = inputs(mine)
    given(*qkv)[0].square().sum().backward()
    mine(*qkv).square().sum().backward()
    packed = given.in_proj_weight
    weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    want = [w.grad for w in weights] if packed is None else packed.grad.chunk(3)
    for linear, weight, bias in zip(
        (mine.W_Q, mine.W_K, mine.W_V), want, given.in_proj_bias.grad.chunk(3), strict=True
    ):
        close(linear.weight.grad, weight)
        close(linear.bias.grad, bias)
    close(mine.W_O.weight.grad, given.out_proj.weight.grad)
    assert mine.sinks is None or mine.sinks.grad is None  # a key of zeros does not learn


def test_from_torch_refuses_batch_first_false_unless_confirmed():
    given = theirs(batch_first=False)
    with pytest.raises(UnsupportedError, match=r"takes \(T, B, d_model\), .*: transpose .*replace_attention"):
        MultiHeadAttention.from_torch(given)
    with pytest.raises(UnsupportedError, match="transpose the inputs"):
        MultiHeadAttention.from_torch(given, batch_first=False)
    with pytest.raises(UnsupportedError, match="got batch_first=False; leave it out"):
        MultiHeadAttention.from_torch(theirs(), batch_first=False)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    mine = MultiHeadAttention.from_torch(given.eval(), batch_first=True)
    close(mine(x), given(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1))


@either("p", [0.0, 0.25, 1.0])
def test_conversion_preserves_dropout(p):
    mine = MultiHeadAttention.from_torch(theirs(dropout=p))
    assert mine.dropout == p
    assert mine.to_torch().dropout == p
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    same = torch.allclose(mine.train()(x), mine.eval()(x))
    assert same == (p == 0)


@either("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_conversion_preserves_dtype(dtype):
    mine = MultiHeadAttention.from_torch(theirs(dtype=dtype, add_zero_attn=True))
    assert {p.dtype for p in mine.parameters()} == {dtype}
    assert {p.dtype for p in mine.to_torch().parameters()} == {dtype}


@every_side
def test_conversion_preserves_device(sides):
    mine = MultiHeadAttention.from_torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device="meta", **sides))
    assert {p.device.type for p in mine.parameters()} == {"meta"}
    assert {p.device.type for p in mine.to_torch().parameters()} == {"meta"}


PACKED = {
    "in_proj_weight": {"W_Q.weight", "W_K.weight", "W_V.weight"},
    "in_proj_bias": {"W_Q.bias", "W_K.bias", "W_V.bias"},
    "out_proj.weight": {"W_O.weight"},
    "out_proj.bias": {"W_O.bias"},
}
APART = {"q_proj_weight": {"W_Q.weight"}, "k_proj_weight": {"W_K.weight"}, "v_proj_weight": {"W_V.weight"}}


@either(
    ("sides", "frozen", "names"),
    [*(({}, *pair) for pair in PACKED.items()), *(({"kdim": 5}, *pair) for pair in APART.items())],
)
def test_conversion_preserves_frozen_parameters(sides, frozen, names):
    given = theirs(**sides)
    given.get_parameter(frozen).requires_grad_(False)
    mine = MultiHeadAttention.from_torch(given)
    assert {name for name, p in mine.named_parameters() if not p.requires_grad} == names
    back = mine.to_torch()
    assert {name for name, p in back.named_parameters() if not p.requires_grad} == {frozen}


@either("training", [True, False])
@every_side
@either("options", [{}, {"bias": False}, {"out_bias": False}, {"bias": False, "out_bias": True}])
@either("kv_heads", [4, 2, 1])
def test_to_torch_gives_the_same_output(kv_heads, options, sides, training):
    """Grouped KV heads are written out, and a bias that is missing becomes zeros where another is there."""
    mine = ours(num_kv_heads=kv_heads, **options, **sides).train(training)
    given = mine.to_torch()
    assert type(given) is nn.MultiheadAttention
    assert given.batch_first and given.training == training
    assert (given.in_proj_bias is None) == (options == {"bias": False})
    qkv, masks = inputs(mine), hidden(dark_rows=False)
    mask = ~masks["attn_mask"] & ~masks["key_padding_mask"][:, None, None, :]
    want, want_a = given(*qkv, **masks, average_attn_weights=False)
    got, a = mine(*qkv, mask=mask, need_weights=True)
    close(got, want)
    close(a, want_a)


@every_side
@either("bias", [True, False])
@either("add_zero_attn", [True, False])
def test_conversion_to_torch_and_back_is_exact(sides, bias, add_zero_attn):
    given = theirs(bias=bias, add_zero_attn=add_zero_attn, dropout=0.2, **sides).eval()
    back = MultiHeadAttention.from_torch(given).to_torch()
    assert repr(back) == repr(given)
    assert (back.add_zero_attn, back.dropout, back.training) == (add_zero_attn, 0.2, False)
    assert back.state_dict().keys() == given.state_dict().keys()
    for name, value in given.state_dict().items():
        close(back.state_dict()[name], value, 0)
    mine = ours(bias=bias, **sides)
    again = MultiHeadAttention.from_torch(mine.to_torch())
    assert again.state_dict().keys() == mine.state_dict().keys()
    for name, value in mine.state_dict().items():
        close(again.state_dict()[name], value, 0)


def test_converted_module_shares_no_memory():
    given = theirs()
    before = copy.deepcopy(given.state_dict())
    mine = MultiHeadAttention.from_torch(given)
    spread(mine)
    spread(mine.to_torch())
    for name, value in given.state_dict().items():
        close(value, before[name], 0)


def test_from_torch_of_a_subclass_gives_the_subclass():
    class Mine(MultiHeadAttention):
        pass

    assert type(Mine.from_torch(theirs())) is Mine
    assert type(Mine(WIDTH, HEADS).prune_heads([0])) is Mine


class DoubledValues(nn.MultiheadAttention):
    """A subclass whose output is not PyTorch's."""

    def forward(self, query, key, value, **options):
        return super().forward(query, key, 2 * value, **options)


def with_own_forward():
    """A module with a forward that somebody set on it alone."""
    module = theirs()
    module.forward = module.forward
    return module


def quantized():
    """A module whose projections are PyTorch's 8-bit ones."""
    quantize = torch.ao.quantization.quantize_dynamic
    return quantize(MultiHeadAttention(WIDTH, HEADS, dtype=torch.float32), {nn.Linear}, dtype=torch.qint8)


def with_sequence():
    """A module whose W_O is a sequence of layers."""
    module = ours()
    module.W_O = nn.Sequential(module.W_O, nn.Dropout())
    return module


@pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization is|are) deprecated")
@either(
    ("make", "words"),
    [
        (
            lambda: MultiHeadAttention.from_torch(DoubledValues(WIDTH, HEADS, batch_first=True)),
            "has a forward of its own",
        ),
        (
            lambda: MultiHeadAttention.from_torch(
                torch.ao.nn.quantizable.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            ),
            "has a forward of its own, which from_torch would lose; load its weights into an nn.MultiheadAttention",
        ),
        (lambda: MultiHeadAttention.from_torch(with_own_forward()), "has a forward of its own"),
        (
            lambda: quantized().prune_heads([0]),
            "prune_heads reads the weights of nn.Linear layers, and W_Q is a torch.ao",
        ),
        (lambda: quantized().to_torch(), "to_torch reads the weights of nn.Linear layers, and W_Q is a torch.ao"),
        (lambda: with_sequence().prune_heads([0]), "W_O is a torch.nn.*Sequential; call prune_heads before"),
        (lambda: with_sequence().to_torch(), "W_O is a torch.nn.*Sequential; call to_torch before"),
        (
            lambda: MultiHeadAttention.from_torch(theirs(add_bias_kv=True)),
            "add_bias_kv=True appends a learned key and value to every sequence, .*; train without it",
        ),
        (lambda: MultiHeadAttention.from_torch(nn.Linear(3, 3)), "nn.MultiheadAttention.*Linear|Linear.*MultiheadAtt"),
        (lambda: ours(position=Rotary(), head_dim=4).to_torch(), "nn.MultiheadAttention has no rotary or ALiBi"),
        (lambda: ours(position=Alibi()).to_torch(), "nn.MultiheadAttention has no rotary or ALiBi"),
        (lambda: ours(qk_norm="rms").to_torch(), "nn.MultiheadAttention has no normed queries and keys"),
        (lambda: ours(softcap=3.0).to_torch(), "nn.MultiheadAttention has no softcap"),
        (lambda: ours(sinks=True).to_torch(), "nn.MultiheadAttention has no learned sinks"),
        (lambda: MultiHeadAttention(WIDTH, HEADS, sinks=True).to_torch(), "no learned sinks"),  # zeros, but they learn
        (lambda: MultiHeadAttention(WIDTH, HEADS, sinks=True, device="meta").to_torch(), "no learned sinks"),
        (
            lambda: MultiHeadAttention.from_torch(theirs(add_zero_attn=True).to("meta")).to_torch(),
            "no learned sinks",  # they are frozen, and nobody knows whether they are zeros
        ),
        (lambda: ours(head_dim=5).to_torch(), "has no 4 heads x 5 in a width of 12"),
        (lambda: ours().prune_heads([1]).to_torch(), "has no 3 heads x 3 in a width of 12"),
    ],
)
def test_conversion_refuses_what_has_no_counterpart(make, words):
    with pytest.raises(HeadwiseError, match=words) as caught:
        make()
    assert type(caught.value) is UnsupportedError
    assert "\n" not in str(caught.value)


def test_from_torch_takes_modules_of_replace_attention_and_parametrized_ones():
    given = theirs()
    qkv = inputs(ours())
    want = given(*qkv)[0]
    close(MultiHeadAttention.from_torch(replace_attention(copy.deepcopy(given)))(*qkv), want)
    torch.nn.utils.parametrizations.weight_norm(given, "in_proj_weight")
    close(MultiHeadAttention.from_torch(given)(*qkv), want)


def test_frozen_zero_sinks_convert_to_add_zero_attn():
    mine = MultiHeadAttention(WIDTH, HEADS, sinks=True, dtype=torch.float64)
    mine.sinks.requires_grad_(False)
    qkv = inputs(mine)
    close(mine(*qkv), mine.to_torch()(*qkv)[0])
    with torch.no_grad():
        mine.sinks[2] = 0.5
    with pytest.raises(UnsupportedError, match="learned sinks"):
        mine.to_torch()


PRUNED = {
    "plain": {},
    "no bias": {"bias": False},
    "out_bias alone": {"bias": False, "out_bias": True},
    "head_dim": {"head_dim": 7},
    "sinks": {"sinks": True},
    "alibi": {"position": Alibi()},
    "slopes of one's own": {"position": Alibi((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))},
    "rms": {"qk_norm": "rms"},
    "layer norm": {"qk_norm": "layer"},
    "softcap": {"softcap": 1.3},
    "rotary": {"position": Rotary(base=30.0), "head_dim": 6},
    "kdim and vdim": {"kdim": 5, "vdim": 9},
    "all of it": {"sinks": True, "qk_norm": "layer", "softcap": 2.0, "position": Rotary(), "head_dim": 6},
}
GONE = [[0], [5], [1, 4], [0, 1], [2, 3], [1, 2, 3], [0, 1, 2, 3, 5], []]


@either("gone", GONE, ids=str)
@either("kv_heads", [6, 3, 2, 1])
@either("options", PRUNED.values(), ids=PRUNED)
def test_pruned_module_equals_the_module_with_zero_gates(options, kv_heads, gone):
    whole = ours(18, 6, num_kv_heads=kv_heads, **options)
    for norm in filter(None, (whole.q_norm, whole.k_norm)):
        norm.eps = 0.2
    small = whole.prune_heads(gone)
    xs = [torch.randn(BATCH, QUERIES, 18, dtype=torch.float64)]
    if "kdim" in options:
        xs += [torch.randn(BATCH, KEYS, width, dtype=torch.float64) for width in (5, 9)]
    gates = torch.ones(6, dtype=torch.float64)
    gates[gone] = 0
    mask = torch.rand(BATCH, 1, QUERIES, xs[-1].shape[1]) > 0.3
    for call_options in ({}, {"causal": True}, {"mask": mask}, {"window": (2, 1)}):
        close(small(*xs, **call_options), whole(*xs, **call_options, gates=gates))
    kept = [i for i, number in enumerate(small.head_numbers) if number is not None]
    numbers = [number for number in small.head_numbers if number is not None]
    assert numbers == [h for h in range(6) if h not in gone]
    close(small.weights(*xs[:2], mask=mask, heads=kept), whole.weights(*xs[:2], mask=mask, heads=numbers))
    _check_sizes(small, whole, gone)


def _check_sizes(small: MultiHeadAttention, whole: MultiHeadAttention, gone: list[int]) -> None:
    """Whole groups are gone, the others are as large as the largest of them."""
    group, dim = whole.heads.group, whole.heads.dim
    left = [sum(h not in gone for h in range(kv * group, (kv + 1) * group)) for kv in range(whole.heads.kv)]
    groups, size = sum(n > 0 for n in left), max(left)
    assert small.heads == Heads(whole.heads.width, groups * size, groups, dim)
    assert small.W_Q.weight.shape == small.W_O.weight.T.shape == (groups * size * dim, whole.heads.width)
    assert small.W_K.weight.shape == (groups * dim, whole.kdim)
    assert small.W_V.weight.shape == (groups * dim, whole.vdim)
    assert small.sinks is None or small.sinks.shape == (groups * size,)
    assert len(small.head_numbers) == groups * size
    assert small.head_numbers.count(None) == groups * size - sum(left)


def test_pruned_module_has_fewer_parameters():
    whole = MultiHeadAttention(768, 12)
    small = whole.prune_heads(range(6))
    assert sum(p.numel() for p in small.parameters()) == 2_359_296 // 2 + 3 * 384 + 768


def test_pruning_twice_equals_pruning_once():
    whole = ours(18, 6, num_kv_heads=2, sinks=True, position=Alibi())
    x = torch.randn(BATCH, QUERIES, 18, dtype=torch.float64)
    first = whole.prune_heads([0, 5])
    assert first.head_numbers == (1, 2, 3, 4)
    second = first.prune_heads([2])  # head 3 of the whole
    assert second.head_numbers == (1, 2, 4, None)
    close(second(x), whole.prune_heads([0, 3, 5])(x))
    third = second.prune_heads([3])  # a head of zeros may go as any other, and its group is filled up again
    assert third.head_numbers == (1, 2, 4, None)
    close(third(x), second(x))
    assert third.prune_heads([0, 1]).head_numbers == (4, None)
    assert copy.deepcopy(third).head_numbers == third.head_numbers


def test_every_subset_of_heads_can_be_pruned():
    """All 2^6 - 1 subsets of heads of a grouped module."""
    whole = ours(6, 6, num_kv_heads=3, head_dim=2, sinks=True)
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    for count in range(6):
        for gone in itertools.combinations(range(6), count):
            gates = torch.tensor([float(h not in gone) for h in range(6)], dtype=torch.float64)
            close(whole.prune_heads(gone)(x, causal=True), whole(x, causal=True, gates=gates))


@either("training", [True, False])
def test_pruning_preserves_all_other_settings(training):
    whole = ours(18, 6, num_kv_heads=3, dropout=0.3, softcap=2.0, qk_norm="rms", sinks=True).train(training)
    frozen = {"W_Q.weight", "W_K.bias", "W_O.weight", "W_O.bias", "sinks", "q_norm.weight"}
    for name in frozen:
        whole.get_parameter(name).requires_grad_(False)
    small = whole.prune_heads([2, 3])
    assert (small.training, small.dropout, small.softcap, small.qk_norm) == (training, 0.3, 2.0, "rms")
    assert {name for name, p in small.named_parameters() if not p.requires_grad} == frozen
    assert {p.dtype for p in small.parameters()} == {torch.float64}
    assert {p.device.type for p in copy.deepcopy(whole).to("meta").prune_heads([1]).parameters()} == {"meta"}


def test_pruning_does_not_modify_its_argument():
    whole = ours(18, 6, num_kv_heads=2, position=Alibi(), qk_norm="layer", sinks=True)
    before, heads = copy.deepcopy(whole.state_dict()), [1, 2]
    small = whole.prune_heads(heads)
    spread(small)
    small(torch.randn(1, 3, 18, dtype=torch.float64)).sum().backward()
    assert heads == [1, 2]
    assert whole.heads == Heads.split(18, 6, 2) and whole.head_numbers == tuple(range(6))
    assert all(p.grad is None for p in whole.parameters())
    for name, value in whole.state_dict().items():
        close(value, before[name], 0)


def test_pruned_module_decodes_with_a_cache():
    small = ours(18, 6, num_kv_heads=3, position=Rotary(), head_dim=4).prune_heads([0, 2, 3])
    x, cache = torch.randn(2, 5, 18, dtype=torch.float64), KVCache()
    steps = [small(x[:, t : t + 1], causal=True, cache=cache) for t in range(5)]
    close(torch.cat(steps, 1), small(x, causal=True))


LISTS = {
    "list": [3, 1],
    "twice": (1, 3, 3),
    "set": {1, 3},
    "range": range(1, 4, 2),
    "generator": (h for h in (1, 3)),
    "numpy": np.array([3, 1]),
    "tensor": torch.tensor([1, 3]),
}


@either("heads", LISTS.values(), ids=LISTS)
def test_prune_heads_takes_any_iterable_of_numbers(heads):
    assert ours(num_kv_heads=4).prune_heads(heads).head_numbers == (0, 2)


@either(
    ("heads", "words"),
    [
        ([4], "head 4 does not exist; there are 4, 0 to 3"),
        ([0, 7, 9], "head 7 does not exist; there are 4, 0 to 3"),
        ([-1], "head -1 does not exist; there are 4, 0 to 3"),
        ([1.0], "head 1.0 does not exist; there are 4, 0 to 3"),
        ([True], "head True does not exist; there are 4, 0 to 3"),
        (torch.tensor([True, False, False, False]), "head tensor.True. does not exist; there are 4, 0 to 3"),
        (["1", 9], "head '?1'? does not exist; there are 4, 0 to 3"),
        (2, r"\[2\]|list"),
        (range(4), "all 4 heads would be removed; leave at least one"),
        ([0, 1, 2, 3, 0], "all 4 heads would be removed; leave at least one"),
    ],
    ids=str,
)
def test_prune_heads_refuses_invalid_heads(heads, words):
    with pytest.raises(HeadwiseError, match=words) as caught:
        ours().prune_heads(heads)
    assert type(caught.value) is ShapeError
