"""Sums over texts that merge exactly, with the sums of the bootstrap beside them.

Per head and score there is a sum over queries and their number; the ratio is the mean over tokens. The same two are
kept for each of some hundred resampled corpora, in which a text counts as often as a Poisson number drawn from a hash
of the text itself. So intervals need no second pass and constant memory, tallies are added by adding arrays, and the
interval does not depend on how the corpus was split into parts.
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
LARGEST_SUM = 1e18  # above that of any corpus, and its square is still finite
LEAST_COUNT = 1e-9
Key = tuple[str, int]  # kind, layer
ARRAYS = ("top", "bottom", "first", "second", "texts")  # of a layer, see Sums


def identity(text: str) -> int:
    """A hash of a text in 64 bits, the same on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass
class Sums:
    """The sums of one layer: S scores, H heads and last uniform attention, R replicates."""

    top: np.ndarray  # (S, H + 1, 1 + R): the sums; index 0 is the corpus itself, then the resampled ones
    bottom: np.ndarray  # (S, 1 + R): the queries that each is a sum over
    first: np.ndarray  # (S, H + 1): sum over texts of the means per text
    second: np.ndarray  # (S, H + 1): sum of the squares of these means
    texts: np.ndarray  # (S,): texts with at least one query that counts

    @classmethod
    def zero(cls, numbers: int, heads: int, replicates: int) -> Sums:
        return cls(**{part: np.zeros(shape) for part, shape in _shapes(numbers, heads, replicates).items()})

    @classmethod
    def of(cls, kind: str, layer: int, arrays: dict[str, np.ndarray], names: tuple[str, ...], replicates: int) -> Sums:
        """The sums of one layer among the arrays of a file; a ValueError where shapes or values are wrong."""
        layer_arrays = {part: np.array(arrays[f"{kind}/{layer}/{part}"]) for part in ARRAYS}
        columns = layer_arrays["first"].shape[1] if layer_arrays["first"].ndim == 2 else 0
        for part, shape in _shapes(len(names), max(columns - 1, 1), replicates).items():
            x = layer_arrays[part]
            if x.shape != shape or x.dtype != np.float64:
                raise ValueError(f"{part} of {kind} layer {layer} is {x.dtype} {x.shape}, expected float64 {shape}")
            if not (np.abs(x) <= LARGEST_SUM).all():
                raise ValueError(f"{part} of {kind} layer {layer} has values that are not finite, or too large")
        if not (are_counts(layer_arrays["bottom"]) and are_counts(layer_arrays["texts"])):
            raise ValueError(f"{kind} layer {layer} has counts that are negative, or too close to zero")
        return cls(**layer_arrays)

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(vars(self))

    def add(self, top: np.ndarray, bottom: np.ndarray, weights: np.ndarray) -> None:
        """Add the texts of a batch: top (B, S, H + 1), bottom (B, S), weights (B, 1 + R) from `poisson_counts`."""
        batch = len(top)
        self.top += (top.reshape(batch, -1).T @ weights).reshape(self.top.shape)
        self.bottom += bottom.T @ weights
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(bottom[..., None] > 0, top / bottom[..., None], 0)
        self.first += means.sum(0)
        self.second += (means**2).sum(0)
        self.texts += (bottom > 0).sum(0)

    def plus(self, other: Sums) -> Sums:
        return Sums(**{name: array + other.arrays()[name] for name, array in self.arrays().items()})

    def means(self) -> np.ndarray:
        """The means over tokens, (S, H + 1)."""
        return _ratio(self.top[..., 0], self.bottom[:, None, 0])

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the 95 % interval of every mean, (S, H + 1) each; it always holds the mean itself."""
        plain = self.means()
        if self.top.shape[-1] < 2:
            return plain, plain
        resampled = _ratio(self.top[..., 1:], self.bottom[:, None, 1:])
        with np.errstate(invalid="ignore"):
            values = np.where(np.isnan(resampled), plain[..., None], resampled)  # a replicate without any text
            low, high = np.percentile(values, INTERVAL, axis=-1)
        return np.minimum(low, plain), np.maximum(high, plain)

    def spread(self) -> np.ndarray:
        """The standard deviation over texts of their means, (S, H + 1)."""
        count = self.texts[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            variance = self.second / count - (self.first / count) ** 2
        return np.sqrt(np.maximum(variance, 0))


def are_counts(x: np.ndarray) -> bool:
    """Whether these can be counts: 0, or no less than the smallest share that is counted."""
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
    """The sums of all layers of a model over some texts, and which texts these are."""

    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> the scores that are measured
    ways: dict[str, str] = field(default_factory=dict)  # kind -> way of attention
    sums: dict[Key, Sums] = field(default_factory=dict)
    texts: int = 0
    tokens: int = 0
    cut: int = 0  # texts that were too long
    seen: int = 0  # the sum of the texts' identities, which recognises the same corpus
    replicates: int = REPLICATES

    def open(self, key: Key, way: str, names: tuple[str, ...], heads: int) -> Sums:
        """The sums of a layer, zero at first."""
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
        """The sum of both; an error where they are of different models, or of the same texts."""
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
        """All arrays, flat: for files and for sums over ranks."""
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
        """The tally that gave these facts and arrays; a ValueError where they do not fit each other."""
        names = {
            kind: tuple(score_names)
            for kind, score_names in mapping(facts["names"], "names", lambda x, path: items(x, path, string)).items()
        }
        ways = mapping(facts["ways"], "ways", string)
        texts, tokens, cut, replicates = (count(facts[x], x) for x in ("texts", "tokens", "cut", "replicates"))
        if names.keys() != ways.keys() or not set(ways.values()) <= set(ANY):
            raise ValueError(f"ways are {ways!r} for names of {', '.join(names) or 'nothing'}")
        if type(facts["seen"]) is not int or not 0 <= facts["seen"] < 2**64:
            raise ValueError(f"seen must be a whole number of 64 bits, got {brief(facts['seen'])}")
        keys = [_key(key) for key in items(facts["layers"], "layers", anything)]
        if len(set(keys)) < len(keys):
            raise ValueError("a layer is listed twice")
        sums = {key: Sums.of(*key, arrays, names[key[0]], replicates) for key in keys}
        if wrong := arrays.keys() - {f"{kind}/{layer}/{part}" for kind, layer in keys for part in ARRAYS}:
            raise ValueError(f"array {min(wrong)!r} belongs to no layer")
        return cls(names, ways, sums, texts, tokens, cut, facts["seen"], replicates)


def _key(value: Any) -> Key:
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise ValueError(f"a layer is a kind and a number, got {brief(value)}")
    return value[0], count(value[1], "a layer's number")
