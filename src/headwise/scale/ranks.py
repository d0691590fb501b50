"""Processes that work together: who is there, that they agree, and sums over them that carry gradients."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import HeadwiseError, RankError

TIMEOUT = 300.0  # seconds that a rank waits for the others before it gives up
# Seconds after the last message. gloo's threads live as long as anybody knows the group (FSDP's caches do, and default
# arguments of what was imported meanwhile), and one that still drops a message's tensors while Python ends aborts it.
REST = 0.1
RECORD, DIGEST = 768, 32  # bytes that a rank tells of itself: a state, a digest, and words for the message
FINE, FAILED = 0, 1


@dataclass(frozen=True)
class Ranks:
    """The processes of one group, and which of them this is. One process alone is a group too."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    timeout: float = TIMEOUT

    @property
    def first(self) -> bool:
        """The one that prints and writes."""
        return self.rank == 0

    @cached_property
    def group(self) -> Any:
        """PyTorch's process group; None alone."""
        return None if self.mesh is None else self.mesh.get_group()

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], Any]:
        return {}

    def among(self, ranks: tuple[int, ...]) -> Any:
        """The process group of some of these ranks. All processes there are must ask, in the same order."""
        if ranks not in self._groups:
            every = dist.get_process_group_ranks(self.group)
            if len(every) < dist.get_world_size():
                raise RankError(
                    "KV heads that live on several ranks need a mesh of all ranks; take fewer ranks, or all"
                )
            wait = timedelta(seconds=self.timeout)
            self._groups[ranks] = dist.new_group([every[rank] for rank in ranks], timeout=wait)
        return self._groups[ranks]

    def global_rank(self, rank: int) -> int:
        """The number by which point-to-point calls know it."""
        return dist.get_global_rank(self.group, rank)

    def agree(self, what: str, words: str | Callable[[], str]) -> None:
        """An error on every rank, unless all of them say the same about `what`.

        words: what this rank has, in a few words; as a function, an error that it raises reaches all ranks too.
        """
        status, text, own = FINE, "", None
        try:
            text = words if isinstance(words, str) else words()
        except HeadwiseError as error:
            status, text, own = FAILED, str(error), error
        if self.count == 1:
            if own is not None:
                raise own
            return
        records = self._told(what, _record(status, text))
        failed = [rank for rank, record in enumerate(records) if record[0] == FAILED]
        if own is not None:
            raise own
        if failed:
            raise RankError(f"rank {failed[0]} failed at {what}: {_words(records[failed[0]])}")
        if any(record[: 1 + DIGEST] != records[0][: 1 + DIGEST] for record in records):
            raise RankError(f"ranks disagree about {what}: {_differences(records)}; start all of them alike")

    def _told(self, what: str, record: bytes) -> list[bytes]:
        """What every rank says."""
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.count)]
        try:
            if dist.get_backend(self.group) == "gloo":  # names those that are missing
                dist.monitored_barrier(self.group, timedelta(seconds=self.timeout), wait_all_ranks=True)
            dist.all_gather(everyone, mine, group=self.group)
        except (RuntimeError, dist.DistError) as error:
            why = " ".join(str(error).split())
            late = "" if "closed" in why else f" within {self.timeout:g} s"
            gone = "; one of them has ended" if "closed" in why else ""
            raise RankError(f"not all ranks came to {what}{late}{gone} ({why[:200]})") from error
        return [x.cpu().numpy().tobytes() for x in everyone]

    def told(self, text: str) -> str:
        """What the first rank says, in a few words."""
        return text if self.count == 1 else _words(self._told("a message", _record(FINE, text))[0])

    def gathered(self, x: Tensor) -> list[Tensor]:
        """Everyone's x; all must have the same shape. No gradient."""
        if self.count == 1:
            return [x]
        x = x.detach().contiguous()
        everyone = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(everyone, x, group=self.group)
        return everyone

    def barrier(self, what: str) -> None:
        """Wait until all are here."""
        self.agree(what, "here")


def _record(status: int, text: str) -> bytes:
    digest = hashlib.sha256(text.encode()).digest()
    words = text.encode()[: RECORD - 1 - DIGEST]
    return (bytes([status]) + digest + words).ljust(RECORD, b"\0")


def _words(record: bytes) -> str:
    return record[1 + DIGEST :].rstrip(b"\0").decode(errors="ignore")


def _differences(records: list[bytes]) -> str:
    """Who has what, those alike together; at most three kinds are told."""
    kinds: dict[bytes, list[int]] = {}
    for rank, record in enumerate(records):
        kinds.setdefault(record[: 1 + DIGEST], []).append(rank)
    told = []
    for ranks in list(kinds.values())[:3]:
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
        told.append(f"{who} {_words(records[ranks[0]])[:200]}")
    return ", ".join(told)


def under_torchrun() -> bool:
    """Whether torchrun started this process, with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def started(timeout: float = TIMEOUT, mesh: DeviceMesh | None = None) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone; gloo on CPUs, nccl on GPUs (not tried on any).

    timeout: seconds that a rank waits for another in anything they do together. A group that is there already is used
    and left as it is.
    """
    if not under_torchrun() and not dist.is_initialized():
        yield Ranks(timeout=timeout)
        return
    ours = not dist.is_initialized()
    cuda = torch.cuda.is_available()
    if ours:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _meet("nccl" if cuda else "gloo", timedelta(seconds=timeout))
    try:
        yield ranks_of(mesh, timeout)
    finally:
        if ours:
            dist.destroy_process_group()
            time.sleep(REST)


def _meet(backend: str, timeout: timedelta) -> None:
    """Where torchrun has started ranks again, those of before have left their addresses, which lead nowhere.

    On one machine all ranks know which attempt this is, and meet under its number.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    under = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=under, rank=rank, world_size=count, timeout=timeout)


def ranks_of(mesh: DeviceMesh | None = None, timeout: float = TIMEOUT) -> Ranks:
    """The ranks of a mesh of one dimension, all there are by default."""
    if not dist.is_initialized():
        return Ranks(timeout=timeout)
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),)) if mesh is None else mesh
    if mesh.ndim != 1:
        raise RankError(f"a mesh of one dimension is expected, got {mesh.ndim}; take one of them: mesh['tp']")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    return Ranks(mesh.get_local_rank(), mesh.size(), device, mesh, timeout)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        slope = slope.clone(memory_format=torch.contiguous_format)  # autograd may go on with the one given
        dist.all_reduce(slope, group=ctx.group)
        return slope, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        whole = x.contiguous()
        if whole is x:
            ctx.mark_dirty(x)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return slope, None


def copied(x: Tensor, group: Any) -> Tensor:
    """x, which all ranks have alike and each uses for a part of the work: its gradient is summed over them."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    found: Tensor = _Copied.apply(x, group)
    return found


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of the ranks' parts, in place; all go on alike, so the gradient passes as it is."""
    found: Tensor = _Summed.apply(x, group)
    return found
