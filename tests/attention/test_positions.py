"""Rotary angles equal transformers' for every kind of scaling; ALiBi's slopes and the sine table are their papers'."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from headwise import MultiHeadAttention
from headwise.attention.nn.positions import Alibi, Rotary, sinusoidal, sinusoidal_at
from headwise.errors import ShapeError, UnsupportedError

DIM, TOKENS = 26, 11
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS = {
    "none": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "llama3, length from the config": LLAMA3,
    "yarn": YARN,
    "yarn, length from the config": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor from the lengths": {**YARN, "factor": None},
    "yarn, own factor": {**YARN, "attention_factor": 1.3},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, half of mscale": {**YARN, "mscale": 0.7},
    "yarn, betas": {**YARN, "beta_fast": 17, "beta_slow": 3},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, no way between": {**YARN, "beta_fast": 5, "beta_slow": 5, "truncate": False},
    "yarn, nothing to stretch": {**YARN, "factor": 1.0},
}


def theirs(scaling: dict, base: float) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=3 * DIM,
        num_attention_heads=3,
        head_dim=DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": base, **scaling},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scaling_equals_transformers(kind, base):
    want = theirs(dict(SCALINGS[kind]), base)
    config = {"rope_theta": base, "rope_scaling": SCALINGS[kind], "max_position_embeddings": 2048}
    rotary = Rotary.from_config(config, DIM)
    frequencies, factor = rotary.frequencies(DIM)
    torch.testing.assert_close(frequencies, want.inv_freq, rtol=3e-7, atol=0)
    assert factor == pytest.approx(want.attention_scaling, rel=1e-12)

    x, positions = torch.randn(2, 3, TOKENS, DIM), torch.randint(0, 3000, (2, TOKENS))
    expected, _ = apply_rotary_pos_emb(x, x, *want(x, positions))
    torch.testing.assert_close(rotary(x, positions), expected, rtol=0, atol=1e-3)  # angles of thousands, in fp32
    near = torch.arange(TOKENS)
    expected, _ = apply_rotary_pos_emb(x, x, *want(x, near[None]))
    torch.testing.assert_close(rotary(x, near), expected, rtol=0, atol=1e-5)


def test_old_and_new_configs_give_the_same_rotary():
    old = {"rope_theta": 7e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 7e5, "rope_type": "linear", "factor": 2.0}}
    assert Rotary.from_config(old, DIM) == Rotary.from_config(new, DIM) == Rotary(7e5, scaling=old["rope_scaling"])
    assert Rotary.from_config({}, DIM) == Rotary()
    assert Rotary.from_config({"rope_theta": 1e6, "rope_scaling": None}, DIM) == Rotary(1e6)
    outside = {"original_max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert Rotary.from_config(outside, DIM) == Rotary(scaling=YARN)


@pytest.mark.parametrize("where", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_partial_rotary_rotates_the_first_dimensions(where):
    rotary = Rotary.from_config(where, 20)
    assert rotary == Rotary(dim=10)
    x = torch.randn(2, 3, TOKENS, 20)
    y = rotary(x, torch.arange(TOKENS))
    assert torch.equal(y[..., 10:], x[..., 10:])
    torch.testing.assert_close(y[..., :10], Rotary()(x[..., :10], torch.arange(TOKENS)))


def test_rotary_rotates_by_known_angles():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4).expand(1, 1, 3, 4)
    slow = 1 / math.sqrt(100.0)
    y = Rotary(base=100.0, interleaved=True)(x, torch.tensor([0, 1, 2]))[0, 0]
    for m in range(3):
        want = [math.cos(m), math.sin(m), -math.sin(m * slow), math.cos(m * slow)]
        torch.testing.assert_close(y[m], torch.tensor(want))


def test_interleaved_rotary_is_a_permutation_of_the_default():
    x, positions = torch.randn(2, 3, TOKENS, DIM), torch.arange(TOKENS)
    order = torch.arange(DIM).view(2, -1).T.flatten()  # 0, 13, 1, 14, ...: the pairs of halves become neighbours
    halves = Rotary()(x, positions)
    torch.testing.assert_close(Rotary(interleaved=True)(x[..., order], positions), halves[..., order])


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(1, 1, 1, DIM, dtype=torch.float64), torch.randn(1, 1, 1, DIM, dtype=torch.float64)

    def score(m: int, n: int) -> float:
        return float((Rotary()(q, torch.tensor([m])) * Rotary()(k, torch.tensor([n]))).sum())

    assert score(19, 7) == pytest.approx(score(12, 0), abs=1e-5)
    assert score(19, 7) != pytest.approx(score(19, 8), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rotary_preserves_dtype_and_computes_angles_in_fp32(dtype):
    x, positions = torch.randn(1, 2, 5, DIM).to(dtype), torch.arange(1000, 1005)
    y = Rotary()(x, positions)
    assert y.dtype == dtype
    torch.testing.assert_close(y, Rotary()(x.double(), positions).to(dtype), rtol=1e-2, atol=1e-5)


def test_rotary_has_gradients_after_inference_mode():
    rotary, x, positions = Rotary(base=12345.0), torch.randn(1, 2, 5, DIM), torch.arange(5)
    with torch.inference_mode():
        seen = rotary(x, positions)
    x = x.clone().requires_grad_()
    rotary(x, positions).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps lengths
    torch.testing.assert_close(rotary(x, positions).detach(), seen.clone())


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(dim=10, interleaved=True), Rotary(scaling=YARN)])
def test_rotary_compiles_to_one_graph(rotary):
    x, positions = torch.randn(2, 3, 5, DIM), torch.arange(5)
    compiled = torch.compile(rotary.__call__, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, positions), rotary(x, positions))


def test_rotary_is_hashable_plain_data():
    a, b = Rotary(scaling=dict(YARN)), Rotary(scaling=dict(reversed(YARN.items())))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Rotary()
    assert Rotary(scaling=a.scaling) == a
    assert Rotary(scaling={"rope_type": "default"}) == Rotary()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: Rotary(scaling={"rope_type": "longrope"}),
            UnsupportedError,
            "'longrope' is not known; known are default",
        ),
        (lambda: Rotary(scaling={"type": "dynamic", "factor": 2}), UnsupportedError, "'dynamic' is not known"),
        (lambda: Rotary(scaling={"type": "linear"}), UnsupportedError, "'linear' needs a number for factor"),
        (lambda: Rotary(scaling=LLAMA3), UnsupportedError, "needs a number for original_max_position_embeddings"),
        (lambda: Rotary(dim=7), ShapeError, "dim must be an even number of at least 2, got 7"),
        (lambda: Rotary(base=0), ShapeError, "must be above 0, got 0"),
        (lambda: Rotary(dim=8)(torch.zeros(1, 1, 1, 6), torch.arange(1)), ShapeError, "cannot rotate 8 of 6 head dim"),
        (lambda: Rotary()(torch.zeros(1, 1, 1, 7), torch.arange(1)), ShapeError, "cannot rotate 7 of 7 head dim"),
        (
            lambda: Rotary.from_config({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, 8),
            UnsupportedError,
            "separate rotary positions per kind of layer are not supported, got full_attention",
        ),
        (lambda: Alibi((0.5, 0.25)).for_heads(3), ShapeError, "Alibi has 2 slopes and the layer 3 heads"),
    ],
)
def test_invalid_positions_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_alibi_slopes_equal_the_papers():
    assert Alibi().for_heads(8) == tuple(2.0**-i for i in range(1, 9))
    sixteen = Alibi().for_heads(16)
    assert sixteen == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    assert Alibi().for_heads(11) == Alibi().for_heads(8) + sixteen[0:6:2]
    assert Alibi().for_heads(1) == (2.0**-8,)
    assert Alibi((0.5, 0.1)).for_heads(2) == (0.5, 0.1)


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoidal_table_equals_the_formula(width):
    table = sinusoidal(13, width)
    assert table.shape == (13, width)
    for position in range(13):
        for column in range(width):
            angle = position / 10000 ** (column // 2 * 2 / width)
            want = math.cos(angle) if column % 2 else math.sin(angle)
            assert float(table[position, column]) == pytest.approx(want, abs=1e-6)
    rows = torch.tensor([[3, 5], [12, 0]])
    assert torch.equal(sinusoidal_at(rows, width), table[rows])


def test_sinusoidal_table_in_any_dtype_and_device():
    assert sinusoidal(3, 4, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sinusoidal(3, 4, device="meta").device.type == "meta"


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_alibi_does_not_depend_on_the_default_dtype(default):
    torch.manual_seed(5)
    module = MultiHeadAttention(33, 11, position=Alibi())  # 11 heads: slopes that 16 bits cannot hold
    x = torch.randn(2, 131, 33)
    want = module(x, causal=True, need_weights=True), module.stats(x, causal=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = module(x, causal=True, need_weights=True), module.stats(x, causal=True)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
    assert got[1] == want[1]
