"""The famous shapes count what was published, and a shape that cannot be meant is refused."""

import subprocess
import sys
from dataclasses import replace

import pytest

from headwise.errors import HeadwiseError, UnsupportedError
from headwise.heads import Heads
from headwise.shapes import PRESETS, Shape, freeze, shape

PUBLISHED = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
}
# the source rounds: what it prints, and what its own sizes give
ROUNDED = {
    "transformer-base": (65_000_000, 63_045_632),
    "transformer-big": (213_000_000, 214_171_648),
    "gpt3": (175_000_000_000, 174_604_259_328),
}
SMALL = Shape(layers=2, heads=Heads.split(12, 3), ffn=7, vocab=11, max_length=5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_exact_counts(name):
    assert shape(name).parameters()["total"] == PRESETS[name].published == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_round_to_the_published_counts(name):
    published, exact = ROUNDED[name]
    assert PRESETS[name].rounded
    assert PRESETS[name].published == published
    assert shape(name).parameters()["total"] == exact
    assert exact == pytest.approx(published, rel=0.031)


def test_the_2017_totals_lie_within_the_range_of_its_vocabulary():
    """ "about 37000 tokens": the base model's 65M is met with a tenth more of them, the big one's 213M with fewer."""
    for name, vocab in (("transformer-base", 40_817), ("transformer-big", 35_856)):
        counted = replace(shape(name), vocab=vocab).parameters()["total"]
        assert round(counted / 1e6) == PRESETS[name].published // 10**6
        assert vocab == pytest.approx(37_000, rel=0.11)


def test_every_preset_is_exact_or_rounded():
    assert set(PRESETS) == set(PUBLISHED) | set(ROUNDED)
    assert all(preset.source for preset in PRESETS.values())


def test_parameter_groups_add_up_to_the_total():
    base = shape("bert-base").parameters()
    assert base["attention"] == 12 * (2_359_296 + 3_072)  # the weights and the biases of 768 / 12
    assert base["other"] == 768 * 768 + 768
    assert sum(base.values()) == 2 * base["total"]
    grouped = shape("llama2-70b")
    assert grouped.heads == Heads(8192, 64, 8, 128)
    assert grouped.parameters()["attention"] == 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)


def test_parameters_equal_a_count_by_hand():
    small = replace(SMALL, token_types=2, embedding_norm=True, embedding_width=5, pooler=True, qk_norm="rms")
    assert small.parameters() == {
        "attention": 2 * 4 * (12 * 12 + 12),
        "ffn": 2 * (2 * 12 * 7 + 7 + 12),
        "embeddings": (11 + 5 + 2) * 5,
        "norms": 2 * 2 * 24 + 24 + 10 + 2 * 2 * 4,
        "other": (12 * 12 + 12) + (5 * 12 + 12),
        "total": 1248 + 374 + 90 + 146 + 228,
    }


def test_one_window_or_one_per_layer():
    assert SMALL.windows == (None, None)
    assert replace(SMALL, window=3).windows == (3, 3)
    assert replace(SMALL, window=(None, 3)).windows == (None, 3)


def test_a_shape_is_a_frozen_hashable_value():
    rope = {"rope_theta": 1e4, "factors": [1, 2]}
    assert replace(SMALL, rope=rope) == replace(SMALL, rope=dict(reversed(rope.items())))
    assert hash(replace(SMALL, rope=rope)) == hash(replace(SMALL, rope=freeze(rope)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "swish"}, "activation 'swish' is not known; known are 'relu', 'gelu', 'gelu_tanh', 'swiglu'"),
        ({"norm": "batch"}, "norm 'batch' is not known"),
        ({"positions": "relative"}, "positions 'relative' is not known"),
        ({"head": "shared"}, "head 'shared' is not known"),
        ({"qk_norm": "layer"}, "qk_norm 'layer' is not known"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"ffn": 1.5}, "ffn must be a whole number of at least 1, got 1.5"),
        ({"vocab": None}, "vocab must be a whole number of at least 1, got None"),
        ({"token_types": -1}, "token_types must be a whole number of at least 0, got -1"),
        ({"max_length": None}, "max_length of learned positions must be a whole number of at least 1, got None"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a small number of at least 0, got '1e-5'"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"window": (3,)}, "window names 1 layers and there are 2"),
        ({"window": 3, "decoder_layers": 1}, "window is for a decoder alone"),
        ({"head": "tied", "embedding_width": 5}, "a tied head needs embeddings of width 12, got 5"),
    ],
)
def test_invalid_shapes_are_refused(change, words):
    with pytest.raises(HeadwiseError, match=words):
        replace(SMALL, **change)


def test_an_unknown_shape_name_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="no shape is called 'gpt5'; known are transformer-base, .*llama2-70b"):
        shape("gpt5")


def test_shapes_need_no_torch():
    code = "import sys, headwise.shapes; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
