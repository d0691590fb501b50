"""HeadStats: what each head does with its weights, as sums that add up exactly over batches, calls and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import HeadwiseError

SHARE = "share:"  # classes of the user's stand beside the built-in names, and must not be mistaken for them


class HeadStats:
    """Statistics of every head of one attention layer.

    `stats["entropy"]` or `stats.entropy` is the mean over the real queries of all sequences, (H,);
    `stats.per_sequence("entropy")` is (B, H); `stats.share("delimiter")` the mean weight on a class of keys.
    A mean over no query at all is NaN. `a + b` puts the sequences of two batches side by side;
    `a.continued(b)` adds more queries of the same sequences. Arrays are NumPy's or PyTorch's, whichever went in.
    """

    __slots__ = ("_make", "count", "sums")
    _make: Callable[[], tuple[dict[str, Any], Any]]

    def __init__(self, sums: dict[str, Any], count: Any):
        self.sums = sums  # name -> (B, H), summed over the real queries
        self.count = count  # (B, H) real queries

    @classmethod
    def later(cls, make: Callable[[], tuple[dict[str, Any], Any]]) -> HeadStats:
        """Sums and count that `make` gives when someone looks: taking them apart can last longer than a short call."""
        stats = cls.__new__(cls)
        stats._make = make
        return stats

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"sums": self.sums, "count": self.count}  # made by now

    @property
    def names(self) -> list[str]:
        """Every statistic there is; a class of keys as "share:NAME"."""
        return list(self.sums)

    def __getitem__(self, name: str) -> Any:
        return self._sum(name).sum(0) / self.count.sum(0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while being copied there is nothing yet
            raise AttributeError(name)
        if name in HeadStats.__slots__:
            self.sums, self.count = self._make()
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
        """Mean weight on the keys of a class of the user's, (H,)."""
        return self[SHARE + name]

    def per_sequence(self, name: str) -> Any:
        """(B, H): the mean over each sequence's real queries."""
        return self._sum(name) / self.count

    def _sum(self, name: str) -> Any:
        if name not in self.sums:
            raise HeadwiseError(f"no statistic {name!r} here; there are {', '.join(self.sums)}")
        return self.sums[name]

    def __add__(self, other: HeadStats) -> HeadStats:
        """The sequences of both."""
        if not isinstance(other, HeadStats):
            return NotImplemented
        self._check_alike(other)
        sums = {name: _stack(mine, other.sums[name]) for name, mine in self.sums.items()}
        return HeadStats(sums, _stack(self.count, other.count))

    def continued(self, other: HeadStats) -> HeadStats:
        """More queries of the same sequences, as cached decoding gives them."""
        self._check_alike(other)
        if self.count.shape != other.count.shape:
            raise HeadwiseError(
                f"{len(other.count)} sequences cannot continue {len(self.count)}; to join two batches add them"
            )
        sums = {name: mine + _like(mine, other.sums[name]) for name, mine in self.sums.items()}
        return HeadStats(sums, self.count + _like(self.count, other.count))

    def total(self) -> HeadStats:
        """All sequences summed into one: the same means, a size that does not grow."""
        return HeadStats({name: x.sum(0)[None] for name, x in self.sums.items()}, self.count.sum(0)[None])

    def _check_alike(self, other: HeadStats) -> None:
        if set(self.sums) != set(other.sums):
            odd = ", ".join(sorted(set(self.sums) ^ set(other.sums)))
            raise HeadwiseError(f"these statistics are not of the same kind: only one of them has {odd}")
        if self.count.shape[1] != other.count.shape[1]:
            raise HeadwiseError(f"statistics of {self.count.shape[1]} and {other.count.shape[1]} heads cannot be added")

    def numpy(self) -> HeadStats:
        """The same in NumPy arrays, off any device."""
        return HeadStats({name: _numpy(x) for name, x in self.sums.items()}, _numpy(self.count))

    def to_json(self) -> dict[str, Any]:
        plain = self.numpy()
        sums = {name: x.tolist() for name, x in plain.sums.items()}
        return {"heads": plain.count.shape[1], "count": plain.count.tolist(), "sums": sums}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadStats:
        def table(rows: Any) -> Any:
            return np.asarray(rows, float).reshape(-1, data["heads"])  # also of no sequences at all

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
        with np.errstate(invalid="ignore"):  # no query, no mean
            for name in plain.sums:
                row = " ".join(f"{x:7.3f}" for x in plain[name][:12])
                lines.append(f"  {name:12} {row}{' ...' if heads > 12 else ''}")
        return "\n".join(lines)


def _stack(a: Any, b: Any) -> Any:
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
