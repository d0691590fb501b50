"""The recorder over ranks: the sums and maxima of all ranks, one file, alarms everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard

import headwise
from headwise import Recorder
from headwise.attention.stats import HeadStats
from headwise.recorder import Thresholds, TrainingLog
from headwise.recorder.rank_totals import reduce_totals
from headwise.recorder.sampling import Samples
from headwise.recorder.totals import LayerTotals
from headwise.recorder.training_log import LoggedLayer
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error
from helpers.training import CLOSE, batches, small_gpt2

from .registry import check


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


@check
def a_recorder_of_a_split_model_is_refused(ranks: Ranks, folder: Path) -> None:
    recorder = Recorder(headwise.scale.load_split(folder / "llama"), path=None)
    assert_error(recorder.start, "each rank has other heads of a model that load_split split")
