"""Heads: how a width divides, and what is said where it does not."""

import copy
import json
import pickle
import signal
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise import Heads
from headwise.errors import HeadwiseError, ShapeError

COUNTS = st.integers(1, 97)


@pytest.mark.parametrize(
    ("heads", "values", "kind", "group"),
    [
        (Heads(768, 12, 12, 64), (768, 12, 12, 64, 64), "MHA", 1),
        (Heads(4096, 32, 8, 128), (4096, 32, 8, 128, 128), "GQA", 4),
        (Heads(4544, 71, 1, 64), (4544, 71, 1, 64, 64), "MQA", 71),
        (Heads(64, 1, 1, 64), (64, 1, 1, 64, 64), "MHA", 1),  # one head is no multi-query attention
        (Heads(5120, 128, 128, 192, 128), (5120, 128, 128, 192, 128), "MHA", 1),
        (Heads(7, 3, 3, 5, value_dim=11), (7, 3, 3, 5, 11), "MHA", 1),
    ],
)
def test_kind_and_group_follow_from_the_head_counts(heads, values, kind, group):
    assert (heads.width, heads.query, heads.kv, heads.dim, heads.value_dim) == values
    assert (heads.kind, heads.group) == (kind, group)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ((768, 12), Heads(768, 12, 12, 64)),
        ((768, 12, 4), Heads(768, 12, 4, 64)),
        ((768, 12, 1), Heads(768, 12, 1, 64)),
        ((768, 10, None, 64), Heads(768, 10, 10, 64)),  # 10 does not divide 768, and need not
        ((768, 10, 5, 7), Heads(768, 10, 5, 7)),
        ((1, 1), Heads(1, 1, 1, 1)),
    ],
)
def test_split_divides_the_width(given, want):
    assert Heads.split(*given) == want


@given(query=COUNTS, dim=COUNTS, data=st.data())
def test_split_of_any_size(query, dim, data):
    kv = data.draw(st.sampled_from([n for n in range(1, query + 1) if query % n == 0]))
    heads = Heads.split(query * dim, query, kv)
    assert (heads.query * heads.dim, heads.kv * heads.group) == (heads.width, query)
    assert {"MHA": kv == query, "MQA": kv == 1 < query, "GQA": 1 < kv < query}[heads.kind]


@given(width=st.integers(1, 10**5), query=st.integers(1, 10**4))
def test_head_counts_suggested_by_the_error_are_valid(width, query):
    if width % query == 0:
        assert Heads.split(width, query).dim == width // query
        return
    with pytest.raises(ShapeError) as caught:
        Heads.split(width, query)
    words = str(caught.value)
    offered = words.split("; ")[1].removesuffix(" do, or give head_dim").replace(" and ", ", ").split(", ")
    assert offered
    for n in map(int, offered):
        Heads.split(width, n)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Heads.split(768, 10),
            r"10 heads do not divide d_model 768 \(768 / 10 = 76.8\); 8, 12 and 16 do, or give head_dim$",
        ),
        (lambda: Heads.split(7, 11), r"11 heads do not divide d_model 7 \(7 / 11 = 0.6364\); 7 do, or give head_dim$"),
        (lambda: Heads.split(13, 2), r"\(13 / 2 = 6.5\); 1 and 13 do, or give head_dim$"),
        (lambda: Heads.split(16, 4, 3), "3 key/value heads do not divide 4 query heads; 2 and 4 would$"),
        (lambda: Heads.split(16, 4, 8), "8 key/value heads do not divide 4 query heads; 4 would$"),
        (lambda: Heads(16, 4, 3, 4), "3 key/value heads do not divide 4 query heads"),
        (lambda: Heads.split(0, 4), "d_model must be a whole number of at least 1, got 0$"),
        (lambda: Heads.split(16.0, 4), "d_model must be a whole number of at least 1, got 16.0$"),
        (lambda: Heads.split("16", 4), "d_model must be a whole number of at least 1, got '16'$"),
        (lambda: Heads.split(16, 0), "num_heads must be a whole number of at least 1, got 0$"),
        (lambda: Heads.split(16, -4), "num_heads must be a whole number of at least 1, got -4$"),
        (lambda: Heads.split(16, 4.0), "num_heads must be a whole number of at least 1, got 4.0$"),
        (lambda: Heads.split(16, None), "num_heads must be a whole number of at least 1, got None$"),
        (lambda: Heads.split(16, True), "num_heads must be a whole number of at least 1, got True$"),
        (lambda: Heads.split(16, 4, 0), "kv must be a whole number of at least 1, got 0$"),
        (lambda: Heads.split(16, 4, 2.0), "kv must be a whole number of at least 1, got 2.0$"),
        (lambda: Heads.split(16, 4, 4, 0), "dim must be a whole number of at least 1, got 0$"),
        (lambda: Heads.split(16, 4, 4, "4"), "dim must be a whole number of at least 1, got '4'$"),
        (lambda: Heads(-1, 4, 4, 4), "width must be a whole number of at least 1, got -1$"),
        (lambda: Heads(16, 0, 1, 4), "query must be a whole number of at least 1, got 0$"),
        (lambda: Heads(16, 4, None, 4), "kv must be a whole number of at least 1, got None$"),
        (lambda: Heads(16, 4, 4, 4, -2), "value_dim must be a whole number of at least 1, got -2$"),
        (lambda: Heads(16, 4, 4, 4, 2.5), "value_dim must be a whole number of at least 1, got 2.5$"),
    ],
)
def test_invalid_head_counts_are_refused(make, words):
    with pytest.raises(HeadwiseError, match=words) as caught:
        make()
    assert isinstance(caught.value, ShapeError)
    assert "\n" not in str(caught.value)


def test_heads_are_a_frozen_hashable_value():
    heads = Heads(24, 6, 2, 4)
    assert heads == Heads.split(24, 6, 2) != Heads(24, 6, 3, 4)
    assert len({heads, Heads.split(24, 6, 2), Heads(24, 6, 3, 4)}) == 2
    assert copy.deepcopy(heads) == pickle.loads(pickle.dumps(heads)) == heads
    assert repr(heads) == "Heads(width=24, query=6, kv=2, dim=4, value_dim=4)"
    with pytest.raises(FrozenInstanceError):
        heads.query = 5
    with pytest.raises((AttributeError, TypeError)):
        heads.other = 5


def test_heads_as_json():
    heads = Heads(24, 6, 2, 4, 5)
    assert heads.to_json() == {"width": 24, "query": 6, "kv": 2, "dim": 4, "value_dim": 5}
    assert Heads(**json.loads(json.dumps(heads.to_json()))) == heads


@pytest.fixture
def _at_once():
    """A search through every number below a huge one fails the test instead of hanging it."""

    def stop(*_):
        raise TimeoutError("still searching after 20 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("width", "query", "words"),
    [
        pytest.param(2**61 - 1, 2**31, "1 and 2305843009213693951 do", id="a prime"),
        pytest.param(10**30, 10**15 + 1, "do, or give head_dim", id="many divisors"),
        pytest.param(10**400, 7, "7 heads do not divide d_model 1000", id="more than a float holds"),
    ],
)
def test_split_handles_huge_numbers(width, query, words):
    with pytest.raises(HeadwiseError, match=words):
        Heads.split(width, query)
    assert Heads.split(width * query, query).dim == width
