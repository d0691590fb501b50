"""The processes of one group (ranks): their collectives, agreements between them, and errors that reach all of them.

An agreement comes before anything is sent: if ranks are about to do different things, all of them raise the same error,
where collectives would hang or give wrong numbers. It is one all-reduce of a digest, or direct sends between few ranks.
Only if digests differ, an all-gather of the ranks' descriptions follows, for the error message.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import HeadwiseError, RankError
from .agreement import FAILED, FINE, Record, describe_difference, is_alike
from .traffic import uncounted

TIMEOUT = 300.0  # seconds that a rank waits for the others, by default
FAILURE_WAIT = 5.0  # seconds in which a failed rank finds out whether all ranks failed in the same call
ABSENCE_WAIT = 2.0  # seconds in which a rank finds out which others wait too
STORE_WAIT = 5.0  # seconds in which the store answers; else the machine that holds it is cut off
WAITING_KEY = "headwise/waiting"  # in the store: what a rank waited for when the transport failed
FAILURE_KEY = "headwise/failure"  # in the store: the message of the rank that failed
FEW_RANKS = 8  # up to this many ranks, every rank sends its digest to every other, which is faster than an all-reduce
UNUSED_TAG = (1 << 31) - 1  # of point-to-point messages that no rank sends
AGREEMENT_TAG = UNUSED_TAG - 1  # of digests
OUT_OF_STEP = "the ranks are no longer in step, start all of them again"

ranks_by_key: dict[str, Ranks] = {}  # for operators in compiled graphs, which take numbers and text only
agreement_counts: Counter[str] = Counter()  # agreements so far by group name: the same number on every rank
lost_machines: list[str] = []  # messages about machines that are cut off
machine_checks: list[Callable[[], None]] = []  # wait until it is known whether a machine that is silent is cut off
# every rank's number in agreements of simulated ranks, where it is not this rank's own
simulated_numbers: ContextVar[Sequence[int] | None] = ContextVar("headwise_simulated_numbers", default=None)


@dataclass(frozen=True)
class Ranks:
    """The processes of one group, and this process's rank. One process without torch.distributed is a group too.

    Args:
        rank: of this process in the group.
        count: number of ranks.
        device: of the tensors that are sent.
        mesh: PyTorch's one-dimensional mesh of the group; None for a single process.
        timeout: seconds that this rank waits for the others.
        key: of these ranks in `ranks_by_key`; "" for a single process.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    timeout: float = TIMEOUT
    key: str = ""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @cached_property
    def group(self) -> Any:
        """PyTorch's process group; None for a single process."""
        return None if self.mesh is None else self.mesh.get_group()

    @cached_property
    def simulated(self) -> bool:
        """Whether this is the only rank that runs: PyTorch's fake process group, which sends nothing (`simulation`)."""
        return self.mesh is not None and dist.get_backend(self.group) == dist.Backend.FAKE

    def global_rank(self, rank: int) -> int:
        """A rank's number among all processes, by which point-to-point calls address it."""
        return dist.get_global_rank(self.group, rank)

    def agree(
        self,
        activity: str,
        description: str | Callable[[], str],
        *,
        values: Mapping[str, Tensor] | None = None,
        number: int = 0,
    ) -> list[int]:
        """Raise an error on every rank, unless all of them give the same description. Every rank must call this.

        Args:
            activity: what the ranks agree about, for the error message.
            description: a description of what this rank is about to do; if it is a function, an error that it raises is
                raised on all ranks.
            values: floating-point tensors that must be the same on all ranks, up to rounding.
            number: a number of this rank that is sent to all ranks.

        Returns:
            Every rank's `number`.
        """
        if self.count == 1 or self.simulated:
            if not isinstance(description, str):
                description()  # for its errors
            return list(simulated_numbers.get() or [number] * self.count)
        own_error = None
        try:
            text = description if isinstance(description, str) else description()
            record = Record.of(FINE, text, number, values or {})
        except Exception as error:  # of any kind, or the others would wait for this rank
            record, own_error = Record.of(FAILED, _one_line(error)), error
            _mark_reported(own_error, self.group.group_name)  # by this record
        agreement_counts[self.group.group_name] += 1
        numbers = self._agreed_numbers(activity, record, values or {})
        if numbers is not None:
            return numbers
        records = self._exchange_records(activity, record)
        failed_ranks = [rank for rank, record in enumerate(records) if record.status == FAILED]
        if own_error is not None:
            raise own_error
        if failed_ranks:
            raise RankError(f"rank {failed_ranks[0]} failed at {activity}: {records[failed_ranks[0]].text}")
        disagreement = describe_difference(records, values or {})
        if disagreement:
            raise RankError(f"ranks disagree about {activity}: {disagreement}; start all of them alike")
        return [record.number for record in records]

    def _agreed_numbers(self, activity: str, record: Record, values: Mapping[str, Tensor]) -> list[int] | None:
        """Every rank's number, where all records are alike; the same answer on every rank, None where they are not."""
        extremes = record.extremes()
        if self.count <= FEW_RANKS:
            row = torch.tensor([*extremes, record.number], dtype=torch.float64, device=self.device)
            with self.transport_errors(activity), uncounted():
                rows = self._gather_digests(row)
            maxima, numbers = rows[:, :-1].amax(0).tolist(), rows[:, -1].tolist()
        else:
            numbers = [-math.inf] * self.count
            numbers[self.rank] = record.number
            columns = torch.tensor([*extremes, *numbers], dtype=torch.float64, device=self.device)
            with self.transport_errors(activity), uncounted():
                self._wait(dist.all_reduce(columns, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
            results = columns.tolist()
            maxima, numbers = results[: len(extremes)], results[len(extremes) :]
        return [int(number) for number in numbers] if is_alike(maxima, values) else None

    def _gather_digests(self, row: Tensor) -> Tensor:
        """Every rank's row, by direct sends where they go around the queue of collectives, as in gloo."""
        rows = row.expand(self.count, -1).clone()
        if dist.get_backend(self.group) != "gloo":
            self._wait(dist.all_gather(list(rows.unbind()), row, group=self.group, async_op=True))
            return rows
        others = [rank for rank in range(self.count) if rank != self.rank]
        options = {"group": self.group, "tag": AGREEMENT_TAG}
        works = [dist.irecv(rows[rank], group_src=rank, **options) for rank in others]
        works += [dist.isend(row, group_dst=rank, **options) for rank in others]
        for work in works:
            self._wait(work)
        return rows

    def _exchange_records(self, activity: str, record: Record) -> list[Record]:
        """Every rank's record."""
        message = torch.frombuffer(bytearray(record.pack()), dtype=torch.uint8).to(self.device)
        messages = [torch.empty_like(message) for _ in range(self.count)]
        with self.transport_errors(activity), uncounted():
            self._wait(dist.all_gather(messages, message, group=self.group, async_op=True))
        return [Record.unpack(x.cpu().numpy().tobytes()) for x in messages]

    def broadcast_text(self, text: str) -> str:
        """The first rank's text, which must be short, on every rank."""
        return text if self.count == 1 else self._exchange_records("a message", Record.of(FINE, text))[0].text

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, which must have the same shape on all. No gradient."""
        if self.count == 1:
            return [x]
        x = x.detach().contiguous()
        tensors = [torch.empty_like(x) for _ in range(self.count)]
        with self.transport_errors("an exchange of tensors"):
            self._wait(dist.all_gather(tensors, x, group=self.group, async_op=True))
        return tensors

    def all_reduce(self, x: Tensor, activity: str = "a sum", op: Any = dist.ReduceOp.SUM) -> None:
        """Sum every rank's x, in place. No gradient."""
        if self.count > 1:
            with self.transport_errors(activity):
                self._wait(dist.all_reduce(x, op=op, group=self.group, async_op=True))

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int], activity: str) -> Tensor:
        """Send consecutive parts of a flat tensor to the ranks; what they send to this one, one after another.

        Args:
            x: (sum of `sent`,).
            sent: numbers for each rank.
            received: numbers from each rank.
            activity: for the error message. No gradient.
        """
        result = x.new_empty(sum(received))
        with self.transport_errors(activity):
            self._wait(dist.all_to_all_single(result, x, received, sent, group=self.group, async_op=True))
        return result

    def barrier(self, activity: str) -> None:
        """Wait until all ranks are here."""
        self.agree(activity, "here")

    def wait(self, works: list[Any], activity: str) -> None:
        """Wait for point-to-point messages under way, no longer than `timeout`."""
        with self.transport_errors(activity):
            for work in works:
                self._wait(work)

    def _wait(self, work: Any) -> None:
        if dist.get_backend(self.group) == "gloo":
            work.wait(timedelta(seconds=self.timeout))
        else:  # given a timeout, nccl would block the CPU until the device is done
            work.wait()

    @contextmanager
    def transport_errors(self, activity: str) -> Iterator[None]:
        """Context for communication only: a transport error becomes a RankError, on all ranks at once."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            self.close_connections()  # ranks that wait for this one would wait until their timeout
            reason = " ".join(str(error).split())
            for check_machines in machine_checks:
                check_machines()
            if lost_machines:
                raise RankError(f"{lost_machines[0]}; not all ranks came to {activity}") from error
            closed = "closed" in reason or "closure" in reason
            wait_note = "" if closed else f" within {self.timeout:g} s"
            try:
                failure = ask_store(self._reported_failure)
                if failure:
                    raise RankError(f"{failure}; {OUT_OF_STEP}") from error
                end_note = ask_store(lambda store: self._absence(store, activity))
            except TimeoutError:
                message = describe_cut(int(os.environ.get("GROUP_RANK", "0")))
                raise RankError(f"{message}; not all ranks came to {activity}{wait_note} ({reason[:200]})") from error
            end_note = end_note or ("; one of them has ended" if closed else "")
            raise RankError(f"not all ranks came to {activity}{wait_note}{end_note} ({reason[:200]})") from error

    def _absence(self, store: Any, activity: str) -> str:
        """Which ranks wait for something else or for nothing, after an error of the transport, which all waiting ranks
        get: each leaves in the store what it waited for."""
        elsewhere, missing, name = [], [], self.group.group_name
        keys = [f"{WAITING_KEY}/{name}/{rank}" for rank in range(self.count)]
        store.set(keys[self.rank], activity)
        end = time.monotonic() + min(ABSENCE_WAIT, self.timeout)
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)
        for rank, key in enumerate(keys):
            if not store.check([key]):
                missing.append(rank)
            elif (place := store.get(key).decode(errors="replace")) != activity:
                elsewhere.append(f"; rank {rank} waits for {place}")
        absent = f"; missing: rank {', '.join(map(str, missing[:8]))}" if missing else ""
        return absent + "".join(elsewhere[:3])

    @contextmanager
    def share_failures(self, activity: str) -> Iterator[None]:
        """Context for the work between an agreement and the last collective: a rank that fails notifies the others."""
        try:
            yield
        except RankError:  # the others have it too
            raise
        except Exception as error:
            self.report_failure(activity, error)
            raise

    def report_failure(self, activity: str, error: BaseException) -> None:
        """Notify the other ranks that this one failed after an agreement, unless all failed in the same call."""
        if self.count == 1 or not dist.is_initialized():
            return
        name, message = self.group.group_name, f"rank {self.rank} failed at {activity}: {_one_line(error)}"
        if not _mark_reported(error, name):  # once, by the innermost guard
            return

        def leave_message(store: Any) -> str:
            key = f"{FAILURE_KEY}/{name}/{agreement_counts[name]}"
            all_failed = -(-store.add(key, 1) // self.count) * self.count
            end = time.monotonic() + min(FAILURE_WAIT, self.timeout)
            while time.monotonic() < end:
                if store.add(key, 0) >= all_failed:
                    return "all ranks failed"
                time.sleep(0.01)
            store.set(f"{FAILURE_KEY}/{name}", message)
            return ""

        with suppress(TimeoutError):
            if ask_store(leave_message, FAILURE_WAIT + STORE_WAIT):
                return
        self.close_connections()

    def pass_on_failure(self, error: RankError) -> None:
        """Give an error of the transport in another group to the ranks of this one, which would wait for this rank."""
        cause, name = error.__cause__, "" if self.count == 1 else self.group.group_name
        if not name or not isinstance(cause, RuntimeError | dist.DistError) or not _mark_reported(error, name):
            return
        message = str(error).removesuffix(f"; {OUT_OF_STEP}")
        with suppress(TimeoutError):
            ask_store(lambda store: str(store.set(f"{FAILURE_KEY}/{name}", message)))
        self.close_connections()

    def _reported_failure(self, store: Any) -> str:
        """The message that a failed rank left in the store; "" if there is none."""
        for key in (f"{FAILURE_KEY}/{self.group.group_name}", FAILURE_KEY):
            if store.check([key]):
                return str(store.get(key).decode(errors="replace"))
        return ""

    def close_connections(self) -> None:
        """Close this rank's gloo connections: ranks that wait for it get an error now, not after `timeout`."""
        if dist.get_backend(self.group) != "gloo":
            return
        for peer in dist.get_process_group_ranks(self.group):
            if peer != dist.get_rank():
                with suppress(RuntimeError, dist.DistError):  # gloo closes a pair whose receive timed out
                    work = dist.irecv(torch.empty(1), peer, group=self.group, tag=UNUSED_TAG)
                    assert work is not None  # this rank is in the group
                    work.wait(timedelta(milliseconds=1))


def _mark_reported(error: BaseException, group: str) -> bool:
    """Note that the ranks of a group are told about an error; whether they had not been told before."""
    groups = error.__dict__.setdefault("headwise_groups", set())
    is_new = group not in groups
    groups.add(group)
    return is_new


def report_failure_to_all(error: BaseException) -> None:
    """Leave a message for ranks of every group: this process fails outside anything that ranks agreed about."""
    message = f"rank {dist.get_rank()} failed: {_one_line(error)}"
    with suppress(TimeoutError):
        ask_store(lambda store: str(store.set(FAILURE_KEY, message)))


def _one_line(error: BaseException) -> str:
    """An error as one line; with its class where it is none of headwise's."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, HeadwiseError) else ": ".join(filter(None, [type(error).__name__, text]))


def default_store() -> Any:
    """The key-value store of torch.distributed, which needs no connection between the ranks."""
    return dist.distributed_c10d._get_default_store()


def ask_store(question: Callable[[Any], str], seconds: float = STORE_WAIT) -> str:
    """The answer of the store to a request; "" if the store has ended.

    Raises:
        TimeoutError: there is no answer, since the machine that holds the store, or this one, is cut off. A question
            would wait for hours, so a thread asks it.
    """
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(question(default_store()))
        except (RuntimeError, dist.DistError):  # also where this process has left its group
            answers.append("")

    thread = threading.Thread(target=ask, name="headwise-store-question", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError
    return answers[0]


def describe_cut(machine: int) -> str:
    """A message that a machine and the first one, which holds the store, do not reach each other; the same on both."""
    address = os.environ.get("MASTER_ADDR", "its address is not known")
    if not machine:
        return f"the machine of rank 0 ({address}) cannot be reached: it is down or cut off"
    count = os.environ.get("GROUP_WORLD_SIZE", "several")
    return (
        f"machines 0 ({address}) and {machine} of {count} do not reach each other: one of them is down, or the link "
        "between them is cut"
    )


def report_lost_machine(message: str) -> None:
    """Say on this rank, which is about to get an error of the transport, that a machine is cut off."""
    lost_machines.append(message)


def ranks_of(mesh: DeviceMesh | None = None, timeout: float | None = None, dimension: str | None = None) -> Ranks:
    """The ranks of a one-dimensional mesh.

    Args:
        mesh: all ranks by default.
        timeout: seconds that a rank waits for the others; the time-out of their process group by default.
        dimension: the name of the dimension to take of a mesh that has several.
    """
    if not dist.is_initialized():
        return Ranks(timeout=TIMEOUT if timeout is None else timeout)
    world = dist.distributed_c10d._get_default_group()
    if _world.get("group") is not world:  # another run of init_process_group, whose groups may have the same names
        _world.clear()
        ranks_by_key.clear()
        _slices.clear()
        _world["group"] = world
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if mesh is None:  # making a mesh takes as long as an agreement
        mesh = _world["mesh"] = _world.get("mesh") or init_device_mesh(kind, (dist.get_world_size(),))
    if mesh.ndim > 1 and dimension is not None and dimension in (mesh.mesh_dim_names or ()):
        if (id(mesh), dimension) not in _slices:
            _slices[id(mesh), dimension] = mesh, mesh[dimension]
        _, mesh = _slices[id(mesh), dimension]
    if mesh.ndim != 1:
        raise RankError(
            f"a mesh of one dimension is expected, got {mesh.ndim}; take one of them: mesh[{dimension or 'tp'!r}]"
        )
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    timeout = _group_timeout(mesh.get_group(), device) if timeout is None else timeout
    for ranks in ranks_by_key.values():  # of this very mesh: another one of the same group has other dimensions around
        if ranks.mesh is mesh and ranks.timeout == timeout:
            return ranks
    key = f"{mesh.get_group().group_name} {len(ranks_by_key)}"
    ranks_by_key[key] = Ranks(mesh.get_local_rank(), mesh.size(), device, mesh, timeout, key)
    return ranks_by_key[key]


_world: dict[str, Any] = {}  # the default process group, and the mesh of all its ranks
# dimensions of larger meshes, by the mesh's id and their name, with that mesh: DeviceMesh would make new ones
_slices: dict[tuple[int, str], tuple[DeviceMesh, DeviceMesh]] = {}


def ranks_with_key(key: str) -> Ranks:
    """The ranks that an operator of a compiled graph is given by their key."""
    return ranks_by_key[key] if key else Ranks()


def forget_groups() -> None:
    """Before the process groups are destroyed: drop what is known of them, and with it what refers to them."""
    for known in (agreement_counts, ranks_by_key, lost_machines, machine_checks, _world, _slices):
        known.clear()


def _group_timeout(group: Any, device: torch.device) -> float:
    """The timeout of a process group in seconds; TIMEOUT where its backend does not say."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return TIMEOUT
