"""Sequence over ranks, as every rank runs it: outputs, gradients and statistics against attend's on the whole."""

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
    collected,
    counted,
    placed,
    positions,
    ring_attend,
    ring_head_stats,
    split_sequence,
    sum_gradients,
)
from headwise.scale.ranks import Ranks
from helpers.rank_checks.tensor_parallel import own_mesh
from helpers.torchrun import says

BATCH, DIM, VALUE_DIM = 2, 6, 5
CHECKS: dict[str, Any] = {}


def check(function: Any) -> Any:
    CHECKS[function.__name__] = function
    return function


def whole(
    tokens: int, heads: int = 6, kv: int = 6, dtype: torch.dtype = torch.float64, value: int = DIM
) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    sizes = (heads, DIM), (kv, DIM), (kv, value)
    return [torch.randn(BATCH, h, tokens, d, generator=random, dtype=dtype) for h, d in sizes]


def compared(tokens: int, heads: int, kv: int, zigzag: bool | None, dtype: torch.dtype, value: int, **how: Any) -> None:
    """Output and every gradient."""
    tol = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    given = whole(tokens, heads, kv, dtype, value)
    laid = bool(how.get("causal")) if zigzag is None else zigzag
    mine = [placed(x, 2, zigzag=laid).clone().requires_grad_() for x in given]
    theirs = [x.clone().requires_grad_() for x in given]
    own = {name: x.clone().requires_grad_() if name in ("sinks", "gates") else x for name, x in how.items()}
    their = {name: x.clone().requires_grad_() if name in ("sinks", "gates") else x for name, x in how.items()}
    got, want = ring_attend(*mine, zigzag=zigzag, **own), headwise.attend(*theirs, **their)
    torch.testing.assert_close(got, placed(want, 2, zigzag=laid), **tol)
    torch.testing.assert_close(collected(got, 2, zigzag=laid), want, **tol)
    slope = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    want.backward(slope)
    got.backward(placed(slope, 2, zigzag=laid))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, placed(b.grad, 2, zigzag=laid), **tol)
    for name in ("sinks", "gates"):
        if name in how:
            total = own[name].grad.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total, their[name].grad, **tol)


def test_each(name: str, options: dict[str, Any]) -> None:
    CHECKS[f"ring_{name}"] = lambda ranks, folder: [
        compared(
            *sizes, zigzag, dtype, value, **{k: v(dtype, sizes[1]) if callable(v) else v for k, v in options.items()}
        )
        for (sizes, zigzag), (dtype, value) in itertools.product(
            [((31, 6, 6), None), ((37, 6, 2), None), ((24, 6, 1), not options.get("causal")), ((5, 3, 3), None)],
            [(torch.float64, DIM), (torch.float32, DIM), (torch.float64, VALUE_DIM)],
        )
    ]


for name, options in {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (4, 0)},
    "two_sided": {"window": (3, 2)},
    "lengths": {"causal": True, "lengths": torch.tensor([3, 5])},
    "none_there": {"lengths": torch.tensor([0, 4])},
    "softcap": {"causal": True, "softcap": 2.0, "scale": 0.7},
    "sinks_and_gates": {
        "causal": True,
        "sinks": lambda dtype, heads: torch.linspace(-1, 2, heads, dtype=dtype),
        "gates": lambda dtype, heads: torch.linspace(0, 1, heads, dtype=dtype),
    },
    "negative_scale": {"causal": True, "scale": -0.3},
}.items():
    test_each(name, options)


@check
def statistics_are_exact(ranks: Ranks, folder: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": True, "window": (4, 0), "softcap": 3.0},
        {"window": (2, 5), "lengths": torch.tensor([3, 29])},
        {"causal": True, "sinks": torch.linspace(-1, 3, 6)},
    ]
    for (tokens, kv), how in itertools.product(((31, 6), (37, 2), (7, 1)), ways):
        if "lengths" in how:
            how = {**how, "lengths": how["lengths"].clamp(max=tokens)}
        laid = bool(how.get("causal"))
        given = whole(tokens, 6, kv, torch.float32)
        random = torch.Generator().manual_seed(2)
        queries = torch.rand(BATCH, tokens, generator=random) > 0.2
        classes = {name: torch.rand(BATCH, tokens, generator=random) > 0.5 for name in ("rare", "odd")}
        out, got = ring_head_stats(
            *(placed(x, 2, zigzag=laid) for x in given), queries=placed(queries, 1, zigzag=laid),
            classes={name: placed(x, 1, zigzag=laid) for name, x in classes.items()}, **how,
        )  # fmt: skip
        want_out, want = headwise.head_stats(*given, queries=queries, classes=classes, **how)
        torch.testing.assert_close(out, placed(want_out, 2, zigzag=laid), rtol=1e-4, atol=1e-5)
        assert set(got.names) == set(want.names)
        torch.testing.assert_close(got.count, want.count)
        for name in want:
            torch.testing.assert_close(
                got.sums[name], want.sums[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
            )


@check
def whole_stacks_take_split_sequences(ranks: Ranks, folder: Path) -> None:
    shapes = {
        "decoder": Shape(layers=3, heads=Heads(30, 6, 2, 6), ffn=37, vocab=41, positions="rotary", norm="rms",
                         activation="swiglu", head="own", window=(None, 5, None)),
        "learned": Shape(layers=2, heads=Heads.split(28, 7), ffn=23, vocab=41, max_length=64, head="tied"),
    }  # fmt: skip
    for name, shape in shapes.items():
        torch.manual_seed(3)
        alone = headwise.Decoder(shape).double()
        split = split_sequence(copy.deepcopy(alone))
        ids = torch.randint(41, (2, 27))
        want, got = alone(ids), split(placed(ids, 1))
        torch.testing.assert_close(collected(got, 1), want, msg=name)
        slope = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
        want.backward(slope)
        got.backward(placed(slope, 1))
        sum_gradients(split)
        for a, b in zip(split.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        for mine, theirs in zip(split.stats(placed(ids, 1)), alone.stats(ids), strict=True):
            for statistic in theirs:
                torch.testing.assert_close(mine[statistic], theirs[statistic], msg=f"{name} {statistic}")


@check
def one_attention_takes_a_split_sequence(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(4)
    for how in ({"position": headwise.Alibi(), "sinks": True}, {"position": headwise.Rotary(), "softcap": 3.0}):
        alone = headwise.MultiHeadAttention(24, 6, **how)
        split = split_sequence(copy.deepcopy(alone), zigzag=False)
        x, gates = torch.randn(2, 17, 24), torch.rand(6)
        got = split(placed(x, 1, zigzag=False), gates=gates, lengths=torch.tensor([9, 17]))
        want = alone(x, gates=gates, lengths=torch.tensor([9, 17]))
        torch.testing.assert_close(collected(got, 1, zigzag=False), want, rtol=1e-4, atol=1e-5)
    x = placed(x, 1, zigzag=False)
    says(lambda: split(x, mask=torch.ones(17, 17).bool()), "takes no mask; lengths and windows it takes")
    says(lambda: split(x, torch.randn(2, 3, 24)), "is for self-attention")
    says(lambda: split.weights(x), "are on no rank whole")
    says(lambda: split_sequence(torch.nn.Linear(3, 3)), "no self-attention whose sequence can be split")


@check
def nan_reaches_those_who_look_at_it_only(ranks: Ranks, folder: Path) -> None:
    q, k, v = whole(23, dtype=torch.float32)
    k[0, :, 11], v[1, :, 13] = torch.nan, torch.nan
    got = collected(ring_attend(*(placed(x, 2) for x in (q, k, v)), causal=True), 2)
    assert got[0, :, :11].isfinite().all() and got[0, :, 11:].isnan().all()
    assert got[1, :, :13].isfinite().all() and got[1, :, 13:].isnan().all()


@check
def tokens_are_placed_and_collected(ranks: Ranks, folder: Path) -> None:
    for tokens, zigzag in itertools.product((3, 16, 29), (True, False)):
        x = torch.arange(tokens)
        assert torch.equal(placed(x, 0, zigzag=zigzag), positions(tokens, zigzag=zigzag))
        assert torch.equal(collected(placed(x, 0, zigzag=zigzag), 0, zigzag=zigzag), x)


@check
def mistakes_are_told_on_every_rank(ranks: Ranks, folder: Path) -> None:
    q, k, v = (placed(x, 2) for x in whole(31, dtype=torch.float32))
    more = 2 if ranks.rank == 1 else 0
    says(
        lambda: ring_attend(*(torch.cat([x, x[:, :, :more]], 2) for x in (q, k, v)), causal=True),
        "belong there (zigzag)",
    )
    says(lambda: ring_attend(q, k, v, causal=ranks.first, zigzag=True), "ranks disagree about what to attend to")
    says(lambda: ring_attend(q[:, : 6 - more], k[:, : 6 - more], v[:, : 6 - more]), "rank 1 has 4 and 4 heads")
    bad = k[:, :, 1:] if ranks.rank == 1 else k
    says(lambda: ring_attend(q, bad, v), "each key needs a value")
    says(lambda: ring_attend(q, k[:, :, 1:], v[:, :, 1:]), "as many queries as keys")
    says(lambda: ring_attend(q, k, v, sinks=torch.ones(5)), "sinks must be one number a query head")
    says(lambda: ring_attend(q, k, v, lengths=torch.ones(5)), "lengths must be (2,)")
    says(
        lambda: ring_head_stats(q, k, v, causal=True, classes={"a": torch.ones(2, 3).bool()}),
        "class 'a' must be True/False",
    )
    assert SequencePlan(31, ranks.count).count(ranks.rank) == q.shape[2]


@check
def numbers_per_head_must_be_the_same_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    q, k, v = (placed(x, 2, zigzag=False) for x in whole(31, dtype=torch.float32))
    numbers = torch.linspace(0.1, 1.3, 6)
    for name in ("slopes", "sinks", "gates"):
        some: dict[str, Any] = {name: numbers} if ranks.first else {}
        says(lambda some=some: ring_attend(q, k, v, **some), f"zigzag False, {name} float32 (6,)")
        other: dict[str, Any] = {name: numbers * (1 + ranks.rank)}
        says(lambda other=other: ring_attend(q, k, v, **other), f"the values of {name} float32 (6,) on rank 1")
        says(lambda other=other: ring_head_stats(q, k, v, **other), f"the values of {name} float32 (6,) on rank 1")
    says(lambda: ring_attend(q.clone().requires_grad_(ranks.first), k, v), "zigzag False, with gradient")


@check
def split_sequences_are_called_alike_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(5)
    split = split_sequence(headwise.MultiHeadAttention(24, 6, dropout=0.1))
    x = placed(torch.randn(2, 17, 24), 1)
    split.eval()
    split(x)
    words = "no dropout inside attention" if ranks.rank else "rank 1 failed at the tokens of a split sequence"
    says(lambda: split.train(ranks.rank > 0)(x), words)
    split.eval()
    words = "takes no mask" if ranks.rank else "rank 1 failed at the tokens of a split sequence"
    says(lambda: split(x, mask=torch.ones(17, 17).bool() if ranks.rank else None), words)
    block = split_sequence(headwise.TransformerBlock(24, 6, ffn=13))
    says(lambda: block.train(ranks.first)(x), "without positions, not training")


@check
def a_rank_without_a_gradient_takes_part_with_zeros(ranks: Ranks, folder: Path) -> None:
    layer = torch.nn.Linear(5, 3)
    if ranks.rank != 1:
        layer(torch.full((2, 5), 1.0 + ranks.rank)).sum().backward()
        layer.bias.grad = None
    sum_gradients(layer)
    want = 2.0 * sum(1 + rank for rank in range(ranks.count) if rank != 1)
    torch.testing.assert_close(layer.weight.grad, torch.full((3, 5), want))
    assert layer.bias.grad is None  # on no rank
    says(lambda: sum_gradients(torch.nn.Linear(5, 3 + ranks.rank)), "ranks disagree about the gradients to sum")


@check
def messages_are_waited_for_no_longer_than_said(ranks: Ranks, folder: Path) -> None:
    q, k, v = (placed(x, 2).requires_grad_() for x in whole(31, dtype=torch.float32))
    out = ring_attend(q, k, v, causal=True, mesh=own_mesh(), timeout=1)
    if ranks.rank != 1:
        says(lambda: out.sum().backward(), "not all ranks came to")
    ranks.barrier("the end of waiting")


@check
def bytes_sent_are_those_of_the_plan(ranks: Ranks, folder: Path) -> None:
    q, k, v = whole(37, 6, 2, torch.float32, VALUE_DIM)
    ways: list[tuple[dict[str, Any], SequencePlan]] = [
        ({"causal": True}, SequencePlan(37, ranks.count, right=0)),
        ({"causal": True, "window": (5, 0), "zigzag": False}, SequencePlan(37, ranks.count, 5, 0, False)),
        ({}, SequencePlan(37, ranks.count, zigzag=False)),
    ]
    a_token = BATCH * 2 * (DIM + VALUE_DIM) * 4
    for how, plan in ways:
        mine = [placed(x, 2, zigzag=plan.zigzag).clone().requires_grad_() for x in (q, k, v)]
        with counted() as forward:
            out = ring_attend(*mine, **how)
        with counted() as backward:
            out.sum().backward()
        assert forward["messages"] == forward.data == plan.bytes_sent(ranks.rank, a_token)
        assert backward["messages"] == backward.data == plan.bytes_sent_backward(ranks.rank, a_token, a_token)
