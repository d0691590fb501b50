"""Checks and calls that the tests of several backends share: outputs, weights, statistics and gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headwise import HeadStats, attend, head_stats, reference, weights

from .attention_cases import LAYOUTS, AttentionCase, array, random_case

# Besides rounding the result, the kernels round the weights to the inputs' dtype before the product with the values.
TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 5e-3, "atol": 1e-2},
    torch.bfloat16: {"rtol": 4e-2, "atol": 6e-2},
}


def check_attend(call: AttentionCase, dtype: torch.dtype = torch.float64, layout: str = "default") -> None:
    """attend equals the specification."""
    call = call.rounded(dtype)
    inputs = call.tensors(dtype)
    out = attend(*(LAYOUTS[layout](x) for x in (inputs.q, inputs.k, inputs.v)), **inputs.options)
    assert out.dtype == dtype
    np.testing.assert_allclose(array(out), reference.attend(call.q, call.k, call.v, **call.options), **TOLERANCE[dtype])


def check_weights(
    call: AttentionCase, selection: dict, dtype: torch.dtype = torch.float64, layout: str = "default"
) -> None:
    """weights equal the specification."""
    call = call.rounded(dtype)
    inputs = call.tensors(dtype)
    a = weights(LAYOUTS[layout](inputs.q), LAYOUTS[layout](inputs.k), **inputs.weight_options, **selection)
    assert a.dtype == dtype
    np.testing.assert_allclose(
        array(a), reference.weights(call.q, call.k, **call.weight_options, **selection), **TOLERANCE[dtype]
    )


# The output is rounded to its dtype, the statistics are not.
OUTPUT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1e-2}
SUMS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-4}


def check_stats(call: AttentionCase, dtype: torch.dtype = torch.float64) -> None:
    """head_stats equals the specification."""
    call = call.rounded(dtype)
    inputs = call.tensors(dtype)
    out, stats = head_stats(inputs.q, inputs.k, inputs.v, **inputs.options, **inputs.stats_options)
    expected, specified = reference.head_stats(call.q, call.k, call.v, **call.options, **call.stats_options)
    np.testing.assert_allclose(array(out), expected, rtol=OUTPUT_TOLERANCE[dtype], atol=OUTPUT_TOLERANCE[dtype])
    assert out.dtype == dtype
    assert_same_stats(stats, specified, SUMS_TOLERANCE[dtype])


def assert_same_stats(stats: HeadStats, specified: HeadStats, tolerance: float) -> None:
    """Statistics in tensors equal those of the specification, in all that they hold."""
    np.testing.assert_array_equal(stats.count, specified.count)
    for got, want in ((stats.sums, specified.sums), (stats.maxima, specified.maxima)):
        assert set(got) == set(want)
        for name, x in want.items():
            assert got[name].dtype == torch.float64
            np.testing.assert_allclose(got[name], x, tolerance, tolerance, err_msg=name)
    assert (stats.received is None) == (specified.received is None)
    if specified.received is not None:
        np.testing.assert_allclose(stats.received, specified.received, tolerance, tolerance, err_msg="received")


# What may stand between q.k of 5 queries and 11 keys and the scores. Masks hide key 0 and show key 10.
ADJUSTMENTS = {
    "nothing": {},
    "a bool mask": {"mask": np.arange(11) % 3 > 0},
    "softcap": {"softcap": 2.0},
    "a float mask": {"mask": np.where(np.arange(11) % 4, np.linspace(9.0, -9.0, 11), -np.inf)},
    "sinks": {"sinks": np.full(6, 50.0)},
    "all of them": {
        "softcap": 3.0, "sinks": np.full(6, 50.0), "causal": True,
        "mask": np.where(np.arange(11) % 4, np.linspace(9.0, -9.0, 11), -np.inf),
    },
}  # fmt: skip


def check_max_logit(name: str) -> None:
    """max_logit is of visible keys and counted queries alone, before what adjusts the scores."""
    call = replace(random_case(7, 2, 6, 2, 5, 11), options=ADJUSTMENTS[name])
    call.q[:, :, 3] *= 100  # the largest logits are of a query that does not count,
    call.k[:, :, 0] *= 100  # and of a key that the masks hide
    counted = np.arange(5) != 3
    call = replace(call, stats_options={"queries": np.stack([counted, counted])})
    k = np.repeat(call.k, 3, 1)
    logits = call.q @ k.swapaxes(-1, -2) * call.q.shape[-1] ** -0.5
    seen = reference.visible(call.q, call.k, **call.visibility_options) & counted[:, None]
    want = np.where(seen, logits, -np.inf).max((2, 3))
    x = call.tensors(torch.float32)
    got = head_stats(x.q, x.k, x.v, **x.options, **x.stats_options)[1]
    # inputs, products, partial sums and the scale are rounded, each relative to the sum of magnitudes at most
    magnitudes = np.where(seen, abs(call.q) @ abs(k).swapaxes(-1, -2) * call.q.shape[-1] ** -0.5, 0)
    bound = (4 + call.q.shape[-1]) * 2.0**-24 * magnitudes.max((2, 3))
    assert (abs(got.per_sequence("max_logit").numpy() - want) <= bound).all()
    specified = reference.head_stats(call.q, call.k, call.v, **call.options, **call.stats_options)[1]
    np.testing.assert_allclose(specified.per_sequence("max_logit"), want, rtol=1e-12)


def check_nonfinite_logits(name: str, value: float) -> None:
    """A NaN that a counted query sees is max_logit, and an infinity is a logit like any other; hidden they are not."""
    call = replace(random_case(3, 2, 6, 2, 5, 11), options=ADJUSTMENTS[name] | {"causal": True, "offset": 6})
    call.k[0, 1, 10, 0] = value  # of KV head 1, and seen by the last query alone
    for counted in (np.arange(5) < 4, np.arange(5) > 1):
        call = replace(call, stats_options={"queries": np.stack([counted, counted])})
        want = reference.head_stats(call.q, call.k, call.v, **call.options, **call.stats_options)[1]
        x = call.tensors(torch.float32)
        got = head_stats(x.q, x.k, x.v, **x.options, **x.stats_options)[1]
        for statistic in ("max_logit", "lse"):
            np.testing.assert_allclose(
                got.per_sequence(statistic), want.per_sequence(statistic), rtol=1e-4, atol=1e-4, err_msg=statistic
            )
        assert np.isnan(want.per_sequence("max_logit")).any() == (counted[4] and np.isnan(value))
        arguments: dict = {"received": True, **x.options, **x.stats_options}
        want = reference.head_stats(call.q, call.k, call.v, received=True, **call.options, **call.stats_options)[1]
        received = head_stats(x.q, x.k, x.v, **arguments)[1].received
        np.testing.assert_allclose(received, want.received, rtol=1e-4, atol=1e-4)


def as_leaves(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies that require gradients."""
    return tuple(x.detach().clone().requires_grad_() for x in xs)


def gradients(function, xs, **options) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of an uneven sum of it."""
    xs = as_leaves(*xs)
    out = function(*xs, **options)
    out = out[0] if isinstance(out, tuple) else out
    grad_out = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * grad_out).sum(), xs)


def assert_all_close(got, want, **tolerance) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 1e-8, "atol": 1e-10} | tolerance))


# Sizes, options, and how explain names the path of the call with the constants as they are.
LARGE_CALLS = {
    "causal, below the triangle": ((1, 2, 1, 700, 700), {"causal": True}, "queries each"),
    "causal, the kernel's triangle": ((1, 2, 1, 1000, 1000), {"causal": True}, "own causal form"),
    "causal, a chunk after a cache": ((1, 2, 2, 300, 1000), {"causal": True}, "queries each"),
    "causal, a chunk with free slots after it": ((1, 2, 2, 300, 1000), {"causal": True, "offset": 400}, "queries each"),
    "a causal window": ((1, 2, 1, 1000, 1000), {"window": (100, 0)}, "queries each"),
    "a window to both sides": ((1, 2, 1, 1000, 1000), {"window": (37, 211)}, "queries each"),
    "a window open to the right": ((1, 2, 2, 500, 1000), {"window": (37, None), "offset": 100}, "queries each"),
    "grouped decoding": ((2, 8, 2, 1, 1000), {}, "of a group stacked"),
    "grouped, not stacked": ((1, 8, 2, 100, 900), {}, "one call"),
    "lengths one by one": ((3, 2, 2, 300, 1000), {"lengths": np.array([1000, 0, 613])}, "one per sequence"),
    "offsets one by one": ((2, 2, 1, 300, 900), {"causal": True, "offset": np.array([650, 3])}, "one per sequence"),
    "softcap in blocks": ((1, 4, 2, 600, 1000), {"causal": True, "softcap": 3.0}, "blockwise: softcap"),
    "windows per head": (
        (1, 4, 2, 1000, 1000),
        {"window": [(40, 0), (None, 0), (9, 0), (300, 5)], "keep_first": [4, 0, 1, 600]},
        "blockwise: the window differs between heads",
    ),
    "a window and the first keys": (
        (2, 4, 2, 700, 900),
        {"causal": True, "window": (64, 0), "keep_first": 4, "starts": np.array([3, 700])},
        "blockwise: the window differs between heads, or keeps the first keys",
    ),
    "sinks in a window": ((1, 4, 2, 1000, 1000), {"window": (50, 9), "sinks": np.arange(4.0)}, "blockwise: sinks"),
}
# Sizes are batch, heads, KV heads, queries, keys.
LARGE_CALLS_WITH_STATS = {
    "dense": ((1, 2, 1, 700, 700), {}),
    "causal": ((1, 4, 2, 900, 900), {"causal": True}),
    "a window": ((1, 2, 2, 1000, 1000), {"window": (40, 7)}),
    "a chunk": ((1, 2, 2, 300, 1000), {"causal": True, "offset": 500}),
    "lengths": ((3, 2, 2, 300, 500), {"lengths": np.array([500, 0, 77])}),
    "starts": ((3, 2, 2, 300, 500), {"starts": np.array([500, 0, 77]), "causal": True}),
    "windows per head": (
        (1, 4, 2, 300, 500),
        {"window": [(40, 0), (None, 0), (9, 0), (300, 5)], "keep_first": [4, 0, 1, 200]},
    ),
    "windows and first keys per head with left padding": (
        (3, 4, 2, 500, 500),
        {
            "window": [(40, 0), (None, 0), (9, 0), (300, 0)],
            "keep_first": [4, 0, 1, 200],
            "causal": True,
            "starts": np.array([77, 0, 460]),
        },
    ),
    "decoding": ((2, 8, 2, 1, 1000), {}),
    "a padding mask": ((2, 2, 1, 600, 600), {"causal": True, "mask": np.arange(600) > np.array([[[[9]]], [[[0]]]])}),
}

# Options for 5 queries on 7 keys, and the rows with no visible keys, (B, Tq) or for all sequences.
SOME_ROWS = torch.ones(5, 7, dtype=torch.bool)
SOME_ROWS[[1, 4]] = False
EMPTY_ROWS = {
    "a bool mask": ({"mask": SOME_ROWS}, [[0, 1, 0, 0, 1]]),
    "a float mask": ({"mask": torch.zeros(5, 7).masked_fill(~SOME_ROWS, -torch.inf)}, [[0, 1, 0, 0, 1]]),
    "before the first key": ({"causal": True, "offset": -2}, [[1, 1, 0, 0, 0]]),
    "past the last key": ({"window": (1, 1), "offset": 4}, [[0, 0, 0, 0, 1]]),
    "offsets": ({"causal": True, "offset": torch.tensor([-3, 0])}, [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]),
    "lengths": ({"lengths": torch.tensor([4, 0])}, [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
    "starts": ({"starts": torch.tensor([4, 7]), "causal": True}, [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]),
    "no row has keys": ({"lengths": torch.tensor([0, 0])}, [[1, 1, 1, 1, 1]]),
}
OTHER_OPTIONS = {
    "nothing": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 6, dtype=torch.float64)},
    "dropout": {"dropout": 0.3},
    "gates": {"gates": torch.linspace(0.5, 1, 6, dtype=torch.float64)},
}

HIDDEN_KEYS = {  # options for 5 queries on 7 keys, some of which no query sees
    "a bool mask": {"mask": torch.tensor([1, 1, 0, 1, 1, 0, 1]).bool()},
    "a bool mask per head": {"mask": (torch.arange(42).view(6, 1, 7) % 7 < 4).roll(1, 0)},
    "a float mask": {"mask": torch.tensor([0.0, 1.0, -torch.inf, 0.5, 0.0, -torch.inf, 0.0])},
    "one length": {"lengths": torch.tensor([4, 4])},
    "starts": {"starts": torch.tensor([3, 1])},
    "one start": {"starts": torch.tensor([2, 2]), "causal": True},
    "first keys and a window": {"window": (0, 0), "keep_first": 1, "offset": 3, "causal": True},
    "lengths": {"lengths": torch.tensor([3, 6])},
    "causal from the start": {"causal": True, "offset": 0},
    "a window": {"window": (1, 0), "offset": 1},
    "offsets": {"window": (1, 1), "offset": torch.tensor([0, 1])},
    "all of them": {
        "mask": torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool(), "causal": True, "window": (1, None),
        "lengths": torch.tensor([6, 7]), "offset": 1,
    },
}  # fmt: skip
