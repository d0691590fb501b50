"""The folder where ranks keep what each has done: one run at a time, seen by all ranks, and of one content.

lock       locked (flock) by every rank of the run that is at work here
run.json   what the run is of, by content: a run of anything else is refused
...        the parts, which the ranks write
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, HeadwiseError
from ..files import written
from .ranks import ORPHAN_GRACE, ORPHAN_POLL, Ranks

LOCK, ABOUT = "lock", "run.json"
# Ranks whose torchrun was killed notice it and end by themselves: so long, a run that follows waits for them.
LOCK_WAIT = ORPHAN_POLL + ORPHAN_GRACE + 5.0
SEEN_WAIT = 5.0  # seconds that a network file system may take to show what another machine wrote


@contextmanager
def run_folder(path: str | os.PathLike[str] | None, ranks: Ranks, content: Mapping[str, str]) -> Iterator[Path]:
    """The folder at `path`, or a temporary one, checked and locked on all ranks; gone at the end if it is empty then.

    content: what the run is of, by name; a folder that holds work of another content is refused on all ranks.
    """
    with ExitStack() as stack:
        folder = Path("" if path is None else path)
        if path is None:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="headwise-")) if ranks.first else ""
            folder = Path(ranks.told(own))
        token = ranks.told(secrets.token_hex(8))
        lock = Lock(folder / LOCK)
        stack.callback(lock.release)

        def begin() -> str:
            if ranks.first:
                _begin(folder, lock, content, token, min(LOCK_WAIT, ranks.timeout / 2))
            return "ready"

        def join() -> str:
            _check_seen(folder, token, path is None)
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
    """Whether a run left anything here to go on from."""
    with suppress(FileNotFoundError):
        return any(not (x.name in (LOCK, ABOUT) or x.name.startswith(".")) for x in folder.iterdir())
    return False


def save_and_sync(paths: list[Path]) -> None:
    """Let files that were written be on the disk, with their names, before anything that depends on it."""
    for path in [*paths, *{path.parent for path in paths}]:
        with suppress(OSError):  # not every file system can, and folders cannot everywhere
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _begin(folder: Path, lock: Lock, content: Mapping[str, str], token: str, wait: float) -> None:
    """On the first rank: make the folder, have it alone for a moment, check what is in it, and say what comes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be made: {error.strerror or error}") from error
    lock.take(wait)
    if has_work(folder):
        _check_content(folder, content)
    for path in folder.glob(".*"):  # what killed ranks were writing: nobody else is here
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    with written(folder / ABOUT, CheckpointError) as made:
        made.write_text(json.dumps({"content": dict(content), "token": token}, indent=1) + "\n", encoding="utf-8")
    lock.share()  # now the other ranks may


def _check_content(folder: Path, content: Mapping[str, str]) -> None:
    before = _about(folder).get("content")
    if not isinstance(before, dict):
        raise CheckpointError(
            f"{str(folder)!r} holds parts of a run that did not say what it is of; remove it to begin again"
        )
    for name in [*content, *before]:
        if before.get(name) != content.get(name):
            was, now = (str(of.get(name, "none"))[:60] for of in (before, content))
            raise CheckpointError(
                f"{str(folder)!r} was left by a run with another {name} ({was}, now {now}); finish that run as it was "
                "started, give another folder, or remove this one to begin again"
            )


def _about(folder: Path) -> dict[str, object]:
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_seen(folder: Path, token: str, temporary: bool) -> None:
    end = time.monotonic() + SEEN_WAIT
    while _about(folder).get("token") != token:
        if time.monotonic() > end:
            where = "without out= or resume= this is a temporary one; give one" if temporary else "give one"
            raise HeadwiseError(
                f"{str(folder)!r} on {socket.gethostname()} is not the folder that the first rank wrote to; "
                f"{where} on a disk that all ranks share"
            )
        time.sleep(0.05)


def _remove_if_done(folder: Path) -> None:
    if not has_work(folder):
        for name in (ABOUT, LOCK):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something of the user's is in it
            folder.rmdir()


class Lock:
    """A lock file: first held by one rank alone, then by all ranks of one run together."""

    def __init__(self, path: Path) -> None:
        self.path, self.handle = path, -1

    def take(self, wait: float) -> None:
        """Hold it alone: no rank of another run is at work here."""
        end = time.monotonic() + wait
        while True:
            self._open(os.O_CREAT)
            done = self._try(alone=True)
            if done is None:
                warnings.warn(f"{str(self.path.parent)!r} cannot be locked here; start one run at a time", stacklevel=2)
                return
            if done and os.fstat(self.handle).st_nlink:
                os.truncate(self.handle, 0)
                os.write(self.handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return
            if not done and time.monotonic() > end:
                raise CheckpointError(self._in_use())
            self.release()  # the run that held it has ended and removed it, or is still at work
            time.sleep(0.1)

    def share(self) -> None:
        """Hold it together with the other ranks of this run."""
        self._open(0)
        if self._try(alone=False) is False:
            raise CheckpointError(self._in_use())

    def release(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _in_use(self) -> str:
        who = ""
        with suppress(OSError):
            who = self.path.read_text(encoding="utf-8", errors="replace").strip()[:100]
        return (
            f"{str(self.path.parent)!r} is in use by another run ({who or 'of unknown process'}); wait for its end, or "
            "give another folder"
        )

    def _open(self, flags: int) -> None:
        if self.handle < 0:
            try:
                self.handle = os.open(self.path, os.O_RDWR | flags, 0o666)
            except OSError as error:
                raise CheckpointError(f"{str(self.path)!r} cannot be opened: {error.strerror or error}") from error

    def _try(self, alone: bool) -> bool | None:
        """Whether the lock is held now; None where the file system, or the system, has none."""
        if sys.platform == "win32":
            return None
        import fcntl

        try:
            fcntl.flock(self.handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True
