"""Data parallel: an atlas and scores over ranks against those of one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from headwise import scale
from headwise.models.fingerprint import batches_fingerprint, fingerprint
from headwise.prune.registry import scores
from headwise.roles.atlas.build import atlas as atlas_alone
from headwise.scale import run_folder
from headwise.scale.ranks import Ranks
from helpers.rank_inputs import small_batches, small_bert, small_decoder, small_texts
from helpers.torchrun import assert_error

from .registry import check


@check
def an_atlas_over_ranks_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    model, tokenizer, texts = small_bert(), headwise.tokenizer("minilm"), small_texts()
    for resume in (None, folder / "parts"):
        got, want = scale.atlas(model, texts, tokenizer, resume=resume), atlas_alone(model, texts, tokenizer)
        assert got.about["texts"] == want.about["texts"] == 23
        for name in want.scores:
            for table in ("scores", "low", "high", "baseline"):
                a, b = getattr(got, table)[name]["self"], getattr(want, table)[name]["self"]
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True, err_msg=f"{name} {table}")
    assert not (folder / "parts").exists()


def record_in(steps: list[Any]) -> Any:
    """A progress callback that appends its arguments."""
    return lambda *progress: steps.append(progress)


@check
def importance_over_ranks_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    model = small_bert()
    for name, score in scores().items():
        options: dict[str, Any] = {"steps": 5} if "steps" in score.options else {}
        steps, whole_steps = list[Any](), list[Any]()
        got = scale.importance(model, small_batches(), name, seed=3, progress=record_in(steps), **options)
        want = headwise.importance(model, small_batches(), name, seed=3, progress=record_in(whole_steps), **options)
        np.testing.assert_allclose(got["self"], want["self"], rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(got.low["self"], want.low["self"], rtol=1e-4, atol=1e-6, err_msg=name)
        assert (got.objective, got.relative, got.count) == (want.objective, want.relative, want.count), name
        assert bool(steps) == (ranks.first and bool(whole_steps)), name


@check
def a_context_need_over_ranks_is_that_of_one_process_to_the_bit(ranks: Ranks, folder: Path) -> None:
    model, work = small_decoder(), folder / "need"
    torch.manual_seed(2)
    batches = [torch.randint(0, 31, (1 + length % 2, length)) for length in (19, 14, 11, 23, 17)]
    want = headwise.context_need(model, batches, (3, 7)).to_json()
    for resume in (None, work):
        steps = list[Any]()
        assert scale.context_need(model, batches, (3, 7), resume=resume, progress=record_in(steps)).to_json() == want
        assert bool(steps) == ranks.first and (not steps or steps[-1] == (5, 5))
    assert not work.exists()


@check
def a_context_need_is_resumed_by_any_number_of_ranks(ranks: Ranks, folder: Path) -> None:
    model, work = small_decoder(), folder / "stopped need"
    torch.manual_seed(2)
    batches = [torch.randint(0, 31, (1, length)) for length in (19, 14, 11, 23, 17)]
    want = headwise.context_need(model, batches, (3, 7)).to_json()
    if ranks.first:  # as a run of one process leaves it
        headwise.context_need(model, batches[1:4], (3, 7), resume=work)
        content = {
            "task": "context need", "model": fingerprint(model),
            "batches": f"5, digest {batches_fingerprint(batches)}",
            "option windows": "[3, 7]", "option keep_first": "4", "option loss": "False",
        }  # fmt: skip
        (work / "run.json").write_text(json.dumps({"content": content}))
    ranks.barrier("the folder")
    runs = list[Any]()
    handle = model.register_forward_pre_hook(record_in(runs))
    assert scale.context_need(model, batches, (3, 7), resume=work).to_json() == want
    handle.remove()
    expected = [number for number in (0, 4) if number % ranks.count == ranks.rank]
    assert len(runs) == len(expected), (len(runs), expected)


def text_file(kind: str, folder: Path, texts: list[str]) -> Path:
    file = folder / f"{kind}.txt"
    file.write_text("\n".join(texts) + "\n")
    return file


@check
def the_folder_of_another_run_is_refused_and_left_as_it_is(ranks: Ranks, folder: Path) -> None:
    """The parts of a run whose merged atlas could not be saved serve only the same texts, model and options."""
    model, tokenizer, resumed = small_bert(), headwise.tokenizer("minilm"), folder / "resumed"
    first, second = (text_file(f"{kind}-{ranks.rank}", folder, small_texts(n)) for kind, n in (("a", 23), ("b", 19)))
    missing = folder / "missing" / "atlas.json"
    assert_error(
        lambda: scale.atlas(model, first, tokenizer, resume=resumed, out=missing, name="a"), "cannot be written"
    )
    parts = {f"part-{rank}-of-{ranks.count}.json" for rank in range(ranks.count)}
    assert parts <= {x.name for x in resumed.iterdir()}
    with torch.no_grad():
        other = small_bert()
        other.encoder.layer[1].output.dense.weight[3, 5] += 1e-3
    before = sorted((x.name, x.stat().st_size) for x in resumed.iterdir() if x.name != "run.json")
    for run, message in (
        (lambda: scale.atlas(model, second, tokenizer, resume=resumed, name="a"), "a run with another corpus ("),
        (lambda: scale.atlas(other, first, tokenizer, resume=resumed, name="a"), "a run with another model ("),
        (
            lambda: scale.atlas(model, first, tokenizer, resume=resumed, name="a", length=7),
            "with another option length (",
        ),
        (
            lambda: scale.importance(model, small_batches(), resume=resumed),
            "a run with another task (atlas, now importance",
        ),
        (lambda: scale.atlas(model, iter(small_texts()), tokenizer, resume=resumed), "that can be read only once"),
    ):
        assert_error(run, message)
    assert sorted((x.name, x.stat().st_size) for x in resumed.iterdir() if x.name != "run.json") == before
    out = folder / "saved.json"
    got, want = (
        scale.atlas(model, first, tokenizer, resume=resumed, out=out, name="a"),
        atlas_alone(model, first, tokenizer),
    )
    assert got.about["texts"] == want.about["texts"] == 23 and not resumed.exists()
    ranks.barrier("the look at the folder")
    np.testing.assert_array_equal(
        headwise.Atlas.load(out).scores["entropy"]["self"], np.round(got.scores["entropy"]["self"], 5)
    )


@check
def a_folder_that_another_run_uses_is_refused(ranks: Ranks, folder: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    model, tokenizer, texts = small_bert(), headwise.tokenizer("minilm"), small_texts()
    before, run_folder.LOCK_WAIT = run_folder.LOCK_WAIT, 0.3
    used = folder / "used"
    used.mkdir(exist_ok=True)
    ranks.barrier("the folder")
    with open(used / "lock", "a") as lock:
        if ranks.rank == 1:  # as an orphan of another run does
            fcntl.flock(lock, fcntl.LOCK_SH)
        ranks.barrier("the lock")
        assert_error(lambda: scale.atlas(model, texts, tokenizer, resume=used), "is in use by another run")
    run_folder.LOCK_WAIT = before
    scale.atlas(model, texts, tokenizer, resume=used)
    assert not used.exists()


@check
def a_folder_that_ranks_do_not_share_is_refused(ranks: Ranks, folder: Path) -> None:
    model, tokenizer = small_bert(), headwise.tokenizer("minilm")
    before, run_folder.VISIBLE_WAIT = run_folder.VISIBLE_WAIT, 0.2
    own = folder / f"own-{ranks.rank}"
    steps: list[Any] = []
    assert_error(
        lambda: scale.atlas(model, small_texts(), tokenizer, resume=own, progress=record_in(steps)),
        "is not the folder that the first rank wrote to; give one on a disk that all ranks share",
    )
    assert not steps and (ranks.first or not own.exists())
    run_folder.VISIBLE_WAIT = before


@check
def different_texts_fail_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    model, tokenizer = small_bert(), headwise.tokenizer("minilm")
    texts = small_texts(7 if ranks.first else 5)
    assert_error(lambda: scale.atlas(model, texts, tokenizer), "ranks disagree about what to measure")
    texts = small_batches()[: 3 if ranks.first else 2]
    assert_error(lambda: scale.importance(model, texts), "ranks disagree about what to score")
    assert_error(lambda: scale.recover(copy.deepcopy(model), model, texts, 2), "ranks disagree about the recovery")
