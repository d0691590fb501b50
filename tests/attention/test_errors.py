"""Bad input: each mistake is an error of its kind, by its words. Empty input is legal, and explain names the path."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

from headwise import MultiHeadAttention, attend, explain, head_stats, reference, weights
from headwise.attention import functional
from headwise.errors import HeadwiseError, MaskError, ShapeError, UnsupportedError
from helpers.attention_cases import forced

B, H, KV, TQ, TK, D, DV = 2, 6, 3, 5, 7, 4, 3


def inputs(**other) -> dict[str, torch.Tensor]:
    return {"q": torch.randn(B, H, TQ, D), "k": torch.randn(B, KV, TK, D), "v": torch.randn(B, KV, TK, DV), **other}


def whole(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def yes(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


x = torch.zeros
FULL = "does not broadcast to (B, Hq, Tq, Tk) = (2, 6, 5, 7)"
KINDS = "mask must be bool (True: may attend) or float (added to the scores)"
NOT_WHOLE = "2 whole numbers, one per sequence, got numbers that are not whole of shape (2,)"

# what is given instead of what fits -> the error and its words
SIZES = [
    ({"q": x(B, TQ, D)}, "q must be (B, Hq, Tq, D), got (2, 5, 4)"),
    ({"k": x(7)}, "k must be (B, Hkv, Tk, D), got (7,)"),
    ({"v": x(1, B, KV, TK, DV)}, "v must be (B, Hkv, Tk, Dv), got (1, 2, 3, 7, 3)"),
    ({"k": x(1, KV, TK, D)}, "batches of 2, 1 and 2; expand"),
    ({"v": x(3, KV, TK, DV)}, "batches of 2, 2 and 3; expand"),
    ({"k": x(B, KV, TK, 5)}, "q has heads of width 4 and k of width 5"),
    ({"v": x(B, KV, 8, DV)}, "k has 3 heads x 7 keys and v has 3 heads x 8"),
    ({"v": x(B, H, TK, DV)}, "k has 3 heads x 7 keys and v has 6 heads x 7"),
    ({"k": x(B, 4, TK, D), "v": x(B, 4, TK, DV)}, "4 key/value heads do not divide 6 query heads"),
    ({"q": x(B, 2, TQ, D)}, "3 key/value heads do not divide 2 query heads"),
    ({"q": x(B, 0, TQ, D)}, "heads and their width must be at least 1"),
    ({"k": x(B, 0, TK, D), "v": x(B, 0, TK, DV)}, "heads and their width must be at least 1"),
    ({"v": x(B, KV, TK, 0)}, "heads and their width must be at least 1"),
    ({"q": x(B, H, TQ, 0), "k": x(B, KV, TK, 0)}, "heads and their width must be at least 1"),
    ({"sinks": x(KV)}, "sinks must be one number per query head, shape (6,), got (3,)"),
    ({"sinks": x(B, H)}, "sinks must be one number per query head, shape (6,), got (2, 6)"),
    ({"gates": x(5)}, "gates must be one number per query head, shape (6,) or (2, 6), got (5,)"),
    ({"gates": x(1, H)}, "gates must be one number per query head, shape (6,) or (2, 6), got (1, 6)"),
    ({"scale": float("inf")}, "scale must be a finite number, got inf"),
    ({"scale": float("nan")}, "scale must be a finite number, got nan"),
    ({"scale": [1]}, "scale must be a finite number, got [1]"),
    ({"softcap": "2"}, "softcap must be a number above 0, or None for none, got '2'"),
    ({"softcap": 0.0}, "softcap must be a number above 0, or None for none, got 0.0"),
    ({"softcap": -2.0}, "softcap must be a number above 0, or None for none, got -2.0"),
    ({"softcap": float("nan")}, "softcap must be a number above 0, or None for none, got nan"),
    ({"softcap": float("inf")}, "softcap must be a number above 0, or None for none, got inf"),
    ({"dropout": -0.1}, "dropout must lie between 0 and 1, got -0.1"),
    ({"dropout": 1.5}, "dropout must lie between 0 and 1, got 1.5"),
    ({"dropout": float("nan")}, "dropout must lie between 0 and 1, got nan"),
    ({"k": x(B, KV, TK, D).double()}, "one dtype, got q torch.float32, k torch.float64, v torch.float32; bring them"),
    ({"v": x(B, KV, TK, DV).half()}, "one dtype, got q torch.float32, k torch.float32, v torch.float16; bring them"),
    ({"k": x(B, KV, TK, D, device="meta")}, "one device, got q cpu, k meta, v cpu; bring them"),
    (
        {"q": whole(B, H, TQ, D), "k": whole(B, KV, TK, D), "v": whole(B, KV, TK, DV)},
        "must be float32, bfloat16, float16 or float64, got torch.int64; use .float()",
    ),
    (
        {"q": x(B, H, TQ, D) + 0j, "k": x(B, KV, TK, D) + 0j, "v": x(B, KV, TK, DV) + 0j},
        "must be float32, bfloat16, float16 or float64, got torch.complex64; use .float()",
    ),
]
SIGHTS = [
    ({"mask": yes(TK, TQ)}, f"mask (7, 5) {FULL}"),
    ({"mask": yes(B, KV, TQ, TK)}, "mask (2, 3, 5, 7) does not broadcast"),
    ({"mask": yes(1, B, H, TQ, TK)}, "mask (1, 2, 6, 5, 7) does not broadcast"),
    ({"mask": yes(0)}, "mask (0,) does not broadcast"),
    ({"mask": yes(B, TK)}, f"mask (2, 7) {FULL}; for a padding mask give mask[:, None, None, :]"),
    ({"mask": yes(B, TQ, TK)}, f"mask (2, 5, 7) {FULL}; for one mask per sequence give mask[:, None]"),
    ({"mask": whole(TQ, TK)}, f"{KINDS}, got torch.int64; use .bool()"),
    ({"mask": x(TQ, TK) + 0j}, f"{KINDS}, got torch.complex64"),
    ({"mask": np.ones((TQ, TK), bool)}, "mask must be a tensor, got ndarray; use torch.as_tensor(mask)"),
    ({"mask": yes(TQ, TK).to("meta")}, "mask is on meta and q on cpu; use mask.to(q.device)"),
    ({"mask": x(TQ, TK).to_sparse()}, "mask must be a dense tensor, got a torch.sparse_coo one; use a padded tensor"),
    ({"window": (-1, 0)}, "window's left side must be None or a whole number of at least 0, got -1"),
    ({"window": (None, -3)}, "window's right side must be None or a whole number of at least 0, got -3"),
    ({"window": (2.5, 0)}, "window's left side must be None or a whole number of at least 0, got 2.5"),
    ({"window": (2, True)}, "window's right side must be None or a whole number of at least 0, got True"),
    ({"window": 512}, "window must be a pair (left, right), None for open, or one pair per query head, got 512;"),
    (
        {"window": (1, 2, 3)},
        "window must be a pair (left, right), None for open, or one pair per query head, got",
    ),
    (
        {"window": whole(H, 2)},
        "window must be a pair (left, right), None for open, or one pair per query head, got tensor([[1, 1], [1, 1],",
    ),
    ({"window": [(1, 0), (2, 0)]}, "window has 2 pairs (left, right) and there are 6 query heads; give one per head"),
    (
        {"window": [(1, 0)] * 5 + [7]},
        "window must be a pair (left, right), None for open, or one pair per",
    ),
    ({"window": [(1, 0)] * 5 + [(1, -2)]}, "window's right side must be None or a whole number of at least 0, got -2"),
    ({"keep_first": -1}, "keep_first must be a whole number of at least 0, or one per query head, got -1"),
    ({"keep_first": 1.5}, "keep_first must be a whole number of at least 0, or one per query head, got 1.5"),
    (
        {"keep_first": whole(H)},
        "keep_first must be a whole number of at least 0, or one per query head, got tensor([1, 1,",
    ),
    (
        {"keep_first": np.ones((2, H), int)},
        "keep_first must be a whole number of at least 0, or one per query head, got array([[1,",
    ),
    ({"keep_first": [1, 2]}, "keep_first has 2 numbers and there are 6 query heads; give one per head"),
    (
        {"keep_first": [1, 2, True, 3, 4, 5]},
        "keep_first must be a whole number of at least 0, or one per query head",
    ),
    ({"starts": torch.tensor([3, 8])}, "starts must lie between 0 and the 7 keys there are, got 8"),
    ({"starts": x(B)}, f"starts must be {NOT_WHOLE}"),
    ({"starts": [3, 7]}, "starts must be a tensor of shape (2,), got [3, 7]; use torch.tensor(starts)"),
    ({"starts": whole(B).to("meta")}, "starts is on meta, without values, and q on cpu; use a tensor with values"),
    ({"lengths": torch.tensor([3, 8])}, "lengths must lie between 0 and the 7 keys there are, got 8"),
    ({"lengths": torch.tensor([-1, 7])}, "lengths must lie between 0 and the 7 keys there are, got -1"),
    ({"lengths": x(B)}, f"lengths must be {NOT_WHOLE}"),
    ({"lengths": yes(B)}, f"lengths must be {NOT_WHOLE}"),
    ({"lengths": whole(3)}, "lengths must be 2 whole numbers, one per sequence, got whole numbers of shape (3,)"),
    ({"lengths": whole(B, 1)}, "lengths must be 2 whole numbers, one per sequence, got whole numbers of shape (2, 1)"),
    ({"lengths": [3, 7]}, "lengths must be a tensor of shape (2,), got [3, 7]; use torch.tensor(lengths)"),
    ({"offset": 1.0}, "offset must be a whole number or one per sequence, shape (2,), got 1.0"),
    ({"offset": True}, "offset must be a whole number or one per sequence, shape (2,), got True"),
    ({"offset": [1, 2]}, "offset must be a whole number or one per sequence, shape (2,), got [1, 2]"),
    ({"offset": x(B)}, f"offset must be {NOT_WHOLE}"),
    ({"offset": whole(B).to("meta")}, "offset is on meta, without values, and q on cpu; use a tensor with values"),
    ({"offset": whole(3)}, "offset must be 2 whole numbers, one per sequence, got whole numbers of shape (3,)"),
]
CASES = [(given, ShapeError, words) for given, words in SIZES] + [(given, MaskError, words) for given, words in SIGHTS]
NAMED = {words: (given, kind, words) for given, kind, words in CASES}


def says(words: str) -> str:
    return f"^(.* )?{re.escape(words)}"


@pytest.mark.parametrize("function", [attend, head_stats, explain], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("given", "kind", "words"), NAMED.values(), ids=NAMED)
def test_invalid_arguments_are_named_in_the_error(function, given, kind, words):
    with pytest.raises(kind, match=says(words)) as caught:
        function(**inputs(**given))
    assert isinstance(caught.value, HeadwiseError) and "\n" not in str(caught.value)


def without_v(words: str) -> str:
    """weights was given no v, so it cannot be told about one."""
    return re.sub(r", v [\w.]+|, 1 and 2; expand", "", words)


OF_WEIGHTS = {
    without_v(words): (given, kind) for given, kind, words in CASES if not {"v", "gates", "dropout"} & set(given)
}


@pytest.mark.parametrize("words", OF_WEIGHTS)
def test_weights_names_the_same_invalid_arguments(words):
    given, kind = OF_WEIGHTS[words]
    given = inputs(**given)
    del given["v"]
    with pytest.raises(kind, match=says(words)):
        weights(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"queries": yes(B, TK)}, "queries must be True/False of shape (B, Tq) = (2, 5), got torch.bool (2, 7)"),
        ({"queries": x(B, TQ)}, "queries must be True/False of shape (B, Tq) = (2, 5), got torch.float32 (2, 5)"),
        (
            {"classes": {"good": yes(B, TK), "rare": yes(B, TQ)}},
            "class 'rare' must be True/False of shape (B, Tk) = (2, 7), got torch.bool (2, 5)",
        ),
        (
            {"classes": {"rare": whole(B, TK)}},
            "class 'rare' must be True/False of shape (B, Tk) = (2, 7), got torch.int64 (2, 7)",
        ),
        ({"classes": {7: yes(B, TK)}}, "the names of classes must be strings, got 7"),
    ],
    ids=["queries of a wrong shape", "queries as floats", "a class of a wrong shape", "a class as ints", "no name"],
)
def test_head_stats_names_invalid_queries_and_classes(given, words):
    with pytest.raises(MaskError, match=says(words)):
        head_stats(**inputs(**given))
    arrays = {
        name: {n: k.numpy() for n, k in g.items()} if isinstance(g, dict) else g.numpy() for name, g in given.items()
    }
    with pytest.raises(MaskError, match=says(words.replace("torch.", ""))):
        reference.head_stats(*(t.numpy() for t in inputs().values()), **arrays)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": TQ}, "row 5 does not exist; there are 5, 0 to 4"),
        ({"rows": [0, -6]}, "row -6 does not exist; there are 5, 0 to 4"),
        ({"heads": [5, 6, 7]}, "head 6 does not exist; there are 6, 0 to 5"),
        ({"heads": -7}, "head -7 does not exist; there are 6, 0 to 5"),
        ({"rows": [True, False, True, False, False]}, "rows must be their numbers, got True or False for each"),
        ({"rows": yes(TQ)}, "rows must be their numbers, got True or False for each; use .nonzero()[:, 0]"),
        ({"heads": np.ones(H, bool)}, "heads must be their numbers, got True or False for each"),
    ],
)
def test_weights_refuses_rows_and_heads_that_do_not_exist(given, words):
    q, k, _ = inputs().values()
    with pytest.raises(ShapeError, match=says(words)):
        weights(q, k, **given)
    with pytest.raises(ShapeError, match=says(words)):
        reference.weights(q.numpy(), k.numpy(), **given)


def test_weights_of_no_queries_has_no_rows():
    q, k, _ = inputs(q=x(B, H, 0, D)).values()
    with pytest.raises(ShapeError, match="row 0 does not exist; there are none"):
        weights(q, k, rows=[0])


OF_BOTH = [words for words in NAMED if not re.search(r"torch|meta|device|tensor|offset.* got (1\.0|True|\[)", words)]


@pytest.mark.parametrize("function", [reference.attend, reference.head_stats], ids=lambda f: f.__name__)
@pytest.mark.parametrize("words", OF_BOTH)
def test_the_reference_raises_the_same_messages(words, function):
    given, kind, _ = NAMED[words]
    with pytest.raises(kind, match=says(words)):
        function(**{name: t.numpy() if isinstance(t, torch.Tensor) else t for name, t in inputs(**given).items()})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"offset": 1.5},
            "offset must be 2 whole numbers, one per sequence, got numbers that are not whole of shape ()",
        ),
        ({"offset": True}, "offset must be 2 whole numbers, one per sequence"),
        ({"lengths": 3}, "lengths must be 2 whole numbers, one per sequence, got whole numbers of shape ()"),
        ({"gates": np.ones(B * H)}, "gates must be one number per query head, shape (6,) or (2, 6), got (12,)"),
        ({"v": None}, "v must be (B, Hkv, Tk, Dv), got ()"),
        ({"dropout": 0.5, "seed": 1.5}, "seed must be a whole number, got 1.5"),
    ],
    ids=str,
)
def test_the_reference_takes_no_numbers_of_another_shape(given, words):
    arrays = {name: t.numpy() for name, t in inputs().items()}
    with pytest.raises(HeadwiseError, match=re.escape(words)):
        reference.attend(**arrays | given)


@pytest.mark.parametrize("shape", [(2, 5, 11), (5, 12), (2, 3, 5, 12)], ids=str)
def test_the_reference_module_names_the_shape_of_a_wrong_input(shape):
    with pytest.raises(ShapeError, match=re.escape(f"the input must be (B, T, 12), got {shape}")):
        reference.MultiHeadAttention(12, 3)(np.zeros(shape))


MEANT = {
    "zeros and ones": (torch.tensor([1.0, 0, 1, 0, 1, 1, 0]), True),
    "all ones": (torch.ones(TQ, TK), True),
    "a first row of zeros": (torch.cat([torch.zeros(1, TK), torch.ones(TQ - 1, TK)]), True),
    "zeros": (torch.zeros(TQ, TK), False),
    "a half among them": (torch.tensor([1.0, 0, 1, 0, 0.5, 1, 0]), False),
    "zeros and -inf": (torch.zeros(TQ, TK).masked_fill(torch.ones(TQ, TK).triu(3) > 0, -torch.inf), False),
    "zeros and a half behind": (torch.cat([torch.zeros(TQ - 1, TK), torch.full((1, TK), 0.5)]), False),
}


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.parametrize("function", ["attend", "weights", "head_stats", "explain"])
def test_a_float_mask_of_zeros_and_ones_warns_at_the_callers_line(function, name):
    mask, warned = MEANT[name]
    given = inputs(mask=mask)
    if function == "weights":
        del given["v"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        {"attend": attend, "weights": weights, "head_stats": head_stats, "explain": explain}[function](**given)
    assert [w.filename for w in caught] == [__file__] * warned  # the line that has to change is the caller's
    words = "a torch.float32 mask of zeros and ones is added to the scores; if 1 means 'may attend', give mask.bool()"
    assert all(str(w.message) == words for w in caught)


EMPTY = {"no queries": (B, 0, TK), "no keys": (B, TQ, 0), "neither": (B, 0, 0), "no sequences": (0, TQ, TK)}
RULES = {
    "plain": lambda b, tq, tk: {},
    "causal": lambda b, tq, tk: {"causal": True},
    "a window": lambda b, tq, tk: {"window": (2, 1), "offset": 1},
    "lengths": lambda b, tq, tk: {"lengths": whole(b) * tk, "offset": whole(b), "causal": True},
    "a bool mask": lambda b, tq, tk: {"mask": yes(b, 1, tq, tk)},
    "a float mask": lambda b, tq, tk: {"mask": torch.zeros(H, 1, tk) - 1},
    "sinks": lambda b, tq, tk: {"sinks": x(H), "softcap": 2.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_inputs_are_valid(empty, rule, dtype):
    b, tq, tk = EMPTY[empty]
    options = RULES[rule](b, tq, tk)
    q, k, v = (
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((b, H, tq, D), (b, KV, tk, D), (b, KV, tk, DV))
    )
    out = attend(q, k, v, gates=torch.ones(H), **options)
    torch.testing.assert_close(out, torch.zeros(b, H, tq, DV, dtype=dtype))
    out.sum().backward()
    assert all(not t.grad.any() for t in (q, k, v))
    assert weights(q, k, **options).shape == (b, H, tq, tk)
    with torch.no_grad():
        out, stats = head_stats(q, k, v, classes={"some": yes(b, tk)}, queries=yes(b, tq), **options)
    torch.testing.assert_close(out, torch.zeros(b, H, tq, DV, dtype=dtype))
    assert stats.count.shape == (b, H) and not stats.count.any()
    assert stats.share("some").isnan().all() and stats.share("some").shape == (H,)
    assert f"over {b} sequences, 0 queries at most" in repr(stats)
    assert explain(q, k, v, **options)


def long(queries: int, keys: int = TK, **options) -> dict:
    return {"q": x(B, H, queries, D), "k": x(B, KV, keys, D), "v": x(B, KV, keys, DV), **options}


ONE = "sdpa: one call of PyTorch's kernel"
PATHS = {
    "softcap": ({"softcap": 3.0}, "blockwise: softcap comes between the scores and the mask"),
    "sinks": ({"sinks": x(H)}, "blockwise: sinks change the softmax's denominator"),
    "dropout": ({"dropout": 0.1}, "blockwise: PyTorch's fused CPU kernel has no dropout"),
    "a learned mask": ({"mask": torch.zeros(TQ, TK, requires_grad=True)}, "blockwise: the mask requires a gradient"),
    "plain": ({}, f"{ONE}, the queries of a group stacked"),
    "a mask": ({"mask": yes(TQ, TK)}, f"{ONE}, the queries of a group stacked"),
    "large groups": (long(100), ONE),
    "a window": (
        long(300, window=(4, 1)),
        "sdpa: 3 calls of PyTorch's kernel, 128 queries each on the keys that they see",
    ),
    "causal": (long(900, 900, causal=True), f"{ONE} in its own causal form"),
    "lengths": (
        long(99, 900, lengths=torch.tensor([5, 900])),
        "sdpa: 2 calls of PyTorch's kernel, one per sequence, since their lengths differ",
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_explain_names_the_backend_and_the_reason(name):
    given, words = PATHS[name]
    with forced("default"):
        said = explain(**inputs(**given))
    words = words if words.startswith("sdpa") else f"{words}; blocks of query rows in PyTorch"
    assert said == f"{words} (HEADWISE_KERNEL=off)"


def test_explain_ignores_requires_grad_where_gradients_are_disabled():
    given, _ = PATHS["a learned mask"]
    with forced("default"), torch.no_grad():
        assert explain(**inputs(**given)).startswith("sdpa")


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [None, [1.0], np.zeros((B, H, TQ, D)), "v"], ids=["None", "list", "array", "str"])
def test_arguments_that_are_no_tensors_are_refused_by_name(name, wrong):
    given = inputs(**{name: wrong})
    words = f"{name} must be a tensor, got {type(wrong).__name__}"
    for call in (attend, head_stats, explain):
        for _ in range(3):
            attend(**inputs())
        with pytest.raises(ShapeError, match=words):
            call(*given.values())
    if name != "v":
        with pytest.raises(ShapeError, match=words):
            weights(given["q"], given["k"])


DENSE = {
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", DENSE)
def test_sparse_and_nested_tensors_are_refused(kind):
    given = inputs()
    for _ in range(3):
        attend(**given)
    with pytest.raises(ShapeError, match="q must be a dense tensor, got a .* one; use a padded tensor"):
        attend(**given | {"q": DENSE[kind](given["q"])})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_mask_is_refused_after_calls_with_a_dense_one():
    """PyTorch's tensor guards, which recognise a repeated call, abort the process on a nested tensor."""
    given = inputs(mask=yes(B, H, TQ, TK))
    for _ in range(3):
        attend(**given)
    with pytest.raises(MaskError, match="mask must be a dense tensor, got a nested one; use a padded tensor"):
        attend(**given | {"mask": torch.nested.nested_tensor(list(given["mask"]))})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_starts_lengths_and_offsets_may_be_unsigned(dtype):
    given, numbers = inputs(), torch.tensor([1, 3])
    for name in ("starts", "lengths", "offset"):
        want = attend(**given, causal=True, **{name: numbers})
        torch.testing.assert_close(attend(**given, causal=True, **{name: numbers.to(dtype)}), want)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"causal": torch.tensor([True, False])}, "causal must be True or False, got tensor"),
        ({"scale": 10**400}, "scale must be a finite number, got 1000"),
        (
            {"scale": torch.tensor(0.5, requires_grad=True)},
            "scale has no gradient, got a tensor that requires one; mul",
        ),
        ({"softcap": torch.tensor(2.0, requires_grad=True)}, "softcap has no gradient, got a tensor that requires one"),
        ({"gates": torch.ones(H, dtype=torch.complex64)}, "gates must be real numbers, got torch.complex64"),
        ({"sinks": torch.ones(H, dtype=torch.bool)}, "sinks must be real numbers, got torch.bool"),
    ],
    ids=str,
)
def test_options_of_the_wrong_type_are_refused(other, words):
    for _ in range(3):
        attend(**inputs())
    with pytest.raises(HeadwiseError, match=re.escape(words)):
        attend(**inputs(), **other)


def test_a_learned_scale_is_a_number_where_gradients_are_disabled():
    scale, tensors = torch.tensor(0.5, requires_grad=True), inputs()
    with torch.no_grad():
        torch.testing.assert_close(attend(**tensors, scale=scale), attend(**tensors, scale=0.5))


def test_dropout_may_be_a_scalar_tensor():
    tensors = inputs()
    torch.manual_seed(3)
    want = attend(**tensors, dropout=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(attend(**tensors, dropout=torch.tensor(0.5)), want)


def test_classes_must_be_a_dict():
    with pytest.raises(MaskError, match="classes must be a dict from names to .*, got list"):
        head_stats(**inputs(), classes=["rare"])


def test_a_misspelt_option_is_named_with_the_closest_match():
    given = inputs()
    q, k, v = given.values()
    arrays = [x.numpy() for x in given.values()]
    module, x = MultiHeadAttention(8, 2), torch.zeros(1, 3, 8)
    spec = reference.MultiHeadAttention(8, 2)
    calls = [
        lambda **options: explain(q, k, v, **options),
        lambda **options: functional.head_stats_without_values(q, k, **options),
        lambda **options: functional.is_one_pass(q, k, v, **options),
        lambda **options: module.stats(x, **options),
        lambda **options: module.weights(x, **options),
        lambda **options: reference.attend(*arrays, **options),
        lambda **options: reference.weights(*arrays[:2], **options),
        lambda **options: reference.head_stats(*arrays, **options),
        lambda **options: spec(x.numpy(), **options),
        lambda **options: spec.weights(x.numpy(), **options),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="no option 'casual' here; did you mean 'causal'"):
            call(casual=True)
        with pytest.raises(UnsupportedError, match="no option 'zzz' here; there are mask, causal, window, keep_first"):
            call(zzz=1)


def test_module_without_a_query_raises():
    with pytest.raises(ShapeError, match="query must be a tensor, got NoneType"):
        MultiHeadAttention(8, 2)(None)
