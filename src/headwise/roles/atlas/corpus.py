"""A corpus of any size -> batches of encoded texts of similar length, streamed.

A window of texts is read, encoded, sorted by length and split into batches; then the next window. So memory does not
grow with the corpus, there is little padding, and the same corpus gives the same batches, which resuming relies on.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import HeadwiseError
from ...json_documents import brief, parse_json
from ...role_definitions import Tokens
from .sums import identity

WINDOW = 2048  # texts that are sorted together
COUNTED_TEXTS = 20_000  # texts at most from which token frequencies are counted
TOKENS = 1024  # per batch at most; more would leave a core's cache and gain nothing
PAIRS = 1 << 17  # of a query and a key per batch: more of them leave a core's cache, see pair_columns.py
Text = str | tuple[str, str]


@dataclass(frozen=True)
class Batch:
    """Texts that a model reads at once."""

    source: Tokens
    target: Tokens | None  # what the decoder of an encoder-decoder reads
    identities: np.ndarray  # (B,) uint64
    cut: int  # texts that were too long

    @property
    def tokens(self) -> int:
        return int(self.source.real.sum()) + (0 if self.target is None else int(self.target.real.sum()))

    def to(self, device: Any) -> Batch:
        return Batch(
            self.source.to(device), None if self.target is None else self.target.to(device), self.identities, self.cut
        )


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One encoded text; the fields are those of Tokens."""

    ids: list[int]
    special: list[bool]
    word: list[int]
    word_index: list[int]
    cut: bool


class TextEncoder:
    """A tokenizer, and the length that texts are cut to."""

    def __init__(self, tokenizer: Any, length: int, start: int | None = None) -> None:
        """start: the token that the decoder of an encoder-decoder begins with; None for other models."""
        self.tokenizer, self.length, self.start = tokenizer, length, start
        self._punctuation: dict[int, bool] = {}

    def lines(self, texts: Sequence[str]) -> list[EncodedText]:
        encoded = self.tokenizer(
            list(texts), truncation=True, max_length=self.length, return_special_tokens_mask=True,
            return_overflowing_tokens=False, verbose=False,
        )  # fmt: skip
        whole = getattr(encoded, "encodings", None)
        lines = []
        for i, (text, ids) in enumerate(zip(texts, encoded["input_ids"], strict=True)):
            word, word_index = _words(text, whole[i]) if whole else (ids, list(range(len(ids))))
            special = [bool(mark) for mark in encoded["special_tokens_mask"][i]]
            lines.append(EncodedText(ids, special, word, word_index, len(ids) >= self.length))
        return lines

    def punctuation(self, token: int) -> bool:
        """Whether a token consists of punctuation."""
        if token not in self._punctuation:
            text = self.tokenizer.decode([token]).strip()
            text = text.removeprefix("##") if len(text) > 2 else text
            self._punctuation[token] = bool(text) and all(unicodedata.category(sign)[0] == "P" for sign in text)
        return self._punctuation[token]

    def tokens(self, lines: Sequence[EncodedText], counts: np.ndarray, shift: bool = False) -> Tokens:
        """Encoded texts as padded tensors. shift: as a decoder reads them, the start token instead of the last one."""
        begin: list[list[Any]] = [[self.start or 0], [True], [-1], [-1]]
        rows: list[list[list[Any]]] = [[line.ids, line.special, line.word, line.word_index] for line in lines]
        if shift:
            rows = [[head + part[:-1] for head, part in zip(begin, parts, strict=True)] for parts in rows]
        longest = max(len(ids) for ids, *_ in rows)

        def table(column: int, fill: Any, dtype: Any) -> Tensor:
            return torch.tensor([row[column] + [fill] * (longest - len(row[column])) for row in rows], dtype=dtype)

        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids, special = table(0, pad, torch.long), table(1, True, torch.bool)
        real = torch.tensor([[True] * len(row[0]) + [False] * (longest - len(row[0])) for row in rows])
        marks = torch.tensor([[self.punctuation(token) for token in row] for row in ids.tolist()]) & ~special & real
        word = table(2, -1, torch.long).masked_fill(special | marks, -1)
        count = torch.from_numpy(counts)[ids.clamp(max=len(counts) - 1)]
        return Tokens(ids, real, special & real, marks, word, table(3, -1, torch.long), count)


def batch_sizes() -> list[int]:
    """The settings that determine the batches; a run can only be resumed with the same settings."""
    return [WINDOW, TOKENS, PAIRS]


def _words(text: str, encoding: Any) -> tuple[list[int], list[int]]:
    """Per token the word that it is part of, ignoring case, and the number of that word in the text."""
    spans: dict[int, tuple[int, int]] = {}
    places = [-1 if place is None else place for place in encoding.word_ids]
    for place, (start, end) in zip(places, encoding.offsets, strict=True):
        low, high = spans.get(place, (start, end))
        spans[place] = min(low, start), max(high, end)
    word_ids: dict[str, int] = {}
    words = {
        place: word_ids.setdefault(text[start:end].strip().casefold(), len(word_ids))
        for place, (start, end) in spans.items()
    }
    return [-1 if place < 0 else words[place] for place in places], places


def read(texts: Any, field: str = "text", limit: int | None = None) -> tuple[Iterator[Text], int | None]:
    """The texts of a file or an iterable, and their number where it is known."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise HeadwiseError(f"the limit must be at least 1 text, got {brief(limit)}")
    if isinstance(texts, str) and not _exists(texts):
        raise HeadwiseError(
            f"texts are a file or several texts; there is no file {texts[:60]!r}, put one text into a list"
        )
    if isinstance(texts, (str, os.PathLike)):
        path = Path(texts)
        total: int | None = sum(1 for _ in _file(path, field))
        stream: Iterator[Any] = _file(path, field)
    else:
        if not isinstance(texts, Iterable):
            raise HeadwiseError(f"texts are a file or several texts, got {type(texts).__name__}")
        total, stream = (len(texts) if isinstance(texts, Sized) else None), _check_texts(texts)
    if limit is not None:
        return itertools.islice(stream, min(limit, sys.maxsize)), limit if total is None else min(limit, total)
    return stream, total


def check_file(path: Path, field: str = "text") -> None:
    """Refuse a file without texts, or that cannot be read up to its first text."""
    if next(_file(path, field), None) is None:
        raise HeadwiseError(f"there is not one text in {str(path)!r}; give at least one that is not empty")


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a NUL is in it
        return False


def _file(path: Path, field: str) -> Iterator[str]:
    """One text per line; in .jsonl the value of a field."""
    try:
        if path.exists() and not (path.is_file() or path.is_fifo()):
            raise HeadwiseError(f"texts {str(path)!r} is not a file; give one with one text per line")
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                text = _field(path, number, line, field) if path.suffix in (".jsonl", ".ndjson") else line
                if text.strip():
                    yield text.strip()
    except OSError as error:
        raise HeadwiseError(f"texts {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise HeadwiseError(f"texts {str(path)!r} is not text in UTF-8") from None
    except ValueError as error:
        if isinstance(error, HeadwiseError):
            raise
        raise HeadwiseError(f"texts {str(path)!r} cannot be read: {error}") from None  # a NUL in the path


def _field(path: Path, number: int, line: str, field: str) -> str:
    if not line.strip():
        return ""
    try:
        text = parse_json(line)[field]
    except (ValueError, KeyError, TypeError):
        raise HeadwiseError(f"line {number} of {str(path)!r} is no JSON object with a {field!r}") from None
    if not isinstance(text, str):
        raise HeadwiseError(f"{field!r} in line {number} of {str(path)!r} is no text")
    return _check_text(text, f"{field!r} in line {number} of {str(path)!r}")


def _check_text(text: str, name: str) -> str:
    """JSON and Python strings can contain half of a surrogate pair, which no tokenizer can read."""
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
        raise HeadwiseError(f"{name} has half of a surrogate pair, which is no character; remove it")
    return text


def _check_texts(texts: Iterable[Any]) -> Iterator[Text]:
    for number, text in enumerate(texts):
        pair = isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(part, str) for part in text)
        if not (isinstance(text, str) or pair):
            raise HeadwiseError(f"text {number} is neither a text nor a pair of texts but {type(text).__name__}")
        for side in text if pair else (text,):
            _check_text(side, f"text {number}")
        if pair or text.strip():
            yield tuple(text) if pair else text


@dataclass(frozen=True)
class Corpus:
    """Texts, their encoder, and the frequencies of their tokens."""

    texts: Iterator[Text]
    encoder: TextEncoder
    counts: np.ndarray  # of every token of the vocabulary
    beginning: int  # identity of the first texts, which tells one corpus from another
    seen: Any = field(default_factory=hashlib.sha256)  # of all texts read so far, in their order

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the texts read so far, including those of other parts."""
        return str(self.seen.hexdigest()[:32])

    @classmethod
    def of(cls, texts: Iterator[Text], encoder: TextEncoder) -> Corpus:
        """Count tokens in the first COUNTED texts; all texts are still to come."""
        first = list(itertools.islice(texts, COUNTED_TEXTS))
        if not first:
            raise HeadwiseError("there is not one text; give at least one that is not empty")
        counts = np.zeros(len(encoder.tokenizer), np.int64)
        for start in range(0, len(first), WINDOW):
            for side in _sides(first[start : start + WINDOW]):
                encoded = encoder.tokenizer(side, truncation=True, max_length=encoder.length, verbose=False)
                new = np.bincount(np.fromiter(itertools.chain.from_iterable(encoded["input_ids"]), np.int64))
                counts = np.pad(counts, (0, max(0, len(new) - len(counts))))
                counts[: len(new)] += new
        beginning = identity("\n".join(str(text) for text in first[:WINDOW]))
        return cls(itertools.chain(first, texts), encoder, counts, beginning)

    def windows(self, skip: int = 0, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, int, list[Batch]]]:
        """Window after window from text number `skip` on: where it begins, where it ends, and its batches."""
        stream = map(self._read, self.texts)
        start = sum(1 for _ in itertools.islice(stream, skip))
        while window := list(itertools.islice(stream, WINDOW)):
            part_texts = [text for number, text in enumerate(window, start) if number % part[1] == part[0]]
            yield start, start + len(window), list(self._batches(part_texts)) if part_texts else []
            start += len(window)

    def _read(self, text: Text) -> Text:
        for side in _as_tuple(text):
            data = side.encode("utf-8", "surrogatepass")
            self.seen.update(b"%d %d:" % (isinstance(text, tuple), len(data)) + data)
        return text

    def _batches(self, texts: list[Text]) -> Iterator[Batch]:
        paired = self.encoder.start is not None
        if not paired and any(isinstance(text, tuple) for text in texts):
            raise HeadwiseError("pairs of texts are for encoder-decoders; this model reads one text at a time")
        sides = [self.encoder.lines(side) for side in _sides(texts)]
        first, second = sides[0], sides[-1]
        order = sorted(
            (i for i in range(len(texts)) if first[i].ids and second[i].ids),
            key=lambda i: (len(first[i].ids), len(second[i].ids)),
        )
        for chunk in chunks(order, [max(len(a.ids), len(b.ids)) for a, b in zip(first, second, strict=True)]):
            source = self.encoder.tokens([first[i] for i in chunk], self.counts)
            target = self.encoder.tokens([second[i] for i in chunk], self.counts, shift=True) if paired else None
            names = np.array([identity("\n".join(_as_tuple(texts[i]))) for i in chunk], np.uint64)
            yield Batch(source, target, names, sum(first[i].cut or second[i].cut for i in chunk))


def _sides(texts: Sequence[Text]) -> list[list[str]]:
    """The texts that encoder and decoder read: one list where they are the same, two for pairs."""
    single = [text for text in texts if isinstance(text, str)]
    if len(single) == len(texts):
        return [single]
    return [
        list(side) for side in zip(*(text if isinstance(text, tuple) else (text, text) for text in texts), strict=True)
    ]


def _as_tuple(text: Text) -> tuple[str, ...]:
    return text if isinstance(text, tuple) else (text,)


def chunks(order: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Split texts in the order of their lengths into batches of the allowed size."""
    chunk: list[int] = []
    for i in order:
        longest = lengths[i]
        if chunk and (len(chunk) + 1) * longest * max(longest, PAIRS // TOKENS) > PAIRS:
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
