"""What must hold on every code path: empty rows, NaN, gradients, dropout, autocast, compiled and exported code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from headwise import HeadStats, attend, head_stats, weights
from headwise.errors import ShapeError
from helpers.attention_cases import FEW, PATHS, READABLE, array, cases, forced, random_case
from helpers.attention_checks import EMPTY_ROWS, HIDDEN_KEYS, OTHER_OPTIONS, as_leaves, assert_all_close, gradients


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(seed: int = 0, dtype: torch.dtype = torch.float64, **sizes) -> tuple[torch.Tensor, ...]:
    call = random_case(seed, **sizes).tensors(dtype)
    return call.q, call.k, call.v


def causal_mask(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beside", OTHER_OPTIONS)
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_query_with_no_visible_keys_gets_zeros_and_finite_gradients(name, beside, path):
    options, empty = EMPTY_ROWS[name]
    options = {**options, **OTHER_OPTIONS[beside]}
    empty = torch.tensor(empty).bool().expand(2, 5)[:, None].expand(2, 6, 5)
    q, k, v = inputs()
    with forced(path):
        with torch.inference_mode():
            inferred = attend(q, k, v, **options)
        with torch.no_grad():
            measured, _ = head_stats(q, k, v, **options)
        q, k, v = as_leaves(q, k, v)
        trained = attend(q, k, v, **options)
        trained.square().sum().backward()
        options = {name: value for name, value in options.items() if name not in ("dropout", "gates")}
        a = weights(q, k, **options)
    for out in (inferred, measured, trained, a):
        assert not out[empty].any()
        assert out[~empty].isfinite().all() and (out[~empty].any() or empty.all())
    assert not q.grad[empty].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    if not empty.all():
        assert k.grad.any() and v.grad.any() and q.grad[~empty].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beside", ["nothing", "sinks"])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_nan_query_with_no_visible_keys_gets_zeros(name, beside, path):
    options, empty = EMPTY_ROWS[name]
    options = {**options, **OTHER_OPTIONS[beside]}
    empty = torch.tensor(empty).bool().expand(2, 5)[:, None].expand(2, 6, 5)
    q, k, v = inputs()
    q[empty] = torch.nan
    with forced(path):
        for out in (attend(q, k, v, **options), weights(q, k, **options), head_stats(q, k, v, **options)[0]):
            assert not out[empty].any() and out.isfinite().all()


@pytest.mark.parametrize("keys", [1, 2, 7, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_in_visible_inputs_propagates(where, path, dtype, keys):
    """PyTorch's CPU kernel gives zeros for NaN scores on fewer than 16 keys."""
    q, k, v = inputs(dtype=dtype, keys=keys)
    {"query": q[0, 3, 2], "key": k[0, 1, -1], "value": v[0, 1, -1]}[where][:] = torch.nan
    with forced(path):
        out = attend(q, k, v, causal=keys > 7)
        stats_out, stats = head_stats(q, k, v, causal=keys > 7)
    touched = torch.zeros_like(out, dtype=torch.bool)
    if where == "query":
        touched[0, 3, 2] = True
    else:
        touched[0, 3:, (4 if keys > 7 else 0) :] = True
    if path in READABLE or where == "query":
        assert out.isnan().equal(touched) and stats_out.isnan().equal(touched)
    else:
        assert out[touched].isnan().all() and stats_out[touched].isnan().all()
    if where != "value":
        assert stats.per_sequence("entropy").isnan().equal(touched.any(-1).any(-1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options", [{"lengths": torch.tensor([6, 9])}, {"offset": torch.tensor([1, 2]), "causal": True}]
)
def test_nan_propagates_where_lengths_or_offsets_differ(path, options):
    q, k, v = inputs(keys=9)
    q[0, 3, 2] = torch.nan
    with forced(path):
        out = attend(q, k, v, **options)
    assert out[0, 3, 2].isnan().all() and out.isnan().sum() == 3


def with_nan_in_hidden_keys(options: dict, tokens: int | None = None) -> tuple[torch.Tensor, ...]:
    """Inputs with NaN in all hidden keys: 5 queries on 7 keys, or self-attention of this many tokens."""
    call = random_case() if tokens is None else random_case(queries=tokens, keys=tokens)
    call = replace(call, options=array(options)).spoil_hidden_keys(np.nan).tensors()
    return call.q, call.k, call.v


@pytest.mark.parametrize("name", HIDDEN_KEYS)
def test_the_cases_have_hidden_and_visible_keys(name):
    _, k, v = with_nan_in_hidden_keys(HIDDEN_KEYS[name])
    assert 0 < k.isnan().sum() < k.numel() and 0 < v.isnan().sum() < v.numel()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beside", ["nothing", "softcap", "sinks"])
@pytest.mark.parametrize("name", HIDDEN_KEYS)
def test_gradients_ignore_nan_in_hidden_keys(name, beside, path):
    options = {**HIDDEN_KEYS[name], **OTHER_OPTIONS[beside]}
    xs = with_nan_in_hidden_keys(options)
    zeros = [x.nan_to_num(0.0) for x in xs]
    with forced(path):
        assert_all_close(gradients(attend, xs, **options), gradients(attend, zeros, **options))


MORE_HIDDEN_KEYS = {
    "a bool mask": {"mask": torch.arange(23) % 5 > 0},
    "a float mask": {"mask": torch.zeros(23).masked_fill(torch.arange(23) % 5 == 0, -torch.inf)},
    "lengths": {"lengths": torch.tensor([17, 20])},
    "a window": {"window": (3, 1), "offset": 5},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MORE_HIDDEN_KEYS)
def test_gradients_ignore_nan_in_hidden_keys_beyond_one_vector(name, path):
    """Fewer than 16 take another way where values cannot be read."""
    options = MORE_HIDDEN_KEYS[name]
    xs = with_nan_in_hidden_keys(options, 23)
    with forced(path):
        assert_all_close(
            gradients(attend, xs, **options), gradients(attend, [x.nan_to_num(0.0) for x in xs], **options)
        )


@pytest.mark.parametrize("path", ["default", "unreadable"])
@pytest.mark.parametrize("beside", ["nothing", "softcap", "sinks"])
@pytest.mark.parametrize("name", HIDDEN_KEYS)
def test_gradients_of_weights_ignore_nan_in_hidden_keys(name, beside, path):
    options = {**HIDDEN_KEYS[name], **OTHER_OPTIONS[beside]}
    q, k, _ = with_nan_in_hidden_keys(options)
    with forced(path):
        assert_all_close(gradients(weights, (q, k), **options), gradients(weights, (q, k.nan_to_num(0.0)), **options))


@pytest.mark.parametrize("path", [name for name in PATHS if name != "one block of rows"])
@given(call=cases())
@FEW
def test_gradients_of_every_path_equal_those_of_blockwise(path, call):
    got = call.tensors()
    with forced("one block of rows"):
        want = gradients(attend, (got.q, got.k, got.v), **got.options)
    with forced(path):
        assert_all_close(gradients(attend, (got.q, got.k, got.v), **got.options), want)


SMALL = {"batch": 2, "heads": 4, "kv": 2, "queries": 2, "keys": 3}
CHECKED = {  # what is differentiated besides q, k and v; what is not
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "a window": ({}, {"window": (1, 0), "offset": 0}),
    "lengths": ({}, {"lengths": torch.tensor([2, 3]), "causal": True}),
    "a bool mask": ({}, {"mask": torch.tensor([[True, False, True], [False, False, False]])}),
    "a float mask": ({"mask": (4, 1, 3)}, {}),
    "softcap": ({}, {"softcap": 1.5, "causal": True}),
    "sinks": ({"sinks": (4,)}, {"lengths": torch.tensor([2, 0])}),
    "gates": ({"gates": (4,)}, {}),
    "gates a sequence": ({"gates": (2, 4)}, {"causal": True}),
    "all of them": (
        {"mask": (2, 3), "sinks": (4,), "gates": (2, 4)},
        {"softcap": 1.5, "scale": 0.7, "window": (1, 1), "lengths": torch.tensor([2, 3])},
    ),
}


@pytest.mark.parametrize("path", ["default", "many calls of the kernel", "many blocks of rows", "unreadable"])
@pytest.mark.parametrize("name", CHECKED)
def test_attend_and_weights_pass_gradcheck(name, path):
    shapes, options = CHECKED[name]
    more = [torch.randn(shape, dtype=torch.float64) for shape in shapes.values()]
    xs = as_leaves(*inputs(**SMALL), *more)

    def run(q, k, v, *rest):
        return attend(q, k, v, **dict(zip(shapes, rest, strict=True)), **options)

    def look(q, k, v, *rest):
        tensors = {**dict(zip(shapes, rest, strict=True)), **options}
        tensors.pop("gates", None)
        return weights(q, k, **tensors)

    with forced(path):
        assert torch.autograd.gradcheck(run, xs)
        assert torch.autograd.gradcheck(look, xs)


def test_blockwise_passes_gradgradcheck():
    xs = as_leaves(*inputs(**SMALL))
    assert torch.autograd.gradgradcheck(lambda *xs: attend(*xs, softcap=2.0, causal=True), xs)


def test_dropout_drops_or_scales_up_each_weight():
    q, k, _ = inputs(keys=17)
    v = torch.eye(17, dtype=torch.float64).expand(2, 2, 17, 17)  # the output is the weights
    a, dropped = attend(q, k, v, causal=True), attend(q, k, v, causal=True, dropout=0.75)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 4 * a[kept])
    share = kept[a > 0].double().mean()
    assert 0.15 < share < 0.35 and not kept[a == 0].any()


def test_dropout_preserves_the_mean():
    q, k, v = (x[:1].expand(4000, -1, -1, -1) for x in inputs())
    out = attend(q, k, v, dropout=0.4)
    error = (out.mean(0) - attend(q[:1], k[:1], v[:1])[0]) / (out.std(0) / 4000**0.5)
    assert error.abs().max() < 5 and out.std(0).min() > 0


@pytest.mark.parametrize("path", ["default", "many blocks of rows"])
def test_dropout_of_zero_and_one(path):
    xs = inputs()
    with forced(path):
        assert not attend(*xs, dropout=1.0).any()
        torch.testing.assert_close(attend(*xs, dropout=0.0), attend(*xs))


@pytest.mark.parametrize("path", READABLE)
def test_dropout_is_reproducible_and_its_gradient_uses_the_same_draw(path):
    q, k, v = as_leaves(*inputs())
    with forced(path):
        torch.manual_seed(5)
        out = attend(q, k, v, dropout=0.4)
        torch.manual_seed(5)
        again = attend(q, k, v, dropout=0.4)
        other = attend(q, k, v, dropout=0.4)
        assert out.equal(again) and not out.equal(other)
        slope = torch.randn_like(out)
        torch.manual_seed(77)  # blocks are computed again in backward, with the draw they had
        (grad,) = torch.autograd.grad((out * slope).sum(), v)
    torch.testing.assert_close((grad * v).sum(), (out * slope).sum())  # the output is linear in v


def test_statistics_are_of_the_weights_before_dropout():
    q, k, v = inputs()
    _, quiet = head_stats(q, k, v)
    torch.manual_seed(5)
    out, stats = head_stats(q, k, v, dropout=0.4)
    torch.manual_seed(5)
    torch.testing.assert_close(out, attend(q, k, v, dropout=0.4))
    assert stats == quiet


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 3.0}, {"sinks": torch.ones(6)}], ids=["", "cap", "sinks"]
)
def test_autocast_runs_in_its_dtype_and_sums_in_fp32(options):
    q, k, v = inputs(dtype=torch.float32, keys=20)
    v = v.bfloat16()  # mixed dtypes are what autocast is for
    with torch.autocast("cpu", torch.bfloat16):
        out, a, (also, stats) = attend(q, k, v, **options), weights(q, k, **options), head_stats(q, k, v, **options)
    assert out.dtype == a.dtype == also.dtype == torch.bfloat16
    near = q.bfloat16(), k.bfloat16(), v
    torch.testing.assert_close(out, attend(*near, **options))
    torch.testing.assert_close(out.float(), attend(q, k, v.float(), **options), rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(also.float(), attend(q, k, v.float(), **options), rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(a.float(), weights(q, k, **options), rtol=4e-2, atol=2e-2)
    torch.testing.assert_close(stats.entropy, head_stats(*near, **options)[1].entropy, rtol=1e-6, atol=1e-6)


def test_mixed_dtypes_are_refused_without_autocast():
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(ShapeError, match="must have one dtype"):
        attend(q, k, v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16, enabled=False), pytest.raises(ShapeError, match="must have one dtype"):
        attend(q, k, v.bfloat16())


def test_gradients_under_autocast_have_the_dtype_of_the_inputs():
    q, k, v = as_leaves(*inputs(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, softcap=2.0)
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("path", PATHS)
@given(call=cases())
@settings(FEW, max_examples=20)
def test_results_are_bitwise_equal_in_every_gradient_mode(path, call):
    got = call.tensors(torch.float32)
    with forced(path):
        out, a = attend(got.q, got.k, got.v, **got.options), weights(got.q, got.k, **got.weight_options)
        with torch.inference_mode():
            assert attend(got.q, got.k, got.v, **got.options).equal(out)
            assert weights(got.q, got.k, **got.weight_options).equal(a)
            _, stats = head_stats(got.q, got.k, got.v, **got.options)
        assert head_stats(got.q, got.k, got.v, **got.options)[1] == stats


GRAPHS = {
    "plain": {},
    "causal": {"causal": True},
    "a window": {"window": (2, 1), "offset": 1},
    "windows per head": {"window": [(2, 1), (0, 0), (None, 0)] * 2, "keep_first": [1, 2, 0, 0, 1, 1]},
    "first keys": {"window": (1, 0), "causal": True, "keep_first": 2, "starts": torch.tensor([1, 0])},
    "offsets": {"causal": True, "offset": torch.tensor([-1, 2])},
    "lengths": {"lengths": torch.tensor([3, 6])},
    "a bool mask": {"mask": causal_mask(5, 7)},
    "a padding mask": {"mask": torch.tensor([1, 1, 0, 1, 1, 0, 1]).bool().expand(2, 1, 1, 7)},
    "a float mask": HIDDEN_KEYS["a float mask"],
    "softcap": {"softcap": 2.0, "causal": True, "offset": 0},
    "all of them": {
        **HIDDEN_KEYS["all of them"],
        "softcap": 2.0,
        "scale": 0.7,
        "sinks": torch.linspace(-1, 1, 6, dtype=torch.float64),
    },
}
STATS = {"queries": torch.arange(10).view(2, 5) % 3 > 0, "classes": {"rare": torch.arange(14).view(2, 7) % 3 == 0}}


def compiled(function, backend: str, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def alike(got: HeadStats, want: HeadStats, **tolerance) -> None:
    assert isinstance(got, HeadStats) and set(got.names) == set(want.names)
    arrays = [[x.count, *(x.per_sequence(name) for name in want.names)] for x in (got, want)]
    assert_all_close(*arrays, equal_nan=True, **tolerance)
    assert (got.received is None) == (want.received is None)
    if want.received is not None:
        torch.testing.assert_close(got.received, want.received, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_attend_equals_eager_forward_and_backward(name):
    options = GRAPHS[name]
    xs = with_nan_in_hidden_keys(options)
    fast = compiled(lambda q, k, v: attend(q, k, v, gates=torch.ones(6), **options), "aot_eager")
    assert_all_close(gradients(fast, xs), gradients(attend, xs, **options))


@pytest.mark.parametrize("name", ["causal", "lengths", "a float mask", "all of them"])
def test_compiled_weights_equal_eager_forward_and_backward(name):
    options = GRAPHS[name]
    xs = with_nan_in_hidden_keys(options)[:2]
    fast = compiled(lambda q, k: weights(q, k, heads=[4, 1], rows=[0, 3], **options), "aot_eager")
    assert_all_close(gradients(fast, xs), gradients(weights, xs, heads=[4, 1], rows=[0, 3], **options))


@pytest.mark.parametrize("name", ["causal", "offsets", "a padding mask", "all of them"])
def test_compiled_statistics_equal_eager(name):
    options = {**GRAPHS[name], **STATS}
    xs = with_nan_in_hidden_keys(GRAPHS[name])
    fast = compiled(lambda q, k, v: head_stats(q, k, v, **options), "aot_eager")
    (out, stats), (want, expected) = fast(*xs), head_stats(*xs, **options)
    assert_all_close([out], [want])
    alike(stats, expected)
    assert_all_close(gradients(fast, xs), gradients(head_stats, xs, **options))


@pytest.mark.parametrize("name", ["plain", "a window", "softcap", "statistics"])
def test_compiled_code_takes_any_number_of_lengths(name):
    """A graph a length would end at PyTorch's limit of 8, which a full graph makes an error."""
    options = {"window": {"window": (6, 0)}, "softcap": {"softcap": 2.0}}.get(name, {})

    def run(q, k, v):
        return head_stats(q, k, v)[0] if name == "statistics" else attend(q, k, v, **options)

    fast = compiled(run, "eager")
    for tokens in range(20, 31):
        xs = inputs(queries=tokens, keys=tokens)
        assert_all_close([fast(*xs)], [run(*xs)])


INDUCTOR = {
    "attend, fused": lambda q, k, v: attend(q, k, v, window=(2, 1), offset=1, lengths=torch.tensor([3, 6])),
    "attend, rows": lambda q, k, v: attend(q, k, v, **GRAPHS["all of them"]),
    "head_stats": lambda q, k, v: head_stats(q, k, v, causal=True, softcap=2.0, **STATS),
}


@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_equals_eager(name):
    function, xs = INDUCTOR[name], inputs()
    fast = compiled(function, "inductor")
    assert_all_close(gradients(fast, xs), gradients(function, xs))
    if name == "head_stats":
        alike(fast(*xs)[1], function(*xs)[1])


EXPORTED = {  # for self-attention of any length from 2 on
    "plain": {},
    "causal": {"causal": True},
    "causal with an offset": {"causal": True, "offset": -1},
    "a window": {"window": (3, 1)},
    "a window with an offset": {"window": (1, 0), "offset": 2},
    "offsets": {"causal": True, "offset": torch.tensor([-1, 2])},
    "lengths": {"lengths": torch.tensor([3, 6])},
    "a mask a head": {"mask": (torch.arange(6) % 4 > 0).view(6, 1, 1)},
    "softcap and sinks": {"softcap": 2.0, "causal": True, "sinks": torch.linspace(-1, 1, 6, dtype=torch.float64)},
}
FUNCTIONS = {
    "attend": lambda q, k, v, options: attend(q, k, v, gates=torch.arange(6.0), **options),
    "weights": lambda q, k, v, options: weights(q, k, **options),
    "head_stats": lambda q, k, v, options: head_stats(q, k, v, **options),
    "weight per key": lambda q, k, v, options: head_stats(q, k, v, received=True, **options),
}


class Exported(torch.nn.Module):
    """One call of attention, as a module that torch.export takes."""

    def __init__(self, function, options: dict):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, q, k, v):
        return self.function(q, k, v, self.options)


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_exported_graph_takes_any_length(function, name):
    options = EXPORTED[name]
    function = FUNCTIONS[function]
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    graph = torch.export.export(
        Exported(function, options), inputs(queries=11, keys=11), dynamic_shapes=[{2: tokens}] * 3
    ).module()
    for length in (7, 19, 900):
        xs = with_nan_in_hidden_keys(options, length)
        got, want = graph(*xs), function(*xs, options)
        if isinstance(want, tuple):
            alike(got[1], want[1])
            got, want = got[0], want[0]
        assert_all_close([got], [want])


@pytest.mark.parametrize("name", ["starts", "lengths", "offset"])
@pytest.mark.parametrize("received", [False, True])
def test_an_exported_graph_takes_any_batch_of_numbers_per_sequence(received, name):
    class Statistics(torch.nn.Module):
        def forward(self, q, k, v, numbers):
            return head_stats(q, k, v, causal=True, received=received, **{name: numbers})

    def call(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        return *inputs(batch=batch, queries=queries, keys=keys), torch.arange(batch) % keys

    batch, queries, keys = (torch.export.Dim(x, min=2, max=4096) for x in ("batch", "queries", "keys"))
    shapes = [{0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch}]
    graph = torch.export.export(Statistics(), call(5, 11, 17), dynamic_shapes=shapes).module()
    for size in ((2, 19, 7), (7, 5, 13)):
        xs = call(*size)
        got, want = graph(*xs), Statistics()(*xs)
        assert_all_close([got[0]], [want[0]])
        alike(got[1], want[1])
