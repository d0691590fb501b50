"""`headwise.atlas`: a model and a corpus in, what every head does out. Streamed, resumable, in parts if wanted."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import HeadwiseError, UnsupportedError
from ..models import anatomy
from ..models.inspection import longest
from ..models.load import load
from ..models.load import tokenizer as load_tokenizer
from ..models.places import DEFAULT
from .atlas import Atlas
from .checkpoint import load_tallies, save_tallies
from .corpus import PAIRS, TOKENS, Corpus, Encoder, read
from .measure import Adding, Observer
from .repeated import probe, vocabulary_of
from .tally import REPLICATES, Key, Tally, identity

LENGTH = 512  # tokens of a text at most
EVERY = 30.0  # seconds between checkpoints
HOLES = 64  # batches after which freed memory goes back to the system
Progress = Callable[[int, int | None], None]  # texts done, texts in all where that is known


def atlas(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    conllu: Any = None,
    name: str | None = None,
    limit: int | None = None,
    length: int = LENGTH,
    field: str = "text",
    part: tuple[int, int] = (0, 1),
    resume: str | os.PathLike[str] | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Atlas:
    """What every head of a model does on a corpus: an Atlas, which prints as a table by role.

    model: a name as `load` takes it, or a transformers model with its tokenizer. texts: a file (a text a line, or
    .jsonl with a field), or anything that gives texts, of any size; for encoder-decoders also pairs (source, target),
    else the decoder reads the text itself. part=(i, n) takes every n-th text from the i-th on: the atlases of all parts
    merge into that of the whole. resume: a file that keeps the sums; an interrupted run goes on from there, and the
    file is gone when all is done. conllu: files with gold links, to see which heads follow which relation between
    words (`headwise.relations` does that alone). seed: for the random tokens that are repeated.
    """
    _check(length, part, replicates)
    name, model, tokenizer = given(model, tokenizer, name)
    found, total = read(texts, field, limit)
    observer = Observer.of(model)
    encoder = encoder_of(observer.model, tokenizer, length)
    corpus = Corpus.of(found, encoder)
    about = {
        "corpus": _corpus_name(texts), "length": encoder.length, "seed": seed,
        "counts": f"{identity(corpus.counts.tobytes().hex()):016x}", "part": list(part), "notes": _notes(encoder),
    }  # fmt: skip
    asked = {"model": name, "beginning": corpus.beginning, "limit": limit, "replicates": replicates, **about}
    asked["batch"] = [TOKENS, PAIRS]  # where a run stands is counted in batches
    run = Run(observer, corpus, Path(resume) if resume else None, asked, part, progress, total)
    tally, measured = run.all(vocabulary_of(observer.model, tokenizer), seed, replicates)
    made = Atlas.of(tally, measured, name, _original(model), about)
    if conllu is None:
        return made
    from .relations import relations

    return replace(made, relations=relations(model, conllu, tokenizer=tokenizer, seed=seed))


class Run:
    """One pass over a corpus: what is done, what was asked for, and where it is kept meanwhile."""

    def __init__(
        self, observer: Observer, corpus: Corpus, file: Path | None, asked: dict[str, Any], part: tuple[int, int],
        progress: Progress | None, total: int | None,
    ) -> None:  # fmt: skip
        self.observer, self.corpus, self.file, self.asked, self.part = observer, corpus, file, asked, part
        self.progress, self.total = progress or (lambda done, total: None), total
        self.tally = Tally()
        self.window, self.batches = 0, 0  # where it stands: a window's first text, and batches done in it

    def all(self, vocabulary: int, seed: int, replicates: int) -> tuple[Tally, Tally | None]:
        self.tally = Tally(replicates=replicates)
        resumed = self.file is not None and self.file.exists()
        if resumed:
            self._resume()
        self.adding = Adding(self.tally)
        with self.observer.watching(), interruptible() as stopped:
            # also where it was done before: it shows which way each layer attends
            measured = probe(self.observer, self.corpus.encoder, vocabulary, seed, replicates)
            kept = time.monotonic()
            for _ in self._steps():
                if stopped() or (self.file and time.monotonic() - kept > EVERY):
                    self._keep()
                    kept = time.monotonic()
                if stopped():
                    raise KeyboardInterrupt
        if self.file and self.file.exists():
            self.file.unlink()
        if not self.tally.texts:
            raise HeadwiseError("not one text has a token; nothing was measured")
        return self.tally, measured if self.part[0] == 0 else None

    def _steps(self) -> Iterator[None]:
        """Batch after batch from where it stands."""
        skip = self.batches
        for begins, ends, batches in self.corpus.windows(self.window, self.part):
            self.window = begins
            self.batches = skip
            self.progress(begins, self.total)
            for number, batch in enumerate(batches[skip:], skip + 1):
                self.adding.take(self.observer.run(batch), batch)
                if number % HOLES == 0:
                    _give_back()
                self.batches = number
                self.progress(begins + (ends - begins) * number // len(batches), self.total)
                yield
            self.window, self.batches, skip = ends, 0, 0
        self.adding.settle()
        self.progress(self.window, self.total or self.window)

    def _keep(self) -> None:
        self.adding.settle()
        if self.file is not None:
            more = {"asked": self.asked, "window": self.window, "batches": self.batches}
            save_tallies(self.file, {"tally": self.tally}, more)

    def _resume(self) -> None:
        assert self.file is not None
        tallies, more = load_tallies(self.file)
        asked = more.get("asked", {})
        wrong = [key for key, value in self.asked.items() if asked.get(key) != value]
        if wrong:
            raise HeadwiseError(
                f"{str(self.file)!r} was left by a run with another {wrong[0]}: {asked.get(wrong[0])!r}, now "
                f"{self.asked[wrong[0]]!r}; remove it to begin again"
            )
        self.tally, self.window, self.batches = tallies["tally"], more["window"], more["batches"]


def _give_back() -> None:
    """Batches of ever other sizes leave holes between what is in use, by which a long run would grow."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
        if trim is not None:
            trim(0)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted and asked for between batches, so that no batch is counted half; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _check(length: int, part: tuple[int, int], replicates: int) -> None:
    if length < 4:
        raise HeadwiseError(f"length is the most tokens of a text, at least 4, got {length}")
    if not (len(part) == 2 and 0 <= part[0] < part[1]):
        raise HeadwiseError(f"part is (i, n) with 0 <= i < n, got {part!r}")
    if replicates < 1:
        raise HeadwiseError(f"replicates must be at least 1, got {replicates}")


def given(model: Any, tokenizer: Any, name: str | None) -> tuple[str, Any, Any]:
    """A name, a model and its tokenizer, where a model may be given by its name."""
    if model is None or isinstance(model, (str, os.PathLike)):
        place = DEFAULT if model is None else model
        tokenizer = tokenizer or load_tokenizer(place)  # first, for it tells a wrong name soonest
        return name or os.fspath(place), load(place), tokenizer
    if tokenizer is None:
        raise HeadwiseError("a model that is already loaded needs its tokenizer: atlas(model, texts, tokenizer)")
    return name or type(model).__name__, model, tokenizer


def encoder_of(body: Any, tokenizer: Any, length: int) -> Encoder:
    """The tokenizer with room for as many tokens as asked for and as the model has positions for."""
    wanted = getattr(body, "main_input_name", "input_ids")
    if wanted != "input_ids":
        raise UnsupportedError(f"{type(body).__name__} takes {wanted}, not text; an atlas needs a text model")
    return Encoder(tokenizer, min(length, longest(body, False)[0]), _start(body))


def _start(body: Any) -> int | None:
    """What a decoder beside an encoder begins with."""
    config = body.config
    if not getattr(config, "is_encoder_decoder", False):
        return None
    for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if getattr(config, key, None) is not None:
            return int(getattr(config, key))
    return 0


def _notes(encoder: Encoder) -> list[str]:
    notes = []
    if encoder.start is not None:
        notes.append("the decoder reads the text itself, or the second of a pair")
    if not getattr(encoder.tokenizer, "is_fast", False):
        notes.append("this tokenizer knows no offsets: words are tokens")
    return notes


def _corpus_name(texts: Any) -> str:
    return Path(texts).name if isinstance(texts, (str, os.PathLike)) else type(texts).__name__


def _original(model: Any) -> dict[Key, list[int | None]]:
    """For pruned layers, what their heads were numbered before."""
    return {
        site.key: list(kept.query)
        for site in anatomy.sites(model)
        if (kept := getattr(site.module, "headwise_kept", None)) is not None
    }
