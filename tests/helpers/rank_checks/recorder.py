"""The recorder over ranks: the sums and maxima of all ranks, one file, alarms everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import headwise
from headwise import Recorder
from headwise.attention.stats import HeadStats
from headwise.models.structure import attention_sites
from headwise.recorder import Thresholds, TrainingLog
from headwise.recorder.rank_totals import reduce_totals
from headwise.recorder.sampling import Samples
from headwise.recorder.totals import LayerTotals
from headwise.recorder.training_log import LoggedLayer
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error
from helpers.training import CLOSE, batches, small_gpt2

from .registry import check
from .watching import decoder, split_models


def one_rank(ranks: Ranks) -> DeviceMesh:
    """A mesh of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(ranks.count)]
    return DeviceMesh.from_group(groups[ranks.rank], "cpu")


def one_step(model: Any, inputs: list[torch.Tensor], **options: Any) -> Recorder:
    """A step of a recorded training whose gradient is never used."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Recorder(model, every=1, **options) as recorder:
        for ids in inputs:
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return recorder


@check
def a_recorded_step_of_all_ranks_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    model, inputs, alarms = small_gpt2(), batches(ranks.count + 1), list[Any]()
    own = inputs[ranks.rank : ranks.rank + 1] if ranks.rank else [inputs[0], inputs[-1]]  # the first rank has two
    path = folder / "heads.jsonl" if ranks.first else folder / "never.jsonl"
    thresholds = Thresholds(max_logit=0.0)
    recorder = one_step(model, own, path=path, thresholds=thresholds, on_alarm=alarms.extend)
    entry = recorder.entry
    assert entry is not None and (entry.passes, entry.ranks) == (len(inputs), ranks.count)
    assert len(alarms) == 6 and not (folder / "never.jsonl").exists()
    with headwise.watch(model) as seen, torch.no_grad():
        model(input_ids=torch.cat(inputs))
    for layer in seen.layers:
        for name in ("entropy", "max_logit", "first", "confidence"):
            np.testing.assert_allclose(entry.values[layer.key][name], layer.stats[name], **CLOSE, err_msg=name)
    if ranks.first:
        assert TrainingLog.load(path).steps == [1]
    ranks.barrier("the file")
    resumed = one_step(model, own, path=path, thresholds=thresholds, resume=True, on_alarm=alarms.extend)
    assert resumed.step_number == 2 and len(alarms) == 6, "the alarms last on every rank"
    if ranks.first:
        assert TrainingLog.load(path).steps == [1, 2]


@check
def a_model_inside_a_data_parallel_wrapper_is_recorded(ranks: Ranks, folder: Path) -> None:
    inputs = batches(ranks.count)
    entries = []
    for wrap in (lambda model: model, torch.nn.parallel.DistributedDataParallel, fully_shard):
        model = wrap(small_gpt2())
        recorder = one_step(model, [inputs[ranks.rank]], path=folder / "wrapped.jsonl", resume=True)
        assert recorder.entry is not None and recorder.entry.passes == ranks.count
        entries.append(recorder.entry)
    for entry in entries[1:]:
        for key, values in entries[0].values.items():
            np.testing.assert_allclose(entry.values[key]["entropy"], values["entropy"], **CLOSE)
    if ranks.first:
        assert TrainingLog.load(folder / "wrapped.jsonl").steps == [1, 2, 3], "one model, whatever it is wrapped in"


@check
def a_log_of_another_model_is_refused_on_every_rank(ranks: Ranks, folder: Path) -> None:
    path = folder / "other.jsonl"
    if ranks.first:
        path.write_text("{}\n")
    recorder = Recorder(small_gpt2(), path=path, resume=True)
    assert_error(recorder.start, "its first line is not the header of a training log")


def totals(layer: int, value: float, heads: int = 2, **sums: float) -> LayerTotals:
    row = torch.full((1, heads), value, dtype=torch.float64)
    by_name = {"entropy": row, **{name: row * x for name, x in sums.items()}}
    stats = HeadStats(by_name, torch.ones_like(row), {"max_logit": row})
    samples = Samples(torch.eye(heads).double() * value, row[0], torch.tensor(1.0).double())
    return LayerTotals(LoggedLayer("self", layer, f"layers.{layer}", heads, heads), stats, samples)


@check
def ranks_with_different_layers_are_joined(ranks: Ranks, folder: Path) -> None:
    own = {("self", 0): totals(0, ranks.rank + 1.0, **({"sink": 1.0} if ranks.first else {}))}
    if not ranks.first:
        own["self", 1] = totals(1, float("nan") if ranks.rank == 1 else 1.0)
    joined = reduce_totals(own, ranks)
    assert list(joined) == [("self", 0), ("self", 1)]
    first, second = joined["self", 0], joined["self", 1]
    assert first.stats.names == ["entropy", "max_logit"] and first.calls == ranks.count
    assert first.stats.max_logit.tolist() == [ranks.count] * 2
    assert first.stats.entropy.tolist() == [(ranks.count + 1) / 2] * 2
    assert second.stats.count.tolist() == [[ranks.count - 1] * 2] and second.stats.max_logit.isnan().all()


@check
def layers_with_other_heads_on_another_rank_are_refused(ranks: Ranks, folder: Path) -> None:
    own = {("self", 0): totals(0, 1.0, heads=2 if ranks.first else 3)}
    assert_error(lambda: reduce_totals(own, ranks), "self layer 0 has 2 heads on one rank and 3 on another")


def recorded(model: Any, inputs: list[torch.Tensor], **options: Any) -> Any:
    """The entry of a step of any model, whose gradient is never used."""
    model.train()
    with Recorder(model, every=1, **options) as recorder:
        for ids in inputs:
            output = model(input_ids=ids) if hasattr(model, "config") else model(ids)
            getattr(output, "logits", output).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.0).step()
    return recorder.entry


def check_same_entries(got: Any, want: Any) -> None:
    assert (got.passes, got.queries) == (want.passes, want.queries) and list(got.values) == list(want.values)
    assert got.twins == want.twins
    for key, values in want.values.items():
        assert values.keys() == got.values[key].keys()
        for name, row in values.items():
            np.testing.assert_allclose(got.values[key][name], row, rtol=1e-5, atol=1e-6, err_msg=name)


@check
def a_recorder_counts_each_split_head_once(ranks: Ranks, folder: Path) -> None:
    ids = batches(2, seed=9)
    for name in ("decoder (8, 4)", "decoder (5, 1)", "decoder (3, 3)", "llama"):
        whole, split, _ = split_models(folder)[name]
        inputs = [x % 31 for x in ids]
        path = folder / f"split-{name.replace(' ', '')}.jsonl"
        got = recorded(split, inputs, path=path, mesh=None)
        want = recorded(whole, inputs, path=None, mesh=one_rank(ranks))
        check_same_entries(got, want)
        if ranks.first:
            [layer, _, *_] = TrainingLog.load(path).header.layers
            assert layer.heads == headwise.models.structure.query_heads(whole, attention_sites(whole)[0])


@check
def a_recorder_gathers_split_heads_and_sums_over_data_parallel_ranks(ranks: Ranks, folder: Path) -> None:
    if ranks.count < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    inputs = [x % 31 for x in batches(2, seed=4)]
    want = recorded(decoder(5, 5), inputs, path=None, mesh=one_rank(ranks))
    for recorder_mesh in (None, mesh["dp"]):
        for wrap in (lambda model: model, lambda model: fully_shard(model, mesh=mesh["dp"])):
            split = wrap(headwise.scale.split_heads(decoder(5, 5), mesh["tp"]))
            path = folder / "both.jsonl"
            got = recorded(split, [inputs[mesh["dp"].get_local_rank()]], path=path, mesh=recorder_mesh)
            check_same_entries(got, want)
            ranks.barrier("the log")
            if ranks.first:
                assert TrainingLog.load(path).steps == [1], "one rank writes"
                path.unlink()
            ranks.barrier("the log is gone")


@check
def a_recorder_counts_the_tokens_of_a_split_sequence_once(ranks: Ranks, folder: Path) -> None:
    ids = torch.arange(2 * 19).view(2, 19) * 5 % 31
    want = recorded(decoder(6, 3), [ids], path=None, mesh=one_rank(ranks))
    local = headwise.scale.shard_sequence(ids, 1)
    got = recorded(headwise.scale.split_sequence(decoder(6, 3)), [local], path=folder / "tokens.jsonl")
    for key, values in want.values.items():
        values.pop("output"), values.pop("twin")
        want.twins.pop(key)
    check_same_entries(got, want)
    assert set(got.queries.values()) == {38}
