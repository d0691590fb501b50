"""Every backend implements one Protocol: what it accepts, it computes as the reference does, whatever is requested."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from headwise import head_stats, reference, weights
from headwise.attention.backends import blockwise, blockwise_stats, sdpa
from headwise.attention.backends.native import library
from headwise.attention.backends.protocol import NO_EXTRA, Backend, ExtraOutputs
from headwise.attention.call import StatsRequest, build_call
from headwise.attention.stats import COLUMNS, POSITIONAL, STEPS, stats_from_weights
from helpers.attention_cases import FEW, NATIVE, array, cases, cases_with_stats, random_case

# a random mask of one number may round to one
pytestmark = pytest.mark.filterwarnings("ignore:a torch.* mask of zeros and ones")

BACKENDS: dict[str, Backend] = {
    "native": library,
    "sdpa": sdpa,
    "blockwise": blockwise,
    "blockwise_stats": blockwise_stats,
}
EXTRA = {
    "nothing": NO_EXTRA,
    "statistics": ExtraOutputs(stats=StatsRequest()),
    "log-sum-exp": ExtraOutputs(lse=True),
    "strongest keys": ExtraOutputs(strongest=2),
}


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "native" or NATIVE])
@given(call=cases())
@settings(FEW, max_examples=40)
def test_a_backend_computes_what_it_accepts(name, call):
    backend, call = BACKENDS[name], call.rounded(torch.float32)
    x = call.tensors(torch.float32)
    built = build_call(x.q, x.k, x.v, **x.options)
    for extra in EXTRA.values():
        if backend.why_not(x.q, built, extra) is not None:
            continue
        outputs = backend.run(x.q, x.k, x.v, built, extra)
        expected, stats = reference.head_stats(call.q, call.k, call.v, **call.options)
        np.testing.assert_allclose(array(outputs.out), expected, rtol=1e-4, atol=2e-5)
        if extra.stats is not None:
            for name in stats.names:
                np.testing.assert_allclose(outputs.stats[name], stats[name], rtol=1e-4, atol=1e-4, err_msg=name)
        assert (outputs.lse is not None) == extra.lse
        assert (outputs.strongest is not None) == bool(extra.strongest)


def test_each_backend_refuses_the_extra_outputs_that_it_does_not_compute():
    x = random_case().tensors(torch.float32)
    call = build_call(x.q, x.k, x.v)
    accepted = {
        name: [wanted for wanted, extra in EXTRA.items() if backend.why_not(x.q, call, extra) is None]
        for name, backend in BACKENDS.items()
        if name != "native" or NATIVE
    }
    accepted.pop("native", None)
    assert accepted == {
        "sdpa": ["nothing"],
        "blockwise": ["nothing"],
        "blockwise_stats": ["nothing", "statistics"],
    }


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@given(call=cases_with_stats())
@settings(FEW, max_examples=60)
def test_statistics_of_full_weights_equal_head_stats(kind, call):
    """With all that weights do not tell: which keys are visible, and which is the first that exists."""
    x = call.tensors()
    a = weights(x.q, x.k, **x.weight_options)
    _, expected = head_stats(x.q, x.k, x.v, **x.options, **x.stats_options)
    offset = x.options.get("offset")
    offset = x.k.shape[2] - x.q.shape[2] if offset is None else offset
    counted = call.stats_options.get("queries", np.ones((call.q.shape[0], call.q.shape[2]), bool))
    first = reference._first_key(reference.validation.sizes(call.q, call.k), call.options, counted)
    arguments = {
        "weights": a,
        "offset": offset,
        **x.stats_options,
        "sinks": "sinks" in x.options,
        "visible": torch.from_numpy(reference.visible(call.q, call.k, **call.visibility_options)),
        "first": torch.from_numpy(first),
    }
    if kind == "numpy":
        arguments = {name: array(value) for name, value in arguments.items()}
    stats = stats_from_weights(arguments.pop("weights"), **arguments)
    assert set(expected.names) - set(stats.names) == {"lse", "max_logit"}  # weights do not tell them
    assert isinstance(stats.count, np.ndarray if kind == "numpy" else torch.Tensor)
    np.testing.assert_array_equal(stats.count, expected.count)
    for name in stats.names:
        np.testing.assert_allclose(stats.sums[name], expected.sums[name], rtol=1e-8, atol=1e-9, err_msg=name)


def test_names_of_statistics_are_consistent():
    assert set(STEPS) < set(POSITIONAL) < set(COLUMNS)
    assert len(set(COLUMNS)) == len(COLUMNS) and COLUMNS[-1] == "count"
