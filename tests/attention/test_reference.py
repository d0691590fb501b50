"""The specification against numbers worked out by hand: each rule alone, the statistics, the module head by head.

Keys are logarithms of odds, so that with scale 1 and a query of 1 the weights are the odds over their sum.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from headwise import reference
from headwise.errors import ShapeError

LN2, LN3 = math.log(2), math.log(3)


def keys(*odds: float) -> np.ndarray:
    """(1, 1, Tk, 1)."""
    return np.log(np.array(odds, float)).reshape(1, 1, -1, 1)


def queries(*numbers: float) -> np.ndarray:
    """(1, 1, Tq, 1): 1 weighs keys by their odds, 0 all alike, 2 by the odds squared."""
    return np.array(numbers, float).reshape(1, 1, -1, 1)


def look(q, k, **options) -> np.ndarray:
    """The weights of the only sequence's only head, (Tq, Tk)."""
    return reference.weights(q, k, **{"scale": 1.0, **options})[0, 0]


def close(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)


def seen(text: str) -> np.ndarray:
    """Rows such as "x.." with an x where a query may look."""
    return np.array([[c == "x" for c in row] for row in text.split()])


def test_weights_are_the_softmax_of_the_scores():
    a = look(queries(1, 0, 2), keys(1, 2, 5))
    close(a, [[1 / 8, 2 / 8, 5 / 8], [1 / 3, 1 / 3, 1 / 3], [1 / 30, 4 / 30, 25 / 30]])


def test_the_output_is_the_values_averaged_by_the_weights():
    v = np.array([[8.0, 0.0], [0.0, 4.0], [16.0, -8.0]])[None, None]
    out = reference.attend(queries(1, 0), keys(1, 2, 5), v, scale=1.0)
    close(out[0, 0], [[11.0, -4.0], [8.0, -4 / 3]])


def test_scores_are_divided_by_the_root_of_the_head_dimension():
    q, k = np.ones((1, 1, 1, 4)), np.zeros((1, 1, 2, 4))
    k[0, 0, 1] = LN3 / 2  # a dot product of 2 ln 3, halved
    close(reference.weights(q, k)[0, 0], [[1 / 4, 3 / 4]])
    close(reference.weights(q, k, scale=1.0)[0, 0], [[1 / 10, 9 / 10]])


def test_query_head_i_reads_kv_head_i_over_group():
    k = np.concatenate([keys(1, 1), keys(1, 3)], 1)  # two KV heads
    v = np.array([[[[1.0], [3.0]], [[10.0], [30.0]]]])
    q = np.ones((1, 4, 1, 1))
    close(reference.weights(q, k, scale=1.0)[0, :, 0], [[1 / 2, 1 / 2], [1 / 2, 1 / 2], [1 / 4, 3 / 4], [1 / 4, 3 / 4]])
    close(reference.attend(q, k, v, scale=1.0)[0, :, 0, 0], [2, 2, 25, 25])


VISIBLE = {  # how three queries look at four keys
    "no rule": ({}, "xxxx xxxx xxxx"),
    "causal stands at the end": ({"causal": True}, "xx.. xxx. xxxx"),
    "causal from the start": ({"causal": True, "offset": 0}, "x... xx.. xxx."),
    "causal before the start": ({"causal": True, "offset": -2}, ".... .... x..."),
    "causal past the end": ({"causal": True, "offset": 7}, "xxxx xxxx xxxx"),
    "window of its own key": ({"window": (0, 0)}, ".x.. ..x. ...x"),
    "window to the left": ({"window": (1, 0)}, "xx.. .xx. ..xx"),
    "window to the right": ({"window": (0, 1)}, ".xx. ..xx ...x"),
    "window open to the left": ({"window": (None, 1)}, "xxx. xxxx xxxx"),
    "window open to the right": ({"window": (0, None)}, ".xxx ..xx ...x"),
    "window open to both sides": ({"window": (None, None)}, "xxxx xxxx xxxx"),
    "window and causal": ({"window": (1, 2), "causal": True}, "xx.. .xx. ..xx"),
    "window with an offset": ({"window": (1, 1), "offset": 3}, "..xx ...x ...."),
    "length": ({"lengths": [2]}, "xx.. xx.. xx.."),
    "no length": ({"lengths": [0]}, ".... .... ...."),
    "length and causal": ({"lengths": [3], "causal": True}, "xx.. xxx. xxx."),
    "length and window": ({"lengths": [3], "window": (1, 0)}, "xx.. .xx. ..x."),
    "bool mask": ({"mask": seen("x.xx .... xxx.")}, "x.xx .... xxx."),
    "bool mask for all queries": ({"mask": seen("x.xx")[0]}, "x.xx x.xx x.xx"),
    "bool mask for all keys": ({"mask": seen("x . x")}, "xxxx .... xxxx"),
    "float mask hides where -inf": ({"mask": np.where(seen("x.xx"), -9.0, -np.inf)}, "x.xx x.xx x.xx"),
    "mask and causal": ({"mask": seen(".xxx"), "causal": True}, ".x.. .xx. .xxx"),
    "all of them": (
        {"mask": seen("xx.x"), "causal": True, "window": (2, 5), "lengths": [3], "offset": 1},
        "xx.. xx.. .x..",
    ),
}


@pytest.mark.parametrize("rule", VISIBLE)
def test_visible_keys_of_each_option(rule):
    options, expected = VISIBLE[rule]
    q, k = queries(1, 0, 2), keys(1, 2, 5, 3)
    np.testing.assert_array_equal(reference.visible(q, k, **options)[0, 0], seen(expected))
    a = look(q, k, **options)
    np.testing.assert_array_equal(a > 0, seen(expected))  # weights follow
    close(a.sum(-1), seen(expected).any(-1))  # and a row of them sums to one, or is zeros


def test_hidden_keys_take_no_part_in_the_softmax():
    close(look(queries(1, 1), keys(1, 2, 5), causal=True), [[1 / 3, 2 / 3, 0], [1 / 8, 2 / 8, 5 / 8]])


def test_offset_and_lengths_may_differ_per_sequence():
    q, k = np.repeat(queries(1, 1), 2, 0), np.repeat(keys(1, 2, 5), 2, 0)
    a = reference.weights(q, k, scale=1.0, causal=True, offset=np.array([0, 1]))[:, 0]
    close(a, [[[1, 0, 0], [1 / 3, 2 / 3, 0]], [[1 / 3, 2 / 3, 0], [1 / 8, 2 / 8, 5 / 8]]])
    a = reference.weights(q, k, scale=1.0, lengths=np.array([1, 2]))[:, 0, 0]
    close(a, [[1, 0, 0], [1 / 3, 2 / 3, 0]])


def test_a_ragged_cache_needs_lengths_and_offsets():
    q, k, filled = np.ones((2, 1, 1, 1)), np.repeat(keys(1, 2, 5), 2, 0), np.array([2, 3])
    a = reference.weights(q, k, scale=1.0, causal=True, lengths=filled, offset=filled - 1)[:, 0, 0]
    close(a, [[1 / 3, 2 / 3, 0], [1 / 8, 2 / 8, 5 / 8]])


def test_masks_differ_by_sequence_and_head():
    q, k = np.ones((2, 2, 1, 1)), np.repeat(keys(1, 3), 2, 0)
    mask = np.ones((2, 2, 1, 2), bool)
    mask[1, 0, 0, 0] = False
    a = reference.weights(q, k, scale=1.0, mask=mask)[:, :, 0]
    close(a, [[[1 / 4, 3 / 4], [1 / 4, 3 / 4]], [[0, 1], [1 / 4, 3 / 4]]])


def test_a_float_mask_is_added_to_the_scores():
    close(look(queries(1), keys(1, 3), mask=np.array([LN2, 0.0])), [[2 / 5, 3 / 5]])


def test_softcap_comes_after_the_scale_and_before_the_mask():
    cap = 2.0
    before = cap * math.atanh(LN3 / cap)  # what the cap brings down to ln 3
    k = np.array([0.0, before]).reshape(1, 1, 2, 1)
    close(look(queries(1), k, softcap=cap), [[1 / 4, 3 / 4]])
    close(look(queries(2), k, softcap=cap, scale=0.5), [[1 / 4, 3 / 4]])
    close(look(queries(1), k, softcap=cap, mask=np.array([5 * LN2, 0.0])), [[32 / 35, 3 / 35]])


def test_sinks_add_to_the_denominator_alone():
    q, k = np.ones((1, 2, 1, 1)), keys(1, 2)
    a = reference.weights(q, k, scale=1.0, sinks=np.log([5.0, 1.0]))[0, :, 0]
    close(a, [[1 / 8, 2 / 8], [1 / 4, 2 / 4]])
    far = reference.weights(q, k, scale=1.0, sinks=np.array([5000.0, -5000.0]))[0, :, 0]
    close(far, [[0, 0], [1 / 3, 2 / 3]])


@pytest.mark.parametrize("sinks", [None, np.array([1.0])], ids=["no sinks", "sinks"])
def test_a_query_with_no_visible_keys_gets_zeros(sinks):
    mask = seen("xx ..")
    q, k = queries(1, 1), keys(1, 3)
    np.testing.assert_array_equal(look(q, k, mask=mask, sinks=sinks)[1], [0, 0])
    out = reference.attend(q, k, np.ones((1, 1, 2, 3)), mask=mask, sinks=sinks)
    assert (out[0, 0, 0] > 0).all()
    np.testing.assert_array_equal(out[0, 0, 1], [0, 0, 0])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_in_hidden_keys_is_ignored_and_in_visible_keys_propagates(where, odd):
    k, v = keys(1, 3, 1), np.array([1.0, 5.0, 7.0]).reshape(1, 1, 3, 1)
    (k if where == "key" else v)[0, 0, 2] = odd
    out = reference.attend(queries(1, 1), k, v, scale=1.0, mask=seen("xx. xxx"))[0, 0, :, 0]
    close(out[0], 4.0)
    if where == "key" and odd == -np.inf:
        close(out[1], 4.0)  # a score of -inf is a weight of zero, as anyone would expect
    else:
        assert not math.isfinite(out[1])


def test_nan_in_a_query_affects_its_own_row_alone():
    out = reference.attend(queries(1, np.nan), keys(1, 3), np.ones((1, 1, 2, 1)))[0, 0, :, 0]
    close(out[0], 1.0)
    assert math.isnan(out[1])
    np.testing.assert_array_equal(look(queries(np.nan), keys(1, 3, 1), mask=seen("xx."))[0], [np.nan, np.nan, 0])


@pytest.mark.parametrize(
    ("gates", "expected"),
    [(np.array([2.0, -1.0]), [[2, -1], [2, -1]]), (np.array([[0.0, 1.0], [0.5, 3.0]]), [[0, 1], [0.5, 3]])],
    ids=["a head", "a sequence and head"],
)
def test_gates_multiply_each_heads_output(gates, expected):
    q, k, v = np.ones((2, 2, 1, 1)), np.ones((2, 1, 3, 1)), np.ones((2, 1, 3, 1))
    close(reference.attend(q, k, v, gates=gates)[:, :, 0, 0], expected)


def test_dropout_scales_up_the_remaining_weights():
    q, k, v = queries(0, 1), keys(1, 2, 5), np.eye(3)[None, None]  # the output is the weights
    whole = reference.attend(q, k, v, scale=1.0)
    dropped = reference.attend(q, k, v, scale=1.0, dropout=0.75, rng=np.random.default_rng(3))
    kept = np.random.default_rng(3).random(whole.shape) >= 0.75
    assert 0 < kept.sum() < kept.size
    close(dropped, np.where(kept, 4 * whole, 0))
    close(reference.attend(q, k, v, dropout=1.0), np.zeros_like(whole))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(1, [1]), (-1, [2]), ([2, 0, 2], [2, 0, 2]), (slice(1, None), [1, 2]), ([], []), (np.array([0, 2]), [0, 2])],
    ids=str,
)
@pytest.mark.parametrize("what", ["rows", "heads"])
def test_rows_and_heads_are_selected_as_in_numpy(what, chosen, expected):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 3, 4)), rng.normal(size=(2, 1, 5, 4))
    axis = 1 if what == "heads" else 2
    whole = reference.weights(q, k)
    np.testing.assert_array_equal(reference.weights(q, k, **{what: chosen}), whole.take(expected, axis))


def stats_of(q, k, **options):
    return reference.head_stats(q, k, np.ones_like(k), **{"scale": 1.0, **options})[1]


def test_statistics_equal_values_computed_by_hand():
    """Two queries on two keys: (1/4, 3/4) and (1/2, 1/2)."""
    stats = stats_of(queries(1, 0), keys(1, 3), received=True)
    expected = {
        "entropy": (math.log(4) - 0.75 * LN3 + LN2) / 2,
        "confidence": (3 / 4 + 1 / 2) / 2,
        "distance": (3 / 4 + 1 / 2) / 2,
        "previous": (0 + 1 / 2) / 2,  # query 0 has no previous key and counts with 0
        "next": (3 / 4 + 0) / 2,
        "self": (1 / 4 + 1 / 2) / 2,
        "first": (1 / 4 + 1 / 2) / 2,
        "lse": (math.log(4) + LN2) / 2,
        "max_logit": LN3,
    }
    assert set(stats.names) == set(expected)
    for name, value in expected.items():
        close(stats[name], [value])
    close(stats.count, [[2]])
    close(stats.received, [[[1 / 4 + 1 / 2, 3 / 4 + 1 / 2]]])


def test_positional_statistics_follow_the_offset():
    """One query on three keys, standing at the last: weights (1/8, 2/8, 5/8)."""
    stats = stats_of(queries(1), keys(1, 2, 5))
    close([stats.distance, stats.previous, stats.self, stats.next], [[4 / 8], [2 / 8], [5 / 8], [0]])
    stats = stats_of(queries(1), keys(1, 2, 5), offset=np.array([0]))
    close([stats.distance, stats.previous, stats.self, stats.next], [[12 / 8], [0], [1 / 8], [2 / 8]])


FIRST = {  # two queries of 1 on odds 1, 2, 5: the mean weight on the first key that exists
    "key 0": ({}, 1 / 8),
    "left padding": ({"mask": seen(".xx")}, 2 / 7),
    "left padding as floats": ({"mask": np.array([-np.inf, 0.0, 0.0])}, 2 / 7),
    "a key that one query sees exists": ({"mask": seen("xxx .xx")}, (1 / 8 + 0) / 2),
    "a key that only a query that does not count sees": ({"mask": seen("xxx .xx"), "queries": seen(".x")}, 2 / 7),
    "a window does not end a key": ({"window": (0, 0)}, 0.0),
    "right padding": ({"lengths": [2]}, 1 / 3),
}


@pytest.mark.parametrize("case", FIRST)
def test_first_is_the_first_existing_key(case):
    options, expected = FIRST[case]
    close(stats_of(queries(1, 1), keys(1, 2, 5), **options).first, [expected])


def test_only_selected_queries_with_visible_keys_count():
    q, k = queries(1, 0, 0), keys(1, 3)
    dark = stats_of(q, k, mask=seen("xx .. xx"))
    close([dark.count[0], dark.confidence], [[2], [(3 / 4 + 1 / 2) / 2]])
    asked = stats_of(q, k, mask=seen("xx .. xx"), queries=seen(".xx"))
    close([asked.count[0], asked.confidence], [[1], [1 / 2]])


def test_sink_is_the_weight_missing_from_a_row():
    stats = stats_of(queries(1), keys(1, 2), sinks=np.log([5.0]))
    close(stats.sink, [5 / 8])
    close(stats.entropy, [-(1 / 8) * math.log(1 / 8) - (1 / 4) * math.log(1 / 4)])
    close(stats.confidence, [2 / 8])
    assert "sink" not in stats_of(queries(1), keys(1, 2))


def test_shares_are_the_weight_on_a_class_of_keys():
    classes = {"rare": seen("x.x"), "none": seen("...")}
    stats = stats_of(queries(1, 0), keys(1, 2, 5), classes=classes)
    close(stats.share("rare"), [(6 / 8 + 2 / 3) / 2])
    close(stats.share("none"), [0])


def test_cross_attention_has_no_positions_to_compare():
    stats = stats_of(queries(1), keys(1, 2), cross=True)
    assert set(stats.names) == {"entropy", "confidence", "first", "lse", "max_logit"}


def test_statistics_are_of_the_weights_before_dropout_and_gates():
    plain = stats_of(queries(1, 0), keys(1, 3))
    assert stats_of(queries(1, 0), keys(1, 3), dropout=0.9, gates=np.array([0.0])) == plain


def by_heads(attn, query, key, value):
    """The module written as the literature has it: head by head, each with its own slice of the projections."""
    heads, d = attn.heads, attn.heads.dim
    outputs, rows = [], []
    for i in range(heads.query):
        j = i // (heads.query // heads.kv)
        mine, shared = slice(i * d, (i + 1) * d), slice(j * d, (j + 1) * d)
        q = query @ attn.W_Q[:, mine] + attn.b_Q[mine]
        k = key @ attn.W_K[:, shared] + attn.b_K[shared]
        v = value @ attn.W_V[:, shared] + attn.b_V[shared]
        scores = q @ k.swapaxes(1, 2) / math.sqrt(d)
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        rows.append(raised / raised.sum(-1, keepdims=True))
        outputs.append(rows[-1] @ v)
    return np.concatenate(outputs, -1) @ attn.W_O + attn.b_O, np.stack(rows, 1)


SHAPES = {  # heads, KV heads, head_dim; query; key
    "the classic, on itself": ((8, None, None), (2, 10, 128), None),
    "the classic, on others": ((8, None, None), (4, 15, 256), (4, 20, 256)),
    "grouped": ((6, 2, None), (2, 5, 30), None),
    "one KV head": ((6, 1, None), (2, 5, 30), (2, 7, 30)),
    "heads of their own width": ((3, 3, 11), (2, 5, 30), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_module_equals_its_heads_computed_one_by_one(name):
    (heads, kv, dim), shape, other = SHAPES[name]
    rng = np.random.default_rng(1)
    attn = reference.MultiHeadAttention(shape[-1], heads, kv, head_dim=dim, seed=2)
    for bias in (attn.b_Q, attn.b_K, attn.b_V, attn.b_O):
        bias[:] = rng.normal(size=bias.shape)
    x = rng.normal(size=shape)
    memory = None if other is None else rng.normal(size=other)
    key = x if memory is None else memory
    out, a = by_heads(attn, x, key, key)
    np.testing.assert_allclose(attn(x, memory), out, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(attn.weights(x, memory), a, rtol=1e-10, atol=1e-12)
    assert out.shape == shape and a.shape == (shape[0], heads, shape[1], key.shape[1])


def test_the_module_takes_separate_values_and_no_biases():
    rng = np.random.default_rng(1)
    attn = reference.MultiHeadAttention(12, 3)
    x, memory, values = rng.normal(size=(2, 5, 12)), rng.normal(size=(2, 7, 12)), rng.normal(size=(2, 7, 12))
    expected, _ = by_heads(attn, x, memory, values)  # biases start as zeros
    attn.b_Q = attn.b_K = attn.b_V = attn.b_O = None
    np.testing.assert_allclose(attn(x, memory, values), expected, rtol=1e-10, atol=1e-12)


def test_heads_must_divide_the_width():
    with pytest.raises(ShapeError, match="10 heads do not divide d_model 768"):
        reference.MultiHeadAttention(768, 10)
