"""Split heads with PyTorch's own parallelism around them: sub-meshes, FSDP2, foreach optimizers, clipping, checkpoints.

Four ranks are two groups of two that split heads, with data parallelism between the groups; two ranks are one group.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headwise import Decoder, Heads, Shape
from headwise.scale import load_state, save_state, split_heads
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


def sharded_model(whole: Any, mesh: DeviceMesh) -> Any:
    """A copy of a decoder, heads split over "tp" and parameters sharded over "dp" by FSDP2."""
    model = split_heads(copy.deepcopy(whole), mesh)
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
        model = sharded_model(whole, mesh)
        assert all(isinstance(x, DTensor) for x in model.parameters())
        optimizers = [new_optimizer(x) for x in (whole, model)]
        for ids in batches():
            want = step(whole, optimizers[0], ids)
            got = step(model, optimizers[1], own_sequences(ids, mesh))
            assert want > 0.05  # they are clipped
            torch.testing.assert_close(got, want, **EXACT, msg=lambda m, name=name: f"{name}: {m}")
            for (key, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
                message = f"{name} {key}"
                torch.testing.assert_close(whole_tensor(y.grad), x.grad, **EXACT, msg=lambda m, n=message: f"{n}: {m}")
                torch.testing.assert_close(whole_tensor(y), x.detach(), **EXACT, msg=lambda m, n=message: f"{n}: {m}")
        ids = batches()[0]
        torch.testing.assert_close(model(own_sequences(ids, mesh)), own_sequences(whole(ids), mesh), **EXACT)


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
