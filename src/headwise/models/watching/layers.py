"""What `watch` records: one value per layer, with the statistics, weights, links and outputs of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...attention.stats import HeadStats, concatenate, join_queries, select_sequences
from ...errors import HeadwiseError
from ...heads import Heads
from ..structure.partition import Partition
from ..structure.selection import HeadChoice

T = TypeVar("T")


class Links(NamedTuple):
    """The strongest keys of every query."""

    keys: Tensor  # (B, H, Tq, k)
    weights: Tensor  # (B, H, Tq, k)


class HeadRows:
    """A tensor (B, heads, rows, ...) of some heads, indexed by the heads' own numbers: `[b, head]` is (rows, ...)."""

    def __init__(self, tensor: Tensor, heads: list[int], rows: list[int] | None) -> None:
        self.tensor = tensor
        self.heads = heads
        self.rows = rows  # the numbers of the queries; None for all

    def __getitem__(self, index: Any) -> Tensor:
        if not isinstance(index, tuple) or len(index) < 2:
            raise HeadwiseError(
                f"{self!r} is indexed by sequence and head, [b, head], got [{index!r}]; `.tensor` has all that was kept"
            )
        batch, head, *rest = index
        if isinstance(head, bool) or not hasattr(head, "__index__"):
            raise HeadwiseError(f"a head is a number, got {head!r}; `.tensor` has all heads that were kept")
        if head not in self.heads:
            raise HeadwiseError(f"head {head} was not kept; heads {', '.join(map(str, self.heads))} were")
        try:
            return self.tensor[(batch, self.heads.index(head), *rest)]
        except (IndexError, TypeError) as error:
            raise HeadwiseError(f"{self!r} has no [{', '.join(map(repr, index))}]: {error}") from None

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Tensor]:
        raise HeadwiseError(f"{self!r} is indexed by sequence and head, [b, head]; `.tensor` has all that was kept")

    def __repr__(self) -> str:
        return f"HeadRows(heads={self.heads}, shape={tuple(self.tensor.shape)})"


@dataclass
class Run:
    """The statistics of one batch of sequences, from its first call to its last decoding step."""

    all: HeadStats
    prefill: HeadStats | None
    decode: HeadStats | None
    packed: bool = False  # packed sequences of one call; a later step cannot be matched to them

    def changed(self, change: Callable[[HeadStats], HeadStats]) -> Run:
        """The same run with a function applied to its statistics."""
        prefill, decode = (None if part is None else change(part) for part in (self.prefill, self.decode))
        return Run(change(self.all), prefill, decode, self.packed)


@dataclass
class Layer:
    """One attention layer as it was watched."""

    kind: str  # "self", "encoder", "decoder", "cross", or a tower's name
    index: int  # the model's own layer number
    name: str  # the module's path
    heads: Heads
    source: str = "registry"  # how it was seen: "registry", "module" or "function"
    absent: dict[str, str] = field(default_factory=dict)  # statistics that could not be recorded, and why
    all_weights: list[Tensor | HeadRows] = field(default_factory=list)  # one per call
    all_rows: list[list[int] | None] = field(default_factory=list)  # the queries of each of them; None for all
    all_outputs: list[Tensor | HeadRows] = field(default_factory=list)
    all_links: list[Links] = field(default_factory=list)
    requested_links: int = 0  # per query
    partition: Partition | None = field(default=None, repr=False)  # until heads of other processes are gathered
    runs: list[Run] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.index

    @property
    def stats(self) -> HeadStats:
        """Statistics of all queries."""
        self._check_gathered()
        stats = _join([run.all for run in self.runs])
        if stats is None:
            raise HeadwiseError("no statistics were kept; watch with stats=True")
        return stats

    @property
    def prefill(self) -> HeadStats | None:
        """Statistics of queries that follow no cached key."""
        self._check_gathered()
        return _join([run.prefill for run in self.runs])

    @property
    def decode(self) -> HeadStats | None:
        """Statistics of queries that follow a cached key."""
        self._check_gathered()
        return _join([run.decode for run in self.runs])

    @property
    def weights(self) -> Tensor | HeadRows:
        """Weights of the last call: (B, H, Tq, Tk), or `HeadRows` where heads were chosen."""
        self._check_gathered()
        return _last(self.all_weights, "weights", "weights=True")

    @property
    def outputs(self) -> Tensor | HeadRows:
        """Each head's output before W_O in the last call: (B, H, Tq, Dv), or `HeadRows` where heads were chosen."""
        return _last(self.all_outputs, "outputs", "outputs=True")

    def links(self, k: int) -> Links:
        """The k strongest keys of every query in the last call, and their weights."""
        self._check_gathered()
        links = _last(self.all_links, "links", f"links={k}")
        available = links.keys.shape[-1]
        if k > available < self.requested_links:
            k = available  # the call had no more keys than that
        if not 0 < k <= available:
            raise HeadwiseError(f"{available} links of each query were kept, got links({k}); watch with links={k}")
        return Links(links.keys[..., :k], links.weights[..., :k])

    def add(self, stats: HeadStats, decoding: bool) -> None:
        """Add the statistics of one call. A decoding step continues the sequences of the call before it."""
        last = self.runs[-1] if self.runs else None
        if not decoding or last is None or last.packed or last.all.count.shape != stats.count.shape:
            self.runs.append(Run(stats, None, stats) if decoding else Run(stats, stats, None))
            return
        # a statistic that one of the calls does not have is dropped
        last.all = join_queries(last.all, stats)
        last.decode = stats if last.decode is None else join_queries(last.decode, stats)

    def add_packed(self, stats: HeadStats, decoding: list[bool]) -> None:
        """Add the statistics of one call on packed sequences: a row for each, and whether it follows cached keys."""
        is_decoding = torch.tensor(decoding, device=stats.count.device)
        prefill, decode = (
            select_sequences(stats, mask) if bool(mask.any()) else None for mask in (~is_decoding, is_decoding)
        )
        self.runs.append(Run(stats, prefill, decode, packed=True))

    def describe(self) -> str:
        """A description of the record, which must be the same on all processes before they gather it."""
        runs = [f"{len(run.all.count)} sequences, {' '.join(run.all.names)}" for run in self.runs]
        tensors: list[Any] = [*self.all_weights, *(links.keys for links in self.all_links)]
        shapes = ["x".join(map(str, (*x.shape[:1], *x.shape[2:]))) for x in tensors]  # without heads
        return f"{self.kind} {self.index}: {', '.join([*runs, *shapes])}"

    def gather(self, chosen: HeadChoice | None) -> None:
        """Gather the heads of all processes. chosen: those whose weights are kept."""
        partition = self.partition
        if partition is None:
            return
        self.runs = [run.changed(partition.gather_stats) for run in self.runs]
        by_call = zip(self.all_weights, self.all_rows, strict=True)
        self.all_weights = [
            x if chosen is True or chosen is None else HeadRows(x[:, chosen], chosen, rows)
            for x, rows in ((partition.gather(x), rows) for x, rows in by_call)  # type: ignore[arg-type]
        ]
        self.all_links = [Links(*(partition.gather(x) for x in links)) for links in self.all_links]
        self.partition = None

    def _check_gathered(self) -> None:
        if self.partition is not None:
            raise HeadwiseError(
                f"this process has some heads of {self.name} alone; those of all are gathered at the end of the `with`"
            )

    def __repr__(self) -> str:
        name = f", {self.name}" if self.name else ""  # a model that is itself an attention layer has none
        return f"Layer({self.kind} {self.index}, {self.heads.query} heads{name})"

    def to_json(self) -> dict[str, Any]:
        """The layer and its statistics as plain JSON values."""
        layer = {"kind": self.kind, "index": self.index, "name": self.name, "source": self.source}
        layer["heads"] = self.heads.to_json()
        parts = {"stats": self.stats, "prefill": self.prefill, "decode": self.decode}
        return {**layer, **{name: None if stats is None else stats.to_json() for name, stats in parts.items()}}


def _join(parts: list[HeadStats | None]) -> HeadStats | None:
    """The sequences of all runs, one after the other."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    return concatenate(present)


def _last(values: list[T], name: str, option: str) -> T:
    if not values:
        raise HeadwiseError(f"no {name} were kept; watch with {option}")
    return values[-1]
