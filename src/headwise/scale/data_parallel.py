"""Data parallel: an atlas, scores of heads and context needs, each rank on its part of the texts, merged exactly.

Every rank saves its part in a file of its own. When one dies, torchrun starts all of them again, and each resumes from
its file; at the end every part counts once. On several machines the folder must be on a shared disk.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch import nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.fingerprint import batches_fingerprint, fingerprint, tokenizer_fingerprint
from ..models.loading.resolve import resolve
from ..models.structure import attention_sites
from ..models.structure.partition import check_whole_weights
from ..models.structure.wrappers import inner_model
from ..prune import HeadScores
from ..prune.attention_layers import UNITS
from ..prune.context_need import NeedSettings, measure_batches, need_inputs
from ..prune.context_need_result import ContextNeed, join_needs
from ..prune.importance import importance as importance_of
from ..prune.importance import merge_examples
from ..prune.need_files import NeedFiles
from ..prune.registry import scores as registered_scores
from ..roles.atlas import Atlas
from ..roles.atlas import atlas as atlas_of
from ..roles.atlas.file_format import SUMS
from .ranks import ranks_of
from .run_folder import run_folder, sync_files
from .score_checkpoint import ScoreCheckpoint

# seconds that a finished rank waits for the others; when one dies, the others do not wait for it
CORPUS_TIMEOUT = 12 * 3600.0
Progress = Callable[[int, int | None], None]


class AtlasOptions(TypedDict, total=False):
    """Options of headwise.atlas that it has over ranks too."""

    conllu: Any
    probes: str | Sequence[str]
    name: str | None
    limit: int | None
    length: int
    field: str
    replicates: int
    seed: int


def atlas(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = CORPUS_TIMEOUT,
    **options: Unpack[AtlasOptions],
) -> Atlas:
    """headwise.atlas over ranks: each measures its part of the texts, and all get the whole atlas. All must call it.

    Args:
        model, texts, tokenizer: as in headwise.atlas, the same on all ranks.
        resume: a folder in which each rank saves its sums; a run that was killed is resumed from there, and one with
            other texts, weights or options is refused.
        out: a file that the first rank writes the whole atlas and its sums to, before the parts in that folder are
            removed.
        progress: called on the first rank only, with the progress of all.
        timeout: seconds that a finished rank waits for the others.
        options: as in headwise.atlas.

    Returns:
        The atlas of all texts, on every rank.

    Example:
        >>> with headwise.scale.init_ranks():
        ...     atlas = headwise.scale.atlas("smollm2", "corpus.txt", resume="unfinished", out="atlas.json")
    """
    ranks = ranks_of(timeout=timeout)
    if ranks.count == 1:
        file = None if resume is None else Path(resume)
        whole = atlas_of(model, texts, tokenizer, resume=file, progress=progress, **options)
        if out is not None:
            whole.save(out, sums=True)
        return whole
    content: dict[str, str] = {}

    def describe_run() -> str:
        nonlocal model, tokenizer
        options["name"], model, tokenizer = resolve(model, tokenizer, options.get("name"))
        content.update(
            {
                "task": "atlas", "number of ranks": str(ranks.count), "model": _fingerprint_model(model),
                "tokenizer": tokenizer_fingerprint(tokenizer), "corpus": _fingerprint_texts(texts, resume is not None),
                **{f"option {name}": _describe_option(x) for name, x in sorted(options.items()) if x is not None},
            }
        )  # fmt: skip
        return _describe(content)

    ranks.agree("what to measure", describe_run)
    failures = ranks.share_failures("measuring its texts")
    with run_folder(resume, ranks, content) as folder, interrupt_on_sigterm(), failures:
        own_part = folder / f"part-{ranks.rank}-of-{ranks.count}.json"
        if not _is_finished(own_part):
            part = (ranks.rank, ranks.count)
            checkpoint = own_part.with_suffix(".safetensors")
            shown_progress = progress if ranks.first else None
            part_atlas = atlas_of(
                model, texts, tokenizer, part=part, resume=checkpoint, progress=shown_progress, **options
            )
            part_atlas.save(own_part, sums=True)
        ranks.barrier("the end of the texts")
        parts = [Atlas.load(folder / f"part-{rank}-of-{ranks.count}.json") for rank in range(ranks.count)]
        whole = parts[0].merge(*parts[1:])
        ranks.agree("the merging of the parts", lambda: _save_merged(whole, out if ranks.first else None))
        for file in (own_part, _sums_file(own_part)):
            file.unlink(missing_ok=True)
    return whole


def importance(
    model: nn.Module,
    batches: Sequence[Any],
    score: str = "michel",
    loss: Any = None,
    *,
    unit: str = "head",
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    timeout: float = CORPUS_TIMEOUT,
    **options: Any,
) -> HeadScores:
    """headwise.importance over ranks: each scores its part of the batches, and all get all scores. All must call it.

    A score that is not additive over batches (see its entry in the registry) is computed completely by every rank.

    Args:
        model, batches, score, loss, unit, seed: as in headwise.importance, the same on all ranks.
        resume: a folder in which each rank saves its scores; a run that was killed is resumed from there.
        progress: called on the first rank only, with the progress of all.
        timeout: seconds that a finished rank waits for the others.
        options: of the score, as in headwise.importance.

    Example:
        >>> with headwise.scale.init_ranks():
        ...     scores = headwise.scale.importance(model, batches, "michel")
    """
    ranks = ranks_of(timeout=timeout)
    all_batches = list(batches)
    content: dict[str, str] = {}

    def describe_run() -> str:
        all_options = {"seed": seed, "loss": getattr(loss, "__qualname__", type(loss).__name__), **options}
        content.update(
            {
                "task": f"importance, {score} of {unit}s",
                "number of ranks": str(ranks.count),
                "model": _fingerprint_model(model),
                "batches": f"{len(all_batches)}, digest {batches_fingerprint(all_batches)}",
                **{f"option {name}": _describe_option(value) for name, value in sorted(all_options.items())},
            }
        )
        return _describe(content)

    if ranks.count > 1:
        ranks.agree("what to score", describe_run)
    definition = registered_scores().get(score)
    by_batch = definition is not None and definition.additive and unit in UNITS
    if ranks.count == 1 or not by_batch or len(all_batches) < 2:
        shown_progress = progress if ranks.first else None
        return importance_of(model, all_batches, score, loss, unit=unit, seed=seed, progress=shown_progress, **options)
    failures = ranks.share_failures("scoring its batches")
    with run_folder(resume, ranks, content) as folder, interrupt_on_sigterm(), failures:
        run_id = hashlib.sha256(_describe(content).encode()).hexdigest()[:16]
        checkpoint = ScoreCheckpoint(folder, ranks, run_id)
        own_batches = range(ranks.rank, len(all_batches), ranks.count)
        with checkpoint.save_at_exit():
            for number in own_batches:
                if number in checkpoint.rows:
                    continue
                batch = [all_batches[number]]
                scores = importance_of(
                    model, batch, score, loss, unit=unit, seed=seed, batch_numbers=[number], **options
                )
                checkpoint.add(number, scores)
                if progress and ranks.first:
                    progress(min(len(all_batches), len(checkpoint.rows) * ranks.count), len(all_batches))
        ranks.barrier("the end of the batches")
        examples = checkpoint.merge_all(len(all_batches))
        ranks.barrier("the merging of the scores")
        checkpoint.file.unlink(missing_ok=True)
    return merge_examples(model, all_batches, score, loss, unit, examples)


def context_need(
    model: nn.Module,
    batches: Any = None,
    windows: Sequence[int] = (64, 256),
    keep_first: int = 4,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    loss: bool | str | Mapping[Any, Sequence[int]] = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = CORPUS_TIMEOUT,
) -> ContextNeed:
    """headwise.context_need over ranks: each measures its part of the batches, and all get the need of all of them.

    All ranks must call it. The numbers are those of one process, bit for bit.

    Args:
        model, batches, windows, keep_first, tokenizer, length, loss: as in headwise.context_need, the same on all
            ranks.
        resume: a folder in which each rank saves its batches; a run that was killed is resumed from there, also by
            another number of ranks. What was saved is removed at the end.
        progress: called on the first rank only, with the progress of all.
        timeout: seconds that a finished rank waits for the others.

    Example:
        >>> with headwise.scale.init_ranks():
        ...     need = headwise.scale.context_need(model, tokenizer=tokenizer, resume="unfinished")
    """
    ranks = ranks_of(timeout=timeout)
    model = inner_model(model)
    settings = NeedSettings(windows, keep_first, loss)
    all_batches = list(need_inputs(model, batches, tokenizer, length))
    content: dict[str, str] = {}

    def describe_run() -> str:
        content.update(
            {
                "task": "context need",
                "model": _fingerprint_model(model),
                "batches": f"{len(all_batches)}, digest {batches_fingerprint(all_batches)}",
                **{f"option {name}": repr(value) for name, value in settings.to_json().items()},
            }
        )
        return _describe(content)

    if ranks.count == 1:
        return join_needs(measure_batches(model, all_batches, settings, resume, progress))
    ranks.agree("what to measure", describe_run)
    failures = ranks.share_failures("measuring its batches")
    with run_folder(resume, ranks, content) as folder, interrupt_on_sigterm(), failures:
        shown_progress = progress if ranks.first else None
        measure_batches(model, all_batches, settings, folder, shown_progress, (ranks.rank, ranks.count))
        ranks.barrier("the end of the batches")
        whole = join_needs(measure_batches(model, all_batches, settings, folder, None))
        ranks.barrier("the merging of the needs")
        files = NeedFiles(folder, model, settings.to_json())
        for batch in all_batches[ranks.rank :: ranks.count]:
            files.path(batch).unlink(missing_ok=True)
    return whole


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, which saves the sums: torchrun sends it to the other ranks when one has died."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _save_merged(whole: Atlas, out: str | os.PathLike[str] | None) -> str:
    """Save the whole atlas and flush it to the disk, on the rank that is given a file."""
    if out is not None:
        whole.save(out, sums=True)
        sync_files([Path(out), _sums_file(Path(out))])
    return "merged"


def _is_finished(part: Path) -> bool:
    return part.exists() and _sums_file(part).exists()


def _sums_file(part: Path) -> Path:
    return Path(os.fspath(part) + SUMS)


def _fingerprint_model(model: Any) -> str:
    """The fingerprint of a model that every rank has whole."""
    inner = inner_model(model)
    check_whole_weights(inner, attention_sites(inner), "divide a corpus over the ranks of")
    return fingerprint(model)


def _fingerprint_texts(texts: Any, resumable: bool) -> str:
    """A digest of all texts. Texts that can be read only once are left unread, and refused in a run to be resumed."""
    if isinstance(texts, str | os.PathLike) and os.path.exists(texts):
        try:
            with open(texts, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
        except OSError as error:
            raise HeadwiseError(f"texts {os.fspath(texts)!r} cannot be read: {error.strerror or error}") from error
    if isinstance(texts, Sequence) or (resumable and isinstance(texts, Iterable) and iter(texts) is not texts):
        return batches_fingerprint(list(texts))
    if resumable:
        raise UnsupportedError(
            f"texts that can be read only once ({type(texts).__name__}) cannot be compared when a run is resumed; "
            "give a file or a list, or no folder to resume from"
        )
    return type(texts).__name__


def _describe_option(value: Any) -> str:
    """An option's value as text: tensors by a digest."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else batches_fingerprint(value)


def _describe(content: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in content.items())
