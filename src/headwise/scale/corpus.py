"""Corpus over ranks (data parallel): an atlas and scores of heads, each rank on its part of the texts, merged exactly.

Every rank keeps what it has done in a file of its own. When one dies, torchrun starts all of them again and each goes
on from its file; what counts in the end are the parts, each once. On several machines the folder must be shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..errors import CheckpointError, HeadwiseError
from ..files import written
from ..prune.importance import SCORES, UNITS, merged
from ..prune.importance import importance as importance_of
from ..prune.scores import Scores
from ..roles.atlas import SUMS, Atlas
from ..roles.survey import atlas as atlas_of
from .ranks import Ranks, ranks_of

EVERY = 30.0  # seconds between checkpoints
PATIENCE = 12 * 3600.0  # seconds that a rank which is done waits for the others; one that died ends all of them
Progress = Callable[[int, int | None], None]


def atlas(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = PATIENCE,
    **how: Any,
) -> Atlas:
    """headwise.atlas over the ranks there are: every rank takes its part of the texts, and all get the whole atlas.

    resume: a folder that keeps each part's sums meanwhile; a run that was killed goes on from there. The rest is as in
    headwise.atlas; progress is called on the first rank alone, and tells of all.
    """
    ranks = ranks_of(timeout=timeout)
    if ranks.count == 1:
        file = None if resume is None else Path(resume)
        return atlas_of(model, texts, tokenizer, resume=file, progress=progress, **how)
    ranks.agree("what to measure", lambda: _asked(model, texts, how))
    with _folder(resume, ranks) as folder, stopping_in_order():
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
        ranks.barrier("the merging of the parts")
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
) -> Scores:
    """headwise.importance over the ranks there are: each scores its part of the batches, and all get all scores."""
    ranks = ranks_of(timeout=timeout)
    kept = list(batches)
    # every rank computes the whole of a score that does not come apart by batches
    apart = score in SCORES and SCORES[score].additive and unit in UNITS
    if ranks.count == 1 or not apart or len(kept) < 2:
        shown = progress if ranks.first else None
        return importance_of(model, kept, score, loss, unit=unit, seed=seed, progress=shown, **how)
    told = ", ".join(f"{key} {value}" for key, value in sorted(how.items()))
    asked = f"{score} of {unit}s, seed {seed}, {len(kept)} batches, digest {_digest(kept)}, {_weights(model)}, {told}"
    ranks.agree("what to score", asked)
    with _folder(resume, ranks) as folder, stopping_in_order():
        ledger = Ledger(folder, ranks, hashlib.sha256(asked.encode()).hexdigest()[:16])
        todo = [number for number in range(ranks.rank, len(kept), ranks.count) if number not in ledger.done]
        with ledger.kept_at_the_end():
            for number in todo:
                ledger.add(
                    number,
                    importance_of(model, [kept[number]], score, loss, unit=unit, seed=seed, numbers=[number], **how),
                )
                if progress and ranks.first:
                    progress(min(len(kept), len(ledger.done) * ranks.count), len(kept))
        ranks.barrier("the end of the batches")
        each, _ = ledger.all(len(kept))
        ranks.barrier("the merging of the scores")
        ledger.file.unlink(missing_ok=True)
    return merged(model, kept, score, loss, unit, each)


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

    def add(self, number: int, found: Scores) -> None:
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
def _folder(resume: str | os.PathLike[str] | None, ranks: Ranks) -> Iterator[Path]:
    """Where parts are kept: the folder given, or one that is gone in the end."""
    with ExitStack() as stack:
        if resume is not None:
            folder = Path(resume)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="headwise-")) if ranks.first else ""
            folder = Path(ranks.told(own))
        yield folder
        ranks.barrier("the end")
        if resume is not None and ranks.first and not any(folder.iterdir()):
            folder.rmdir()


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


def _finished(part: Path) -> bool:
    return part.exists() and _sums(part).exists()


def _sums(part: Path) -> Path:
    return Path(os.fspath(part) + SUMS)


def _asked(model: Any, texts: Any, how: dict[str, Any]) -> str:
    what = os.fspath(model) if isinstance(model, str | os.PathLike) else _weights(model) if model is not None else ""
    told = ", ".join(f"{key} {value}" for key, value in sorted(how.items()))
    return f"model {what}, texts {_texts(texts)}, {told}"


def _texts(texts: Any) -> str:
    if isinstance(texts, str | os.PathLike) and os.path.exists(texts):
        return f"{Path(texts).name} of {os.path.getsize(texts)} bytes"
    return f"{len(texts)} in a {type(texts).__name__}" if hasattr(texts, "__len__") else type(texts).__name__


def _weights(model: nn.Module) -> str:
    """What a model is, in words that differ where its sizes do."""
    digest = hashlib.sha256()
    for name, x in model.named_parameters():
        digest.update(f"{name} {tuple(x.shape)}".encode())
        if x.numel():
            digest.update(repr(float(x.detach().flatten()[0])).encode())
    return f"a {type(model).__name__}, digest {digest.hexdigest()[:12]}"


def _digest(batches: list[Any]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for x in batch.values() if isinstance(batch, dict) else [batch]:
            digest.update(x.cpu().numpy().tobytes() if isinstance(x, Tensor) else b"")
    return digest.hexdigest()[:12]
