"""What watch gives: one value a layer, with the statistics, weights, links and outputs of its heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.stats import HeadStats
from ...errors import HeadwiseError
from ...heads import Heads


class Links(NamedTuple):
    """The strongest keys of every query."""

    keys: Tensor  # (B, H, Tq, k)
    weights: Tensor  # (B, H, Tq, k)


class Rows:
    """Weights of some heads, by their own numbers: `weights[b, head]` is (rows, Tk)."""

    def __init__(self, kept: Tensor, heads: list[int], rows: list[int] | None) -> None:
        self.tensor = kept  # (B, heads, rows, Tk)
        self.heads = heads
        self.rows = rows

    def __getitem__(self, at: Any) -> Tensor:
        if not isinstance(at, tuple) or len(at) < 2:
            raise HeadwiseError(
                f"{self!r} is indexed by sequence and head, [b, head], got [{at!r}]; `.tensor` has all that was kept"
            )
        batch, head, *rest = at
        if isinstance(head, bool) or not hasattr(head, "__index__"):
            raise HeadwiseError(f"a head is a number, got {head!r}; `.tensor` has all heads that were kept")
        if head not in self.heads:
            raise HeadwiseError(f"head {head} was not kept; heads {', '.join(map(str, self.heads))} were")
        try:
            return self.tensor[(batch, self.heads.index(head), *rest)]
        except (IndexError, TypeError) as error:
            raise HeadwiseError(f"{self!r} has no [{', '.join(map(repr, at))}]: {error}") from None

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Any:
        raise HeadwiseError(f"{self!r} is indexed by sequence and head, [b, head]; `.tensor` has all that was kept")

    def __repr__(self) -> str:
        return f"Rows(heads={self.heads}, shape={tuple(self.tensor.shape)})"


@dataclass
class Run:
    """A batch of sequences, from its first call to its last decoding step."""

    all: HeadStats
    prefill: HeadStats | None
    decode: HeadStats | None
    packed: bool = False  # sequences of one call, of which nobody says where they go on


@dataclass
class Layer:
    """One attention layer as it was seen."""

    kind: str  # "self", "encoder", "decoder", "cross", or a tower's name
    index: int  # the model's own layer number
    name: str  # the module's path
    heads: Heads
    all_weights: list[Any] = field(default_factory=list)  # one per call
    all_rows: list[list[int] | None] = field(default_factory=list)  # the queries of each of them; None for all
    all_outputs: list[Any] = field(default_factory=list)
    all_links: list[Links] = field(default_factory=list)
    links_asked: int = 0  # how many were to be kept
    _runs: list[Run] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.index

    @property
    def stats(self) -> HeadStats:
        """Of all queries that were seen."""
        every = _joined([run.all for run in self._runs])
        if every is None:
            raise HeadwiseError("no statistics were kept; watch with stats=True")
        return every

    @property
    def prefill(self) -> HeadStats | None:
        """Of queries that follow no cached key."""
        return _joined([run.prefill for run in self._runs])

    @property
    def decode(self) -> HeadStats | None:
        """Of queries that follow a cached key."""
        return _joined([run.decode for run in self._runs])

    @property
    def weights(self) -> Any:
        """Of the last call: (B, H, Tq, Tk), or `Rows` where heads or rows were chosen."""
        return _last(self.all_weights, "weights", "weights=True")

    @property
    def outputs(self) -> Any:
        """Each head's output before W_O in the last call: (B, H, Tq, Dv)."""
        return _last(self.all_outputs, "outputs", "outputs=True")

    def links(self, k: int) -> Links:
        """The k strongest keys of every query in the last call, and their weights."""
        kept: Links = _last(self.all_links, "links", f"links={k}")
        if k > kept.keys.shape[-1] < self.links_asked:
            k = kept.keys.shape[-1]  # there were no more keys than that
        if not 0 < k <= kept.keys.shape[-1]:
            raise HeadwiseError(
                f"{kept.keys.shape[-1]} links of each query were kept, got links({k}); watch with links={k}"
            )
        return Links(kept.keys[..., :k], kept.weights[..., :k])

    def add(self, new: HeadStats, decoding: bool) -> None:
        """One more call. What a decoding step adds belongs to the sequences of the call before it."""
        if not decoding or not self._runs or self._runs[-1].packed or self._runs[-1].all.count.shape != new.count.shape:
            self._runs.append(Run(new, None, new) if decoding else Run(new, new, None))
            return
        run = self._runs[-1]
        run.all = _continued(run.all, new)
        run.decode = new if run.decode is None else _continued(run.decode, new)

    def add_packed(self, new: HeadStats, decoding: list[bool]) -> None:
        """One more call on packed sequences: a row for each of them, with whether it follows cached keys."""
        chosen = torch.tensor(decoding)
        prefill, decode = (_rows_of(new, which) if bool(which.any()) else None for which in (~chosen, chosen))
        self._runs.append(Run(new, prefill, decode, packed=True))

    def __repr__(self) -> str:
        return f"Layer({self.kind} {self.index}, {self.heads.query} heads, {self.name})"

    def to_json(self) -> dict[str, Any]:
        parts = {"stats": self.stats, "prefill": self.prefill, "decode": self.decode}
        return {
            "kind": self.kind, "index": self.index, "name": self.name, "heads": self.heads.to_json(),
            **{name: None if stats is None else stats.to_json() for name, stats in parts.items()},
        }  # fmt: skip


def _joined(parts: list[HeadStats | None]) -> HeadStats | None:
    """The sequences of all runs, side by side."""
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    names = [name for name in there[0] if all(name in part for part in there)]
    sums = {name: torch.cat([part.sums[name] for part in there]) for name in names}
    return HeadStats(sums, torch.cat([part.count for part in there]))


def _rows_of(stats: HeadStats, which: Tensor) -> HeadStats:
    """Of some of the sequences."""
    which = which.to(stats.count.device)
    return HeadStats({name: x[which] for name, x in stats.sums.items()}, stats.count[which])


def _continued(old: HeadStats, new: HeadStats) -> HeadStats:
    """More queries of the same sequences. A statistic that one of the calls could not tell is gone from both."""
    sums = {name: old.sums[name] + new.sums[name] for name in old if name in new}
    return HeadStats(sums, old.count + new.count)


def _last(kept: list[Any], what: str, how: str) -> Any:
    if not kept:
        raise HeadwiseError(f"no {what} were kept; watch with {how}")
    return kept[-1]
