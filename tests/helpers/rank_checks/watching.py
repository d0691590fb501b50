"""watch, mask_heads and what is built on them over ranks: all heads, with the numbers that one process has.

MODELS are split in every way that is supported; each is compared with the whole model in the same process, in float64.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise
from headwise import Decoder, Encoder, Heads, HeadwiseError, Shape, TransformerBlock, scale
from headwise.models.structure.attention_layers import attention_layers
from headwise.models.structure.wrappers import inner_model
from headwise.scale import ranks as ranks_module
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error
from helpers.training import small_gpt2
from helpers.undeclared_models import NanoGPTFlash, NanoGPTManual, Stack

from .meshes import separate_mesh
from .registry import check

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
IDS = torch.arange(2, 24).view(2, 11) * 7 % 31


def decoder(heads: int, kv_heads: int) -> Decoder:
    shape = Shape(
        layers=2, heads=Heads.split(6 * heads, heads, kv_heads), ffn=17, vocab=31, positions="rotary", head="own"
    )
    return randomize(Decoder(shape))


def randomize(model: Any) -> Any:
    """The same random weights on every rank, in float64."""
    torch.manual_seed(5)
    model = model.double().eval()
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    return model


class FusedProjection(nn.Module):
    """Attention as timm writes it: one linear layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, -1, 5).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))


class TorchLayers(nn.Module):
    """Layers of nn.MultiheadAttention's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(15, 3, 19, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def embedded() -> Tensor:
    return torch.randn(2, 7, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sharded(model: Any, mesh: DeviceMesh | None = None) -> Any:
    """The model under FSDP2, each layer on its own, as one does."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(model: Any, inputs: Any) -> Tensor:
    output = model(input_ids=inputs) if hasattr(model, "config") else model(inputs)
    return getattr(output, "logits", output)


@functools.cache
def split_models(folder: Path) -> dict[str, tuple[Any, Any, Any]]:
    """Models whose heads are split over the ranks: the whole model, the split one, and their input."""
    models: dict[str, tuple[Any, Any, Any]] = {}
    # on 4 ranks: heads that divide; a KV head on all ranks; a rank without heads
    wholes: dict[str, tuple[Any, Any]] = {f"decoder {n}": (decoder(*n), IDS) for n in ((8, 4), (5, 1), (3, 3))}
    encoder = Shape(layers=2, heads=Heads.split(21, 7), ffn=13, vocab=31, positions="learned", max_length=16)
    wholes |= {"encoder": (randomize(Encoder(encoder)), IDS), "block": (randomize(TransformerBlock(15, 5)), embedded())}
    for name, (whole, inputs) in wholes.items():
        models[name] = whole, scale.split_heads(copy.deepcopy(whole)), inputs
    for name in ("llama", "qwen", "phi"):
        whole, split = (load(folder / name, dtype=torch.float64) for load in (headwise.load, scale.load_split))
        models[name] = whole, split, IDS
    return models


def data_parallel_models() -> dict[str, tuple[Any, Any, Any]]:
    """Models under FSDP2, of every source, and one under DDP: the whole model, the wrapped one, and their input."""
    wholes = {
        "registry": (small_gpt2().eval(), IDS),
        "own": (decoder(6, 3), IDS),
        "nn.MultiheadAttention": (randomize(TorchLayers()), embedded()),
        "nanoGPT": (randomize(Stack(NanoGPTFlash)), embedded()),
        "softmax": (randomize(Stack(NanoGPTManual)), embedded()),
        "timm": (randomize(Stack(FusedProjection)), embedded()),
    }
    models = {name: (whole, sharded(copy.deepcopy(whole)), inputs) for name, (whole, inputs) in wholes.items()}
    whole = decoder(6, 3)
    return models | {"DDP": (whole, nn.parallel.DistributedDataParallel(copy.deepcopy(whole)), IDS)}


def check_same_records(got: Any, want: Any, name: str) -> None:
    assert [layer.heads for layer in got.layers] == [layer.heads for layer in want.layers], name
    for a, b in zip(got.layers, want.layers, strict=True):
        assert (a.key, a.stats.names) == (b.key, b.stats.names), name
        for statistic in b.stats:
            torch.testing.assert_close(a.stats[statistic], b.stats[statistic], **CLOSE)
        torch.testing.assert_close(a.stats.count, b.stats.count)
        torch.testing.assert_close(a.outputs, b.outputs, **CLOSE)
        torch.testing.assert_close(a.links(2).keys, b.links(2).keys)
        torch.testing.assert_close(a.links(2).weights, b.links(2).weights, **CLOSE)


@check
def watch_sees_all_heads_that_ranks_split(ranks: Ranks, folder: Path) -> None:
    for name, (whole, split, inputs) in split_models(folder).items():
        options: dict[str, Any] = {"weights": {0: [2, 1]}, "outputs": True, "links": 2, "rows": [4, -1]}
        with torch.no_grad(), headwise.watch(split, **options) as got, headwise.watch(whole, **options) as want:
            torch.testing.assert_close(run(split, inputs), run(whole, inputs), **CLOSE)
            if name != "phi":  # of which every rank has all heads
                assert_error(lambda got=got: got.layers[0].stats, "those of all are gathered at the end of the `with`")
        check_same_records(got, want, name)
        assert (got[0].weights.heads, got[0].weights.rows) == (want[0].weights.heads, want[0].weights.rows)
        torch.testing.assert_close(got[0].weights.tensor, want[0].weights.tensor, **CLOSE)
        with (
            torch.no_grad(),
            scale.watch(split, weights=True, classes=None) as got,
            headwise.watch(whole, weights=True) as want,
        ):
            run(split, inputs), run(whole, inputs)
        torch.testing.assert_close(got[0].weights, want[0].weights, **CLOSE)


@check
def watch_of_split_heads_follows_cached_decoding(ranks: Ranks, folder: Path) -> None:
    whole = decoder(5, 1)
    split = scale.split_heads(copy.deepcopy(whole))
    with headwise.watch(split) as got, headwise.watch(whole) as want:
        assert split.generate(IDS, 4).tolist() == whole.generate(IDS, 4).tolist()
    for part in ("prefill", "decode", "stats"):
        a, b = getattr(got.layers[1], part), getattr(want.layers[1], part)
        torch.testing.assert_close(a.entropy, b.entropy, **CLOSE)
        torch.testing.assert_close(a.count, b.count)


@check
def mask_heads_of_split_heads_takes_numbers_of_the_whole_layer(ranks: Ranks, folder: Path) -> None:
    for whole, split, inputs in split_models(folder).values():
        with torch.no_grad(), headwise.watch(whole, outputs=True) as seen:
            plain = run(whole, inputs)
        outputs = seen.layers[0].outputs.flip(0)
        for heads, value in (({0: [0, 2]}, "zero"), ({0: [1]}, "mean"), ({0: [2, 0]}, outputs)):
            with torch.no_grad(), headwise.mask_heads(split, heads, value), headwise.mask_heads(whole, heads, value):
                got, want = run(split, inputs), run(whole, inputs)
            torch.testing.assert_close(got, want, **CLOSE)
            assert not torch.allclose(want, plain)
        records = []
        for model in (split, whole):
            with torch.no_grad(), scale.mask_heads(model, {0: [1]}), headwise.watch(model) as seen:
                run(model, inputs)
            records.append(seen)
        for a, b in zip(*(seen.layers for seen in records), strict=True):
            torch.testing.assert_close(a.stats.entropy, b.stats.entropy, **CLOSE)


@check
def gates_of_split_heads_get_the_gradient_of_the_whole_layer(ranks: Ranks, folder: Path) -> None:
    for whole, split, inputs in split_models(folder).values():
        gradients = []
        for model in (split, whole):
            count = headwise.models.structure.query_heads(model, headwise.models.structure.attention_sites(model)[0])
            gates = torch.linspace(0.5, 2.0, count, dtype=torch.float64).requires_grad_()
            with headwise.mask_heads(model, {0: gates}):
                run(model, inputs).square().mean().backward()
            gradients.append(gates.grad)
        torch.testing.assert_close(*gradients, **CLOSE)


def squares(output: Any, batch: Any) -> Tensor:
    """A loss of any model's output."""
    return getattr(output, "logits", output).square().mean((1, 2))


def last_value(output: Any) -> Tensor:
    """A metric of any model's output."""
    return getattr(output, "logits", output)[:, -1, 1]


# scores and their losses; the last two read weights
SCORES = {"michel": squares, "ablation": squares, "confidence": None, "output": None, "magnitude": None}


def check_importance(whole: Any, split: Any, inputs: Any) -> None:
    for score, loss in SCORES.items():
        got, want = (headwise.importance(model, [inputs], score=score, loss=loss) for model in (split, whole))
        for kind, values in want.items():
            torch.testing.assert_close(torch.tensor(got[kind]), torch.tensor(values), rtol=1e-5, atol=1e-9)


def check_patching(whole: Any, split: Any, inputs: Any) -> None:
    for method in ("exact", "gradient"):
        got, want = (
            headwise.patch(model, inputs, inputs.flip(1), last_value, method=method) for model in (split, whole)
        )
        for kind, values in want.items():
            torch.testing.assert_close(torch.tensor(got[kind]), torch.tensor(values), rtol=1e-6, atol=1e-9)


@check
def importance_and_patching_of_split_heads_are_those_of_one_process(ranks: Ranks, folder: Path) -> None:
    models = split_models(folder)
    for name in ("decoder (8, 4)", "decoder (3, 3)", "llama"):
        check_importance(*models[name])
        check_patching(*models[name])
    for whole, split, _ in models.values():
        assert attention_layers(split) == attention_layers(whole)


@check
def watch_mask_importance_and_patching_work_under_fsdp_and_ddp(ranks: Ranks, folder: Path) -> None:
    for name, (whole, split, inputs) in data_parallel_models().items():
        options: dict[str, Any] = {"weights": True, "outputs": True, "links": 2}
        own = inputs if ranks.first else inputs.flip(1)  # each rank records its own batch
        with torch.no_grad(), headwise.watch(split, **options) as got, headwise.watch(whole, **options) as want:
            run(split, own), run(whole, own)
        check_same_records(got, want, name)
        torch.testing.assert_close(got.layers[0].weights, want.layers[0].weights, **CLOSE)
        for value in ("zero", "mean"):
            with torch.no_grad(), headwise.mask_heads(split, {0: [1], 1: [0, 2]}, value):
                masked = run(split, own)
            with torch.no_grad(), headwise.mask_heads(whole, {0: [1], 1: [0, 2]}, value):
                torch.testing.assert_close(masked, run(whole, own), **CLOSE)
        check_patching(whole, split, inputs)
        assert attention_layers(inner_model(split)) == attention_layers(whole)
        if name in ("registry", "own", "DDP"):
            check_importance(whole, split, inputs)
            plan = streaming_plan(whole)
            with torch.no_grad(), headwise.streaming(split, plan), headwise.streaming(whole, plan):
                torch.testing.assert_close(run(split, own), run(whole, own), **CLOSE)


def streaming_plan(model: Any) -> Any:
    batch = {"input_ids": IDS} if hasattr(model, "config") else IDS
    return headwise.stream_plan(headwise.context_need(model, [batch], windows=(4,)), window=4, share=0.5)


@check
def what_needs_whole_weights_is_refused_over_ranks(ranks: Ranks, folder: Path) -> None:
    whole = decoder(8, 4)
    need, plan = headwise.context_need(whole, [IDS], windows=(4,)), streaming_plan(whole)
    calls: dict[str, Callable[[Any], Any]] = {
        "attribute": lambda model: headwise.attribute(model, IDS, last_value),
        "circuit": lambda model: headwise.circuit(model, IDS, IDS.flip(1), last_value),
        "head_matrices": lambda model: headwise.head_matrices(model, 0, 1),
        "prune_heads": lambda model: headwise.prune_heads(model, {0: [1]}),
        "group_kv_heads": lambda model: headwise.group_kv_heads(model, kv_heads=1),
        "save": lambda model: headwise.save(model, folder / f"never-{ranks.rank}"),
        "streaming": lambda model: headwise.streaming(model, plan),
        "context_need": lambda model: headwise.context_need(model, [IDS], windows=(4,)),
        "patterns": lambda model: headwise.patch(model, IDS, IDS.flip(1), last_value, what="pattern"),
        "each": lambda model: headwise.watch(model, each=print),
        "importance": lambda model: headwise.importance(model, [IDS], "michel", squares),
        "patch": lambda model: headwise.patch(model, IDS, IDS.flip(1), last_value),
        "scale.importance": lambda model: scale.importance(model, [IDS, IDS], "confidence"),
        "scale.context_need": lambda model: scale.context_need(model, [IDS, IDS], windows=(4,)),
    }
    models = {
        "heads": scale.split_heads(copy.deepcopy(whole)),
        "transformers": scale.load_split(folder / "llama"),
        "tokens": scale.split_sequence(copy.deepcopy(whole)),
        "fsdp": sharded(copy.deepcopy(whole)),
        "ddp": nn.parallel.DistributedDataParallel(copy.deepcopy(whole)),
    }
    scored = ("importance", "patch")
    permitted = {
        "heads": scored, "transformers": scored, "tokens": ("head_matrices",), "ddp": tuple(calls),
        "fsdp": (*scored, "streaming", "context_need", "patterns", "each"),
    }  # fmt: skip
    for way, model in models.items():
        for name, call in calls.items():
            if name in permitted.get(way, ()):
                call(model)
                continue
            with pytest.raises(HeadwiseError) as caught:
                call(model)
            words = "rank|FSDP|sharded"
            assert any(word in str(caught.value) for word in words.split("|")), (way, name, caught.value)
    assert headwise.context_need(models["fsdp"], [IDS], windows=(4,)).to_json() == need.to_json()


@check
def an_error_inside_a_watch_reaches_all_ranks(ranks: Ranks, folder: Path) -> None:
    split = scale.split_heads(decoder(3, 3), separate_mesh())

    def fail_on_rank_1() -> None:
        with headwise.watch(split), torch.no_grad():
            split(IDS)
            if ranks.rank == 1:
                raise HeadwiseError("no such file")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "FAILURE_WAIT", 0.5)
        others = "rank 1 failed at what was watched: no such file"
        assert_error(fail_on_rank_1, "no such file" if ranks.rank == 1 else others)
    split = scale.split_heads(decoder(3, 3))

    def ask_for_a_row_that_only_one_rank_wants() -> None:
        with headwise.watch(split, weights=True, rows=[2 if ranks.first else 50]), torch.no_grad():
            split(IDS)

    assert_error(ask_for_a_row_that_only_one_rank_wants, "rows 50 were not in any call")
    with headwise.watch(split) as seen, torch.no_grad():
        split(IDS)
    assert len(seen.layers[0].stats.entropy) == 3, "the ranks are in step again"


def parallelize_llama(model: Any, mesh: DeviceMesh) -> Any:
    """A Llama whose attention PyTorch's own styles split."""
    styles: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**styles, "self_attn.o_proj": RowwiseParallel()})
    return model


@check
def layers_that_others_split_are_seen_or_refused(ranks: Ranks, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (ranks.count,))
    whole = headwise.load(folder / "llama", dtype=torch.float64)
    split = parallelize_llama(copy.deepcopy(whole), mesh)
    records = []
    for model in (split, whole):
        options: dict[str, Any] = {"outputs": True, "links": 2}
        with torch.no_grad(), headwise.watch(model, **options) as seen, headwise.mask_heads(model, {1: [2, 7]}):
            run(model, IDS)
        records.append(seen)
    check_same_records(records[0], records[1], "PyTorch's styles")
    unknown = randomize(Stack(FusedProjection))
    for step in unknown.steps:
        parallelize_module(step, mesh, {"proj": RowwiseParallel(input_layouts=torch.distributed.tensor.Replicate())})

    def watch_unknown() -> None:
        with headwise.watch(unknown), torch.no_grad():
            unknown(embedded())

    assert_error(watch_unknown, f"steps.0.proj.weight of Stack is split over {ranks.count} ranks")


@check
def heads_are_watched_under_fsdp_around_split_heads(ranks: Ranks, folder: Path) -> None:
    if ranks.count < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = IDS if mesh["dp"].get_local_rank() == 0 else IDS.flip(1)
    own_whole, llama = decoder(5, 5), headwise.load(folder / "llama", dtype=torch.float64)
    own_split = scale.split_heads(copy.deepcopy(own_whole), mesh["tp"])
    pairs = ((own_split, own_whole), (parallelize_llama(copy.deepcopy(llama), mesh["tp"]), llama))
    for split, whole in pairs:
        records = []
        for model in (sharded(split, mesh["dp"]), whole):
            with torch.no_grad(), headwise.watch(model, outputs=True, links=2) as seen:
                run(model, own)
            with torch.no_grad(), headwise.mask_heads(model, {1: [0, 3]}, "mean"):
                run(model, own)
            records.append(seen)
        check_same_records(records[0], records[1], "FSDP around split heads")


@check
def watch_of_split_sequences_has_statistics_of_whole_sequences(ranks: Ranks, folder: Path) -> None:
    whole = decoder(6, 3)
    split = scale.split_sequence(copy.deepcopy(whole))
    ids = torch.arange(2 * 19).view(2, 19) * 5 % 31
    lengths = torch.tensor([19, 12])
    chosen = torch.rand(2, 19, generator=torch.Generator().manual_seed(0)) > 0.5
    for options in ({}, {"lengths": lengths}):
        mask, classes = {0: [1, 4]}, {"some": scale.shard_sequence(chosen, 1)}
        with torch.no_grad(), headwise.watch(split, classes=classes) as got, headwise.mask_heads(split, mask):
            a = split(scale.shard_sequence(ids, 1), **options)
        with torch.no_grad(), headwise.watch(whole, classes={"some": chosen}) as want, headwise.mask_heads(whole, mask):
            b = whole(ids, **options)
        gathered = scale.gather_sequence(a, 1)
        for row, length in enumerate(lengths if options else [19, 19]):
            torch.testing.assert_close(gathered[row, :length], b[row, :length], **CLOSE)
        for got_layer, want_layer in zip(got.layers, want.layers, strict=True):
            assert got_layer.heads == want_layer.heads
            torch.testing.assert_close(got_layer.stats.count, want_layer.stats.count, check_dtype=False)
            assert set(want_layer.stats) == set(got_layer.stats)
            for name in want_layer.stats:
                torch.testing.assert_close(got_layer.stats[name], want_layer.stats[name], **CLOSE)
    for refused in ({"weights": True}, {"outputs": True}, {"links": 1}):
        assert_error(lambda refused=refused: headwise.watch(split, **refused), "cannot watch more than statistics of")
    assert_error(lambda: headwise.mask_heads(split, {0: [1]}, "mean"), "cannot put means over tokens into Decoder")
