"""CoNLL-U, the format of Universal Dependencies -> sentences with gold links."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import HeadwiseError
from ...json_documents import whole_number
from . import coreference
from .gold import GoldLink, Sentence

COLUMNS = 10
RANGE, EMPTY = re.compile(r"([0-9]+)-([0-9]+)"), re.compile(r"[0-9]+\.[0-9]+")
HEADLESS = ("root",)  # a relation to no word
UNCOUNTED = ("root", "punct")  # not among "any": the literature leaves punctuation out
ANY = "any"


@dataclass(frozen=True, slots=True)
class Word:
    """One syntactic word: one line of the file."""

    form: str
    tag: str  # UPOS
    features: str
    head: int  # the number of another word of the sentence, from 0; -1 for the root
    relation: str
    misc: dict[str, str]
    start: int  # in the text of the sentence
    end: int


@dataclass(frozen=True, slots=True)
class Tree:
    """One sentence of a file."""

    text: str
    words: tuple[Word, ...]
    document: str
    line: int  # its first in the file

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple((word.start, word.end) for word in self.words)


@dataclass(frozen=True, slots=True)
class Treebank:
    """The sentences of one or more files, and notes on annotation that was left out."""

    trees: tuple[Tree, ...]
    entities: bool  # whether mentions are marked
    notes: tuple[str, ...]

    def syntax(self) -> list[Sentence]:
        """Each sentence by itself, with its dependencies in both directions."""
        return [Sentence(tree.text, tree.spans, tuple(dependencies(tree)), tree.document) for tree in self.trees]

    def coreference(self, words: int = 100) -> list[Sentence]:
        """Consecutive sentences of one document, up to `words` words, with links from pronouns to antecedents."""
        return coreference.windows(self.trees, words)


def read_conllu(*paths: str | os.PathLike[str]) -> Treebank:
    """Read one or more CoNLL-U files; errors name the line."""
    trees = [tree for path in paths for tree in _trees(str(path), _lines(Path(path)))]
    entities = any("Entity" in word.misc for tree in trees for word in tree.words)
    skipped = sum(coreference.mentions(tree).skipped for tree in trees) if entities else 0
    notes = [f"{skipped} mentions are discontinuous or not closed in their sentence: left out"] if skipped else []
    return Treebank(tuple(trees), entities, tuple(notes))


def dependencies(tree: Tree) -> Iterator[GoldLink]:
    """Every relation from dependent to head and from head to its dependents, and "any": each word to its head."""
    below: dict[tuple[str, int], list[int]] = {}
    for number, word in enumerate(tree.words):
        if word.relation in HEADLESS or word.head < 0:
            continue
        yield GoldLink(f"{word.relation} > head", number, (word.head,))
        below.setdefault((word.relation, word.head), []).append(number)
        if word.relation not in UNCOUNTED:
            yield GoldLink(f"{ANY} > head", number, (word.head,))
    for (relation, head), dependents in below.items():
        yield GoldLink(f"head > {relation}", head, tuple(dependents))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a line may hold U+2028, which is no line break here
    except OSError as error:
        raise HeadwiseError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise HeadwiseError(f"{str(path)!r} is not text in UTF-8; CoNLL-U is") from None
    except ValueError as error:  # a NUL in the path
        raise HeadwiseError(f"{str(path)!r} cannot be read: {error}") from None


@dataclass
class _SentenceLines:
    """A sentence while its lines are read."""

    line: int
    rows: list[list[str]] = field(default_factory=list)
    ranges: dict[int, tuple[int, str, str]] = field(default_factory=dict)  # first word -> last word, form, misc


def _trees(name: str, lines: list[str]) -> Iterator[Tree]:
    document, current, empty = name, _SentenceLines(1), True
    for number, raw in enumerate([*lines, ""], 1):
        line = raw.rstrip("\r")
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            if key.strip() in ("newdoc", "newdoc id"):
                document = value.strip() or f"{name} line {number}"
        elif line.strip():
            if not current.rows and not current.ranges:
                current.line = number
            _add(current, line, f"{name} line {number}")
        elif current.rows:
            yield _tree(current, document, name)
            current, empty = _SentenceLines(number + 1), False
    if empty:
        raise HeadwiseError(f"{name} holds no sentence; CoNLL-U with one word per line is expected")


def _add(sentence: _SentenceLines, line: str, location: str) -> None:
    row = line.split("\t")
    if len(row) != COLUMNS:
        raise HeadwiseError(f"{location} has {len(row)} columns; CoNLL-U has {COLUMNS}, divided by tabs")
    if EMPTY.fullmatch(row[0]):
        return  # a node that is not in the text
    expected = len(sentence.rows) + 1
    if token_range := RANGE.fullmatch(row[0]):
        first, last = whole_number(token_range[1]), whole_number(token_range[2])
        if first != expected or last is None or last < first:
            raise HeadwiseError(f"{location}: the range {row[0][:60]} does not begin at the next word, {expected}")
        sentence.ranges[first - 1] = last - 1, row[1], row[9]
    elif row[0] != str(expected):
        raise HeadwiseError(f"{location}: word {row[0][:60]!r} follows word {expected - 1}; {expected} is expected")
    elif not row[1].strip():
        raise HeadwiseError(f"{location}: word {expected} has no form")
    else:
        sentence.rows.append([*row, location])


def _tree(sentence: _SentenceLines, document: str, name: str) -> Tree:
    count = len(sentence.rows)
    spans, text = _text_and_spans(sentence, name)
    words = []
    for number, (row, (start, end)) in enumerate(zip(sentence.rows, spans, strict=True)):
        location, head = row[COLUMNS], whole_number(row[6])
        if head is None or head > count:
            raise HeadwiseError(f"{location}: head {row[6][:60]!r} is not a number from 0 to {count}")
        if head == number + 1:
            raise HeadwiseError(f"{location}: word {number + 1} is its own head")
        words.append(Word(row[1], row[3], row[5], head - 1, row[7], _pairs(row[9]), start, end))
    cyclic = _in_cycle([word.head for word in words])
    if cyclic is not None:
        raise HeadwiseError(f"{sentence.rows[cyclic][COLUMNS]}: word {cyclic + 1} depends on itself through its heads")
    return Tree(text, tuple(words), document, sentence.line)


def _in_cycle(heads: list[int]) -> int | None:
    """A word whose chain of heads never ends; None in a tree. heads: -1 for the root."""
    rooted = {-1}  # words whose chain reaches the root
    for start in range(len(heads)):
        path: list[int] = []
        word = start
        while word not in rooted:
            if len(path) > len(heads):
                return word
            path.append(word)
            word = heads[word]
        rooted.update(path)
    return None


def _text_and_spans(sentence: _SentenceLines, name: str) -> tuple[list[tuple[int, int]], str]:
    """The span of each word, and the text: forms with a space after each, unless the file says otherwise."""
    spans: list[tuple[int, int]] = []
    text = ""
    while len(spans) < len(sentence.rows):
        first = len(spans)
        last, form, misc = sentence.ranges.get(first, (first, sentence.rows[first][1], sentence.rows[first][9]))
        if last >= len(sentence.rows):
            raise HeadwiseError(f"{name} line {sentence.line}: the range {first + 1}-{last + 1} ends past its sentence")
        spans += _inside([row[1] for row in sentence.rows[first : last + 1]], form, len(text))
        text += form + ("" if _pairs(misc).get("SpaceAfter") == "No" else " ")
    return spans, text.rstrip()


def _inside(forms: list[str], whole: str, start: int) -> list[tuple[int, int]]:
    """Words of one token: "do" and "n't" divide "don't"; where they do not spell it, each stands for the whole."""
    if "".join(forms) != whole:
        return [(start, start + len(whole))] * len(forms)
    spans = []
    for form in forms:
        spans.append((start, start + len(form)))
        start += len(form)
    return spans


def _pairs(column: str) -> dict[str, str]:
    """ "A=1|B=2" as a dict; what has no "=" is its own key."""
    parts: Iterable[str] = () if column == "_" else column.split("|")
    return {key: value for key, _, value in (part.partition("=") for part in parts)}
