"""The folder of a data-parallel run, where each rank saves its part: for one run at a time, on a disk they all share.

lock       locked (flock) by every rank of the run that is at work here
run.json   fingerprints of the run's texts, model and options: another run is refused
...        the ranks' parts
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, HeadwiseError
from ..files import Lock, write_atomically
from .process_group import ORPHAN_GRACE, ORPHAN_POLL
from .ranks import Ranks

LOCK, RUN_FILE = "lock", "run.json"
# Ranks whose torchrun agent was killed end by themselves; seconds that the next run waits for them.
LOCK_WAIT = ORPHAN_POLL + ORPHAN_GRACE + 5.0
VISIBLE_WAIT = 5.0  # seconds until a file that another machine wrote must be visible on a network file system


@contextmanager
def run_folder(path: str | os.PathLike[str] | None, ranks: Ranks, content: Mapping[str, str]) -> Iterator[Path]:
    """The folder at `path`, or a temporary one, checked and locked on all ranks; removed at the end if it is empty.

    Args:
        path: None for a temporary folder.
        ranks: of the run.
        content: what identifies the run, by name; a folder with parts of another run is refused on all ranks.
    """
    with ExitStack() as stack:
        folder = Path("" if path is None else path)
        if path is None:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="headwise-")) if ranks.first else ""
            folder = Path(ranks.broadcast_text(temporary))
        token = ranks.broadcast_text(secrets.token_hex(8))
        lock = Lock(folder / LOCK)
        stack.callback(lock.release)

        def begin() -> str:
            if ranks.first:
                _begin(folder, lock, content, token, min(LOCK_WAIT, ranks.timeout / 2))
            return "ready"

        def join() -> str:
            _check_visible(folder, token, path is None)
            if not ranks.first:
                lock.share()
            return "ready"

        ranks.agree("the folder of the run", begin)
        ranks.agree("the folder of the run", join)
        yield folder
        ranks.barrier("the end")
        if ranks.first:
            _remove_if_done(folder)
        ranks.barrier("the removal of the folder")


def has_work(folder: Path) -> bool:
    """Whether a run left parts here that can be resumed."""
    with suppress(FileNotFoundError):
        return any(not (x.name in (LOCK, RUN_FILE) or x.name.startswith(".")) for x in folder.iterdir())
    return False


def sync_files(paths: list[Path]) -> None:
    """Flush files and their folders to the disk (fsync)."""
    for path in [*paths, *{path.parent for path in paths}]:
        with suppress(OSError):  # not every system can sync a folder, nor every file system a file
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _begin(folder: Path, lock: Lock, content: Mapping[str, str], token: str, wait: float) -> None:
    """On the first rank: make the folder, lock it exclusively, check its parts, write run.json, share the lock."""
    lock.acquire(wait)
    if has_work(folder):
        _check_content(folder, content)
    for path in folder.glob(".*"):  # half-written files of killed ranks; the lock is exclusive
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    with write_atomically(folder / RUN_FILE, CheckpointError) as file:
        file.write_text(json.dumps({"content": dict(content), "token": token}, indent=1) + "\n", encoding="utf-8")
    lock.share()  # now the other ranks can


def _check_content(folder: Path, content: Mapping[str, str]) -> None:
    previous = _read_run_file(folder).get("content")
    if not isinstance(previous, dict):
        raise CheckpointError(
            f"{str(folder)!r} holds parts of a run that did not say what it is of; remove it to begin again"
        )
    for name in [*content, *previous]:
        if previous.get(name) != content.get(name):
            previous_value, value = (str(run.get(name, "none"))[:60] for run in (previous, content))
            raise CheckpointError(
                f"{str(folder)!r} was left by a run with another {name} ({previous_value}, now {value}); finish that "
                "run as it was started, give another folder, or remove this one to begin again"
            )


def _read_run_file(folder: Path) -> dict[str, object]:
    try:
        document = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _check_visible(folder: Path, token: str, temporary: bool) -> None:
    """Check that this rank sees the token that the first rank wrote, so that the folder is on a shared disk."""
    end = time.monotonic() + VISIBLE_WAIT
    while _read_run_file(folder).get("token") != token:
        if time.monotonic() > end:
            advice = "without out= or resume= this is a temporary one; give one" if temporary else "give one"
            raise HeadwiseError(
                f"{str(folder)!r} on {socket.gethostname()} is not the folder that the first rank wrote to; "
                f"{advice} on a disk that all ranks share"
            )
        time.sleep(0.05)


def _remove_if_done(folder: Path) -> None:
    if not has_work(folder):
        for name in (RUN_FILE, LOCK):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it has files of the user's
            folder.rmdir()
