"""Corpus over ranks (data parallel): an atlas and scores of heads, each rank on its part of the texts, merged exactly.

Every rank keeps what it has done in a file of its own. When one dies, torchrun starts all of them again and each goes
on from its file; what counts in the end are the parts, each once. On several machines the folder must be shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..errors import CheckpointError, HeadwiseError, UnsupportedError
from ..files import written
from ..models.fingerprint import batches_fingerprint, fingerprint, tokenizer_fingerprint
from ..models.loading.resolve import resolve
from ..prune.attention_layers import UNITS
from ..prune.head_scores import HeadScores
from ..prune.importance import importance as importance_of
from ..prune.importance import merge_examples
from ..prune.registry import scores as registered_scores
from ..roles.atlas.build import atlas as atlas_of
from ..roles.atlas.file_format import SUMS
from ..roles.atlas.result import Atlas
from .ranks import Ranks, ranks_of
from .run_folder import run_folder, save_and_sync

EVERY = 30.0  # seconds between checkpoints
PATIENCE = 12 * 3600.0  # seconds that a rank which is done waits for the others; one that died ends all of them
Progress = Callable[[int, int | None], None]


def atlas(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = PATIENCE,
    **how: Any,
) -> Atlas:
    """headwise.atlas over the ranks there are: every rank takes its part of the texts, and all get the whole atlas.

    resume: a folder that keeps each part's sums meanwhile; a run that was killed goes on from there, and one of other
    texts, weights or options is refused. out: a file that the first rank writes the whole atlas and its sums to, before
    the parts in that folder are removed. The rest is as in headwise.atlas; progress is called on the first rank alone,
    and tells of all.
    """
    ranks = ranks_of(timeout=timeout)
    if ranks.count == 1:
        file = None if resume is None else Path(resume)
        whole = atlas_of(model, texts, tokenizer, resume=file, progress=progress, **how)
        if out is not None:
            whole.save(out, sums=True)
        return whole
    content: dict[str, str] = {}

    def words() -> str:
        nonlocal model, tokenizer
        how["name"], model, tokenizer = resolve(model, tokenizer, how.get("name"))
        content.update(
            {
                "task": "atlas", "number of ranks": str(ranks.count), "model": fingerprint(model),
                "tokenizer": tokenizer_fingerprint(tokenizer), "corpus": _content_of_texts(texts, resume is not None),
                **{f"option {name}": _option(value) for name, value in sorted(how.items()) if value is not None},
            }
        )  # fmt: skip
        return _words(content)

    ranks.agree("what to measure", words)
    measuring = ranks.in_step("measuring its texts")
    with run_folder(resume, ranks, content) as folder, stopping_in_order(), measuring:
        mine = folder / f"part-{ranks.rank}-of-{ranks.count}.json"
        if not _finished(mine):
            part = (ranks.rank, ranks.count)
            kept = mine.with_suffix(".safetensors")
            shown = progress if ranks.first else None
            found = atlas_of(model, texts, tokenizer, part=part, resume=kept, progress=shown, **how)
            found.save(mine, sums=True)
        ranks.barrier("the end of the texts")
        parts = [Atlas.load(folder / f"part-{rank}-of-{ranks.count}.json") for rank in range(ranks.count)]
        whole = parts[0].merge(*parts[1:])
        ranks.agree("the merging of the parts", lambda: _saved(whole, out if ranks.first else None))
        for file in (mine, _sums(mine)):
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
    timeout: float = PATIENCE,
    **how: Any,
) -> HeadScores:
    """headwise.importance over the ranks there are: each scores its part of the batches, and all get all scores."""
    ranks = ranks_of(timeout=timeout)
    kept = list(batches)
    content: dict[str, str] = {}

    def words() -> str:
        options = {"seed": seed, "loss": getattr(loss, "__qualname__", type(loss).__name__), **how}
        content.update(
            {
                "task": f"importance, {score} of {unit}s", "number of ranks": str(ranks.count),
                "model": fingerprint(model), "batches": f"{len(kept)}, digest {batches_fingerprint(kept)}",
                **{f"option {name}": _option(value) for name, value in sorted(options.items())},
            }
        )  # fmt: skip
        return _words(content)

    if ranks.count > 1:
        ranks.agree("what to score", words)
    known = registered_scores().get(score)
    apart = known is not None and known.additive and unit in UNITS  # else every rank scores all batches
    if ranks.count == 1 or not apart or len(kept) < 2:
        shown = progress if ranks.first else None
        return importance_of(model, kept, score, loss, unit=unit, seed=seed, progress=shown, **how)
    scoring = ranks.in_step("scoring its batches")
    with run_folder(resume, ranks, content) as folder, stopping_in_order(), scoring:
        ledger = Ledger(folder, ranks, hashlib.sha256(_words(content).encode()).hexdigest()[:16])
        todo = [number for number in range(ranks.rank, len(kept), ranks.count) if number not in ledger.done]
        with ledger.kept_at_the_end():
            for number in todo:
                ledger.add(
                    number,
                    importance_of(
                        model, [kept[number]], score, loss, unit=unit, seed=seed, batch_numbers=[number], **how
                    ),
                )
                if progress and ranks.first:
                    progress(min(len(kept), len(ledger.done) * ranks.count), len(kept))
        ranks.barrier("the end of the batches")
        each, _ = ledger.all(len(kept))
        ranks.barrier("the merging of the scores")
        ledger.file.unlink(missing_ok=True)
    return merge_examples(model, kept, score, loss, unit, each)


class Ledger:
    """What one rank has scored, batch by batch: a file, written whole now and then, and read by all at the end."""

    def __init__(self, folder: Path, ranks: Ranks, asked: str) -> None:
        self.folder, self.ranks, self.asked = folder, ranks, asked
        self.file = self._of(ranks.rank)
        self.done: dict[int, list[np.ndarray]] = {}
        self.objective = ""
        self.kept = time.monotonic()
        if self.file.exists():
            self.done, self.objective = self._read(self.file)

    def _of(self, rank: int) -> Path:
        return self.folder / f"scores-{rank}-of-{self.ranks.count}.safetensors"

    def add(self, number: int, found: HeadScores) -> None:
        """One more batch."""
        self.done[number], self.objective = found.examples, found.objective
        if time.monotonic() - self.kept > EVERY:
            self.keep()

    @contextmanager
    def kept_at_the_end(self) -> Iterator[None]:
        """Whatever ends the body, what is done is written down."""
        try:
            yield
        finally:
            self.keep()

    def keep(self) -> None:
        from safetensors.numpy import save_file

        arrays = {
            f"{number}/{i}": np.ascontiguousarray(x) for number, each in self.done.items() for i, x in enumerate(each)
        }
        about = {"asked": self.asked, "objective": self.objective, "batches": json.dumps(sorted(self.done))}
        with written(self.file, CheckpointError) as made:
            save_file(arrays, made, about)
        self.kept = time.monotonic()

    def _read(self, path: Path) -> tuple[dict[int, list[np.ndarray]], str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="numpy") as opened:
                about = opened.metadata() or {}
                if about.get("asked") != self.asked:
                    raise HeadwiseError(f"{str(path)!r} was left by another run; remove it to begin again")
                arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # this is no dict
            layers = 1 + max((int(key.split("/")[1]) for key in arrays), default=-1)
            done = {number: [arrays[f"{number}/{i}"] for i in range(layers)] for number in json.loads(about["batches"])}
            return done, about["objective"]
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            if isinstance(error, HeadwiseError):
                raise
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}; remove it to begin again") from error

    def all(self, count: int) -> tuple[list[np.ndarray], str]:
        """Every batch's examples in the order of the batches, each once."""
        everyone: dict[int, list[np.ndarray]] = {}
        objective = ""
        for rank in range(self.ranks.count):
            done, told = self._read(self._of(rank))
            twice = everyone.keys() & done.keys()
            assert not twice, f"batches {twice} were scored twice"
            everyone |= done
            objective = told or objective
        assert sorted(everyone) == list(range(count))
        layers = len(everyone[0])
        return [np.concatenate([everyone[n][i] for n in range(count)]) for i in range(layers)], objective


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """torchrun ends those who are left with SIGTERM when one rank has died: take it as Ctrl-C, which keeps the sums."""

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _saved(whole: Atlas, out: str | os.PathLike[str] | None) -> str:
    """Let the whole atlas be on the disk, where it is to be."""
    if out is not None:
        whole.save(out, sums=True)
        save_and_sync([Path(out), _sums(Path(out))])
    return "merged"


def _finished(part: Path) -> bool:
    return part.exists() and _sums(part).exists()


def _sums(part: Path) -> Path:
    return Path(os.fspath(part) + SUMS)


def _content_of_texts(texts: Any, resumed: bool) -> str:
    """A digest of all texts. Where they can be read only once, they are not, unless a finished part must be told."""
    if isinstance(texts, str | os.PathLike) and os.path.exists(texts):
        try:
            with open(texts, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
        except OSError as error:
            raise HeadwiseError(f"texts {os.fspath(texts)!r} cannot be read: {error.strerror or error}") from error
    if isinstance(texts, Sequence) or (resumed and isinstance(texts, Iterable) and iter(texts) is not texts):
        return batches_fingerprint(list(texts))
    if resumed:
        raise UnsupportedError(
            f"texts that can be read only once ({type(texts).__name__}) cannot be told from others when a run goes on; "
            "give a file or a list, or no folder to resume from"
        )
    return type(texts).__name__


def _option(value: Any) -> str:
    """An option's content in words: that of tensors by a digest."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else batches_fingerprint(value)


def _words(content: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in content.items())
