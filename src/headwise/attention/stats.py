"""HeadStats: statistics of each head's weights, kept as sums that add up exactly over batches, calls and ranks.

The names of the statistics, and the order in which the kernels write them, are defined here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import HeadwiseError

SHARE = "share:"  # prefix of the user's classes of keys, so that none is mistaken for a built-in statistic
# The columns of sums that the kernels write, in this order, followed by one per class of keys:
# the enumeration in call.h (a test compares them) and the columns of triton/kernel.py (which reads them from here).
COLUMNS = ("entropy", "confidence", "first", "distance", "previous", "next", "self", "sink", "count")
POSITIONAL = ("distance", "previous", "next", "self")  # absent in cross-attention
STEPS = {"previous": -1, "next": 1, "self": 0}  # the key that a statistic is the weight of, relative to the query


class HeadStats:
    """Statistics of every head of one attention layer.

    Reading one gives its mean over the real queries of all sequences: those that count and have a visible key. A mean
    over no query at all is NaN. Arrays are NumPy's or PyTorch's, whichever went in.

    Args:
        sums: name -> (B, H), summed over the real queries.
        count: (B, H), the number of real queries.

    Example:
        >>> _, stats = headwise.head_stats(q, k, v, classes={"delimiter": is_delimiter})
        >>> stats.entropy, stats["entropy"]    # (H,) each, the mean over all queries in nats
        >>> stats.per_sequence("entropy")      # (B, H)
        >>> stats.share("delimiter")           # (H,), the mean weight on a class of keys
        >>> stats + other                      # the sequences of two batches side by side
        >>> stats.continued(other)             # more queries of the same sequences
    """

    __slots__ = ("_compute", "count", "sums")
    _compute: Callable[[], tuple[dict[str, Any], Any]]

    def __init__(self, sums: dict[str, Any], count: Any):
        self.sums = sums  # name -> (B, H), summed over the real queries
        self.count = count  # (B, H) real queries

    @classmethod
    def lazy(cls, compute: Callable[[], tuple[dict[str, Any], Any]]) -> HeadStats:
        """Sums and count that `compute` returns on first use: naming them can take longer than a short call."""
        stats = cls.__new__(cls)
        stats._compute = compute
        return stats

    @classmethod
    def from_columns(cls, columns: Any, classes: Sequence[str], *, cross: bool, sinks: bool) -> HeadStats:
        """From what a kernel wrote: (COLUMNS and classes, B, H), of which those that do not apply are dropped."""
        return cls(*name_columns(columns, classes, cross=cross, sinks=sinks))

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"sums": self.sums, "count": self.count}  # forces a lazy value

    @property
    def names(self) -> list[str]:
        """The names of all statistics; a class of keys is "share:NAME"."""
        return list(self.sums)

    def __getitem__(self, name: str) -> Any:
        return self._sum(name).sum(0) / self.count.sum(0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while being copied, no attribute is set yet
            raise AttributeError(name)
        if name in HeadStats.__slots__:
            self.sums, self.count = self._compute()
            return getattr(self, name)
        if name not in self.sums:
            raise AttributeError(f"no statistic {name!r} here; there are {', '.join(self.sums)}")
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self.sums if name.isidentifier())]

    def __contains__(self, name: object) -> bool:
        return name in self.sums

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def share(self, name: str) -> Any:
        """Mean weight on the keys of a user's class, (H,)."""
        return self[SHARE + name]

    def per_sequence(self, name: str) -> Any:
        """(B, H): the mean over each sequence's real queries."""
        return self._sum(name) / self.count

    def _sum(self, name: str) -> Any:
        if name not in self.sums:
            raise HeadwiseError(f"no statistic {name!r} here; there are {', '.join(self.sums)}")
        return self.sums[name]

    def __add__(self, other: HeadStats) -> HeadStats:
        """The sequences of both, side by side."""
        if not isinstance(other, HeadStats):
            return NotImplemented
        self._check_compatible(other)
        sums = {name: _concatenate(x, other.sums[name]) for name, x in self.sums.items()}
        return HeadStats(sums, _concatenate(self.count, other.count))

    def continued(self, other: HeadStats) -> HeadStats:
        """These statistics and those of further queries of the same sequences, as in cached decoding."""
        self._check_compatible(other)
        if self.count.shape != other.count.shape:
            raise HeadwiseError(
                f"{len(other.count)} sequences cannot continue {len(self.count)}; to join two batches add them"
            )
        sums = {name: x + _like(x, other.sums[name]) for name, x in self.sums.items()}
        return HeadStats(sums, self.count + _like(self.count, other.count))

    def total(self) -> HeadStats:
        """All sequences summed into one: the same means, in a size that does not grow with the batch."""
        return HeadStats({name: x.sum(0)[None] for name, x in self.sums.items()}, self.count.sum(0)[None])

    def _check_compatible(self, other: HeadStats) -> None:
        if set(self.sums) != set(other.sums):
            differing = ", ".join(sorted(set(self.sums) ^ set(other.sums)))
            raise HeadwiseError(f"these statistics are not of the same kind: only one of them has {differing}")
        if self.count.shape[1] != other.count.shape[1]:
            raise HeadwiseError(f"statistics of {self.count.shape[1]} and {other.count.shape[1]} heads cannot be added")

    def numpy(self) -> HeadStats:
        """The same statistics in NumPy arrays."""
        return HeadStats({name: _numpy(x) for name, x in self.sums.items()}, _numpy(self.count))

    def to_json(self) -> dict[str, Any]:
        """Sums and counts as lists; `from_json` restores them exactly."""
        plain = self.numpy()
        sums = {name: x.tolist() for name, x in plain.sums.items()}
        return {"heads": plain.count.shape[1], "count": plain.count.tolist(), "sums": sums}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadStats:
        """What `to_json` wrote, in NumPy arrays."""

        def table(rows: Any) -> Any:
            return np.asarray(rows, float).reshape(-1, data["heads"])  # (B, H), also of no sequences

        return cls({name: table(x) for name, x in data["sums"].items()}, table(data["count"]))

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
            for name in plain.sums:
                row = " ".join(f"{x:7.3f}" for x in plain[name][:12])
                lines.append(f"  {name:12} {row}{' ...' if heads > 12 else ''}")
        return "\n".join(lines)


def name_columns(columns: Any, classes: Sequence[str], *, cross: bool, sinks: bool) -> tuple[dict[str, Any], Any]:
    """The sums and the count of a kernel's columns (COLUMNS and classes, B, H), without those that do not apply."""
    names = [*COLUMNS, *(SHARE + name for name in classes)]
    sums = dict(zip(names, columns, strict=True))
    for name in (POSITIONAL if cross else ()) + (() if sinks else ("sink",)):
        del sums[name]
    count = sums.pop("count")
    return sums, count


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
) -> HeadStats:
    """The statistics of full weights (B, H, Tq, Tk), NumPy's or PyTorch's: the definition of each of them.

    Args:
        weights: rows that sum to one, or to less with sinks; a query with no visible keys has a row of zeros.
        offset: query i is at key position i + offset; an int, or (B,).
        queries: (B, Tq) bool, the queries that count; all by default.
        classes: {name: (B, Tk) bool}, keys whose share of the weight is wanted.
        cross: positions of queries and keys do not compare, so there are no positional statistics.
        sinks: whether the weight that is missing from a row is the sink's.
        visible: (B, H, Tq, Tk) bool, the keys each query may attend to; by default those with a weight above 0.
        first: (B, Tk) bool, the first existing key of each sequence; by default the first that a counted query sees.

    Example:
        >>> stats_from_weights(model(**inputs, output_attentions=True).attentions[0]).entropy
    """
    xp, a, i, j = _in_double(weights)  # NumPy or PyTorch
    visible = a > 0 if visible is None else visible
    real = visible.any(-1) if queries is None else visible.any(-1) & queries[:, None]  # (B, H, Tq)
    if first is None:
        exists = (visible & real[..., None]).any(2).any(1)  # (B, Tk)
        first = exists & (exists.cumsum(-1) == 1)
    step = j - (i + (offset if isinstance(offset, int) else offset.reshape(-1, 1, 1, 1)))  # (B or 1, 1, Tq, Tk)
    per_query = {
        "entropy": -(a * xp.log(xp.where(a > 0, a, 1.0))).sum(-1),
        "confidence": xp.amax(a, -1) if a.shape[-1] else a.sum(-1),
        "first": (a * first[:, None, None]).sum(-1),
    }
    if not cross:
        per_query["distance"] = (a * abs(step)).sum(-1)
        per_query |= {name: (a * (step == at)).sum(-1) for name, at in STEPS.items()}
    if sinks:
        per_query["sink"] = 1 - a.sum(-1)
    per_query |= {SHARE + name: (a * keys[:, None, None]).sum(-1) for name, keys in (classes or {}).items()}
    sums = {name: xp.where(real, values, 0.0).sum(-1) for name, values in per_query.items()}
    return HeadStats(sums, xp.where(real, xp.ones_like(per_query["first"]), 0.0).sum(-1))


def _in_double(weights: Any) -> tuple[Any, Any, Any, Any]:
    """The array's library, the weights in float64, and the numbers of queries (Tq, 1) and keys (Tk,)."""
    rows, keys = weights.shape[2:]
    if isinstance(weights, np.ndarray):
        return np, weights.astype(float), np.arange(rows)[:, None], np.arange(keys)
    import torch

    at = weights.device
    a = weights.detach().to(torch.float32 if at.type == "mps" else torch.float64)  # Apple's GPUs have no float64
    return torch, a, torch.arange(rows, device=at)[:, None], torch.arange(keys, device=at)


def _concatenate(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.concatenate([a, _like(a, b)])
    import torch

    return torch.cat([a, _like(a, b)])


def _like(a: Any, b: Any) -> Any:
    """b as the kind of array that a is."""
    if isinstance(a, np.ndarray):
        return _numpy(b)
    import torch

    return torch.as_tensor(b, device=a.device)


def _numpy(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.detach().cpu().numpy()
