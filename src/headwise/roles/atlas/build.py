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

from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from ...files import remove_leftovers
from ...inspection.run import longest
from ...json_documents import LARGEST, brief, count, in_words, string
from ...models.fingerprint import fingerprint, tokenizer_fingerprint
from ...models.loading.loader import load
from ...models.loading.loader import tokenizer as load_tokenizer
from ...models.loading.locate import DEFAULT
from ...models.structure import sites
from ...role_definitions import added_scores
from .accumulator import Accumulator
from .checkpoint import load_tallies, save_tallies
from .corpus import Corpus, Encoder, batch_sizes, read
from .induction import measure_repetition, vocabulary_size
from .observer import Observer
from .result import Atlas
from .sums import REPLICATES, Key, Tally, identity

LENGTH = 512  # tokens of a text at most
FORMAT = 2  # of what a checkpoint holds beside the sums
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
    keep_checkpoint: bool = False,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Atlas:
    """What every head of a model does on a corpus: an Atlas, which prints as a table by role.

    model: a name as `load` takes it, or a transformers model with its tokenizer. texts: a file (a text a line, or
    .jsonl with a field), or anything that gives texts, of any size; for encoder-decoders also pairs (source, target),
    else the decoder reads the text itself. part=(i, n) takes every n-th text from the i-th on: the atlases of all parts
    merge into that of the whole. resume: a file that keeps the sums; an interrupted run goes on from there, if weights,
    tokenizer, texts and settings are the same, and the file is gone when all is done; keep_checkpoint leaves it there
    for a caller who removes it once the atlas is saved. conllu: files with gold links, to see which heads follow which
    relation between words (`headwise.relations` does that alone). seed: for the random tokens that are repeated.
    """
    _check(length, part, replicates, seed)
    name, model, tokenizer = given(model, tokenizer, name)
    found, total = read(texts, field, limit)
    observer = Observer.of(model)
    encoder = encoder_of(observer.model, tokenizer, length)
    corpus = Corpus.of(found, encoder)
    about = {
        "corpus": _corpus_name(texts), "length": encoder.length, "seed": seed,
        "counts": f"{identity(corpus.counts.tobytes().hex()):016x}", "part": list(part), "notes": _notes(encoder),
    }  # fmt: skip
    content = {"weights": fingerprint(model), "tokenizer": tokenizer_fingerprint(tokenizer)}
    # where a run stands is counted in windows and batches
    sizes = {"format": FORMAT, "batch": batch_sizes()}
    asked = {"model": name, "beginning": corpus.beginning, "limit": limit, "replicates": replicates}
    asked["scores"] = added_scores() or None  # runs of versions without such roles left none
    run = Run(
        observer,
        corpus,
        Path(resume) if resume else None,
        {**sizes, **content, **asked, **about},
        part,
        progress,
        total,
    )
    tally, measured = run.all(vocabulary_size(observer.model, tokenizer), seed, replicates)
    about["fingerprint"] = {**content, "texts": corpus.fingerprint}
    made = Atlas.from_sums(tally, measured, name, _original(model), about)
    if conllu is not None:
        from ..relations.find import relations

        made = replace(made, relations=relations(model, conllu, tokenizer=tokenizer, seed=seed))
    if resume and not keep_checkpoint:
        Path(resume).unlink(missing_ok=True)
    return made


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
        self.kept_texts: str | None = None  # the fingerprint of the texts that a run before this one had read

    def all(self, vocabulary: int, seed: int, replicates: int) -> tuple[Tally, Tally | None]:
        self.tally = Tally(replicates=replicates)
        self.accumulator = Accumulator(self.tally)
        if self.file is not None:
            remove_leftovers(self.file.parent)
            if os.path.lexists(self.file):
                self._resume()
        with self.observer.watching(), interruptible() as stopped:
            # also where it was done before: it shows which way each layer attends
            measured = measure_repetition(self.observer, self.corpus.encoder, vocabulary, seed, replicates)
            kept = time.monotonic()
            for _ in self._steps():
                if stopped() or (self.file and time.monotonic() - kept > EVERY):
                    self._keep()
                    kept = time.monotonic()
                if stopped():
                    raise KeyboardInterrupt
        if not (self.tally.texts or self.accumulator.pending):
            raise HeadwiseError("not one text has a token; nothing was measured")
        self._keep()  # so that nothing is measured again if the run ends before its atlas is saved
        self.accumulator.flush()
        return self.tally, measured if self.part[0] == 0 else None

    def _steps(self) -> Iterator[None]:
        """Batch after batch from where it stands."""
        skip, ends = self.batches, self.window
        for begins, ends, batches in self.corpus.windows(self.window, self.part):
            if self.kept_texts not in (None, self.corpus.fingerprint) or skip > len(batches):
                break  # not what was measured
            self.kept_texts = None
            self.window, self.batches = begins, skip
            self.progress(begins, self.total)
            for number, batch in enumerate(batches[skip:], skip + 1):
                self.accumulator.add(self.observer.run(batch), batch)
                if number % HOLES == 0:
                    _give_back()
                self.batches = number
                self.progress(begins + (ends - begins) * number // len(batches), self.total)
                yield
            skip = 0
        if self.kept_texts is not None:
            raise HeadwiseError(_left_by(self.file, ["other texts"]))
        self.progress(ends, self.total or ends)

    def _keep(self) -> None:
        if self.file is None:
            return
        facts = {
            "asked": self.asked, "window": self.window, "batches": self.batches, "texts": self.corpus.fingerprint,
            "waiting": self.accumulator.facts(),
        }  # fmt: skip
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{str(self.file.parent)!r} cannot be made: {error.strerror or error}") from error
        save_tallies(self.file, {"tally": self.tally}, facts, self.accumulator.arrays())

    def _resume(self) -> None:
        assert self.file is not None
        tallies, facts, arrays = load_tallies(self.file)
        asked = facts.get("asked")
        asked = asked if isinstance(asked, dict) else {}
        if wrong := _differences(asked, self.asked):
            raise HeadwiseError(_left_by(self.file, wrong))
        try:
            self.tally = self.accumulator.tally = tallies["tally"]
            self.window, self.batches = count(facts["window"], "window"), count(facts["batches"], "batches")
            self.kept_texts = string(facts["texts"], "texts")
            self.accumulator.restore(facts["waiting"], arrays)
            if self.tally.replicates != self.asked["replicates"]:
                raise ValueError(f"there are {self.tally.replicates} replicates, expected {self.asked['replicates']}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{str(self.file)!r} is damaged: {in_words(error)}; remove it to begin again"
            ) from error


# what differs, where its values would tell a reader nothing
DIFFERENCES = {
    "format": "another version of headwise",
    "batch": "another version of headwise",
    "weights": "other weights",
    "tokenizer": "another tokenizer",
    "beginning": "other texts",
    "counts": "other texts",
    "corpus": "other texts",
    "scores": "other roles",
}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what a run was asked for before and is not now."""
    wrong = [key for key, value in now.items() if before.get(key) != value]
    words = [DIFFERENCES.get(key, f"another {key} ({brief(before.get(key))}, now {brief(now[key])})") for key in wrong]
    return list(dict.fromkeys(words))


def _left_by(file: Path | None, differences: list[str]) -> str:
    return (
        f"{str(file)!r} was left by an unfinished run with {', '.join(differences)}; "
        "finish that run, give another place, or remove the file to begin again"
    )


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


def _check(length: int, part: tuple[int, int], replicates: int, seed: int) -> None:
    if not 0 <= seed <= LARGEST:
        raise HeadwiseError(f"the seed must be a whole number from 0 to {LARGEST}, got {brief(seed)}")
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
        for site in sites.sites(model)
        if (kept := getattr(site.module, "headwise_kept", None)) is not None
    }
