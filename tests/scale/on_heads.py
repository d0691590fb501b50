"""Heads over ranks, as every rank runs it: each check compares a split module with the whole one beside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from launch import says
from torch.distributed.tensor import DTensor

from headwise import Alibi, Decoder, Heads, KVCache, MultiHeadAttention, Rotary, Shape, Transformer, TransformerBlock
from headwise.attention.blocks import FeedForward
from headwise.scale import counted, load_state, save_state, split_heads
from headwise.scale.linear import local, pieces
from headwise.scale.ranks import RankError, Ranks

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
LAYERS: dict[str, dict[str, Any]] = {
    "divides": {"d_model": 24, "num_heads": 4},
    "uneven": {"d_model": 35, "num_heads": 5, "qk_norm": "rms"},
    "grouped": {"d_model": 24, "num_heads": 12, "num_kv_heads": 4, "position": Rotary()},
    "fewer_kv": {"d_model": 24, "num_heads": 12, "num_kv_heads": 3, "sinks": True, "bias": False},
    "one_kv": {"d_model": 22, "num_heads": 11, "num_kv_heads": 1, "softcap": 7.0},
    "idle": {"d_model": 15, "num_heads": 3, "position": Alibi(), "qk_norm": "layer", "sinks": True},
    "idle_grouped": {"d_model": 14, "num_heads": 2, "num_kv_heads": 1, "out_bias": False},
}
DECODER = Shape(layers=3, heads=Heads(30, 5, 5, 6), ffn=37, vocab=41, positions="rotary", norm="rms",
                activation="swiglu", head="own", window=(None, 5, None))  # fmt: skip
BOTH = Shape(
    layers=2, decoder_layers=2, heads=Heads.split(28, 7), ffn=23, vocab=31, positions="sinusoidal", head="tied"
)


def pair(module: Any) -> tuple[Any, Any]:
    """The whole and a split copy of it."""
    return module, split_heads(copy.deepcopy(module))


def check_gradients(whole: Any, split: Any) -> None:
    """Each rank's gradients are its part of the whole's."""
    others, parts = dict(split.named_parameters()), pieces(split)
    for name, x in whole.named_parameters():
        mine = others[name]
        if x.grad is None:
            assert mine.grad is None, name
            continue
        want = parts[name].of(x.grad) if name in parts else x.grad
        torch.testing.assert_close(local(mine.grad), want, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def check_weights(whole: Any, split: Any) -> None:
    """Each rank has its part of the whole's."""
    others, parts = dict(split.named_parameters()), pieces(split)
    for name, x in whole.named_parameters():
        assert torch.equal(local(others[name]), parts[name].of(x) if name in parts else x), name


def attention(name: str) -> None:
    torch.manual_seed(3)
    whole = MultiHeadAttention(**LAYERS[name])
    for x in whole.parameters():
        torch.nn.init.normal_(x, std=0.3)
    whole, split = pair(whole)
    count = whole.heads.query
    x = torch.randn(2, 13, whole.heads.width)
    gates, mask = torch.rand(count), torch.rand(2, count, 13, 13) > 0.3
    options = [
        {},
        {"causal": True, "window": (4, 0)},
        {"causal": True, "gates": gates, "lengths": torch.tensor([7, 13])},
        {"mask": mask},
        {"mask": torch.randn(13, 13), "gates": torch.rand(2, count)},
    ]
    for how in options:
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        if "gates" in how:
            how = {**how, "gates": how["gates"].clone().requires_grad_()}
        again = {**how, "gates": how["gates"].detach().clone().requires_grad_()} if "gates" in how else how
        got, want = split(mine, **again), whole(theirs, **how)
        torch.testing.assert_close(got, want, **CLOSE)
        whole.zero_grad()
        split.zero_grad()
        slope = torch.randn_like(want)
        want.backward(slope)
        got.backward(slope)
        torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
        if "gates" in how:
            torch.testing.assert_close(again["gates"].grad, how["gates"].grad, **CLOSE)
        check_gradients(whole, split)
    _, weights = split(x, causal=True, need_weights=True)
    torch.testing.assert_close(weights, whole.weights(x, causal=True), **CLOSE)
    some: dict[str, Any] = {"heads": [count - 1, 0], "rows": [2]}
    torch.testing.assert_close(split.weights(x, **some), whole.weights(x, **some), **CLOSE)
    got, want = split.stats(x, causal=True), whole.stats(x, causal=True)
    assert got.names == want.names
    for name in want:
        torch.testing.assert_close(got[name], want[name], **CLOSE)
    torch.testing.assert_close(got.count, want.count)
    caches = KVCache(), KVCache()
    for first, last in ((0, 7), (7, 8), (8, 13)):
        step = x[:, first:last]
        torch.testing.assert_close(
            split(step, causal=True, cache=caches[0]), whole(step, causal=True, cache=caches[1]), **CLOSE
        )


CHECKS: dict[str, Any] = {f"attention_{name}": lambda ranks, folder, name=name: attention(name) for name in LAYERS}


def check(function: Any) -> Any:
    CHECKS[function.__name__] = function
    return function


@check
def parameters_are_dtensors_where_they_divide(ranks: Ranks, folder: Path) -> None:
    split = split_heads(MultiHeadAttention(24, 12))
    assert all(isinstance(getattr(split, name).weight, DTensor) for name in ("W_Q", "W_K", "W_V", "W_O"))
    assert split.W_Q.weight.shape == (24, 24) and local(split.W_Q.weight).shape == (24 // ranks.count, 24)
    assert f"on rank {ranks.rank} of {ranks.count}" in repr(split)


@check
def pruned_layers(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(4)
    whole, split = pair(MultiHeadAttention(24, 12, 4).prune_heads([0, 1, 2, 3, 7, 11]))
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(split(x, causal=True), whole(x, causal=True), **CLOSE)


@check
def cross_attention_of_other_widths(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(5)
    whole, split = pair(MultiHeadAttention(21, 3, kdim=13, vdim=17))
    given = [torch.randn(2, 5, 21), torch.randn(2, 11, 13), torch.randn(2, 11, 17)]
    mine, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    split(*mine).square().sum().backward()
    whole(*theirs).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE)


@check
def feed_forward_and_block(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(6)
    whole, split = pair(TransformerBlock(26, 13, ffn=29, activation="swiglu", cross=True))
    assert isinstance(split.ffn, FeedForward)
    x, memory = torch.randn(2, 7, 26), torch.randn(2, 5, 26)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    split(mine, memory).square().sum().backward()
    whole(theirs, memory).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
    check_gradients(whole, split)


@check
def decoder_trains_and_generates(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(7)
    whole, split = pair(Decoder(DECODER))
    ids = torch.randint(41, (2, 17))
    for model in (whole, split):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    torch.testing.assert_close(split(ids), whole(ids), rtol=1e-3, atol=1e-4)
    assert split.generate(ids[:, :5], 9).tolist() == whole.generate(ids[:, :5], 9).tolist()
    for got, want in zip(split.stats(ids), whole.stats(ids), strict=True):
        torch.testing.assert_close(got["entropy"], want["entropy"], rtol=1e-3, atol=1e-4)


@check
def encoder_decoder(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(8)
    whole, split = pair(Transformer(BOTH))
    source, target = torch.randint(31, (2, 11)), torch.randint(31, (2, 7))
    torch.testing.assert_close(split(source, target), whole(source, target), **CLOSE)
    assert split.generate(source, 5, bos=1).tolist() == whole.generate(source, 5, bos=1).tolist()


@check
def dropout_leaves_ranks_in_step(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(9)
    split = split_heads(TransformerBlock(15, 5, ffn=11, dropout=0.3)).train()
    out = split(torch.randn(2, 7, 15))
    every = ranks.gathered(out)
    assert all(torch.equal(every[0], x) for x in every)
    assert not torch.equal(split(torch.ones(2, 7, 15)), split(torch.ones(2, 7, 15)))


@check
def state_is_saved_for_other_counts(ranks: Ranks, folder: Path) -> None:
    """Read what another number of ranks wrote before, and write for the next one."""
    for name, whole in stored().items():
        split = split_heads(copy.deepcopy(whole))
        save_state(split, folder / f"{name}-{ranks.count}")
        source = folder / f"{name}-given"
        if not source.exists():
            continue
        with torch.no_grad():
            for x in split.parameters():
                local(x).fill_(7.0)
        load_state(split, source)
        check_weights(whole, split)


@check
def bytes_sent_are_those_of_the_head_plan(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(13)
    for name in ("divides", "uneven", "grouped", "fewer_kv", "one_kv", "idle"):
        split = split_heads(MultiHeadAttention(**{**LAYERS[name], "qk_norm": None}), checked=False)
        x = torch.randn(2, 13, split.plan.heads.width, requires_grad=True)
        with counted() as forward:
            out = split(x)
        with counted() as backward:
            out.sum().backward()
        assert forward == {"sums": split.plan.sent(2, 13)}, name
        assert backward == {"sums": split.plan.sent_backward(ranks.rank, 2, 13, bias=split.W_Q.bias is not None)}, name


@check
def what_is_split_without_memory_gets_its_weights_from_a_file(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(14)
    for name in ("divides", "fewer_kv", "idle"):
        whole = MultiHeadAttention(**LAYERS[name])
        save_state(whole if ranks.count == 1 else split_heads(copy.deepcopy(whole)), folder / f"memory-{name}")
        split = split_heads(MultiHeadAttention(**LAYERS[name], device="meta")).to_empty(device="cpu")
        load_state(split, folder / f"memory-{name}")
        check_weights(whole, split)
        x = torch.randn(2, 7, whole.heads.width)
        torch.testing.assert_close(split(x), whole(x), **CLOSE)


@check
def a_split_module_refuses_what_needs_the_whole(ranks: Ranks, folder: Path) -> None:
    split = split_heads(MultiHeadAttention(15, 5))
    for call, words in (
        (lambda: split.prune_heads([0]), "split over ranks; prune the whole one"),
        (lambda: split.to_torch(), "split over ranks; convert the whole one"),
        (lambda: split_heads(split), "split over ranks already"),
        (lambda: split_heads(torch.nn.Linear(3, 3)), "holds no MultiHeadAttention of headwise's"),
        (lambda: split(torch.randn(1, 2, 15), gates=torch.ones(3)), r"shape (5,), got (3,)"),
        (lambda: split(torch.randn(1, 2, 15), mask=torch.ones(3, 2, 2).bool()), "is for 3 heads; this layer has 5"),
    ):
        says(call, words)


@check
def ranks_that_disagree_all_get_an_error(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(10 + ranks.rank)
    says(lambda: split_heads(MultiHeadAttention(15, 5)), "ranks disagree about the module to split: rank 0 has a Multi")
    says(lambda: split_heads(MultiHeadAttention(15, 5 if ranks.rank else 3)), "ranks disagree about the module")
    torch.manual_seed(11)
    split = split_heads(MultiHeadAttention(15, 5))
    tokens = 7 if ranks.first else 5
    says(lambda: split(torch.randn(1, tokens, 15)), "rank 0 has float32 (1, 7, 15)")
    split(torch.randn(1, 7, 15))  # and they can go on
    words = "it fell" if ranks.rank == 1 else "rank 1 failed at falling: it fell"
    says(lambda: ranks.agree("falling", lambda: fall(ranks.rank)), words)


def fall(rank: int) -> str:
    if rank == 1:
        raise RankError("it fell")
    return "well"


def stored() -> dict[str, Any]:
    """The modules whose states go from one number of ranks to another."""
    torch.manual_seed(12)
    made = {name: MultiHeadAttention(**how) for name, how in LAYERS.items()}
    for module in made.values():
        for x in module.parameters():
            torch.nn.init.normal_(x)
    return {**made, "decoder": Decoder(DECODER)}
