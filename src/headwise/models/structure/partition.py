"""Attention layers whose heads are split over processes (tensor parallel): all heads, by their numbers in the model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from ...attention.nn.module import MultiHeadAttention
from ...attention.stats import HeadStats
from ...errors import UnsupportedError
from ...heads import Heads
from .sites import Site
from .wrappers import is_sharded

FINDER = "headwise.scale.partitions"  # by name: a layer below this one, needed only where weights are DTensors


class RankGroup(Protocol):
    """The processes that a layer's heads are split over."""

    @property
    def group(self) -> Any:
        """PyTorch's process group."""

    def agree(self, activity: str, description: str | Callable[[], str]) -> Any:
        """Raise an error on every process, unless all give the same description."""

    def report_failure(self, activity: str, error: BaseException) -> None:
        """Tell the other processes, which would wait for this one, that it failed."""


class Partition(Protocol):
    """The heads of one layer over processes, all of which make the same calls of it."""

    @property
    def heads(self) -> Heads:
        """The heads of the whole layer."""

    @property
    def ranks(self) -> RankGroup: ...

    def is_whole(self, heads: int) -> bool:
        """Whether a process that attends with this many heads has all of them."""

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """This process's heads in dimension `dim` -> all heads, in order, on every process."""

    def gather_stats(self, stats: HeadStats) -> HeadStats:
        """Statistics of this process's heads -> of all heads."""

    def join(self, x: Tensor) -> Tensor:
        """W_O's input of this process (..., heads here * width) -> of all (..., heads * width), with its gradient."""

    def part(self, whole: Tensor, x: Tensor) -> Tensor:
        """The result of `join`, or a replacement of it -> this process's part, with its gradient."""


def head_partition(model: nn.Module, site: Site) -> Partition | None:
    """How the heads of a layer are split over processes; None where this process has all of them.

    Raises:
        UnsupportedError: for weights that are split in a way that does not tell which heads are here.
    """
    if isinstance(site.module, MultiHeadAttention):
        partition: Partition | None = site.module.partition
    elif any(hasattr(x, "device_mesh") for x in site.module.parameters()):
        partition = importlib.import_module(FINDER).find_partition(model, site)
    else:
        partition = None
    return partition


def splits_tokens(module: nn.Module) -> bool:
    """Whether this process has some tokens of every sequence (context parallel) in an attention module."""
    return isinstance(module, MultiHeadAttention) and module.is_split and module.partition is None


def check_whole(model: nn.Module, sites: Iterable[Site], doing: str) -> None:
    """Refuse a model whose heads or tokens are split over processes, for something that needs all of them in one."""
    for site in sites:
        if splits_tokens(site.module) or head_partition(model, site) is not None:
            part = "tokens" if splits_tokens(site.module) else "heads"
            raise UnsupportedError(
                f"cannot {doing} {type(model).__name__}: {type(site.module).__name__} (at {site.place}) has some "
                f"{part} on each rank; do it before the model is split"
            )


def check_whole_weights(model: nn.Module, sites: Iterable[Site], doing: str) -> None:
    """Like check_whole, and also refuse a model whose weights are sharded by FSDP."""
    check_whole(model, sites, doing)
    if is_sharded(model):
        raise UnsupportedError(
            f"cannot {doing} {type(model).__name__}: FSDP shards its weights, which are needed between its calls; do "
            "it before the model is sharded"
        )


def check_whole_tokens(model: nn.Module, sites: Iterable[Site], doing: str) -> None:
    """Refuse a model whose sequences are split over processes."""
    for site in sites:
        if splits_tokens(site.module):
            raise UnsupportedError(
                f"cannot {doing} {type(model).__name__}: {type(site.module).__name__} (at {site.place}) has some "
                "tokens on each rank; do it before the model's sequences are split"
            )
