"""Joining the ranks that torchrun started into a process group, and leaving it in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankError
from ..terminal import echo
from .machine_watch import watch_machines
from .ranks import TIMEOUT, Ranks, forget_groups, ranks_of, report_failure_to_all

# Seconds after the last message. gloo's threads live as long as something refers to the group (FSDP's caches do, and
# default arguments of modules imported meanwhile); a thread that still frees a message's tensors while Python shuts
# down aborts the process.
DRAIN_SECONDS = 0.1
# Seconds between looks at the parent process, and seconds in which an orphaned rank may save its work
ORPHAN_POLL, ORPHAN_GRACE = 0.5, 30.0
WATCHER = "headwise-parent-watcher"  # name of the thread


@contextmanager
def init_ranks(timeout: float = TIMEOUT, mesh: DeviceMesh | None = None) -> Iterator[Ranks]:
    """Join the ranks that torchrun started: gloo on CPUs, nccl on GPUs (nccl has not been tested).

    Without torchrun, this process is the only rank. A process group that exists already is used and left as it is.

    Args:
        timeout: seconds that a rank waits for another rank in any joint operation.
        mesh: a one-dimensional mesh of some of the ranks; all by default.

    Yields:
        The `Ranks`; its `rank`, `count` and `first` identify this process.

    Example:
        >>> with headwise.scale.init_ranks() as ranks:
        ...     block = headwise.scale.split_heads(headwise.TransformerBlock(768, 12))
    """
    if not under_torchrun() and not dist.is_initialized():
        yield Ranks(timeout=timeout)
        return
    owns_group = not dist.is_initialized()
    if owns_group:
        _end_with_parent()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _init_process_group("nccl" if cuda else "gloo", timedelta(seconds=timeout))
    try:
        ranks = ranks_of(mesh, timeout)
        with watch_machines(ranks) if owns_group else nullcontext():
            yield ranks
    except Exception as error:
        if owns_group and not isinstance(error, RankError):
            report_failure_to_all(error)
        raise
    finally:
        if owns_group:
            forget_groups()
            dist.destroy_process_group()
            time.sleep(DRAIN_SECONDS)


def under_torchrun() -> bool:
    """Whether torchrun started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """Join the other ranks; raises an error if they do not join, or if this rank cannot reach the first."""
    try:
        _rendezvous(backend, timeout)
    except (RuntimeError, dist.DistError) as error:
        rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
        address = ":".join(os.environ.get(name, "none") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = " ".join(str(error).split("Exception raised from")[0].split())[:200]
        raise RankError(
            f"rank {rank} of {count} did not meet the others at {address} within {timeout.total_seconds():g} s; does "
            "every machine reach that address, and do all use the right network interface "
            f"(GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME)? ({reason})"
        ) from error


def _rendezvous(backend: str, timeout: timedelta) -> None:
    """After a restart by torchrun, stale keys in the store point at dead processes.

    On one machine all ranks know the number of the attempt, so its rendezvous uses a prefix of its own. Of several
    machines each counts its own restarts; there torchrun's agents make a new store for every attempt.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    attempt_store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=attempt_store, rank=rank, world_size=count, timeout=timeout)


def _end_with_parent() -> None:
    """End this process when torchrun's agent, its parent, has died: nothing else would end it, and a new run may start.

    A thread watches, since Python handles no signal while the main thread is blocked in a collective.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or any(thread.name == WATCHER for thread in threading.enumerate()):
        return
    parent = os.getppid()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL)
        echo("the torchrun agent that started this rank is gone; the rank saves its work and ends", err=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os._exit(1)

    threading.Thread(target=watch_parent, name=WATCHER, daemon=True).start()
