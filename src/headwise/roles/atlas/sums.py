"""Sums over texts that merge exactly, with their bootstrap inside.

For every head and every number there is a sum over texts and how much it is a sum of; their ratio is the mean over
tokens. The same two are kept for each of some hundred resampled corpora, in which a text counts as often as a Poisson
number drawn from a hash of the text itself. So intervals need no second pass and no memory that grows, adding two
tallies is adding arrays, and the interval is the same however the corpus was cut into parts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import HeadwiseError
from ...json_documents import anything, brief, count, items, mapping, string
from ...resampling import INTERVAL
from ...role_definitions import ANY

REPLICATES = 200
LARGEST_SUM = 1e18  # more than any corpus gives, and its square is still a number
LEAST_COUNT = 1e-9
Key = tuple[str, int]  # kind, layer
SUMS = ("top", "bottom", "first", "second", "texts")  # the arrays of a layer, see Sums


def identity(text: str) -> int:
    """A text as 64 bits, the same on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass
class Sums:
    """Of one layer: what its heads and, in the last place, equal attention did. S numbers, H heads, R replicates."""

    top: np.ndarray  # (S, H + 1, 1 + R)
    bottom: np.ndarray  # (S, 1 + R)
    first: np.ndarray  # (S, H + 1): sum over texts of their own means
    second: np.ndarray  # (S, H + 1): and of their squares
    texts: np.ndarray  # (S,): texts that have anything to tell

    @classmethod
    def zero(cls, numbers: int, heads: int, replicates: int) -> Sums:
        return cls(**{part: np.zeros(shape) for part, shape in _shapes(numbers, heads, replicates).items()})

    @classmethod
    def of(cls, kind: str, layer: int, arrays: dict[str, np.ndarray], names: tuple[str, ...], replicates: int) -> Sums:
        """Those of one layer among the arrays of a file; a ValueError where they are not what sums are."""
        found = {part: np.array(arrays[f"{kind}/{layer}/{part}"]) for part in SUMS}
        columns = found["first"].shape[1] if found["first"].ndim == 2 else 0
        for part, shape in _shapes(len(names), max(columns - 1, 1), replicates).items():
            x = found[part]
            if x.shape != shape or x.dtype != np.float64:
                raise ValueError(f"{part} of {kind} layer {layer} is {x.dtype} {x.shape}, expected float64 {shape}")
            if not (np.abs(x) <= LARGEST_SUM).all():
                raise ValueError(f"{part} of {kind} layer {layer} has values that are not finite, or too large")
        if not (are_counts(found["bottom"]) and are_counts(found["texts"])):
            raise ValueError(f"{kind} layer {layer} has counts that are negative, or next to nothing")
        return cls(**found)

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(vars(self))

    def add(self, top: np.ndarray, bottom: np.ndarray, weights: np.ndarray) -> None:
        """Texts of a batch: top (B, S, H + 1), bottom (B, S), weights (B, 1 + R) as `poisson_counts` gives them."""
        batch = len(top)
        self.top += (top.reshape(batch, -1).T @ weights).reshape(self.top.shape)
        self.bottom += bottom.T @ weights
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(bottom[..., None] > 0, top / bottom[..., None], 0)
        self.first += means.sum(0)
        self.second += (means**2).sum(0)
        self.texts += (bottom > 0).sum(0)

    def plus(self, other: Sums) -> Sums:
        return Sums(**{name: mine + other.arrays()[name] for name, mine in self.arrays().items()})

    def means(self) -> np.ndarray:
        """(S, H + 1)."""
        return _ratio(self.top[..., 0], self.bottom[:, None, 0])

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the 95 % interval of every mean, (S, H + 1) each, never leaving the mean itself out."""
        plain = self.means()
        if self.top.shape[-1] < 2:
            return plain, plain
        drawn = _ratio(self.top[..., 1:], self.bottom[:, None, 1:])
        with np.errstate(invalid="ignore"):
            some = np.where(np.isnan(drawn), plain[..., None], drawn)  # a replicate that drew no text at all
            low, high = np.percentile(some, INTERVAL, axis=-1)
        return np.minimum(low, plain), np.maximum(high, plain)

    def spread(self) -> np.ndarray:
        """(S, H + 1): the standard deviation of the texts' own means."""
        count = self.texts[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            variance = self.second / count - (self.first / count) ** 2
        return np.sqrt(np.maximum(variance, 0))


def are_counts(x: np.ndarray) -> bool:
    """Whether means can be taken over these: 0 where there is nothing, else no less than anything that is counted."""
    return bool(((x == 0) | (x >= LEAST_COUNT)).all())


def _shapes(numbers: int, heads: int, replicates: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's arrays."""
    return {
        "top": (numbers, heads + 1, 1 + replicates),
        "bottom": (numbers, 1 + replicates),
        "first": (numbers, heads + 1),
        "second": (numbers, heads + 1),
        "texts": (numbers,),
    }


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(bottom > 0, top / bottom, np.nan)


@dataclass
class Tally:
    """The sums of all layers of a model over some texts, and which texts these were."""

    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> the numbers that are measured
    ways: dict[str, str] = field(default_factory=dict)  # kind -> way of attention
    sums: dict[Key, Sums] = field(default_factory=dict)
    texts: int = 0
    tokens: int = 0
    cut: int = 0  # texts that were too long
    seen: int = 0  # the texts' identities added up, to tell the same corpus when it comes again
    replicates: int = REPLICATES

    def open(self, key: Key, way: str, names: tuple[str, ...], heads: int) -> Sums:
        """The sums of a layer, made at its first call."""
        kind, layer = key
        if self.ways.setdefault(kind, way) != way:
            raise HeadwiseError(
                f"{kind} layer {layer} attends {way}, other {kind} layers {self.ways[kind]}; give them to watch"
            )
        if self.names.setdefault(kind, names) != names:
            raise HeadwiseError("roles were registered while the atlas was measured; register them before")
        if key not in self.sums:
            self.sums[key] = Sums.zero(len(names), heads, self.replicates)
        return self.sums[key]

    def count(self, identities: np.ndarray, tokens: int, cut: int) -> None:
        self.texts += len(identities)
        self.tokens += tokens
        self.cut += cut
        self.seen = (self.seen + int(identities.astype(object).sum())) % 2**64 if len(identities) else self.seen

    def plus(self, other: Tally) -> Tally:
        """Both; an error where they are not of the same model, or of the very same texts."""
        if (self.names, self.ways, self.replicates) != (other.names, other.ways, other.replicates) or {
            key: sums.top.shape for key, sums in self.sums.items()
        } != {key: sums.top.shape for key, sums in other.sums.items()}:
            raise HeadwiseError("these are atlases of different models or of other settings; they cannot be merged")
        if self.texts and (self.texts, self.seen) == (other.texts, other.seen):
            raise HeadwiseError(f"both atlases are of the same {self.texts:,} texts, which would count twice")
        return Tally(
            self.names, self.ways, {key: sums.plus(other.sums[key]) for key, sums in self.sums.items()},
            self.texts + other.texts, self.tokens + other.tokens, self.cut + other.cut,
            (self.seen + other.seen) % 2**64, self.replicates,
        )  # fmt: skip

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything that adds up, flat: for files and for sums over ranks."""
        return {f"{kind}/{layer}/{name}": x for (kind, layer), s in self.sums.items() for name, x in s.arrays().items()}

    def facts(self) -> dict[str, Any]:
        """The rest, as JSON."""
        return {
            "names": {kind: list(names) for kind, names in self.names.items()}, "ways": self.ways,
            "layers": [list(key) for key in self.sums], "texts": self.texts, "tokens": self.tokens, "cut": self.cut,
            "seen": self.seen, "replicates": self.replicates,
        }  # fmt: skip

    @classmethod
    def of(cls, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Tally:
        """What `facts` and `arrays` gave, put together again; a ValueError where they do not fit each other."""
        names = {
            kind: tuple(found)
            for kind, found in mapping(facts["names"], "names", lambda x, what: items(x, what, string)).items()
        }
        ways = mapping(facts["ways"], "ways", string)
        texts, tokens, cut, replicates = (count(facts[x], x) for x in ("texts", "tokens", "cut", "replicates"))
        if names.keys() != ways.keys() or not set(ways.values()) <= set(ANY):
            raise ValueError(f"ways are {ways!r} for names of {', '.join(names) or 'nothing'}")
        if type(facts["seen"]) is not int or not 0 <= facts["seen"] < 2**64:
            raise ValueError(f"seen must be a whole number of 64 bits, got {brief(facts['seen'])}")
        keys = [_key(key) for key in items(facts["layers"], "layers", anything)]
        if len(set(keys)) < len(keys):
            raise ValueError("a layer is there twice")
        sums = {key: Sums.of(*key, arrays, names[key[0]], replicates) for key in keys}
        if wrong := arrays.keys() - {f"{kind}/{layer}/{part}" for kind, layer in keys for part in SUMS}:
            raise ValueError(f"array {min(wrong)!r} belongs to no layer")
        return cls(names, ways, sums, texts, tokens, cut, facts["seen"], replicates)


def _key(value: Any) -> Key:
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise ValueError(f"a layer is a kind and a number, got {brief(value)}")
    return value[0], count(value[1], "a layer's number")
