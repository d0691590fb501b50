"""HeadStats: statistics of each head, stored as sums and maxima that combine exactly over batches, calls and ranks.

The names of the statistics, and the order in which the kernels write them, are defined here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import HeadwiseError

SHARE = "share:"  # prefix of the user's classes of keys, so that none is mistaken for a built-in statistic
# The columns of sums that the kernels write, in this order, followed by one per class of keys:
# the enumeration in call.h (a test compares them) and the columns of triton/kernel.py (which reads them from here).
COLUMNS = (
    "entropy", "confidence", "first", "distance", "previous", "next", "self", "sink", "lse", "max_logit", "count",
)  # fmt: skip
MAXIMA = ("max_logit",)  # the largest over the real queries, not the sum
Columns = tuple[dict[str, Any], Any, dict[str, Any]]  # sums, count and maxima
POSITIONAL = ("distance", "previous", "next", "self")  # absent in cross-attention
STEPS = {"previous": -1, "next": 1, "self": 0}  # the key that a statistic is the weight of, relative to the query


class HeadStats:
    """Statistics of every head of one attention layer.

    Reading one gives its mean over the real queries of all sequences: those that count and have a visible key. A mean
    over no query at all is NaN. `max_logit` is the largest over them instead, and -inf over none. Arrays are NumPy
    arrays or PyTorch tensors, like the inputs.

    Args:
        sums: name -> (B, H), summed over the real queries.
        count: (B, H), the number of real queries.
        maxima: name -> (B, H), the largest over the real queries; -inf if there is none.
        received: (B, H, Tk), the weight each key receives, summed over the real queries; None if it was not requested.

    Example:
        >>> _, stats = headwise.head_stats(q, k, v, classes={"delimiter": is_delimiter})
        >>> stats.entropy, stats["entropy"]    # (H,) each, the mean over all queries in nats
        >>> stats.per_sequence("entropy")      # (B, H)
        >>> stats.share("delimiter")           # (H,), the mean weight on a class of keys
        >>> stats.max_logit                    # (H,), the largest scale * q.k
        >>> stats + other                      # the sequences of two batches side by side
        >>> stats.continued(other)             # more queries of the same sequences
    """

    __slots__ = ("_compute", "count", "maxima", "received", "sums")
    _compute: Callable[[], Columns]

    def __init__(self, sums: dict[str, Any], count: Any, maxima: dict[str, Any] | None = None, received: Any = None):
        self.sums = sums  # name -> (B, H), summed over the real queries
        self.count = count  # (B, H) real queries
        self.maxima = maxima or {}  # name -> (B, H), the largest over the real queries
        self.received = received  # (B, H, Tk) or None

    @classmethod
    def lazy(cls, compute: Callable[[], Columns]) -> HeadStats:
        """Sums, count and maxima that `compute` returns on first use: naming them can take longer than a short call."""
        stats = cls.__new__(cls)
        stats._compute, stats.received = compute, None
        return stats

    @classmethod
    def from_columns(cls, columns: Any, classes: Sequence[str], *, cross: bool, sinks: bool) -> HeadStats:
        """From a kernel's output (COLUMNS and classes, B, H), without the columns that do not apply."""
        return cls(*name_columns(columns, classes, cross=cross, sinks=sinks))

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        slots = {"sums": self.sums, "count": self.count, "maxima": self.maxima}  # forces a lazy value
        return None, {**slots, "received": self.received}

    @property
    def names(self) -> list[str]:
        """The names of all statistics; a class of keys is "share:NAME"."""
        return [*self.sums, *self.maxima]

    def __getitem__(self, name: str) -> Any:
        return _largest(self.maxima[name]) if name in self.maxima else self._sum(name).sum(0) / self.count.sum(0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while being copied, no attribute is set yet
            raise AttributeError(name)
        if name in HeadStats.__slots__:
            self.sums, self.count, self.maxima = self._compute()
            return getattr(self, name)
        if name not in self:
            raise AttributeError(f"no statistic {name!r} here; there are {', '.join(self)}")
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self if name.isidentifier())]

    def __contains__(self, name: object) -> bool:
        return name in self.sums or name in self.maxima

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def share(self, name: str) -> Any:
        """Mean weight on the keys of a user's class, (H,)."""
        return self[SHARE + name]

    def per_sequence(self, name: str) -> Any:
        """(B, H): the mean, or the maximum, over each sequence's real queries."""
        return self.maxima[name] if name in self.maxima else self._sum(name) / self.count

    def _sum(self, name: str) -> Any:
        if name not in self.sums:
            raise HeadwiseError(f"no statistic {name!r} here; there are {', '.join(self)}")
        return self.sums[name]

    def __add__(self, other: HeadStats) -> HeadStats:
        """The sequences of both, concatenated; `received` is padded with zeros to the larger number of keys."""
        if not isinstance(other, HeadStats):
            return NotImplemented
        self._check_compatible(other)
        return concatenate([self, other])

    def continued(self, other: HeadStats) -> HeadStats:
        """These statistics and those of further queries of the same sequences, as in cached decoding."""
        self._check_compatible(other)
        if self.count.shape != other.count.shape:
            raise HeadwiseError(
                f"{len(other.count)} sequences cannot continue {len(self.count)}; to join two batches add them"
            )
        return join_queries(self, other)

    def total(self) -> HeadStats:
        """All sequences joined into one: the same means and maxima, in a size that does not grow with the batch.

        `received` is dropped: the keys of different sequences are not the same.
        """
        sums = {name: x.sum(0)[None] for name, x in self.sums.items()}
        return HeadStats(sums, self.count.sum(0)[None], {name: _largest(x)[None] for name, x in self.maxima.items()})

    def _map(self, function: Callable[[Any], Any]) -> HeadStats:
        """A function applied to every array."""
        sums, maxima = ({name: function(x) for name, x in part.items()} for part in (self.sums, self.maxima))
        return HeadStats(sums, function(self.count), maxima, None if self.received is None else function(self.received))

    def _check_compatible(self, other: HeadStats) -> None:
        names, others = ({*x, *(() if x.received is None else ("received",))} for x in (self, other))
        if names != others:
            differing = ", ".join(sorted(names ^ others))
            raise HeadwiseError(f"these statistics are not of the same kind: only one of them has {differing}")
        if self.count.shape[1] != other.count.shape[1]:
            raise HeadwiseError(f"statistics of {self.count.shape[1]} and {other.count.shape[1]} heads cannot be added")

    def numpy(self) -> HeadStats:
        """The same statistics in NumPy arrays."""
        return self._map(_numpy)

    def to_json(self) -> dict[str, Any]:
        """Sums, counts and maxima as lists, None for a maximum over no query; `from_json` restores them exactly."""
        plain = self.numpy()
        sums = {name: x.tolist() for name, x in plain.sums.items()}
        maxima = {
            name: [[None if y == -np.inf else y for y in row] for row in x.tolist()] for name, x in plain.maxima.items()
        }
        data = {"heads": plain.count.shape[1], "count": plain.count.tolist(), "sums": sums, "maxima": maxima}
        if plain.received is not None:
            data |= {"keys": plain.received.shape[2], "received": plain.received.tolist()}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadStats:
        """Restore the result of `to_json`, in NumPy arrays."""
        heads = data["heads"]

        def table(rows: Any) -> Any:
            return np.asarray(rows, float).reshape(-1, heads)  # (B, H), also of no sequences

        def maxima(rows: Any) -> Any:
            return table([[-np.inf if y is None else y for y in row] for row in rows])

        received = None
        if "received" in data:
            received = np.asarray(data["received"], float).reshape(len(data["count"]), heads, data["keys"])
        return cls(
            {name: table(x) for name, x in data["sums"].items()},
            table(data["count"]),
            {name: maxima(x) for name, x in data.get("maxima", {}).items()},  # absent before there were any
            received,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadStats):
            return NotImplemented
        return self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def __repr__(self) -> str:
        batch, heads = self.count.shape
        plain = self.numpy()
        lines = [
            f"HeadStats of {heads} heads over {batch} sequences, {int(plain.count.max(initial=0))} queries at most"
        ]
        with np.errstate(invalid="ignore"):  # the mean over no query is NaN
            for name in plain:
                row = " ".join(f"{x:7.3f}" for x in plain[name][:12])
                lines.append(f"  {name:12} {row}{' ...' if heads > 12 else ''}")
        return "\n".join(lines)


def name_columns(columns: Any, classes: Sequence[str], *, cross: bool, sinks: bool) -> Columns:
    """Sums, count and maxima of a kernel's columns (COLUMNS and classes, B, H), without those that do not apply."""
    names = [*COLUMNS, *(SHARE + name for name in classes)]
    sums = dict(zip(names, columns, strict=True))
    for name in (POSITIONAL if cross else ()) + (() if sinks else ("sink",)):
        del sums[name]
    count, maxima = sums.pop("count"), {name: sums.pop(name) for name in MAXIMA}
    return sums, count, maxima


def concatenate(parts: Sequence[HeadStats]) -> HeadStats:
    """The sequences of several statistics, one after the other; only what all of them have."""
    sums, maxima = (
        {name: _concatenate([x[name] for x in tables]) for name in tables[0] if all(name in x for x in tables)}
        for tables in ([x.sums for x in parts], [x.maxima for x in parts])
    )
    received = None
    if all(x.received is not None for x in parts):
        received = _concatenate(_pad_keys([_like(parts[0].received, x.received) for x in parts]))
    return HeadStats(sums, _concatenate([x.count for x in parts]), maxima, received)


def join_queries(stats: HeadStats, other: HeadStats) -> HeadStats:
    """The statistics of two sets of queries of the same sequences; only what both of them have."""
    sums = {name: x + _like(x, other.sums[name]) for name, x in stats.sums.items() if name in other.sums}
    maxima = {
        name: _maximum(x, _like(x, other.maxima[name])) for name, x in stats.maxima.items() if name in other.maxima
    }
    received = None
    if stats.received is not None and other.received is not None:
        a, b = _pad_keys([stats.received, _like(stats.received, other.received)])
        received = a + b
    return HeadStats(sums, stats.count + _like(stats.count, other.count), maxima, received)


def select_sequences(stats: HeadStats, sequences: Any) -> HeadStats:
    """The statistics of some sequences: a (B,) bool mask or indices."""
    return stats._map(lambda x: x[sequences])


def flatten_stats(stats: HeadStats) -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
    """All arrays, and the names that `unflatten_stats` restores the statistics with."""
    leaves = [*stats.sums.values(), *stats.maxima.values(), stats.count]
    received = () if stats.received is None else (stats.received,)
    return [*leaves, *received], (tuple(stats.sums), tuple(stats.maxima))


def unflatten_stats(leaves: Iterable[Any], names: Sequence[Sequence[str]]) -> HeadStats:
    """The inverse of `flatten_stats`."""
    arrays = iter(leaves)
    sums, maxima = ({name: next(arrays) for name in part} for part in names)
    return HeadStats(sums, next(arrays), maxima, next(arrays, None))


def stats_from_weights(
    weights: Any,
    *,
    offset: Any = 0,
    queries: Any = None,
    classes: Mapping[str, Any] | None = None,
    cross: bool = False,
    sinks: bool = False,
    visible: Any = None,
    first: Any = None,
    logits: Any = None,
    lse: Any = None,
    received: bool = False,
) -> HeadStats:
    """The statistics of full weights (B, H, Tq, Tk), NumPy's or PyTorch's: the definition of each of them.

    Args:
        weights: rows that sum to one, or to less with sinks; a query with no visible keys has a row of zeros.
        offset: query i is at key position i + offset; an int, or (B,).
        queries: (B, Tq) bool, the queries that count; all by default.
        classes: {name: (B, Tk) bool}, keys whose share of the weight to measure.
        cross: whether positions of queries and keys are not comparable, so that there are no positional statistics.
        sinks: whether the weight that is missing from a row is the sink's.
        visible: (B, H, Tq, Tk) bool, the keys each query may attend to; by default those with a weight other than 0.
        first: (B, Tk) bool, the first existing key of each sequence; by default the first that a counted query sees.
        logits: (B, H, Tq, Tk), scale * q.k before softcap and bias, or (B, H, Tq), the largest of each query's visible
            keys: without them there is no max_logit.
        lse: (B, H, Tq), the log-sum-exp of each query's scores and sink: without it there is no lse.
        received: whether to compute the weight that each key receives.

    Example:
        >>> stats_from_weights(model(**inputs, output_attentions=True).attentions[0]).entropy
    """
    if not isinstance(weights, np.ndarray):
        from .weight_stats import stats_from_tensor

        return stats_from_tensor(
            weights, offset=offset, queries=queries, classes=classes, cross=cross, sinks=sinks, visible=visible,
            first=first, logits=logits, lse=lse, received=received,
        )  # fmt: skip
    a = weights.astype(float)
    i, j = np.arange(a.shape[2])[:, None], np.arange(a.shape[3])
    visible = a != 0 if visible is None else visible
    real = visible.any(-1) if queries is None else visible.any(-1) & queries[:, None]  # (B, H, Tq)
    if first is None:
        exists = (visible & real[..., None]).any(2).any(1)  # (B, Tk)
        first = exists & (exists.cumsum(-1) == 1)
    step = j - (i + (offset if isinstance(offset, int) else offset.reshape(-1, 1, 1, 1)))  # (B or 1, 1, Tq, Tk)
    per_query = {
        "entropy": -(a * np.log(np.where(a == 0, 1.0, a))).sum(-1),
        "confidence": a.max(-1) if a.shape[-1] else a.sum(-1),
        "first": (a * first[:, None, None]).sum(-1),
    }
    if not cross:
        per_query["distance"] = (a * abs(step)).sum(-1)
        per_query |= {name: (a * (step == at)).sum(-1) for name, at in STEPS.items()}
    if sinks:
        per_query["sink"] = 1 - a.sum(-1)
    if lse is not None:
        per_query["lse"] = lse
    per_query |= {SHARE + name: (a * keys[:, None, None]).sum(-1) for name, keys in (classes or {}).items()}
    sums = {name: np.where(real, values, 0.0).sum(-1) for name, values in per_query.items()}
    maxima = {}
    if logits is not None:
        of_rows = logits if logits.ndim == 3 else _largest(np.where(visible, logits, -np.inf), -1)
        maxima["max_logit"] = _largest(np.where(real, of_rows, -np.inf), -1)
    return HeadStats(
        sums, real.sum(-1).astype(float), maxima, np.where(real[..., None], a, 0.0).sum(2) if received else None
    )


def _concatenate(parts: Sequence[Any]) -> Any:
    """Arrays one after the other, in the kind of the first."""
    parts = [_like(parts[0], x) for x in parts]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(parts)


def _pad_keys(parts: Sequence[Any]) -> list[Any]:
    """Weights per key (B, H, Tk), all of one kind of array, padded on the right with zeros to the most keys."""
    keys = max(x.shape[2] for x in parts)
    if isinstance(parts[0], np.ndarray):
        return [np.pad(x, ((0, 0), (0, 0), (0, keys - x.shape[2]))) for x in parts]
    import torch

    return [torch.nn.functional.pad(x, (0, keys - x.shape[2])) for x in parts]


def _maximum(a: Any, b: Any) -> Any:
    """The larger of two arrays, element by element; NaN if one of them is."""
    if isinstance(a, np.ndarray):
        return np.maximum(a, b)
    import torch

    return torch.maximum(a, b)


def _largest(x: Any, dim: int = 0) -> Any:
    """The maximum over a dimension: NaN if one is among them, -inf over nothing."""
    if isinstance(x, np.ndarray):
        return x.max(dim, initial=-np.inf)
    return x.amax(dim) if x.shape[dim] else x.sum(dim) - np.inf


def _like(a: Any, b: Any) -> Any:
    """b as the kind of array that a is."""
    if isinstance(a, np.ndarray):
        return _numpy(b)
    import torch

    return torch.as_tensor(b, device=a.device)


def _numpy(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.detach().cpu().numpy()
