"""Heads over ranks, as every rank runs it: each check compares a split module with the whole one beside it."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headwise import Alibi, Decoder, Heads, KVCache, MultiHeadAttention, Rotary, Shape, Transformer, TransformerBlock
from headwise.attention.nn.blocks import FeedForward
from headwise.errors import UnsupportedError
from headwise.scale import clip_grad_norm_, counted, load_state, save_state, split_heads
from headwise.scale import ranks as meeting
from headwise.scale.parallel_linear import local, pieces
from headwise.scale.ranks import RankError, Ranks
from helpers.torchrun import says

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
        if not any(isinstance(p, DTensor) for p in split.parameters()):  # also where parameters were made anew
            want = clipped(whole, by_torch, x, 0.1, 2.0)
            torch.testing.assert_close(clipped(split, by_torch, x, 0.1, 2.0), want)


def clipped(module: Any, clip: Any, x: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Gradients of a call, clipped; their norm before."""
    module.zero_grad()
    module(x).square().sum().backward()
    norm: Tensor = clip(module, max_norm, norm_type)
    return norm


def by_torch(module: Any, max_norm: float, norm_type: float) -> Tensor:
    norm: Tensor = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
    return norm


@check
def clipping_counts_every_parameter_once(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(15)
    modules = {name: MultiHeadAttention(**how) for name, how in LAYERS.items()}
    modules["block"] = TransformerBlock(26, 13, ffn=29, activation="swiglu")
    for name, module in modules.items():
        whole, split = pair(module.double())
        x = torch.randn(2, 7, 26 if name == "block" else whole.heads.width, dtype=torch.float64)
        for norm_type in (2.0, 1.0, math.inf):
            want = clipped(whole, by_torch, x, 0.7, norm_type)
            assert want > 1  # it is clipped
            got = clipped(split, clip_grad_norm_, x, 0.7, norm_type)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0.0, msg=f"{name} {norm_type}")
            assert all(torch.equal(got, other) for other in ranks.gathered(got))
            check_gradients(whole, split)
            if any(isinstance(p, DTensor) for p in split.parameters()):  # PyTorch does not mix them with others
                with contextlib.suppress(RuntimeError, UnsupportedError):
                    torch.testing.assert_close(clipped(split, by_torch, x, 0.7, norm_type), want)
                continue
            torch.testing.assert_close(clipped(split, by_torch, x, 0.7, norm_type), want, rtol=1e-12, atol=0.0)
            check_gradients(whole, split)
    mixed = split_heads(
        MultiHeadAttention(6 * ranks.count, 3 * ranks.count, 1)
    )  # query heads divide, the KV head does not
    mixed(torch.ones(1, 2, mixed.plan.heads.width)).sum().backward()
    says(lambda: by_torch(mixed, 1.0, 2.0), "some gradients of this split module are DTensors and some are not")
    says(lambda: clip_grad_norm_(list(split.parameters()), 1.0), "takes the split module, which knows its parts")  # type: ignore[arg-type]
    split.zero_grad()
    if ranks.first:
        next(iter(split.parameters())).grad = torch.zeros_like(next(iter(split.parameters())))
    says(lambda: clip_grad_norm_(split, 1.0), "ranks disagree about the gradients to clip: rank 0 has 1 gradients")


@check
def clipped_training_keeps_what_ranks_share_the_same(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(16)
    whole, split = pair(TransformerBlock(26, 13, ffn=29))
    x = torch.randn(2, 7, 26)
    for module, clip in ((whole, by_torch), (split, clip_grad_norm_)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            clipped(module, clip, x, 0.1, 2.0)
            optimizer.step()
    torch.testing.assert_close(split(x), whole(x), rtol=1e-3, atol=1e-4)
    known = pieces(split)
    for name, p in split.named_parameters():
        if name not in known:
            every = ranks.gathered(p)
            assert all(torch.equal(every[0], other) for other in every), name


@check
def ranks_that_call_in_other_ways_all_get_an_error(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(17)
    split = split_heads(MultiHeadAttention(15, 5, dropout=0.3)).eval()
    x, other = torch.randn(2, 7, 15), 1.0 + ranks.rank
    mask = torch.randn(7, 7).masked_fill(torch.rand(7, 7) > 0.8, -torch.inf)
    moved = x.clone()
    moved[1, 5, 11] += ranks.rank
    for call, words in (
        (lambda: split(x * other), "the values of input 0 float32 (2, 7, 15) on rank 1 are not those on rank 0"),
        (lambda: split(moved), "the values of input 0 float32 (2, 7, 15) on rank 1"),
        (lambda: split(x.roll(ranks.rank, 1)), "the values of input 0 float32 (2, 7, 15) on rank 1"),
        (lambda: split(x, mask=mask * other), "the values of mask float32 (7, 7) on rank 1"),
        (lambda: split(x, mask=mask if ranks.rank else None), "ranks disagree about the inputs"),
        (lambda: split(x, gates=torch.full((5,), other)), "the values of gates float32 (5,) on rank 1"),
        (lambda: split(x, causal=ranks.first), "ranks disagree about the inputs"),
        (lambda: split(x.clone().requires_grad_(ranks.first)), "float32 (2, 7, 15) with gradient"),
        (lambda: split(x, lengths=torch.tensor([3, 5 + min(ranks.rank, 1)])), "ranks disagree about the inputs"),
    ):
        says(call, words)
    split.train(ranks.first)
    says(lambda: split(x), "ranks disagree about the inputs of SplitAttention: rank 0 has")
    split.train()
    if ranks.first:
        torch.rand(1)
    says(lambda: split(x), "random state")
    torch.manual_seed(18)
    split(x)
    split.eval()
    split(x * (1 + 1e-7 * ranks.rank))  # rounding
    caches = KVCache(), KVCache()
    split(x, cache=caches[0])
    says(lambda: split(x, cache=caches[min(ranks.rank, 1)]), "KVCache of 7")
    loose = split_heads(MultiHeadAttention(15, 5), checked="shapes")
    loose(x * other)
    says(lambda: split_heads(MultiHeadAttention(15, 5), checked="values"), "checked is True, False or 'shapes'")


def own_mesh() -> DeviceMesh:
    """All ranks in a group of their own, which a check may leave broken."""
    return DeviceMesh.from_group(dist.new_group(list(range(dist.get_world_size()))), "cpu")


def break_down(*_: Any) -> None:
    raise ValueError("it broke")


@check
def a_failure_after_the_agreement_is_told_to_all(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(19)
    before, meeting.FAILING = meeting.FAILING, 0.2
    split = split_heads(MultiHeadAttention(15, 5), own_mesh(), timeout=50)
    x = torch.randn(2, 7, 15)
    if ranks.rank == 1:
        split.W_O.register_forward_pre_hook(break_down)
    if ranks.rank == 1:
        with pytest.raises(ValueError, match="it broke"):
            split(x)
    else:
        says(
            lambda: split(x),
            "rank 1 failed at the call of SplitAttention: ValueError: it broke; the ranks are no longer in step",
        )
    says(
        lambda: split(x),
        "rank 1 failed at the call of SplitAttention: ValueError: it broke; the ranks are no longer in step",
    )
    both = split_heads(MultiHeadAttention(15, 5), own_mesh())
    hook = both.W_O.register_forward_pre_hook(break_down)
    with pytest.raises(ValueError, match="it broke"):  # on all ranks, which stay in step
        both(x)
    hook.remove()
    both(x)
    meeting.FAILING = before


@check
def waiting_ends_at_the_time_given(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(20)
    assert split_heads(MultiHeadAttention(15, 5)).ranks.timeout == ranks.timeout == 60
    split = split_heads(MultiHeadAttention(15, 5), own_mesh(), timeout=1)
    out = split(torch.randn(2, 7, 15, requires_grad=True))
    if ranks.rank != 1:
        says(lambda: out.sum().backward(), "not all ranks came to a sum of gradients")
    ranks.barrier("the end of waiting")


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
    split(torch.ones(1, 7, 15))  # and they can go on
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
