"""One pass over a corpus, with a checkpoint now and then from which an interrupted pass is resumed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, HeadwiseError
from ...files import remove_leftovers
from ...json_documents import brief, count, in_words, string
from .accumulator import Accumulator
from .checkpoint import load_tallies, save_tallies
from .corpus import Corpus
from .induction import measure_repetition
from .observer import Observer
from .sums import Tally

SAVE_EVERY = 30.0  # seconds between checkpoints
TRIM_EVERY = 64  # batches after which freed memory goes back to the system
Progress = Callable[[int, int | None], None]  # finished texts, and their total number if it is known


class CorpusRun:
    """One pass over a corpus: the sums so far, the settings, and the checkpoint."""

    def __init__(
        self, observer: Observer, corpus: Corpus, file: Path | None, settings: dict[str, Any], part: tuple[int, int],
        progress: Progress | None, total: int | None,
    ) -> None:  # fmt: skip
        """file: the checkpoint. settings: what a resumed run must have in common with this one."""
        self.observer, self.corpus, self.file, self.settings, self.part = observer, corpus, file, settings, part
        self.progress, self.total = progress or (lambda texts, total: None), total
        self.tally = Tally()
        self.window, self.batches = 0, 0  # the first text of the current window, and the batches done in it
        self.resumed_texts: str | None = None  # fingerprint of the texts read before the checkpoint, until checked

    def measure(self, vocabulary: int, seed: int, replicates: int) -> tuple[Tally, Tally | None]:
        """The sums over the texts, and in the first part those over repeated random tokens."""
        self.tally = Tally(replicates=replicates)
        self.accumulator = Accumulator(self.tally)
        if self.file is not None:
            remove_leftovers(self.file.parent)
            if os.path.lexists(self.file):
                self._resume()
        with self.observer.watching(), interruptible() as is_stopped:
            # also in a resumed run: it shows which way each layer attends
            repetition = measure_repetition(self.observer, self.corpus.encoder, vocabulary, seed, replicates)
            last_save = time.monotonic()
            for _ in self._steps():
                if is_stopped() or (self.file and time.monotonic() - last_save > SAVE_EVERY):
                    self._save_checkpoint()
                    last_save = time.monotonic()
                if is_stopped():
                    raise KeyboardInterrupt
        if not (self.tally.texts or self.accumulator.pending):
            raise HeadwiseError("not one text has a token; nothing was measured")
        self._save_checkpoint()  # so that nothing is measured again if the run ends before its atlas is saved
        self.accumulator.flush()
        return self.tally, repetition if self.part[0] == 0 else None

    def _steps(self) -> Iterator[None]:
        """Measure batch after batch, from the checkpoint on."""
        skip, ends = self.batches, self.window
        for begins, ends, batches in self.corpus.windows(self.window, self.part):
            if self.resumed_texts not in (None, self.corpus.fingerprint) or skip > len(batches):
                break  # these are not the texts of the checkpoint
            self.resumed_texts = None
            self.window, self.batches = begins, skip
            self.progress(begins, self.total)
            for number, batch in enumerate(batches[skip:], skip + 1):
                self.accumulator.add(self.observer.run(batch), batch)
                if number % TRIM_EVERY == 0:
                    _trim_memory()
                self.batches = number
                self.progress(begins + (ends - begins) * number // len(batches), self.total)
                yield
            skip = 0
        if self.resumed_texts is not None:
            raise HeadwiseError(_conflict_message(self.file, ["other texts"]))
        self.progress(ends, self.total or ends)

    def _save_checkpoint(self) -> None:
        if self.file is None:
            return
        facts = {
            "asked": self.settings, "window": self.window, "batches": self.batches, "texts": self.corpus.fingerprint,
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
        settings = facts.get("asked")
        if differences := _differences(settings if isinstance(settings, dict) else {}, self.settings):
            raise HeadwiseError(_conflict_message(self.file, differences))
        try:
            self.tally = self.accumulator.tally = tallies["tally"]
            self.window, self.batches = count(facts["window"], "window"), count(facts["batches"], "batches")
            self.resumed_texts = string(facts["texts"], "texts")
            self.accumulator.restore(facts["waiting"], arrays)
            if self.tally.replicates != self.settings["replicates"]:
                raise ValueError(
                    f"there are {self.tally.replicates} replicates, expected {self.settings['replicates']}"
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{str(self.file)!r} is damaged: {in_words(error)}; remove it to begin again"
            ) from error


# settings whose values would mean nothing to a reader, in words
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


def _differences(earlier: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """A description of the settings in which an earlier run differs from this one."""
    wrong = [key for key, value in current.items() if earlier.get(key) != value]
    words = [
        DIFFERENCES.get(key, f"another {key} ({brief(earlier.get(key))}, now {brief(current[key])})") for key in wrong
    ]
    return list(dict.fromkeys(words))


def _conflict_message(file: Path | None, differences: list[str]) -> str:
    return (
        f"{str(file)!r} was left by an unfinished run with {', '.join(differences)}; "
        "finish that run, give another place, or remove the file to begin again"
    )


def _trim_memory() -> None:
    """Give freed memory back: batches of many sizes fragment the heap, by which a long run would grow."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
        if trim is not None:
            trim(0)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C to the end of a batch, so that none is counted half; a second one stops at once.

    Yields a function that says whether Ctrl-C was pressed.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
