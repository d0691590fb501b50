"""Rows of weights that ranks keep between calls without gradients: what is sent, and that no call sees stale ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from headwise import Decoder, MultiHeadAttention
from headwise.scale import count_traffic, load_state, save_state, split_heads
from headwise.scale.call_agreement import agreement_of
from headwise.scale.parallel_linear import local_tensor
from headwise.scale.ranks import Ranks

from .composition import COUNTS, EXACT, batches, data_and_heads_mesh, loss_of, new_decoder, own_sequences, sharded_model
from .registry import check
from .tensor_parallel import DECODER, whole_tensor


def new_pair(**options: Any) -> tuple[Any, Any]:
    """A decoder of 5 heads, which no number of ranks here divides, and a split copy."""
    torch.manual_seed(61)
    whole = Decoder(DECODER).double()
    return whole, split_heads(copy.deepcopy(whole), **options)


def messages(call: Callable[[], Any]) -> int:
    """Bytes of weights that this rank sends in a call."""
    with count_traffic() as traffic:
        call()
    return traffic["messages"]


def kept_layers(split: Any) -> int:
    agreement = agreement_of(split)
    assert agreement is not None
    return len(agreement.rows.kept)


@check
def weights_travel_once_while_nothing_is_trained(ranks: Ranks, folder: Path) -> None:
    for options in ({}, {"checked": False}, {"checked": "shapes"}):
        whole, split = new_pair(**options)
        ids = torch.randint(41, (2, 7))
        sent = torch.zeros(2)
        with torch.no_grad():
            for n in range(2):
                sent[n] = messages(lambda ids=ids, split=split: split(ids))
                torch.testing.assert_close(split(ids), whole(ids), **EXACT)
            cache, whole_cache = split.cache(), whole.cache()
            for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:]):
                got, want = split(part, cache=cache), whole(part, cache=whole_cache)
                torch.testing.assert_close(got, want, **EXACT)
        torch.distributed.all_reduce(sent)
        assert sent[0] > 0 and sent[1] == 0, (options, sent)
        count = kept_layers(split)
        assert count == 4 * DECODER.layers
        assert messages(lambda ids=ids, split=split: split.generate(ids[:, :3], 5)) == 0
        loss_of(split, ids).backward()
        assert kept_layers(split) == 0  # the memory is free
        assert split.generate(ids[:, :3], 4).tolist() == whole.generate(ids[:, :3], 4).tolist()
        assert kept_layers(split) == count


def edit_in_place(module: Any) -> None:
    with torch.no_grad():
        module.blocks[1].attention.W_K.weight.mul_(1.25)


def edit_data(module: Any) -> None:
    module.blocks[2].attention.W_O.weight.data.add_(0.125)


def edit_last_row(module: Any) -> None:
    """Of a parameter of which one rank stores the last row: on that one alone."""
    weight = module.blocks[0].attention.W_Q.weight
    local = local_tensor(weight.detach())
    last = len(weight) == len(local) or weight.device_mesh.get_local_rank() == weight.device_mesh.size() - 1
    if last:
        local[-1].add_(1.0)


def load_scaled(module: Any) -> None:
    module.load_state_dict({name: x * 1.0625 for name, x in module.state_dict().items()})


def trainer(**options: Any) -> Callable[[Any], None]:
    def train(module: Any) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
        loss_of(module, torch.arange(14).view(2, 7)).backward()
        with torch.no_grad():
            module(torch.arange(14).view(2, 7))  # rows are kept again before the step
        optimizer.step()

    return train


CHANGES: dict[str, Callable[[Any], None]] = {
    "in place": edit_in_place,
    "data": edit_data,
    "one rank": edit_last_row,
    "load_state_dict": load_scaled,
    "foreach": trainer(foreach=True),
    "fused": trainer(fused=True),
    "single": trainer(foreach=False),
}


@check
def no_call_sees_weights_of_before_a_change(ranks: Ranks, folder: Path) -> None:
    ids = torch.arange(14).view(2, 7)
    for name, change in CHANGES.items():
        whole, split = new_pair()
        with torch.no_grad():
            split(ids)
            assert kept_layers(split)
        for module in (whole, split):
            change(module)
        with torch.no_grad():
            want = whole(ids)
            torch.testing.assert_close(split(ids), want, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
        assert split.generate(ids, 3).tolist() == whole.generate(ids, 3).tolist(), name
    other = Decoder(DECODER).double()
    save_state(split_heads(copy.deepcopy(other)), folder / "other-rows")
    load_state(split, folder / "other-rows")
    with torch.no_grad():
        torch.testing.assert_close(split(ids), other(ids), **EXACT)


@check
def fsdp_around_kept_rows_gives_the_current_weights(ranks: Ranks, folder: Path) -> None:
    mesh = data_and_heads_mesh(ranks)
    for outer_only in (False, True):
        whole = new_decoder(COUNTS["indivisible"])
        split = fully_shard(split_heads(copy.deepcopy(whole), mesh), mesh=mesh["dp"]) if outer_only else None
        split = split or sharded_model(whole, mesh)
        optimizers = [torch.optim.AdamW(x.parameters(), lr=1e-2, foreach=True) for x in (whole, split)]
        for ids in batches():
            with torch.no_grad():
                for _ in range(2):
                    got: Tensor = split(own_sequences(ids, mesh))
                    torch.testing.assert_close(got, own_sequences(whole(ids), mesh), **EXACT)
            for model, optimizer, part in zip((whole, split), optimizers, (ids, own_sequences(ids, mesh)), strict=True):
                optimizer.zero_grad()
                loss_of(model, part).backward()
                with torch.no_grad():
                    model(part)  # rows are kept again before the step
                if model is split:  # after a forward pass FSDP2 keeps the gathered parameters of the outermost module
                    model.reshard()
                optimizer.step()


@check
def ranks_that_keep_different_rows_fetch_them_again(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(62)
    whole = MultiHeadAttention(35, 5).double()
    split, x = split_heads(copy.deepcopy(whole)), torch.randn(2, 7, 35).double()
    with torch.no_grad():
        split(x)
        agreement = agreement_of(split)
        assert agreement is not None and len(agreement.rows.kept) == 4
        if ranks.first:
            agreement.rows.drop()
        torch.testing.assert_close(split(x), whole(x), **EXACT)
        assert len(agreement.rows.kept) == 4
    with torch.inference_mode():
        torch.testing.assert_close(split(x), whole(x), **EXACT)
    torch.testing.assert_close(split(x), whole(x), **EXACT)
    for name, y in split.named_parameters():
        torch.testing.assert_close(whole_tensor(y), whole.get_parameter(name).detach())
    split(x).sum().backward()
    whole(x).sum().backward()
    torch.testing.assert_close(whole_tensor(split.W_Q.weight.grad), whole.W_Q.weight.grad, **EXACT)
