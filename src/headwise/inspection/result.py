"""What every head of a model does on one text, as a plain value: weights, statistics, links, heads that stand out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeadwiseError
from ..role_definitions import BOTH, CAUSAL, RoleDefinition, definition, meaning
from .words import Words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# words whose antecedent is worth knowing, so the first one is followed by default
PRONOUNS = frozenset("it its itself he him his himself she her hers herself they them their theirs themselves".split())
STATISTICS = {
    name: meaning(name)
    for name in ("entropy", "confidence", "distance", "previous", "next", "self", "first", "delimiter")
}
JSON_LINKS = 50  # links per followed word in JSON
MIN_TOKENS = 5  # on fewer, everything is near everything
MAX_LEVEL = 0.95  # the largest score that a head can be expected to reach


@dataclass(frozen=True, slots=True)
class Kind:
    """A role that one text can show: its name here, the role, and the statistic that decides."""

    name: str
    role: RoleDefinition
    statistic: str

    def is_possible(self, causal: bool) -> bool:
        """Whether heads of a causal model, or of one that attends both ways, can be of this kind."""
        return (CAUSAL if causal else BOTH) in self.role.ways


KINDS = (
    Kind("previous token", definition("previous"), "previous"),
    Kind("next token", definition("next"), "next"),
    Kind("itself", definition("self"), "self"),
    Kind("delimiter", definition("delimiter"), "delimiter"),
    Kind("first token", definition("first"), "first"),
    Kind("broad", definition("broad"), "entropy"),
)


@dataclass(frozen=True, slots=True)
class Link:
    """The weight of one head from one word to another; source and target are word numbers from 0."""

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
    """A head of a kind on this text: its score, and that of uniform attention."""

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
    """What every head does on one text: the result of `headwise.inspect`. It prints as a page.

    Layers and heads count from 0 and are written layer.head. L layers, H heads, W words.

    Attributes:
        text, model: the text, and the model's name.
        words: the words of the text, and the tokens that each is made of.
        layers: the model's own layer numbers.
        weights: per layer, (H, W, W) between words.
        stats: name -> (L, H), over the model's tokens; NaN where a layer has fewer heads.
        equal: name -> (L,), the statistics of uniform attention to all visible tokens.
        causal: whether no token attends to a later one.
        tokens: their number.
        notes: remarks about the text or the model.
        follow: the words to follow, as requested.

    Example:
        >>> seen = headwise.inspect("The cat sat on the mat because it was soft.")
        >>> seen.links("it")[0]                       # the strongest link of any head from "it"
        Link(layer=2, head=1, source=8, target=10, weight=0.76)
        >>> seen.matrix("3.1").shape                  # (W, W)
        (13, 13)
    """

    text: str
    model: str
    words: Words
    layers: tuple[int, ...]
    weights: tuple[np.ndarray, ...]
    stats: dict[str, np.ndarray]
    equal: dict[str, np.ndarray]
    causal: bool
    tokens: int
    notes: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()

    @property
    def heads(self) -> Iterator[tuple[int, int]]:
        """Every (layer, head)."""
        for layer, weights in zip(self.layers, self.weights, strict=True):
            for head in range(len(weights)):
                yield layer, head

    def matrix(self, head: str | tuple[int, int]) -> np.ndarray:
        """The weights of one head, "3.1" or (3, 1), between words: (W, W), one row per word that attends."""
        layer, number = self.head_key(head)
        weights: np.ndarray = self.weights[self.layers.index(layer)][number]
        return weights

    def head_key(self, head: str | tuple[int, int]) -> tuple[int, int]:
        """(layer, head) of a head in either spelling; an error if there is none."""
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
        names = [word.casefold() for word in self.words.names]
        name, occurrence = token.casefold().strip(), 1
        if name not in names and (parts := re.fullmatch(r"(.+):(\d{1,6})", name)):
            name, occurrence = parts[1], int(parts[2])
        places = [place for place, word in enumerate(names) if word == name]
        if not places:
            raise HeadwiseError(f"there is no word {token!r} in the text; there are {self._list_words()}")
        if not 1 <= occurrence <= len(places):
            raise HeadwiseError(f"there is no {token!r}: {name!r} is in the text {_times(len(places))}")
        return places[occurrence - 1]

    def _list_words(self) -> str:
        names = list(dict.fromkeys(self.words.names))
        return ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")

    def followed_words(self) -> list[tuple[int, str]]:
        """The words that are followed, and why: those requested, else a pronoun, else that of the strongest link."""
        if self.follow:
            return [(self.find(token), self._occurrence(token)) for token in self.follow]
        content = [place for place, is_delimiter in enumerate(self.words.delimiter) if not is_delimiter]
        for place in content[1:]:
            if self.is_pronoun(place):
                return [(place, "a pronoun; token= follows another word")]
        strongest = np.max([weights.max(0) for weights in self.weights], axis=0)  # (W, W): over all heads
        best = [
            max((strongest[place, target] for target in self._targets(place, reach=1)), default=0.0)
            for place in content
        ]
        if not content or max(best) == 0:
            return [((content or [0])[0], "the first word")]
        return [(content[int(np.argmax(best))], "the strongest link beyond neighbours; token= follows another word")]

    def is_pronoun(self, place: int) -> bool:
        return self.words.names[place].casefold() in PRONOUNS

    def _occurrence(self, token: str) -> str:
        """Which occurrence of its word this is, where the text has several."""
        place = self.find(token)
        name = self.words.names[place]
        places = [other for other, word in enumerate(self.words.names) if word.casefold() == name.casefold()]
        if len(places) == 1:
            return ""
        return f'number {places.index(place) + 1} of {len(places)}; token="{name}:2" is the second'

    def links(self, source: int | str, *, near: bool = False) -> list[Link]:
        """Every head's weights from a word to other words, strongest first.

        Left out, since much attention goes there anyway: delimiters, the word itself, its neighbours unless near=True,
        and in causal models the first word, which is an attention sink.
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
        """The words that a link from a word may lead to: further away than `reach`, and no attention sinks."""
        first = 1 if self.causal else 0
        delimiter = self.words.delimiter
        return [j for j in range(first, len(delimiter)) if not delimiter[j] and abs(j - place) > reach]

    def ranking(self, source: int | str) -> list[Link]:
        """Each head's strongest link from a word, neighbours included, strongest first."""
        best: dict[tuple[int, int], Link] = {}
        for link in self.links(source, near=True):
            best.setdefault((link.layer, link.head), link)
        return list(best.values())

    def table(self, statistic: str) -> np.ndarray:
        """One statistic of every head, (L, H)."""
        if statistic not in self.stats:
            raise HeadwiseError(f"there is no statistic {statistic!r}; there are {', '.join(self.stats)}")
        return self.stats[statistic]

    def standouts(self, kind: Kind) -> list[Standout]:
        """The heads of a kind on this text, best first."""
        table, equal = self.table(kind.statistic), self.equal[kind.statistic]
        if not self.can_tell(kind):
            return []
        standouts = [
            Standout(kind, layer, head, float(table[row, head]), float(equal[row]))
            for row, layer in enumerate(self.layers)
            for head in range(len(self.weights[row]))
            if table[row, head] >= self._level(kind)
        ]
        return sorted(standouts, key=lambda standout: -standout.score)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that heads of this model can be of."""
        return [kind for kind in KINDS if kind.is_possible(self.causal)]

    def can_tell(self, kind: Kind) -> bool:
        """Whether the text is long enough to tell heads of a kind from uniform attention."""
        if self.tokens < MIN_TOKENS:
            return False
        return kind.role.relative or self._level(kind) <= MAX_LEVEL

    def _level(self, kind: Kind) -> float:
        """The score that a head of a kind needs."""
        return kind.role.level(float(self.equal[kind.statistic].max()))

    def criterion(self, kind: Kind) -> str:
        """The level in words."""
        if kind.role.relative:
            return f"{kind.statistic} ≥ {self._level(kind):.2f}, {kind.role.threshold:.0%} of uniform attention's"
        return f"≥ {self._level(kind):.2f} {STATISTICS[kind.statistic]}"

    def to_json(self, head: str | tuple[int, int] | None = None) -> dict[str, Any]:
        """Everything but the matrices, as plain values; head: with the matrix of this one."""
        names = self.words.names
        data: dict[str, Any] = {
            "text": self.text,
            "model": self.model,
            "tokens": self.tokens,
            "words": list(names),
            "unknown": [name for name, is_unknown in zip(names, self.words.unknown, strict=False) if is_unknown],
            "layers": list(self.layers),
            "causal": self.causal,
            "notes": list(self.notes),
            "followed": [
                {
                    "word": names[place],
                    "place": place,
                    "why": reason,
                    "heads": [self.link_json(link) for link in self.ranking(place)],
                    "links": [self.link_json(link) for link in self.links(place)[:JSON_LINKS]],
                }
                for place, reason in self.followed_words()
            ],
            "standouts": [
                {
                    "kind": kind.name,
                    "criterion": self.criterion(kind),
                    "head": standout.name,
                    "score": standout.score,
                    "equal": standout.equal,
                }
                for kind in self.kinds
                for standout in self.standouts(kind)
            ],
            "statistics": {name: _plain(table) for name, table in self.stats.items()},
            "equal": {name: _plain(row) for name, row in self.equal.items()},
        }
        if head is not None:
            layer, number = self.head_key(head)
            data["head"] = {"name": f"{layer}.{number}", "weights": _plain(self.matrix(head))}
        return data

    def link_json(self, link: Link) -> dict[str, Any]:
        """A link with the words at its ends."""
        names = self.words.names
        return {"head": link.name, "from": names[link.source], "to": names[link.target], "weight": link.weight}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .terminal import draw_overview

        yield draw_overview(self, options.max_width, colour=console.color_system is not None)

    def __repr__(self) -> str:
        from .terminal import render_plain

        return render_plain(self)


def _span(numbers: range | tuple[int, ...]) -> str:
    """0, 1, 2 -> "0 to 2"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == last - first + 1:
        return f"{first} to {last}" if first < last else f"{first} alone"
    return ", ".join(map(str, numbers))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _plain(array: np.ndarray) -> Any:
    """Nested lists of rounded numbers; None for NaN, which JSON does not have."""
    if array.ndim > 1:
        return [_plain(row) for row in array]
    return [None if np.isnan(x) else round(float(x), 6) for x in array]
