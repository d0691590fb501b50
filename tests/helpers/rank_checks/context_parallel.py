"""Context parallel: outputs, gradients and statistics of split sequences against headwise.attend on the whole."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise import Heads, Shape
from headwise.scale import (
    SequencePlan,
    context_parallel_attend,
    context_parallel_head_stats,
    count_traffic,
    gather_sequence,
    local_positions,
    shard_sequence,
    split_sequence,
    sum_gradients,
)
from headwise.scale import ranks as ranks_module
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error

from .meshes import separate_mesh
from .registry import check

BATCH, DIM, VALUE_DIM = 2, 6, 5


def random_qkv(
    tokens: int, heads: int = 6, kv: int = 6, dtype: torch.dtype = torch.float64, value: int = DIM
) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    sizes = (heads, DIM), (kv, DIM), (kv, value)
    return [torch.randn(BATCH, h, tokens, d, generator=random, dtype=dtype) for h, d in sizes]


def compare_with_attend(
    tokens: int, heads: int, kv: int, zigzag: bool | None, dtype: torch.dtype, value: int, **options: Any
) -> None:
    """The output and every gradient."""
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    inputs = random_qkv(tokens, heads, kv, dtype, value)
    split_zigzag = bool(options.get("causal")) if zigzag is None else zigzag
    local = [shard_sequence(x, 2, zigzag=split_zigzag).clone().requires_grad_() for x in inputs]
    whole = [x.clone().requires_grad_() for x in inputs]
    local_options, whole_options = (
        {name: x.clone().requires_grad_() if name in ("sinks", "gates") else x for name, x in options.items()}
        for _ in range(2)
    )
    got, want = (
        context_parallel_attend(*local, zigzag=zigzag, **local_options),
        headwise.attend(*whole, **whole_options),
    )
    torch.testing.assert_close(got, shard_sequence(want, 2, zigzag=split_zigzag), **tolerance)
    torch.testing.assert_close(gather_sequence(got, 2, zigzag=split_zigzag), want, **tolerance)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    want.backward(grad)
    got.backward(shard_sequence(grad, 2, zigzag=split_zigzag))
    for a, b in zip(local, whole, strict=True):
        torch.testing.assert_close(a.grad, shard_sequence(b.grad, 2, zigzag=split_zigzag), **tolerance)
    for name in ("sinks", "gates"):
        if name in options:
            total = local_options[name].grad.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total, whole_options[name].grad, **tolerance)


def compare_over_sizes(options: dict[str, Any]) -> None:
    """The same options with heads grouped and not, both orders of tokens, and fewer tokens than chunks."""
    sizes = [((31, 6, 6), None), ((37, 6, 2), None), ((24, 6, 1), not options.get("causal")), ((5, 3, 3), None)]
    dtypes = [(torch.float64, DIM), (torch.float32, DIM), (torch.float64, VALUE_DIM)]
    for (size, zigzag), (dtype, value) in itertools.product(sizes, dtypes):
        made = {name: x(dtype, size[1]) if callable(x) else x for name, x in options.items()}
        compare_with_attend(*size, zigzag, dtype, value, **made)


for name, options in {
    "without_options": {},
    "causal": {"causal": True},
    "with_a_causal_window": {"causal": True, "window": (4, 0)},
    "with_a_two_sided_window": {"window": (3, 2)},
    "with_lengths": {"causal": True, "lengths": torch.tensor([3, 5])},
    "with_an_empty_sequence": {"lengths": torch.tensor([0, 4])},
    "with_softcap": {"causal": True, "softcap": 2.0, "scale": 0.7},
    "with_sinks_and_gates": {
        "causal": True,
        "sinks": lambda dtype, heads: torch.linspace(-1, 2, heads, dtype=dtype),
        "gates": lambda dtype, heads: torch.linspace(0, 1, heads, dtype=dtype),
    },
    "with_a_negative_scale": {"causal": True, "scale": -0.3},
}.items():
    check(
        lambda ranks, folder, options=options: compare_over_sizes(options), f"context_parallel_attend_is_exact_{name}"
    )


@check
def context_parallel_head_stats_is_exact(ranks: Ranks, folder: Path) -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": True, "window": (4, 0), "softcap": 3.0},
        {"window": (2, 5), "lengths": torch.tensor([3, 29])},
        {"causal": True, "sinks": torch.linspace(-1, 3, 6)},
    ]
    for (tokens, kv), options in itertools.product(((31, 6), (37, 2), (7, 1)), calls):
        if "lengths" in options:
            options = {**options, "lengths": options["lengths"].clamp(max=tokens)}
        zigzag = bool(options.get("causal"))
        inputs = random_qkv(tokens, 6, kv, torch.float32)
        random = torch.Generator().manual_seed(2)
        queries = torch.rand(BATCH, tokens, generator=random) > 0.2
        classes = {name: torch.rand(BATCH, tokens, generator=random) > 0.5 for name in ("rare", "odd")}
        out, got = context_parallel_head_stats(
            *(shard_sequence(x, 2, zigzag=zigzag) for x in inputs),
            queries=shard_sequence(queries, 1, zigzag=zigzag),
            classes={name: shard_sequence(x, 1, zigzag=zigzag) for name, x in classes.items()},
            **options,
        )
        want_out, want = headwise.head_stats(*inputs, queries=queries, classes=classes, **options)
        torch.testing.assert_close(out, shard_sequence(want_out, 2, zigzag=zigzag), rtol=1e-4, atol=1e-4)
        assert set(got.names) == set(want.names)
        torch.testing.assert_close(got.count, want.count)
        tables = (*((name, got.sums[name], x) for name, x in want.sums.items()),
                  *((name, got.maxima[name], x) for name, x in want.maxima.items()))  # fmt: skip
        for name, a, b in tables:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n} {m}")


@check
def context_parallel_head_stats_keep_the_maximum_of_every_rank(ranks: Ranks, folder: Path) -> None:
    q, k, v = random_qkv(31, 6, 2, torch.float64)
    k[0, 1, 30, 0] = torch.nan  # seen by the last query alone, which is on one rank
    for counted in (range(30), range(31)):
        queries = torch.tensor([i in counted for i in range(31)]).expand(BATCH, -1)
        parts = [shard_sequence(x, 2) for x in (q, k, v)]
        _, got = context_parallel_head_stats(*parts, queries=shard_sequence(queries, 1), causal=True)
        want = headwise.head_stats(q, k, v, queries=queries, causal=True)[1]
        assert want.max_logit.isnan().tolist() == [False] * 3 + [30 in counted] * 3
        torch.testing.assert_close(got.maxima["max_logit"], want.maxima["max_logit"], equal_nan=True)


@check
def decoders_over_split_sequences_match_the_whole(ranks: Ranks, folder: Path) -> None:
    shapes = {
        "decoder": Shape(layers=3, heads=Heads(30, 6, 2, 6), ffn=37, vocab=41, positions="rotary", norm="rms",
                         activation="swiglu", head="own", window=(None, 5, None)),
        "learned": Shape(layers=2, heads=Heads.split(28, 7), ffn=23, vocab=41, max_length=64, head="tied"),
    }  # fmt: skip
    for name, shape in shapes.items():
        torch.manual_seed(3)
        whole = headwise.Decoder(shape).double()
        split = split_sequence(copy.deepcopy(whole))
        ids = torch.randint(41, (2, 27))
        want, got = whole(ids), split(shard_sequence(ids, 1))
        torch.testing.assert_close(gather_sequence(got, 1), want, msg=name)
        grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
        want.backward(grad)
        got.backward(shard_sequence(grad, 1))
        sum_gradients(split)
        for a, b in zip(split.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        for got_stats, want_stats in zip(split.stats(shard_sequence(ids, 1)), whole.stats(ids), strict=True):
            for statistic in want_stats:
                torch.testing.assert_close(got_stats[statistic], want_stats[statistic], msg=f"{name} {statistic}")


@check
def attention_over_a_split_sequence_matches_the_whole(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(4)
    for options in ({"position": headwise.Alibi(), "sinks": True}, {"position": headwise.Rotary(), "softcap": 3.0}):
        whole = headwise.MultiHeadAttention(24, 6, **options)
        split = split_sequence(copy.deepcopy(whole), zigzag=False)
        x, gates = torch.randn(2, 17, 24), torch.rand(6)
        got = split(shard_sequence(x, 1, zigzag=False), gates=gates, lengths=torch.tensor([9, 17]))
        want = whole(x, gates=gates, lengths=torch.tensor([9, 17]))
        torch.testing.assert_close(gather_sequence(got, 1, zigzag=False), want, rtol=1e-4, atol=1e-4)
    x = shard_sequence(x, 1, zigzag=False)
    assert_error(lambda: split(x, mask=torch.ones(17, 17).bool()), "takes no mask; lengths and windows it takes")
    assert_error(lambda: split.stats(x, received=True), "takes no received; lengths and windows it takes")
    assert_error(lambda: split(x, torch.randn(2, 3, 24)), "is for self-attention, got a key or value of another")
    assert_error(lambda: split(x, x, torch.randn(2, 3, 24)), "is for self-attention, got a key or value of another")
    assert_error(lambda: split(x, casual=True), "there is no option 'casual' here; did you mean 'causal'?")
    torch.testing.assert_close(split(x, mask=None, cache=None, need_weights=False), split(x))
    assert_error(lambda: split.weights(x), "are on no rank whole")
    assert_error(lambda: split_sequence(torch.nn.Linear(3, 3)), "no self-attention whose sequence can be split")


@check
def nan_reaches_only_queries_that_attend_to_it(ranks: Ranks, folder: Path) -> None:
    q, k, v = random_qkv(23, dtype=torch.float32)
    k[0, :, 11], v[1, :, 13] = torch.nan, torch.nan
    got = gather_sequence(context_parallel_attend(*(shard_sequence(x, 2) for x in (q, k, v)), causal=True), 2)
    assert got[0, :, :11].isfinite().all() and got[0, :, 11:].isnan().all()
    assert got[1, :, :13].isfinite().all() and got[1, :, 13:].isnan().all()


@check
def gather_sequence_inverts_shard_sequence(ranks: Ranks, folder: Path) -> None:
    for tokens, zigzag in itertools.product((3, 16, 29), (True, False)):
        x = torch.arange(tokens)
        assert torch.equal(shard_sequence(x, 0, zigzag=zigzag), local_positions(tokens, zigzag=zigzag))
        assert torch.equal(gather_sequence(shard_sequence(x, 0, zigzag=zigzag), 0, zigzag=zigzag), x)


@check
def wrong_calls_of_context_parallel_attend_fail_on_every_rank(ranks: Ranks, folder: Path) -> None:
    q, k, v = (shard_sequence(x, 2) for x in random_qkv(31, dtype=torch.float32))
    more = 2 if ranks.rank == 1 else 0
    assert_error(
        lambda: context_parallel_attend(*(torch.cat([x, x[:, :, :more]], 2) for x in (q, k, v)), causal=True),
        "belong there (zigzag)",
    )
    assert_error(
        lambda: context_parallel_attend(q, k, v, causal=ranks.first, zigzag=True),
        "ranks disagree about what to attend to",
    )
    assert_error(
        lambda: context_parallel_attend(q[:, : 6 - more], k[:, : 6 - more], v[:, : 6 - more]),
        "rank 1 has 4 and 4 heads",
    )
    bad = k[:, :, 1:] if ranks.rank == 1 else k
    assert_error(lambda: context_parallel_attend(q, bad, v), "each key needs a value")
    assert_error(lambda: context_parallel_attend(q, k[:, :, 1:], v[:, :, 1:]), "as many queries as keys")
    assert_error(
        lambda: context_parallel_attend(q, k, v, sinks=torch.ones(5)), "sinks must be one number per query head"
    )
    assert_error(lambda: context_parallel_attend(q, k, v, lengths=torch.ones(5)), "lengths must be (2,)")
    typo: dict[str, Any] = {"casual": True}
    assert_error(
        lambda: context_parallel_attend(q, k, v, **typo), "there is no option 'casual' here; did you mean 'causal'?"
    )
    assert_error(
        lambda: context_parallel_head_stats(q, k, v, causal=True, classes={"a": torch.ones(2, 3).bool()}),
        "class 'a' must be True/False",
    )
    assert SequencePlan(31, ranks.count).token_count(ranks.rank) == q.shape[2]


@check
def numbers_per_head_must_be_the_same_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    q, k, v = (shard_sequence(x, 2, zigzag=False) for x in random_qkv(31, dtype=torch.float32))
    numbers = torch.linspace(0.1, 1.3, 6)
    for name in ("slopes", "sinks", "gates"):
        some: dict[str, Any] = {name: numbers} if ranks.first else {}
        assert_error(lambda some=some: context_parallel_attend(q, k, v, **some), f"zigzag False, {name} float32 (6,)")
        other: dict[str, Any] = {name: numbers * (1 + ranks.rank)}
        assert_error(
            lambda other=other: context_parallel_attend(q, k, v, **other),
            f"the values of {name} float32 (6,) on rank 1",
        )
        assert_error(
            lambda other=other: context_parallel_head_stats(q, k, v, **other),
            f"the values of {name} float32 (6,) on rank 1",
        )
    assert_error(
        lambda: context_parallel_attend(q.clone().requires_grad_(ranks.first), k, v), "zigzag False, with gradient"
    )


@check
def different_calls_of_a_split_sequence_fail_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(5)
    split = split_sequence(headwise.MultiHeadAttention(24, 6, dropout=0.1))
    x = shard_sequence(torch.randn(2, 17, 24), 1)
    split.eval()
    split(x)
    message = "no dropout inside attention" if ranks.rank else "rank 1 failed at the tokens of a split sequence"
    assert_error(lambda: split.train(ranks.rank > 0)(x), message)
    split.eval()
    message = "takes no mask" if ranks.rank else "rank 1 failed at the tokens of a split sequence"
    assert_error(lambda: split(x, mask=torch.ones(17, 17).bool() if ranks.rank else None), message)
    block = split_sequence(headwise.TransformerBlock(24, 6, ffn=13))
    assert_error(lambda: block.train(ranks.first)(x), "without positions, not training")


@check
def sum_gradients_counts_a_missing_gradient_as_zeros(ranks: Ranks, folder: Path) -> None:
    layer = torch.nn.Linear(5, 3)
    if ranks.rank != 1:
        layer(torch.full((2, 5), 1.0 + ranks.rank)).sum().backward()
        layer.bias.grad = None
    sum_gradients(layer)
    want = 2.0 * sum(1 + rank for rank in range(ranks.count) if rank != 1)
    torch.testing.assert_close(layer.weight.grad, torch.full((3, 5), want))
    assert layer.bias.grad is None  # on no rank
    assert_error(lambda: sum_gradients(torch.nn.Linear(5, 3 + ranks.rank)), "ranks disagree about the gradients to sum")


@check
def context_parallel_attend_waits_no_longer_than_its_timeout(ranks: Ranks, folder: Path) -> None:
    q, k, v = (shard_sequence(x, 2).requires_grad_() for x in random_qkv(31, dtype=torch.float32))
    out = context_parallel_attend(q, k, v, causal=True, mesh=separate_mesh(), timeout=1)
    if ranks.rank != 1:
        assert_error(lambda: out.sum().backward(), "not all ranks came to")
    ranks.barrier("the end of waiting")


@check
def context_parallel_attend_sends_the_bytes_of_the_sequence_plan(ranks: Ranks, folder: Path) -> None:
    q, k, v = random_qkv(37, 6, 2, torch.float32, VALUE_DIM)
    calls: list[tuple[dict[str, Any], SequencePlan]] = [
        ({"causal": True}, SequencePlan(37, ranks.count, right=0)),
        ({"causal": True, "window": (5, 0), "zigzag": False}, SequencePlan(37, ranks.count, 5, 0, False)),
        ({}, SequencePlan(37, ranks.count, zigzag=False)),
    ]
    token_bytes = BATCH * 2 * (DIM + VALUE_DIM) * 4
    for options, plan in calls:
        local = [shard_sequence(x, 2, zigzag=plan.zigzag).clone().requires_grad_() for x in (q, k, v)]
        with count_traffic() as forward:
            out = context_parallel_attend(*local, **options)
        with count_traffic() as backward:
            out.sum().backward()
        assert forward["messages"] == forward.data == plan.bytes_sent(ranks.rank, token_bytes)
        assert backward["messages"] == backward.data == plan.bytes_sent_backward(ranks.rank, token_bytes, token_bytes)


@check
def compiled_attention_over_split_sequences_equals_eager(ranks: Ranks, folder: Path) -> None:
    calls: list[dict[str, Any]] = [
        {"causal": True, "window": (9, 0), "sinks": torch.linspace(-1, 2, 6, dtype=torch.float64)},
        {"lengths": torch.tensor([11, 23]), "gates": torch.linspace(0, 1, 6, dtype=torch.float64), "softcap": 2.0},
    ]
    for options in calls:
        torch.compiler.reset()
        compiled = torch.compile(context_parallel_attend, fullgraph=True, backend="aot_eager")
        for tokens in (31, 23, 27):  # the second compilation is for any count
            results = []
            for attend in (context_parallel_attend, compiled):
                local = [
                    shard_sequence(x, 2, zigzag=bool(options.get("causal"))).clone().requires_grad_()
                    for x in random_qkv(tokens, 6, 2)
                ]
                trained = {
                    name: x.clone().requires_grad_() if name in ("sinks", "gates") else x for name, x in options.items()
                }
                out = attend(*local, **trained)
                out.sin().sum().backward()
                gradients = [trained[name].grad for name in ("sinks", "gates") if name in trained]
                results.append([out, *(x.grad for x in local), *gradients])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        q = local[0].detach()
        assert_error(
            lambda call=compiled, x=q: call(x, x, x, scale=1.0 + ranks.rank),
            "ranks disagree about what",
        )


@check
def compiled_modules_over_split_sequences_equal_eager(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(6)
    shape = Shape(layers=2, heads=Heads(30, 6, 2, 6), ffn=37, vocab=41, positions="rotary", norm="rms",
                  activation="swiglu", head="own", window=(None, 5))  # fmt: skip
    attention = headwise.MultiHeadAttention(24, 6, position=headwise.Rotary(), sinks=True)
    modules: list[tuple[Any, Any]] = [
        (headwise.Decoder(shape).double(), lambda tokens: torch.randint(41, (2, tokens))),
        (headwise.TransformerBlock(24, 6, ffn=13).double(), lambda tokens: torch.randn(2, tokens, 24).double()),
        (attention.double(), lambda tokens: torch.randn(2, tokens, 24).double()),
    ]
    for module, make_input in modules:
        torch.compiler.reset()
        eager = split_sequence(module)
        compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
        for tokens in (27, 22):
            x, results = shard_sequence(make_input(tokens), 1), []
            for call in (eager, compiled):
                eager.zero_grad()
                out = call(x)
                out.sin().sum().backward()
                results.append([out, *(p.grad for p in eager.parameters() if p.grad is not None)])
            assert len(results[0]) > 2
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            differing = torch.tensor([5, 6 + ranks.rank])
            assert_error(lambda c=compiled, y=x, n=differing: c(y, lengths=n), "ranks disagree about the")


@check
def many_ranks_notice_by_all_reduce_what_few_notice_by_direct_sends(ranks: Ranks, folder: Path) -> None:
    few = ranks_module.FEW_RANKS
    try:
        for ranks_module.FEW_RANKS in (few, 0):
            x = torch.linspace(0, 1, 7)
            assert ranks.agree("a test", "alike", values={"x": x}, number=3 + ranks.rank) == [
                3 + rank for rank in range(ranks.count)
            ]
            assert_error(lambda: ranks.agree("a test", f"{ranks.rank}"), "ranks disagree about a test: rank 0 has 0")
            other = {"x": x * (1 + ranks.rank)}
            assert_error(lambda y=other: ranks.agree("a test", "alike", values=y), "the values of x float32 (7,)")
            message = "rank 1 has no words" if ranks.rank == 1 else "rank 1 failed at a test: rank 1 has no words"
            assert_error(lambda: ranks.agree("a test", lambda: _fail_on(1, ranks)), message)
    finally:
        ranks_module.FEW_RANKS = few


def _fail_on(rank: int, ranks: Ranks) -> str:
    if ranks.rank == rank:
        raise headwise.HeadwiseError(f"rank {rank} has no words")
    return "words"
