"""What a model's heads do on one text, as a plain value: weights, statistics, links, heads that stand out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeadwiseError
from .words import Words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# words that stand for others, so that where they look is worth knowing
PRONOUNS = frozenset("it its itself he him his himself she her hers herself they them their theirs themselves".split())
STATISTICS = {
    "entropy": "how widely a head spreads, in nats",
    "confidence": "its largest weight",
    "distance": "how far it looks, in tokens",
    "previous": "weight on the token before",
    "next": "weight on the token after",
    "self": "weight on the token itself",
    "first": "weight on the first token",
    "delimiter": "weight on special tokens and punctuation",
}


LISTED = 50  # links in JSON
FEWEST = 5  # tokens; on fewer, everything is near everything
HIGHEST = 0.95  # a share that a head can be asked to reach


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to stand out: a statistic, from which value on, and whether that is a share of what equal attention has."""

    name: str
    statistic: str
    threshold: float
    relative: bool = False
    causal: bool | None = None  # only where no token sees what comes after it, or only where it does


# 0.5, 0.6: Clark et al. 2019; 0.3: Gu et al. 2024; broad: nearly as wide as can be
KINDS = (
    Kind("previous token", "previous", 0.5),
    Kind("next token", "next", 0.5, causal=False),
    Kind("itself", "self", 0.5),
    Kind("delimiter", "delimiter", 0.6),
    Kind("first token", "first", 0.3, causal=True),
    Kind("broad", "entropy", 0.9, relative=True),
)


@dataclass(frozen=True, slots=True)
class Link:
    """How much of a head's attention goes from one word to another; source and target count the words."""

    layer: int
    head: int
    source: int
    target: int
    weight: float

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, slots=True)
class Standout:
    """A head that is of a kind on this text: its score, and what equal attention would score."""

    kind: Kind
    layer: int
    head: int
    score: float
    equal: float

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """What every head does on one text. Layers and heads count from 0 and are written layer.head."""

    text: str
    model: str
    words: Words
    layers: tuple[int, ...]  # the model's own numbers
    weights: tuple[np.ndarray, ...]  # of each layer: (H, W, W) between words
    stats: dict[str, np.ndarray]  # name -> (L, H) over the model's tokens; NaN where a layer has fewer
    equal: dict[str, np.ndarray]  # name -> (L,): what equal attention to all that is seen would have
    causal: bool
    tokens: int
    notes: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()  # the words to follow, as asked for

    @property
    def heads(self) -> Iterator[tuple[int, int]]:
        """Every (layer, head)."""
        for layer, weights in zip(self.layers, self.weights, strict=True):
            for head in range(len(weights)):
                yield layer, head

    def matrix(self, head: str | tuple[int, int]) -> np.ndarray:
        """Where each word looks in one head, "3.1" or (3, 1): (W, W), a row a word."""
        layer, number = self.at(head)
        found: np.ndarray = self.weights[self.layers.index(layer)][number]
        return found

    def at(self, head: str | tuple[int, int]) -> tuple[int, int]:
        """A head's layer and number, checked."""
        if isinstance(head, str):
            parts = re.fullmatch(r"\s*(\d{1,6})\.(\d{1,6})\s*", head)
            if not parts:
                raise HeadwiseError(f"a head is written layer.head, such as 3.1, got {head!r}")
            head = int(parts[1]), int(parts[2])
        layer, number = head
        if layer not in self.layers:
            raise HeadwiseError(f"there is no layer {layer}; {self.model} has layers {_span(self.layers)}")
        count = len(self.weights[self.layers.index(layer)])
        if not 0 <= number < count:
            raise HeadwiseError(f"there is no head {layer}.{number}; layer {layer} has heads {_span(range(count))}")
        return layer, number

    def find(self, token: str) -> int:
        """The number of a word: "it", or "bank:2" for the second one; capitals do not matter."""
        names = [name.casefold() for name in self.words.names]
        wanted, which = token.casefold().strip(), 1
        if wanted not in names and (parts := re.fullmatch(r"(.+):(\d{1,6})", wanted)):
            wanted, which = parts[1], int(parts[2])
        places = [place for place, name in enumerate(names) if name == wanted]
        if not places:
            raise HeadwiseError(f"there is no word {token!r} in the text; there are {self._names()}")
        if not 1 <= which <= len(places):
            raise HeadwiseError(f"there is no {token!r}: {wanted!r} is in the text {_times(len(places))}")
        return places[which - 1]

    def _names(self) -> str:
        names = list(dict.fromkeys(self.words.names))
        return ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")

    def followed(self) -> list[tuple[int, str]]:
        """The words that are followed, and why: those asked for, else a pronoun, else the strongest link's."""
        if self.follow:
            return [(self.find(token), self._which(token)) for token in self.follow]
        content = [place for place, mark in enumerate(self.words.delimiter) if not mark]
        for place in content[1:]:
            if self.pronoun(place):
                return [(place, "a pronoun; token= follows another word")]
        between = np.max(
            [weights.max(0) for weights in self.weights], axis=0
        )  # (W, W): in the head that links them most
        far = [self._targets(place, reach=1) for place in content]
        best = [
            max((between[place, target] for target in there), default=0.0)
            for place, there in zip(content, far, strict=True)
        ]
        if not content or max(best) == 0:
            return [((content or [0])[0], "the first word")]
        return [(content[int(np.argmax(best))], "the strongest link beyond neighbours; token= follows another word")]

    def pronoun(self, place: int) -> bool:
        return self.words.names[place].casefold() in PRONOUNS

    def _which(self, token: str) -> str:
        """Where a word is in the text several times: which one this is."""
        place = self.find(token)
        name = self.words.names[place]
        places = [other for other, word in enumerate(self.words.names) if word.casefold() == name.casefold()]
        if len(places) == 1:
            return ""
        return f'number {places.index(place) + 1} of {len(places)}; token="{name}:2" is the second'

    def links(self, source: int | str, *, near: bool = False) -> list[Link]:
        """Every head's weights from a word to other words, strongest first.

        Left out, for much attention goes there anyway: delimiters, the word itself, its neighbours unless near=True,
        and in causal models the first word, where heads rest that look for nothing.
        """
        place = self.find(source) if isinstance(source, str) else source
        targets = self._targets(place, reach=0 if near else 1)
        links = [
            Link(layer, head, place, target, float(weights[head, place, target]))
            for layer, weights in zip(self.layers, self.weights, strict=True)
            for head in range(len(weights))
            for target in targets
        ]
        return sorted((link for link in links if link.weight > 0), key=lambda link: -link.weight)

    def _targets(self, place: int, *, reach: int) -> list[int]:
        """The words that a link from a word may lead to: further than its reach, and no place where attention rests."""
        first = 1 if self.causal else 0
        marks = self.words.delimiter
        return [j for j in range(first, len(marks)) if not marks[j] and abs(j - place) > reach]

    def ranking(self, source: int | str) -> list[Link]:
        """Each head's strongest link from a word, neighbours too, strongest first: what a head does with one word."""
        best: dict[tuple[int, int], Link] = {}
        for link in self.links(source, near=True):
            best.setdefault((link.layer, link.head), link)
        return list(best.values())

    def table(self, statistic: str) -> np.ndarray:
        """(L, H): one statistic of every head."""
        if statistic not in self.stats:
            raise HeadwiseError(f"there is no statistic {statistic!r}; there are {', '.join(self.stats)}")
        return self.stats[statistic]

    def standouts(self, kind: Kind) -> list[Standout]:
        """The heads of a kind on this text, best first."""
        table, equal = self.table(kind.statistic), self.equal[kind.statistic]
        if not self.can_tell(kind):
            return []
        found = [
            Standout(kind, layer, head, float(table[row, head]), float(equal[row]))
            for row, layer in enumerate(self.layers)
            for head in range(len(self.weights[row]))
            if table[row, head] >= self._level(kind)
        ]
        return sorted(found, key=lambda one: -one.score)

    @property
    def kinds(self) -> list[Kind]:
        """The ways to stand out that this model's heads have."""
        return [kind for kind in KINDS if kind.causal in (None, self.causal)]

    def can_tell(self, kind: Kind) -> bool:
        """Whether a kind can be told from equal attention here."""
        if self.tokens < FEWEST:
            return False
        return kind.relative or self._level(kind) <= HIGHEST

    def _level(self, kind: Kind) -> float:
        """From which score on a head is of a kind: never less than twice what equal attention has."""
        equal = float(self.equal[kind.statistic].max())
        return kind.threshold * equal if kind.relative else max(kind.threshold, 2 * equal)

    def criterion(self, kind: Kind) -> str:
        """The level in words."""
        if kind.relative:
            return f"{kind.statistic} ≥ {self._level(kind):.2f}, {kind.threshold:.0%} of equal attention's"
        return f"≥ {self._level(kind):.2f} {STATISTICS[kind.statistic]}"

    def to_json(self, head: str | tuple[int, int] | None = None) -> dict[str, Any]:
        """Everything but the matrices, and the matrix of one head where asked for."""
        names = self.words.names
        found: dict[str, Any] = {
            "text": self.text,
            "model": self.model,
            "tokens": self.tokens,
            "words": list(names),
            "unknown": [name for name, lost in zip(names, self.words.unknown, strict=False) if lost],
            "layers": list(self.layers),
            "causal": self.causal,
            "notes": list(self.notes),
            "followed": [
                {
                    "word": names[place],
                    "place": place,
                    "why": why,
                    "heads": [self._link_json(link) for link in self.ranking(place)],
                    "links": [self._link_json(link) for link in self.links(place)[:LISTED]],
                }
                for place, why in self.followed()
            ],
            "standouts": [
                {
                    "kind": kind.name,
                    "criterion": self.criterion(kind),
                    "head": one.name,
                    "score": one.score,
                    "equal": one.equal,
                }
                for kind in self.kinds
                for one in self.standouts(kind)
            ],
            "statistics": {name: _plain(table) for name, table in self.stats.items()},
            "equal": {name: _plain(row) for name, row in self.equal.items()},
        }
        if head is not None:
            layer, number = self.at(head)
            found["head"] = {"name": f"{layer}.{number}", "weights": _plain(self.matrix(head))}
        return found

    def _link_json(self, link: Link) -> dict[str, Any]:
        names = self.words.names
        return {"head": link.name, "from": names[link.source], "to": names[link.target], "weight": link.weight}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .terminal import overview

        yield overview(self, options.max_width, colour=console.color_system is not None)

    def __repr__(self) -> str:
        from .terminal import plain

        return plain(self)


def _span(numbers: range | tuple[int, ...]) -> str:
    """0, 1, 2 -> "0 to 2"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == last - first + 1:
        return f"{first} to {last}" if first < last else f"{first} alone"
    return ", ".join(map(str, numbers))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _plain(array: np.ndarray) -> Any:
    """Lists of numbers rounded to what is meant, None for what is not there: JSON knows no NaN."""
    if array.ndim > 1:
        return [_plain(row) for row in array]
    return [None if np.isnan(x) else round(float(x), 6) for x in array]
