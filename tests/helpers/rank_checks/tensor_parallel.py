"""Tensor parallel: each check compares a split module with the whole one in the same process."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from headwise import Alibi, Decoder, Heads, KVCache, MultiHeadAttention, Rotary, Shape, Transformer, TransformerBlock
from headwise.attention.nn.blocks import FeedForward
from headwise.errors import RankError
from headwise.scale import clip_grad_norm_, count_traffic, load_state, save_state, split_heads, split_sequence
from headwise.scale import ranks as ranks_module
from headwise.scale.parallel_linear import local_tensor
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error

from .meshes import separate_mesh
from .registry import check

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
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


def split_copy(module: Any) -> tuple[Any, Any]:
    """The module and a split copy of it."""
    return module, split_heads(copy.deepcopy(module))


def whole_tensor(x: Any) -> Tensor:
    """All of a parameter or gradient, on every rank."""
    whole: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach()


def check_gradients(whole: Any, split: Any) -> None:
    """The ranks' gradients together are the whole's."""
    others = dict(split.named_parameters())
    for name, x in whole.named_parameters():
        split_x = others[name]
        if x.grad is None:
            assert split_x.grad is None, name
            continue
        assert isinstance(split_x.grad, DTensor), name
        got = whole_tensor(split_x.grad)
        torch.testing.assert_close(got, x.grad, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def check_weights(whole: Any, split: Any) -> None:
    """The ranks' parameters together are the whole's."""
    others = dict(split.named_parameters())
    for name, x in whole.named_parameters():
        assert torch.equal(whole_tensor(others[name]), x), name


def check_attention(name: str) -> None:
    torch.manual_seed(3)
    whole = MultiHeadAttention(**LAYERS[name])
    for x in whole.parameters():
        torch.nn.init.normal_(x, std=0.3)
    whole, split = split_copy(whole)
    count = whole.heads.query
    x = torch.randn(2, 13, whole.heads.width)
    gates, mask = torch.rand(count), torch.rand(2, count, 13, 13) > 0.3
    calls: list[dict[str, Any]] = [
        {},
        {"causal": True, "window": (4, 0)},
        {"causal": True, "gates": gates, "lengths": torch.tensor([7, 13])},
        {"mask": mask},
        {"mask": torch.randn(13, 13), "gates": torch.rand(2, count)},
    ]
    for options in calls:
        split_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        if "gates" in options:
            options = {**options, "gates": options["gates"].clone().requires_grad_()}
        split_options = (
            {**options, "gates": options["gates"].detach().clone().requires_grad_()} if "gates" in options else options
        )
        got, want = split(split_x, **split_options), whole(whole_x, **options)
        torch.testing.assert_close(got, want, **CLOSE)
        whole.zero_grad()
        split.zero_grad()
        grad = torch.randn_like(want)
        want.backward(grad)
        got.backward(grad)
        torch.testing.assert_close(split_x.grad, whole_x.grad, **CLOSE)
        if "gates" in options:
            torch.testing.assert_close(split_options["gates"].grad, options["gates"].grad, **CLOSE)
        check_gradients(whole, split)
    _, weights = split(x, causal=True, need_weights=True)
    torch.testing.assert_close(weights, whole.weights(x, causal=True), **CLOSE)
    some: dict[str, Any] = {"heads": [count - 1, 0], "rows": [2]}
    torch.testing.assert_close(split.weights(x, **some), whole.weights(x, **some), **CLOSE)
    got, want = (module.stats(x, causal=True, received=True) for module in (split, whole))
    torch.testing.assert_close(got.received, want.received, **CLOSE)
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


for layer_name in LAYERS:
    check(
        lambda ranks, folder, name=layer_name: check_attention(name), f"split_attention_matches_the_whole_{layer_name}"
    )


@check
def every_parameter_is_a_dtensor_stored_once(ranks: Ranks, folder: Path) -> None:
    for whole in (Decoder(DECODER), Transformer(BOTH), MultiHeadAttention(48, 12, 3)):
        split = split_heads(copy.deepcopy(whole))
        shapes = {name: x.shape for name, x in whole.named_parameters()}
        parameters = dict(split.named_parameters())
        assert {name: x.shape for name, x in parameters.items()} == shapes
        assert all(isinstance(x, DTensor) for x in parameters.values())
        for name, x in parameters.items():
            counts = [int(n) for n in ranks.all_gather(torch.tensor(x.to_local().numel()))]
            if any(part in name for part in ("W_Q", "W_K", "W_V", "W_O.weight", "up", "gate", "down.weight")):
                dim = x.placements[0].dim
                largest = -(-x.shape[dim] // ranks.count) * (x.numel() // x.shape[dim])
                assert sum(counts) == x.numel() and max(counts) == largest, name
            else:
                assert counts == [x.numel()] * ranks.count, name
    assert f"on rank {ranks.rank} of {ranks.count}" in repr(split)


@check
def pruned_attention_can_be_split(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(4)
    whole, split = split_copy(MultiHeadAttention(24, 12, 4).prune_heads([0, 1, 2, 3, 7, 11]))
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(split(x, causal=True), whole(x, causal=True), **CLOSE)


@check
def split_cross_attention_matches_the_whole(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(5)
    whole, split = split_copy(MultiHeadAttention(21, 3, kdim=13, vdim=17))
    inputs = [torch.randn(2, 5, 21), torch.randn(2, 11, 13), torch.randn(2, 11, 17)]
    split_x, whole_x = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    split(*split_x).square().sum().backward()
    whole(*whole_x).square().sum().backward()
    for a, b in zip(split_x, whole_x, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE)


@check
def a_split_block_matches_the_whole(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(6)
    whole, split = split_copy(TransformerBlock(26, 13, ffn=29, activation="swiglu", cross=True))
    assert isinstance(split.ffn, FeedForward)
    x, memory = torch.randn(2, 7, 26), torch.randn(2, 5, 26)
    split_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    split(split_x, memory).square().sum().backward()
    whole(whole_x, memory).square().sum().backward()
    torch.testing.assert_close(split_x.grad, whole_x.grad, **CLOSE)
    check_gradients(whole, split)


@check
def a_split_decoder_trains_and_generates_as_the_whole(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(7)
    whole, split = split_copy(Decoder(DECODER))
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
def a_split_encoder_decoder_matches_the_whole(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(8)
    whole, split = split_copy(Transformer(BOTH))
    source, target = torch.randint(31, (2, 11)), torch.randint(31, (2, 7))
    torch.testing.assert_close(split(source, target), whole(source, target), **CLOSE)
    assert split.generate(source, 5, bos=1).tolist() == whole.generate(source, 5, bos=1).tolist()


@check
def dropout_gives_the_same_output_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(9)
    split = split_heads(TransformerBlock(15, 5, ffn=11, dropout=0.3)).train()
    out = split(torch.randn(2, 7, 15))
    every = ranks.all_gather(out)
    assert all(torch.equal(every[0], x) for x in every)
    assert not torch.equal(split(torch.ones(2, 7, 15)), split(torch.ones(2, 7, 15)))


@check
def checkpoints_are_read_on_another_number_of_ranks(ranks: Ranks, folder: Path) -> None:
    """Read what another number of ranks wrote before, and write for the next one."""
    for name, whole in saved_modules().items():
        split = split_heads(copy.deepcopy(whole))
        save_state(split, folder / f"{name}-{ranks.count}")
        source = folder / f"{name}-earlier"
        if not source.exists():
            continue
        with torch.no_grad():
            for x in split.parameters():
                local_tensor(x).fill_(7.0)
        load_state(split, source)
        check_weights(whole, split)


@check
def split_attention_sends_the_bytes_of_the_head_plan(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(13)
    for name in ("divides", "uneven", "grouped", "fewer_kv", "one_kv", "idle"):
        split = split_heads(MultiHeadAttention(**{**LAYERS[name], "qk_norm": None}), checked=False)
        x = torch.randn(2, 13, split.plan.heads.width, requires_grad=True)
        with count_traffic() as forward:
            out = split(x)
        with count_traffic() as backward:
            out.sum().backward()
        bias, sinks = split.W_Q.bias is not None, split.sinks is not None
        assert forward.data == split.plan.bytes_sent(2, 13, rank=ranks.rank, bias=bias), name
        assert backward.data == split.plan.bytes_sent_backward(ranks.rank, 2, 13, bias=bias, sinks=sinks), name
        assert forward["messages"] == backward["messages"] == 0 or not split.plan.even, name


@check
def a_module_split_on_the_meta_device_loads_a_checkpoint(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(14)
    for name in ("divides", "fewer_kv", "idle"):
        whole = MultiHeadAttention(**LAYERS[name])
        save_state(whole if ranks.count == 1 else split_heads(copy.deepcopy(whole)), folder / f"memory-{name}")
        split = split_heads(MultiHeadAttention(**LAYERS[name], device="meta")).to_empty(device="cpu")
        load_state(split, folder / f"memory-{name}")
        check_weights(whole, split)
        x = torch.randn(2, 7, whole.heads.width)
        torch.testing.assert_close(split(x), whole(x), **CLOSE)
        want = clip_gradients(whole, clip_by_torch, x, 0.1, 2.0)
        torch.testing.assert_close(clip_gradients(split, clip_by_torch, x, 0.1, 2.0), want, **CLOSE)


def clip_gradients(module: Any, clip: Any, x: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Gradients of a call, clipped; their norm before."""
    module.zero_grad()
    module(x).square().sum().backward()
    norm: Tensor = clip(module, max_norm, norm_type)
    return norm


def clip_by_torch(module: Any, max_norm: float, norm_type: float) -> Tensor:
    return whole_tensor(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type))


@check
def clipping_counts_every_parameter_once(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(15)
    modules = {name: MultiHeadAttention(**options) for name, options in LAYERS.items()}
    modules["block"] = TransformerBlock(26, 13, ffn=29, activation="swiglu")
    for name, module in modules.items():
        whole, split = split_copy(module.double())
        x = torch.randn(2, 7, 26 if name == "block" else whole.heads.width, dtype=torch.float64)
        for norm_type in (2.0, 1.0, math.inf):
            want = clip_gradients(whole, clip_by_torch, x, 0.7, norm_type)
            assert want > 1  # it is clipped
            got = clip_gradients(split, clip_grad_norm_, x, 0.7, norm_type)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0.0, msg=f"{name} {norm_type}")
            assert all(torch.equal(got, other) for other in ranks.all_gather(got))
            check_gradients(whole, split)
            got = clip_gradients(split, clip_by_torch, x, 0.7, norm_type)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0.0, msg=f"{name} {norm_type}")
            check_gradients(whole, split)
    assert_error(lambda: clip_grad_norm_(list(split.parameters()), 1.0), "takes the split module, got a list")  # type: ignore[arg-type]
    split.zero_grad()
    if ranks.first:
        next(iter(split.parameters())).grad = torch.zeros_like(next(iter(split.parameters())))
    assert_error(
        lambda: clip_grad_norm_(split, 1.0), "ranks disagree about the gradients to clip: rank 0 has 1 gradients"
    )


@check
def training_with_clipping_keeps_replicated_parameters_equal(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(16)
    whole, split = split_copy(TransformerBlock(26, 13, ffn=29))
    x = torch.randn(2, 7, 26)
    for module, clip in ((whole, clip_by_torch), (split, clip_grad_norm_)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            clip_gradients(module, clip, x, 0.1, 2.0)
            optimizer.step()
    torch.testing.assert_close(split(x), whole(x), rtol=1e-3, atol=1e-4)
    for name, p in split.named_parameters():
        if p.placements == (Replicate(),):
            every = ranks.all_gather(p.to_local())
            assert all(torch.equal(every[0], other) for other in every), name


@check
def different_calls_of_a_split_module_fail_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(17)
    split = split_heads(MultiHeadAttention(15, 5, dropout=0.3)).eval()
    x, other = torch.randn(2, 7, 15), 1.0 + ranks.rank
    mask = torch.randn(7, 7).masked_fill(torch.rand(7, 7) > 0.8, -torch.inf)
    moved = x.clone()
    moved[1, 5, 11] += ranks.rank
    for call, message in (
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
        assert_error(call, message)
    split.train(ranks.first)
    assert_error(lambda: split(x), "ranks disagree about the inputs of SplitAttention: rank 0 has")
    split.train()
    if ranks.first:
        torch.rand(1)
    assert_error(lambda: split(x), "random state")
    torch.manual_seed(18)
    split(x)
    split.eval()
    split(x * (1 + 1e-7 * ranks.rank))  # rounding
    caches = KVCache(), KVCache()
    split(x, cache=caches[0])
    assert_error(lambda: split(x, cache=caches[min(ranks.rank, 1)]), "KVCache of 7")
    loose = split_heads(MultiHeadAttention(15, 5), checked="shapes")
    loose(x * other)
    assert_error(lambda: split_heads(MultiHeadAttention(15, 5), checked="values"), "checked is True, False or 'shapes'")


def break_down(*_: Any) -> None:
    raise ValueError("it broke")


@check
def a_failure_inside_a_call_reaches_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(19)
    before, ranks_module.FAILURE_WAIT = ranks_module.FAILURE_WAIT, 0.2
    split = split_heads(MultiHeadAttention(15, 5), separate_mesh(), timeout=50)
    x = torch.randn(2, 7, 15)
    if ranks.rank == 1:
        split.W_O.register_forward_pre_hook(break_down)
    if ranks.rank == 1:
        with pytest.raises(ValueError, match="it broke"):
            split(x)
    else:
        assert_error(
            lambda: split(x),
            "rank 1 failed at the call of SplitAttention: ValueError: it broke; the ranks are no longer in step",
        )
    assert_error(
        lambda: split(x),
        "rank 1 failed at the call of SplitAttention: ValueError: it broke; the ranks are no longer in step",
    )
    both = split_heads(MultiHeadAttention(15, 5), separate_mesh())
    hook = both.W_O.register_forward_pre_hook(break_down)
    with pytest.raises(ValueError, match="it broke"):  # on all ranks, which stay in step
        both(x)
    hook.remove()
    both(x)
    ranks_module.FAILURE_WAIT = before


@check
def split_attention_waits_no_longer_than_its_timeout(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(20)
    assert split_heads(MultiHeadAttention(15, 5)).ranks.timeout == ranks.timeout == 60
    split = split_heads(MultiHeadAttention(15, 5), separate_mesh(), timeout=1)
    out = split(torch.randn(2, 7, 15, requires_grad=True))
    if ranks.rank != 1:
        assert_error(lambda: out.sum().backward(), "not all ranks came to a sum of gradients")
    ranks.barrier("the end of waiting")


@check
def a_split_module_refuses_what_needs_the_whole(ranks: Ranks, folder: Path) -> None:
    split = split_heads(MultiHeadAttention(15, 5))
    for call, message in (
        (lambda: split.prune_heads([0]), "split over ranks; prune the whole one"),
        (lambda: split.to_torch(), "split over ranks; convert the whole one"),
        (lambda: split_heads(split), "split over ranks already"),
        (lambda: split_heads(torch.nn.Linear(3, 3)), "holds no MultiHeadAttention of headwise's"),
        (lambda: split(torch.randn(1, 2, 15), gates=torch.ones(3)), r"shape (5,), got (3,)"),
        (lambda: split(torch.randn(1, 2, 15), mask=torch.ones(3, 2, 2).bool()), "is for 3 heads; this layer has 5"),
    ):
        assert_error(call, message)


class DoublingAttention(MultiHeadAttention):
    """Attention with a forward of its own, which a SplitAttention does not have."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return 2 * super().forward(*args, **options)


@check
def splitting_keeps_the_module_its_hooks_and_its_keys(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(21)
    block = TransformerBlock(26, 13, ffn=29, activation="swiglu", qk_norm="rms")
    modules, keys = dict(block.named_modules()), list(block.state_dict())
    calls: list[str] = []
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    x = torch.randn(2, 7, 26)
    want = block.eval()(x)
    calls_before = calls.copy()
    calls.clear()
    assert split_heads(block) is block and not block.training
    torch.testing.assert_close(block(x), want, **CLOSE)
    assert calls == calls_before and {"attention.W_Q", "attention.q_norm", "ffn.down"} <= set(calls)
    assert all(module is modules[name] for name, module in block.named_modules())
    assert list(block.state_dict()) == keys


@check
def what_cannot_be_split_is_refused_on_all_ranks_and_left_as_it_is(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(22)
    own_forward = DoublingAttention(15, 5)
    own_linear = TransformerBlock(15, 5, ffn=11)
    own_linear.ffn.down = torch.nn.modules.linear.NonDynamicallyQuantizableLinear(11, 15)
    shared = torch.nn.ModuleList([MultiHeadAttention(15, 5), MultiHeadAttention(15, 5)])
    shared[1].W_K = shared[0].W_K
    split = split_sequence(MultiHeadAttention(15, 5))
    for module, message in (
        (own_forward, "DoublingAttention is not a plain MultiHeadAttention"),
        (own_linear, "NonDynamicallyQuantizableLinear is not a plain Linear"),
        (shared, "a parameter (15, 15) of ModuleList is shared by two layers"),
        (split, "the sequence of this module is split already; call split_heads before split_sequence"),
    ):
        classes = [type(part) for part in module.modules()]
        assert_error(lambda module=module: split_heads(module), message)
        assert [type(part) for part in module.modules()] == classes
        assert not any(isinstance(x, DTensor) for x in module.parameters())
    assert_error(lambda: split_sequence(own_forward), "DoublingAttention is not a plain MultiHeadAttention")


@check
def different_modules_fail_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(10 + ranks.rank)
    assert_error(
        lambda: split_heads(MultiHeadAttention(15, 5)), "ranks disagree about the module to split: rank 0 has a Multi"
    )
    assert_error(lambda: split_heads(MultiHeadAttention(15, 5 if ranks.rank else 3)), "ranks disagree about the module")
    torch.manual_seed(11)
    split = split_heads(MultiHeadAttention(15, 5))
    tokens = 7 if ranks.first else 5
    assert_error(lambda: split(torch.randn(1, tokens, 15)), "rank 0 has float32 (1, 7, 15)")
    split(torch.ones(1, 7, 15))  # and they can go on
    message = "it fell" if ranks.rank == 1 else "rank 1 failed at falling: it fell"
    assert_error(lambda: ranks.agree("falling", lambda: fall(ranks.rank)), message)


def fall(rank: int) -> str:
    if rank == 1:
        raise RankError("it fell")
    return "well"


def saved_modules() -> dict[str, Any]:
    """The modules whose checkpoints are written by one number of ranks and read by another."""
    torch.manual_seed(12)
    made = {name: MultiHeadAttention(**options) for name, options in LAYERS.items()}
    for module in made.values():
        for x in module.parameters():
            torch.nn.init.normal_(x)
    return {**made, "decoder": Decoder(DECODER)}
