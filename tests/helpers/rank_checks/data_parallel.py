"""Corpus and training over ranks, as every rank runs it, against one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from headwise import scale
from headwise.errors import HeadwiseError
from headwise.prune.importance import SCORES
from headwise.prune.recover import recover as recover_alone
from headwise.roles.atlas.build import atlas as atlas_alone
from headwise.scale import run_folder
from headwise.scale.ranks import Ranks
from headwise.scale.train import crew, learned_alike
from helpers.torchrun import says

CHECKS: dict[str, Any] = {}
WORDS = "the cat sat on a mat and saw that dogs ran far from home with it , but no one knew why .".split()


def check(function: Any) -> Any:
    CHECKS[function.__name__] = function
    return function


def texts(count: int = 23) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, random.integers(3, 19))) for _ in range(count)]


def small_bert() -> Any:
    import transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 36, "intermediate_size": 29, "num_hidden_layers": 2, "vocab_size": 30522}
    made = transformers.BertModel(transformers.BertConfig(num_attention_heads=6, **size), add_pooling_layer=False)
    for x in made.parameters():
        torch.nn.init.normal_(x, std=0.2)
    return made.eval()


def batches(size: int = 3) -> list[dict[str, Any]]:
    from headwise.prune.batches import batched

    return batched(texts(), headwise.tokenizer("minilm"), batch=size).scoring


@check
def an_atlas_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    model, tokenizer, given = small_bert(), headwise.tokenizer("minilm"), texts()
    for resume in (None, folder / "parts"):
        got, want = scale.atlas(model, given, tokenizer, resume=resume), atlas_alone(model, given, tokenizer)
        assert got.about["texts"] == want.about["texts"] == 23
        for name in want.scores:
            for table in ("scores", "low", "high", "baseline"):
                a, b = getattr(got, table)[name]["self"], getattr(want, table)[name]["self"]
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5, equal_nan=True, err_msg=f"{name} {table}")
    assert not (folder / "parts").exists()


@check
def importance_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    model = small_bert()
    for score in SCORES:
        steps: list[Any] = []
        options: dict[str, Any] = {"steps": 5} if score == "l0" else {}
        got = scale.importance(
            model, batches(), score, seed=3, progress=lambda *now, steps=steps: steps.append(now), **options
        )
        want = headwise.importance(model, batches(), score, seed=3, **options)
        np.testing.assert_allclose(got["self"], want["self"], rtol=1e-6, err_msg=score)
        np.testing.assert_allclose(got.low["self"], want.low["self"], rtol=1e-6, err_msg=score)
        assert (got.objective, got.relative, got.count) == (want.objective, want.relative, want.count), score
        assert bool(steps) == (ranks.first and score not in ("magnitude", "random")), score


def file_of(kind: str, folder: Path, given: list[str]) -> Path:
    file = folder / f"{kind}.txt"
    file.write_text("\n".join(given) + "\n")
    return file


@check
def parts_of_another_run_are_refused_and_kept(ranks: Ranks, folder: Path) -> None:
    """All parts are done and the whole cannot be saved: what is there is of this corpus, model and options alone."""
    model, tokenizer, kept = small_bert(), headwise.tokenizer("minilm"), folder / "kept"
    first, second = (file_of(f"{kind}-{ranks.rank}", folder, texts(n)) for kind, n in (("a", 23), ("b", 19)))
    missing = folder / "missing" / "atlas.json"
    says(lambda: scale.atlas(model, first, tokenizer, resume=kept, out=missing, name="a"), "cannot be written")
    parts = {f"part-{rank}-of-{ranks.count}.json" for rank in range(ranks.count)}
    assert parts <= {x.name for x in kept.iterdir()}
    with torch.no_grad():
        other = small_bert()
        other.encoder.layer[1].output.dense.weight[3, 5] += 1e-3
    before = sorted((x.name, x.stat().st_size) for x in kept.iterdir() if x.name != "run.json")
    for again, words in (
        (lambda: scale.atlas(model, second, tokenizer, resume=kept, name="a"), "a run with another corpus ("),
        (lambda: scale.atlas(other, first, tokenizer, resume=kept, name="a"), "a run with another model ("),
        (lambda: scale.atlas(model, first, tokenizer, resume=kept, name="a", length=7), "with another option length ("),
        (lambda: scale.importance(model, batches(), resume=kept), "a run with another task (atlas, now importance"),
        (lambda: scale.atlas(model, iter(texts()), tokenizer, resume=kept), "that can be read only once"),
    ):
        says(again, words)
    assert sorted((x.name, x.stat().st_size) for x in kept.iterdir() if x.name != "run.json") == before
    out = folder / "saved.json"
    got, want = (
        scale.atlas(model, first, tokenizer, resume=kept, out=out, name="a"),
        atlas_alone(model, first, tokenizer),
    )
    assert got.about["texts"] == want.about["texts"] == 23 and not kept.exists()
    ranks.barrier("the look at the folder")
    np.testing.assert_array_equal(
        headwise.Atlas.load(out).scores["entropy"]["self"], np.round(got.scores["entropy"]["self"], 5)
    )


@check
def a_folder_is_of_one_run_at_a_time(ranks: Ranks, folder: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    model, tokenizer, given = small_bert(), headwise.tokenizer("minilm"), texts()
    before, run_folder.LOCK_WAIT = run_folder.LOCK_WAIT, 0.3
    used = folder / "used"
    used.mkdir(exist_ok=True)
    ranks.barrier("the folder")
    with open(used / "lock", "a") as lock:
        if ranks.rank == 1:  # as an orphan of another run does
            fcntl.flock(lock, fcntl.LOCK_SH)
        ranks.barrier("the lock")
        says(lambda: scale.atlas(model, given, tokenizer, resume=used), "is in use by another run")
    run_folder.LOCK_WAIT = before
    scale.atlas(model, given, tokenizer, resume=used)
    assert not used.exists()


@check
def a_folder_that_ranks_do_not_share_is_told_first(ranks: Ranks, folder: Path) -> None:
    model, tokenizer = small_bert(), headwise.tokenizer("minilm")
    before, run_folder.SEEN_WAIT = run_folder.SEEN_WAIT, 0.2
    own = folder / f"own-{ranks.rank}"
    steps: list[Any] = []
    says(
        lambda: scale.atlas(model, texts(), tokenizer, resume=own, progress=lambda *now: steps.append(now)),
        "is not the folder that the first rank wrote to; give one on a disk that all ranks share",
    )
    assert not steps and (ranks.first or not own.exists())
    run_folder.SEEN_WAIT = before


@check
def recovery_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    full = small_bert()
    plan = {0: [0, 1, 5], 1: [2]}
    given = batches()
    given[1] = {name: x[:1] for name, x in given[1].items()}  # fewer examples than ranks
    alone = headwise.prune_heads(full, plan)
    want = recover_alone(alone, full, given, 7)
    for how in ("ddp", "fsdp"):
        pruned = headwise.prune_heads(full, plan)
        got = scale.recover(pruned, full, given, 7, how=how)
        np.testing.assert_allclose(got, want, rtol=1e-3)
        assert learned_alike(pruned, ranks)
        for (name, a), b in zip(pruned.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-2, atol=2e-4, msg=lambda m, name=name, how=how: f"{how} {name} {m}"
            )
    says(lambda: scale.recover(alone, full, given, 7, how="magic"), "training over ranks goes by ddp or fsdp")


def stop(done: int, total: int) -> None:
    if done == 5:
        raise RuntimeError("enough")


@check
def recovery_goes_on_from_a_checkpoint(ranks: Ranks, folder: Path) -> None:
    from headwise.prune import recover as module

    full, plan, given = small_bert(), {0: [0], 1: [2, 3]}, batches()
    for how in ("ddp", "fsdp"):
        whole, broken = (headwise.prune_heads(full, plan) for _ in range(2))
        want = scale.recover(whole, full, given, 6, how=how)
        file = folder / f"{how}.safetensors"
        before, module.EVERY = module.EVERY, 2
        with pytest.raises(RuntimeError, match="enough"):
            recover_alone(broken, full, given, 6, checkpoint=file, progress=stop, crew=crew(how))
        ranks.barrier("the stop")
        assert file.exists()
        again = headwise.prune_heads(full, plan)
        got = scale.recover(again, full, given, 6, how=how, checkpoint=file)
        module.EVERY = before
        np.testing.assert_allclose(got, want, rtol=1e-4)
        for a, b in zip(again.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert not file.exists()


@check
def the_lab_trains_as_one_process_does(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.model import Recipe
    from headwise.lab.train import train

    recipe = Recipe(task="relations", heads=2, seed=1, width=12, layers=1, steps=5, batch=7)
    want = train(recipe)
    for how in ("ddp", "fsdp"):
        got = train(recipe, crew=crew(how))
        # Adam makes steps of one size out of gradients that are nothing but rounding, so weights need not be alike
        np.testing.assert_allclose(got.curve, want.curve, rtol=1e-3, atol=5e-3)
        assert learned_alike(got.model, ranks)


@check
def the_lab_trains_together_and_finds_it_again(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.store import TINY, Lab

    recipe: dict[str, Any] = {"task": "relations", "heads": 2, "seed": 1, "width": 12, "layers": 1, "batch": 7}
    want = Lab(TINY).trained(**recipe)
    for how in ("ddp", "fsdp"):
        lab, later = (Lab(TINY, work=folder / "lab" / how, ranks=ranks, over=how) for _ in range(2))
        got, again = lab.trained(**recipe), later.trained(**recipe)
        np.testing.assert_allclose(got.curve, want.curve, rtol=1e-3, atol=5e-3)
        assert len(lab.made) == 1 and not later.made and learned_alike(again.model, ranks)
        np.testing.assert_array_equal(again.curve[-1], got.curve[-1])


@check
def what_the_lab_computes_else_is_computed_once(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.store import TINY, Lab

    lab = Lab(TINY, work=folder / "pieces", ranks=ranks)
    done: list[int] = []

    def compute() -> int:
        done.append(ranks.rank)
        return 7

    def fails() -> int:
        raise HeadwiseError("there is no such number")

    assert lab.piece("number", {"a": 1}, compute) == 7
    assert done == ([0] if ranks.first else [])  # the others read it
    says(lambda: lab.piece("number", {"b": 1}, fails), "there is no such number")


@check
def ranks_with_other_texts_all_get_an_error(ranks: Ranks, folder: Path) -> None:
    model, tokenizer = small_bert(), headwise.tokenizer("minilm")
    given = texts(7 if ranks.first else 5)
    says(lambda: scale.atlas(model, given, tokenizer), "ranks disagree about what to measure")
    given = batches()[: 3 if ranks.first else 2]
    says(lambda: scale.importance(model, given), "ranks disagree about what to score")
    says(lambda: scale.recover(copy.deepcopy(model), model, given, 2), "ranks disagree about the recovery")
