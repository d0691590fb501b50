"""Processes that work together: who is there, that they agree, and sums over them that carry gradients."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import HeadwiseError, RankError
from ..terminal import echo
from .agreement import FAILED, FINE, Record, difference

TIMEOUT = 300.0  # seconds that a rank waits for the others before it gives up, where nobody said how long
# Seconds after the last message. gloo's threads live as long as anybody knows the group (FSDP's caches do, and default
# arguments of what was imported meanwhile), and one that still drops a message's tensors while Python ends aborts it.
REST = 0.1
FAILING = 5.0  # seconds in which a rank that failed finds out whether all ranks failed in the same call
ORPHAN_POLL, ORPHAN_GRACE = 0.5, 30.0  # seconds between looks at the parent, and those an orphan has to save its work
FAILURE = "headwise/failure"  # in the store: what the rank that failed says to those who wait for it
NO_TAG = (1 << 31) - 1  # of messages that nobody sends
OUT_OF_STEP = "the ranks are no longer in step, start all of them again"

_agreements: Counter[str] = Counter()  # by group: how many there were, the same number on every rank


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

    def agree(
        self, what: str, words: str | Callable[[], str], *, values: Mapping[str, Tensor] | None = None, number: int = 0
    ) -> list[int]:
        """An error on every rank, unless all of them say the same about `what`. Returns every rank's `number`.

        words: what this rank has, in a few words; as a function, an error that it raises reaches all ranks too.
        values: floating-point tensors that must be the same everywhere, to rounding.
        number: something of which each rank has its own, and all are to know.
        """
        if self.count == 1:
            if not isinstance(words, str):
                words()  # for its errors
            return [number]
        own = None
        try:
            record = Record.of(FINE, words if isinstance(words, str) else words(), number, values or {})
        except Exception as error:  # of any kind, or the others would wait for this rank
            record, own = Record.of(FAILED, _line(error)), error
            own.headwise_told = True  # type: ignore[attr-defined]  # by this very record
        _agreements[self.group.group_name] += 1
        records = self._told(what, record)
        failed = [rank for rank, record in enumerate(records) if record.status == FAILED]
        if own is not None:
            raise own
        if failed:
            raise RankError(f"rank {failed[0]} failed at {what}: {records[failed[0]].words}")
        different = difference(records, values or {})
        if different:
            raise RankError(f"ranks disagree about {what}: {different}; start all of them alike")
        return [record.number for record in records]

    def _told(self, what: str, record: Record) -> list[Record]:
        """What every rank says."""
        mine = torch.frombuffer(bytearray(record.packed()), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.count)]
        with self.in_words(what):
            if dist.get_backend(self.group) == "gloo":  # names those that are missing
                dist.monitored_barrier(self.group, timedelta(seconds=self.timeout), wait_all_ranks=True)
            self._wait(dist.all_gather(everyone, mine, group=self.group, async_op=True))
        return [Record.unpacked(x.cpu().numpy().tobytes()) for x in everyone]

    def told(self, text: str) -> str:
        """What the first rank says, in a few words."""
        return text if self.count == 1 else self._told("a message", Record.of(FINE, text))[0].words

    def gathered(self, x: Tensor) -> list[Tensor]:
        """Everyone's x; all must have the same shape. No gradient."""
        if self.count == 1:
            return [x]
        x = x.detach().contiguous()
        everyone = [torch.empty_like(x) for _ in range(self.count)]
        with self.in_words("an exchange of tensors"):
            self._wait(dist.all_gather(everyone, x, group=self.group, async_op=True))
        return everyone

    def sum(self, x: Tensor, what: str = "a sum", group: Any = None, op: Any = dist.ReduceOp.SUM) -> None:
        """Everyone's x added up, in place; of a group of some ranks where one is given. No gradient."""
        if self.count > 1:
            with self.in_words(what):
                self._wait(dist.all_reduce(x, op=op, group=self.group if group is None else group, async_op=True))

    def barrier(self, what: str) -> None:
        """Wait until all are here."""
        self.agree(what, "here")

    def wait(self, works: list[Any], what: str) -> None:
        """Wait for messages under way, as long as for anything else."""
        with self.in_words(what):
            for work in works:
                self._wait(work)

    def _wait(self, work: Any) -> None:
        if dist.get_backend(self.group) == "gloo":
            work.wait(timedelta(seconds=self.timeout))
        else:  # with a time to wait, nccl would hold the processor until the device is done
            work.wait()

    @contextmanager
    def in_words(self, what: str) -> Iterator[None]:
        """Around nothing but messages: what the transport raises becomes a RankError, on all ranks at once."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            self._hang_up()  # those who wait for this rank would wait until their time is up
            why = " ".join(str(error).split())
            words = self._failure_told()
            if words:
                raise RankError(f"{words}; {OUT_OF_STEP}") from error
            closed = "closed" in why or "closure" in why
            late = "" if closed else f" within {self.timeout:g} s"
            gone = "; one of them has ended" if closed else ""
            raise RankError(f"not all ranks came to {what}{late}{gone} ({why[:200]})") from error

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Around what ranks do between an agreement and their last sum: one that fails tells those who wait for it."""
        try:
            yield
        except RankError:  # the others know
            raise
        except Exception as error:
            self.failed(what, error)
            raise

    def failed(self, what: str, error: BaseException) -> None:
        """Say to the others that this rank failed after an agreement, unless all of them did in the same call."""
        if self.count == 1 or not dist.is_initialized() or getattr(error, "headwise_told", False):
            return
        error.headwise_told = True  # type: ignore[attr-defined]  # once, however deep it was raised
        with suppress(RuntimeError, dist.DistError):
            store, name = _store(), self.group.group_name
            key = f"{FAILURE}/{name}/{_agreements[name]}"
            all_failed = -(-store.add(key, 1) // self.count) * self.count
            end = time.monotonic() + min(FAILING, self.timeout)
            while time.monotonic() < end:
                if store.add(key, 0) >= all_failed:
                    return
                time.sleep(0.01)
            store.set(f"{FAILURE}/{name}", f"rank {self.rank} failed at {what}: {_line(error)}")
        self._hang_up()

    def _failure_told(self) -> str:
        with suppress(RuntimeError, dist.DistError):
            store = _store()
            for key in (f"{FAILURE}/{self.group.group_name}", FAILURE):
                if store.check([key]):
                    return str(store.get(key).decode(errors="replace"))
        return ""

    def _hang_up(self) -> None:
        """Close this rank's connections of the group: whoever waits for it gets an error now, not in `timeout`."""
        for group in (self.group, *self._groups.values()):
            here = dist.get_rank(group)
            if here < 0 or dist.get_backend(group) != "gloo":
                continue
            for peer in dist.get_process_group_ranks(group):
                if peer != dist.get_rank():
                    with suppress(RuntimeError, dist.DistError):  # a receive that ran out of time closes them
                        work = dist.irecv(torch.empty(1), peer, group=group, tag=NO_TAG)
                        assert work is not None  # this rank is in the group
                        work.wait(timedelta(milliseconds=1))


def _line(error: BaseException) -> str:
    """An error as one line; what is no message of ours with its kind."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, HeadwiseError) else ": ".join(filter(None, [type(error).__name__, text]))


def _store() -> Any:
    """Where ranks leave words for each other without a connection between them."""
    return dist.distributed_c10d._get_default_store()


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
    if ours:
        _end_with_parent()
    cuda = torch.cuda.is_available()
    if ours:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _meet("nccl" if cuda else "gloo", timedelta(seconds=timeout))
    try:
        yield ranks_of(mesh, timeout)
    except Exception as error:
        if ours and not isinstance(error, RankError):
            with suppress(RuntimeError, dist.DistError):
                _store().set(FAILURE, f"rank {dist.get_rank()} failed: {_line(error)}")
        raise
    finally:
        if ours:
            _agreements.clear()
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


def _end_with_parent() -> None:
    """End this process when torchrun's agent, which started it, is gone: nobody else would, and a new run may follow.

    Looked for from a thread, since a process blocked in a collective sees no signal of Python's.
    """
    name = "headwise-parent"
    if "TORCHELASTIC_RUN_ID" not in os.environ or any(thread.name == name for thread in threading.enumerate()):
        return
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL)
        echo("the torchrun agent that started this rank is gone; the rank saves its work and ends", err=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os._exit(1)

    threading.Thread(target=look, name=name, daemon=True).start()


def ranks_of(mesh: DeviceMesh | None = None, timeout: float | None = None) -> Ranks:
    """The ranks of a mesh of one dimension, all there are by default. They wait as long as their group does."""
    if not dist.is_initialized():
        return Ranks(timeout=TIMEOUT if timeout is None else timeout)
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),)) if mesh is None else mesh
    if mesh.ndim != 1:
        raise RankError(f"a mesh of one dimension is expected, got {mesh.ndim}; take one of them: mesh['tp']")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    timeout = _timeout_of(mesh.get_group(), device) if timeout is None else timeout
    return Ranks(mesh.get_local_rank(), mesh.size(), device, mesh, timeout)


def _timeout_of(group: Any, device: torch.device) -> float:
    """The seconds that a process group was told to wait; a backend that does not say waits TIMEOUT."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return TIMEOUT


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        slope = slope.clone(memory_format=torch.contiguous_format)  # autograd may go on with the one given
        ctx.ranks.sum(slope, "a sum of gradients")
        return slope, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        whole = x.contiguous()
        if whole is x:
            ctx.mark_dirty(x)
        ranks.sum(whole, "the sum of the ranks' outputs")
        return whole

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return slope, None


def copied(x: Tensor, ranks: Ranks) -> Tensor:
    """x, which all ranks have alike and each uses for a part of the work: its gradient is summed over them."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    found: Tensor = _Copied.apply(x, ranks)
    return found


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of the ranks' parts, in place; all go on alike, so the gradient passes as it is."""
    found: Tensor = _Summed.apply(x, ranks)
    return found
