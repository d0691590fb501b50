"""Split heads with PyTorch's own parallelism around them: sub-meshes, FSDP2, foreach optimizers, clipping, checkpoints.

Four ranks are two groups of two that split heads, with data parallelism between the groups; two ranks are one group.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from headwise import Decoder, Heads, MultiHeadAttention, Recorder, Shape, TransformerBlock, watch
from headwise.scale import clip_grad_norm_, load_state, save_state, split_heads
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error

from .registry import check
from .tensor_parallel import whole_tensor

EXACT = {"rtol": 1e-9, "atol": 1e-11}  # of sums of a few hundred float64 in another order
COUNTS = {
    "divisible": Heads(24, 4, 2, 6),
    "indivisible": Heads(30, 5, 5, 6),
    "one_kv": Heads(20, 4, 1, 5),
}


def new_decoder(heads: Heads) -> Any:
    torch.manual_seed(31)
    shape = Shape(layers=2, heads=heads, ffn=27, vocab=23, positions="learned", max_length=16, head="tied")
    return Decoder(shape).double()


def batches() -> list[Tensor]:
    torch.manual_seed(32)
    return [torch.randint(23, (4, 9)) for _ in range(3)]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def step(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    """One step of training; the norm of the gradients before they are clipped."""
    optimizer.zero_grad()
    loss_of(model, ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return whole_tensor(norm)


def data_and_heads_mesh(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks.count // 2, 2), mesh_dim_names=("dp", "tp"))


def sharded_model(whole: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """A copy of a decoder, heads split over "tp" and parameters sharded over "dp" by FSDP2."""
    model = split_heads(copy.deepcopy(whole), mesh, **options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def own_sequences(ids: Tensor, mesh: DeviceMesh) -> Tensor:
    return ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def new_optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


@check
def fsdp_around_split_heads_trains_as_one_process(ranks: Ranks, folder: Path) -> None:
    mesh = data_and_heads_mesh(ranks)
    for name, heads in COUNTS.items():
        whole = new_decoder(heads)
        compare_training(whole, sharded_model(whole, mesh), mesh, name)


def compare_training(whole: Any, model: Any, mesh: DeviceMesh, name: str) -> None:
    """Three clipped steps of both, and the outputs after them."""
    assert all(isinstance(x, DTensor) for x in model.parameters())
    optimizers = [new_optimizer(x) for x in (whole, model)]
    for ids in batches():
        want = step(whole, optimizers[0], ids)
        got = step(model, optimizers[1], own_sequences(ids, mesh))
        assert want > 0.05  # they are clipped
        torch.testing.assert_close(got, want, **EXACT, msg=lambda m: f"{name}: {m}")
        for (key, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
            message = f"{name} {key}"
            torch.testing.assert_close(whole_tensor(y.grad), x.grad, **EXACT, msg=lambda m, n=message: f"{n}: {m}")
            torch.testing.assert_close(whole_tensor(y), x.detach(), **EXACT, msg=lambda m, n=message: f"{n}: {m}")
    ids = batches()[0]
    torch.testing.assert_close(model(own_sequences(ids, mesh)), own_sequences(whole(ids), mesh), **EXACT)


@check
def a_split_residual_stream_trains_as_one_process(ranks: Ranks, folder: Path) -> None:
    """9 tokens on 2 ranks: the stream is split unevenly."""
    mesh = data_and_heads_mesh(ranks)
    for name, heads in COUNTS.items():
        whole = new_decoder(heads)
        compare_training(whole, sharded_model(whole, mesh, sequence_parallel=True), mesh, name)
    world = init_device_mesh("cpu", (ranks.count,))
    block = TransformerBlock(24, 4, 2, norm="rms", activation="swiglu", cross=True, qk_norm="rms", bias=False).double()
    split = split_heads(copy.deepcopy(block), world, sequence_parallel=True)
    seen: list[Any] = []
    split.ffn_norm.register_forward_hook(lambda module, args, out: seen.append(out.to_local().shape[1]))
    inputs = [torch.randn(2, tokens, 24, dtype=torch.float64) for tokens in (7, 5)]
    x, memory = inputs
    wants, gots = ([y.clone().requires_grad_() for y in inputs] for _ in range(2))
    want, got = block(*wants, causal=True), split(*gots, causal=True)
    torch.testing.assert_close(got, want, **EXACT)
    assert seen == [min(-(-7 // ranks.count), max(0, 7 - ranks.rank * -(-7 // ranks.count)))]
    want.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(wants, gots, strict=True):
        torch.testing.assert_close(b.grad, a.grad, **EXACT)
    torch.testing.assert_close(split(x=x, memory=memory), block(x, memory), **EXACT)
    assert_error(lambda: split(x[:, :1], memory), "tokens are fewer than")
    attention = MultiHeadAttention(24, 4)
    assert_error(lambda: split_heads(attention, world, sequence_parallel=True), "is for blocks and stacks")
    dropping = split_heads(TransformerBlock(24, 4, dropout=0.1), world, sequence_parallel=True)
    assert_error(lambda: dropping(torch.randn(1, 8, 24)), "set dropout to 0")


@check
def checkpoints_with_optimizer_state_are_read_on_other_meshes(ranks: Ranks, folder: Path) -> None:
    """Written on data x heads, read on heads only and on data only, by headwise and by torch.distributed.checkpoint."""
    mesh = data_and_heads_mesh(ranks)
    world = init_device_mesh("cpu", (ranks.count,))
    for name, heads in COUNTS.items():
        whole = new_decoder(heads)
        models = {"saved": sharded_model(whole, mesh), "heads": split_heads(copy.deepcopy(whole), world)}
        models["data"] = fully_shard(copy.deepcopy(whole), mesh=world)
        optimizers = {key: new_optimizer(model) for key, model in models.items()}
        first, second = batches()[:2]
        whole_optimizer = new_optimizer(whole)
        step(whole, whole_optimizer, first)
        step(models["saved"], optimizers["saved"], own_sequences(first, mesh))
        save_state(models["saved"], folder / f"mesh-{name}", optimizer=optimizers["saved"])
        states = get_state_dict(models["saved"], optimizers["saved"])
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder / f"dcp-{name}")
        step(whole, whole_optimizer, second)
        for source in ("mesh", "dcp"):
            for key in ("heads", "data"):
                model, optimizer = models[key], optimizers[key]
                if source == "mesh":
                    load_state(model, folder / f"mesh-{name}", optimizer=optimizer)
                else:
                    model_state, optimizer_state = get_state_dict(model, optimizer)
                    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"dcp-{name}")
                    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
                part = second if key == "heads" else second.chunk(ranks.count)[ranks.rank]
                step(model, optimizer, part)
                for (path, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
                    message = f"{name} {source} {key} {path}"
                    torch.testing.assert_close(
                        whole_tensor(y), x.detach(), **EXACT, msg=lambda m, n=message: f"{n}: {m}"
                    )


@check
def a_mesh_without_a_dimension_for_heads_is_refused(ranks: Ranks, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (ranks.count // 2, 2), mesh_dim_names=("dp", "cp"))
    assert_error(
        lambda: split_heads(new_decoder(COUNTS["divisible"]), mesh),
        "a mesh of one dimension is expected, got 2; take one of them: mesh['tp']",
    )


@check
def a_split_vocabulary_trains_by_loss_parallel_as_the_whole(ranks: Ranks, folder: Path) -> None:
    for head, vocab in (("tied", 23), ("own", 8 * ranks.count)):
        torch.manual_seed(33)
        shape = Shape(layers=1, heads=Heads(30, 5, 5, 6), ffn=27, vocab=vocab, positions="rotary", head=head)
        whole = Decoder(shape).double()
        split = split_heads(copy.deepcopy(whole), vocabulary=True)
        ids = torch.randint(vocab, (2, 9))
        loss_of(whole, ids).backward()
        assert split.embed.tokens.weight.placements == (Shard(0),)
        with loss_parallel():
            loss = loss_of(split, ids)
            loss.backward()
        assert split(ids).placements == (Shard(2),)
        torch.testing.assert_close(whole_tensor(loss), loss_of(whole, ids).detach(), **EXACT)
        for (name, x), y in zip(whole.named_parameters(), split.named_parameters(), strict=True):
            torch.testing.assert_close(
                whole_tensor(y[1].grad), x.grad, **EXACT, msg=lambda m, n=f"{head} {name}": f"{n}: {m}"
            )
        with torch.no_grad():
            torch.testing.assert_close(split(ids), whole(ids), **EXACT)
        assert split.generate(ids[:, :3], 4).tolist() == whole.generate(ids[:, :3], 4).tolist()
        assert all(isinstance(x, DTensor) for x in split.parameters())
    assert_error(
        lambda: split_heads(TransformerBlock(12, 3), vocabulary=True),
        "vocabulary=True is for stacks; TransformerBlock has no embeddings of tokens",
    )
    few = Shape(layers=1, heads=Heads(12, 3, 3, 4), ffn=7, vocab=ranks.count - 1, positions="rotary", head="own")
    assert_error(lambda: split_heads(Decoder(few), vocabulary=True), f"of {ranks.count} ranks without any")


class GainAndBlock(torch.nn.Module):
    """A class of a user's own, with a parameter of its own and layers that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((15,), 1.5))
        self.first, self.last = torch.nn.Linear(15, 15), torch.nn.Linear(15, 15)
        self.last.weight = self.first.weight
        self.block = TransformerBlock(15, 5, ffn=11)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x * self.gain)))


@check
def parameters_of_foreign_classes_stay_plain_and_are_clipped_with_the_others(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(34)
    whole = GainAndBlock().double()
    split = split_heads(copy.deepcopy(whole))
    assert type(split.gain) is torch.nn.Parameter and split.last.weight is split.first.weight
    assert all(isinstance(x, DTensor) for name, x in split.named_parameters() if name != "gain")
    x = torch.randn(2, 7, 15, dtype=torch.float64)
    for module in (whole, split):
        module(x).square().sum().backward()
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(split, 0.1), want, **EXACT)
    for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(whole_tensor(q.grad), p.grad, **EXACT, msg=lambda m, name=name: f"{name}: {m}")
    tied = GainAndBlock()
    tied.first.weight = tied.block.attention.W_O.weight
    assert_error(lambda: split_heads(tied), "a parameter (15, 15) of GainAndBlock is shared by two layers")


@check
def replicated_shards_around_split_heads_train_as_one_process(ranks: Ranks, folder: Path) -> None:
    """HSDP: FSDP2 on two dimensions, of which the first has copies of the shards."""
    half = ranks.count // 2
    for sizes, (name, heads) in zip(((half, 1, 2), (1, half, 2), (half, 2, 1)), COUNTS.items(), strict=True):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards", "tp"))
        whole = new_decoder(heads)
        model = split_heads(copy.deepcopy(whole), mesh)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["copies", "shards"])
        fully_shard(model, mesh=mesh["copies", "shards"])
        optimizers = [new_optimizer(x) for x in (whole, model)]
        parts = sizes[0] * sizes[1]
        place = mesh["copies"].get_local_rank() * sizes[1] + mesh["shards"].get_local_rank()
        for ids in batches():
            want = step(whole, optimizers[0], ids)
            got = step(model, optimizers[1], ids.chunk(parts)[place])
            torch.testing.assert_close(got, want, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
            for (key, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
                message = f"{name} {sizes} {key}"
                torch.testing.assert_close(whole_tensor(y), x.detach(), **EXACT, msg=lambda m, n=message: f"{n}: {m}")


@check
def watch_and_recorder_take_a_split_vocabulary(ranks: Ranks, folder: Path) -> None:
    whole = new_decoder(COUNTS["indivisible"])
    split, ids = split_heads(copy.deepcopy(whole), vocabulary=True), batches()[0]
    with watch(whole) as want:
        loss_of(whole, ids).backward()
    with watch(split) as got, loss_parallel():
        loss_of(split, ids).backward()
    for a, b in zip(got.layers, want.layers, strict=True):
        assert a.heads == b.heads
        for statistic in b.stats:
            torch.testing.assert_close(a.stats[statistic], b.stats[statistic], **EXACT)
    with torch.no_grad(), watch(split) as got:
        split(ids)
    torch.testing.assert_close(got.layers[0].stats.entropy, want.layers[0].stats.entropy, **EXACT)
    optimizer = torch.optim.SGD(split.parameters(), 0.0)
    with Recorder(split, every=1, path=folder / "vocabulary.jsonl") as recorder:
        with loss_parallel():
            loss_of(split, ids).backward()
        optimizer.step()
    assert recorder.entry is not None
    for layer in want.layers:
        for name in ("entropy", "max_logit", "confidence"):
            np.testing.assert_allclose(recorder.entry.values[layer.key][name], layer.stats[name], err_msg=name)
