"""Heads and sequence split together: each rank computes its heads for its tokens, against the whole in one process.

Four ranks are a grid of two by two; two ranks are one row, whose ranks split heads alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import headwise
from headwise import Alibi, Decoder, Encoder, Heads, MultiHeadAttention, Rotary, Shape, TransformerBlock
from headwise.scale import (
    clip_grad_norm_,
    gather_sequence,
    load_state,
    save_state,
    shard_sequence,
    split_heads,
    split_sequence,
    sum_gradients,
)
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error

from .composition import COUNTS, EXACT, batches, new_decoder, new_optimizer
from .registry import check
from .tensor_parallel import whole_tensor

DECODERS = {
    "divisible": Shape(layers=3, heads=Heads(30, 6, 2, 6), ffn=37, vocab=41, positions="rotary", norm="rms",
                       activation="swiglu", head="own", window=(None, 5, None)),
    "indivisible": Shape(layers=2, heads=Heads(35, 5, 5, 7), ffn=23, vocab=41, max_length=64, head="tied"),
    "groups_over_ranks": Shape(layers=1, heads=Heads(24, 6, 3, 4), ffn=19, vocab=41, positions="rotary", head="own"),
    "idle": Shape(layers=1, heads=Heads(11, 1, 1, 6), ffn=13, vocab=41, positions="rotary", head="own"),
}  # fmt: skip


def new_grid(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks.count // 2, 2), mesh_dim_names=("cp", "tp"))


def split_both(whole: Any, mesh: DeviceMesh, zigzag: bool = True, **options: Any) -> Any:
    """A copy of a module, heads split over "tp" and sequence over "cp"."""
    return split_sequence(split_heads(copy.deepcopy(whole), mesh, **options), mesh, zigzag=zigzag)


def compare(name: str, whole: Any, mesh: DeviceMesh, x: Tensor, zigzag: bool = True, **options: Any) -> Any:
    """Outputs and all gradients of a module, whole and split; the split one."""
    split = split_both(whole, mesh, zigzag)
    place = {"zigzag": zigzag, "mesh": mesh}
    local_x = shard_sequence(x, 1, **place).clone().requires_grad_(x.is_floating_point())
    whole_x = x.clone().requires_grad_(x.is_floating_point())
    want, got = whole(whole_x, **options), split(local_x, **options)
    torch.testing.assert_close(gather_sequence(got, 1, **place), want, **EXACT, msg=lambda m: f"{name}: {m}")
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    want.backward(grad)
    got.backward(shard_sequence(grad, 1, **place))
    sum_gradients(split, mesh)
    if whole_x.grad is not None:
        torch.testing.assert_close(local_x.grad, shard_sequence(whole_x.grad, 1, **place), **EXACT)
    for (key, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert isinstance(q, DTensor)
        torch.testing.assert_close(
            whole_tensor(q.grad), p.grad, **EXACT, msg=lambda m, key=key: f"{name} {key}: {m}"
        )  # fmt: skip
    return split


@check
def stacks_with_heads_and_sequence_split_match_the_whole(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    for name, shape in DECODERS.items():
        torch.manual_seed(51)
        whole = Decoder(shape).double()
        ids = torch.randint(41, (2, 27))
        split = compare(name, whole, mesh, ids)
        got, want = split.stats(shard_sequence(ids, 1, mesh=mesh)), whole.stats(ids)
        for got_stats, want_stats in zip(got, want, strict=True):
            for statistic in want_stats:
                torch.testing.assert_close(got_stats[statistic], want_stats[statistic], msg=f"{name} {statistic}")
    shape = Shape(layers=2, heads=Heads(35, 5, 5, 7), ffn=23, vocab=41, max_length=64)
    encoder = Encoder(shape).double()
    ids = torch.randint(41, (2, 23))
    compare("encoder", encoder, mesh, ids, zigzag=False, lengths=torch.tensor([9, 23]))


@check
def attention_and_blocks_with_heads_and_sequence_split_match_the_whole(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    torch.manual_seed(52)
    for heads in (6, 5, 1):
        for options in ({"position": Alibi(), "sinks": True}, {"position": Rotary(), "softcap": 3.0, "qk_norm": "rms"}):
            whole = MultiHeadAttention(7 * heads, heads, head_dim=4, **options).double()
            if whole.sinks is not None:
                torch.nn.init.normal_(whole.sinks)
            x, gates = torch.randn(2, 17, 7 * heads).double(), torch.rand(heads).double()
            lengths = torch.tensor([9, 17])
            compare(f"{heads} {options}", whole, mesh, x, zigzag=False, gates=gates, lengths=lengths)
            compare(f"{heads} {options} causal", without_gradients(whole), mesh, x, causal=True, window=(6, 0))
    block = TransformerBlock(35, 5, ffn=19, activation="swiglu", norm="rms", qk_norm="layer", window=7).double()
    compare("block", block, mesh, torch.randn(2, 29, 35).double(), causal=True)
    few = torch.randn(2, 3, 35).double()  # fewer tokens than chunks
    compare("few tokens", without_gradients(block), mesh, few, causal=True)


def without_gradients(module: Any) -> Any:
    new = copy.deepcopy(module)
    new.zero_grad()
    return new


@check
def gates_of_split_heads_and_sequences_get_their_gradient(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    whole = MultiHeadAttention(15, 5, 5).double()
    split, x = split_both(whole, mesh), torch.randn(2, 13, 15).double()
    gates, own_gates = (torch.linspace(0.1, 1.7, 5).double().requires_grad_() for _ in range(2))
    grad = torch.randn(2, 13, 15).double()
    whole(x, gates=gates).backward(grad)
    split(shard_sequence(x, 1, mesh=mesh), gates=own_gates).backward(shard_sequence(grad, 1, mesh=mesh))
    total = own_gates.grad.clone()
    torch.distributed.all_reduce(total, group=mesh.get_group("cp"))
    torch.testing.assert_close(total, gates.grad, **EXACT)


def token_loss(model: Any, ids: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens' part of the mean loss of all tokens, of the next token."""
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    local, local_targets = (shard_sequence(x, 1, mesh=mesh) for x in (ids, targets))
    logits = model(local)
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), local_targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / (targets != -100).sum()


def whole_loss(model: Any, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def compare_steps(whole: Any, model: Any, mesh: DeviceMesh, name: str, after: Any, scale: float = 1.0) -> None:
    """Three clipped steps of both. after: what follows backward; scale: of the loss, where FSDP takes a mean."""
    optimizers = [new_optimizer(x) for x in (whole, model)]
    for ids in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole_loss(whole, ids).backward()
        (scale * token_loss(model, own_batch(ids, mesh), mesh)).backward()
        after(model)
        want, got = (torch.nn.utils.clip_grad_norm_(x.parameters(), 0.05) for x in (whole, model))
        assert want > 0.05  # they are clipped
        torch.testing.assert_close(whole_tensor(got), want, **EXACT, msg=lambda m: f"{name}: {m}")
        for optimizer in optimizers:
            optimizer.step()
        for (key, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
            message = f"{name} {key}"
            torch.testing.assert_close(whole_tensor(y.grad), x.grad, **EXACT, msg=lambda m, n=message: f"{n}: {m}")
            torch.testing.assert_close(whole_tensor(y), x.detach(), **EXACT, msg=lambda m, n=message: f"{n}: {m}")


def own_batch(ids: Tensor, mesh: DeviceMesh) -> Tensor:
    if "dp" not in (mesh.mesh_dim_names or ()):
        return ids
    return ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def shard(model: Any, mesh: DeviceMesh) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@check
def heads_and_sequence_train_as_one_process(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    for name, heads in COUNTS.items():
        whole = new_decoder(heads)
        model = split_both(whole, mesh)
        compare_steps(whole, model, mesh, name, lambda model: sum_gradients(model, mesh))
        save_state(model, folder / f"grid-{name}")
        loaded = split_heads(new_decoder(heads))
        load_state(loaded, folder / f"grid-{name}")
        for x, y in zip(whole.parameters(), loaded.parameters(), strict=True):
            torch.testing.assert_close(whole_tensor(y), x.detach(), **EXACT)


@check
def fsdp_over_data_and_sequence_trains_as_one_process(ranks: Ranks, folder: Path) -> None:
    """FSDP2's mean over the ranks of a sequence is their sum where the loss is multiplied by their number."""
    half = ranks.count // 2
    meshes = {"cp x tp": (1, half, 2), "dp x cp": (half, 2, 1), "dp x tp": (half, 1, 2)}
    if ranks.count == 8:
        meshes = {"dp x cp x tp": (2, 2, 2)}
    for (name, sizes), (counts, heads) in zip(meshes.items(), COUNTS.items(), strict=False):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp"))
        whole = new_decoder(heads)
        model = shard(split_both(whole, mesh), mesh["dp", "cp"]._flatten("dp_cp"))
        compare_steps(whole, model, mesh, f"{name} {counts}", lambda model: None, scale=mesh["cp"].size())
        whole = new_decoder(heads)
        model = shard(split_both(whole, mesh), mesh["dp"])
        compare_steps(whole, model, mesh, f"{name} summed", lambda model, grid=mesh: sum_gradients(model, grid))


@check
def a_split_stream_and_vocabulary_take_a_split_sequence(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    for name, heads in COUNTS.items():
        whole = new_decoder(heads)
        ids = batches()[0]
        whole_loss(whole, ids).backward()
        for options in ({"sequence_parallel": True}, {"vocabulary": True}):
            model = split_both(without_gradients(whole), mesh, **options)
            with loss_parallel():
                token_loss(model, ids, mesh).backward()
            sum_gradients(model, mesh)
            for (key, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
                message = f"{name} {options} {key}"
                torch.testing.assert_close(whole_tensor(y.grad), x.grad, **EXACT, msg=lambda m, n=message: f"{n}: {m}")


@check
def watch_sees_all_heads_and_tokens_of_a_grid(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    whole = Decoder(DECODERS["indivisible"]).double().eval()
    split, ids = split_both(whole, mesh), torch.randint(41, (2, 27))
    with headwise.watch(whole) as want:
        whole(ids)
    with headwise.watch(split) as got:
        split(shard_sequence(ids, 1, mesh=mesh))
    for a, b in zip(got.layers, want.layers, strict=True):
        assert a.heads == b.heads
        for statistic in b.stats:
            torch.testing.assert_close(a.stats[statistic], b.stats[statistic], msg=statistic)
    assert_error(lambda: headwise.prune_heads(split, {0: [1]}), "has some tokens on each rank")
    masked = {0: [1, 4], 1: [3]}
    with torch.no_grad(), headwise.mask_heads(whole, masked), headwise.mask_heads(split, masked):
        got_logits = split(shard_sequence(ids, 1, mesh=mesh))
        torch.testing.assert_close(gather_sequence(got_logits, 1, mesh=mesh), whole(ids), **EXACT)


@check
def the_recorder_counts_every_head_and_token_of_a_grid_once(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    whole = Decoder(DECODERS["indivisible"]).double()
    split, ids = split_both(whole, mesh), torch.randint(41, (2, 27))
    with headwise.watch(whole) as want:
        whole(ids)
    optimizer = torch.optim.SGD(split.parameters(), 0.0)
    with headwise.Recorder(split, every=1, path=folder / "grid.jsonl") as recorder:
        split(shard_sequence(ids, 1, mesh=mesh)).square().sum().backward()
        optimizer.step()
    assert recorder.entry is not None
    for layer in want.layers:
        for name in ("entropy", "max_logit", "confidence"):
            np.testing.assert_allclose(recorder.entry.values[layer.key][name], layer.stats[name], err_msg=name)


@check
def a_compiled_grid_is_the_uncompiled_one(ranks: Ranks, folder: Path) -> None:
    if ranks.count < 4:
        return
    torch._dynamo.reset()
    mesh = new_grid(ranks)
    split = split_both(TransformerBlock(30, 5, ffn=19, position=Rotary()).double(), mesh)
    compiled = torch.compile(split, fullgraph=True, backend="aot_eager")
    for tokens in (27, 22):  # the second compilation is for any count
        x, results = shard_sequence(torch.randn(2, tokens, 30).double(), 1, mesh=mesh), []
        for call in (split, compiled):
            split.zero_grad()
            out = call(x, causal=True)
            out.sin().sum().backward()
            results.append([out, *(whole_tensor(p.grad) for p in split.parameters())])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, **EXACT)


@check
def what_a_grid_cannot_do_is_refused_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    block = TransformerBlock(15, 5, ffn=11)
    same = split_heads(copy.deepcopy(block))
    assert_error(lambda: split_sequence(same), "have the same tokens, so they cannot split its sequence too")
    split = split_both(block, mesh)
    assert_error(lambda: split_heads(split, mesh), "this module is split over ranks already")
    assert_error(lambda: split_sequence(split, mesh), "the sequence of this module is split over ranks already")
    sequence = split_sequence(copy.deepcopy(block), mesh)
    assert_error(lambda: split_heads(sequence, mesh), "call split_heads before split_sequence")
    x = shard_sequence(torch.randn(2, 13, 15), 1, mesh=mesh)
    mask = torch.ones(13, 13).bool()
    assert_error(lambda: split(x, mask=mask), "a split sequence takes no mask")
    split(x)  # the ranks are in step
    other = init_device_mesh("cpu", (ranks.count // 2, 2), mesh_dim_names=("dp", "tp"))
    assert_error(lambda: split_sequence(split_heads(copy.deepcopy(block), other), other), "mesh['cp']")


@check
def a_rank_of_a_grid_that_differs_gives_all_of_them_an_error(ranks: Ranks, folder: Path) -> None:
    mesh = new_grid(ranks)
    split = split_both(TransformerBlock(15, 5, ffn=11), mesh)
    x = shard_sequence(torch.randn(2, 13, 15), 1, mesh=mesh)
    for options in ({"causal": ranks.first}, {"lengths": torch.tensor([7, 9 + ranks.first])}):
        assert_error(lambda options=options: split(x, **options), "ranks disagree about the inputs of TransformerBlock")
    assert_error(lambda: split(x * (1 + ranks.first)), "ranks disagree about the inputs of TransformerBlock")
    first_row = mesh["cp"].get_local_rank() == 0
    if mesh["cp"].size() > 1:  # whole rows agree, and differ from each other
        assert_error(lambda: split(x, causal=first_row), "ranks disagree about the call of TransformerBlock")
    split(x, causal=True).square().sum().backward()
    sum_gradients(split, mesh)
    norm = clip_grad_norm_(split, 1.0)
    assert norm.isfinite()


@check
def a_rank_of_a_grid_that_fails_tells_all_others(ranks: Ranks, folder: Path) -> None:
    if ranks.count < 4:  # the groups of a smaller grid are those of all ranks, which other checks need
        return
    split = split_both(Decoder(DECODERS["indivisible"]), new_grid(ranks))

    def fail(*arguments: Any) -> None:
        raise headwise.HeadwiseError("there are no words")

    if ranks.first:  # after the attention of the first layer, so that no rank of the other row waits for this one yet
        split.blocks[0].ffn.register_forward_hook(fail)
    assert_error(lambda: split(torch.zeros(2, 5, dtype=torch.long)), "there are no words")
    ranks.barrier("the end of failing")
