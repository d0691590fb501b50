"""Atomic files and folders, and the removal of what killed processes left behind.

While something is written, there is a working folder beside the target:

    .NAME.headwise-MACHINE-RANDOM/lock       locked (flock) as long as its process lives
                                 /new/NAME   the new content, moved to NAME at the end by one rename
                                 /old/NAME   a folder that is being replaced

A working folder whose lock is free belongs to a process that was killed, and the next write in that place removes it.

A run that works on an output folder for long holds `.NAME.lock` beside it: a second run there is refused. The lock is
flock's and dies with its process; the file that a killed process leaves is taken over by the next run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError, HeadwiseError

WORKING = re.compile(r"\..*\.headwise-([0-9a-f]{8})-[0-9a-f]{16}", re.DOTALL)
NAME_LENGTH = 40  # characters of the target's name in its working folder's: a file name has at most 255 bytes
# A lock of another machine may be invisible here (network file systems): then its age in seconds decides.
OLD_AGE = 24 * 3600.0


@contextmanager
def write_atomically(path: str | os.PathLike[str], error: type[HeadwiseError] = HeadwiseError) -> Iterator[Path]:
    """A temporary file to write to; it replaces `path` when the body ends without an exception.

    A failed write (full disk, no permission) raises `error` with one line, and the previous file stays.

    Example:
        >>> with write_atomically("report.json") as file:
        ...     file.write_text("{}")
    """
    with _failures(path, error):
        target = _target(path, error)
        if target.is_dir():
            raise error(f"{str(path)!r} is a directory; give a file")
        if target.exists() and not target.is_file():  # a rename would replace the device itself
            raise error(f"{str(path)!r} is a device, socket or pipe; give a file")
        with _working_folder(target) as folder:
            file = folder / "new" / target.name
            file.touch()
            with _named(file, path):
                yield file
            os.chmod(file, target.stat().st_mode if target.exists() else 0o666 & ~umask())
            os.replace(file, target)


@contextmanager
def write_folder_atomically(
    path: str | os.PathLike[str], error: type[HeadwiseError] = HeadwiseError, *, private: bool = False
) -> Iterator[Path]:
    """A temporary folder to write to; it replaces `path` when the body ends without an exception.

    An existing folder at `path` is replaced: ask the user before. Missing parent folders are made. private: readable
    by its owner alone.
    """
    with _failures(path, error, "; what was there before is untouched"):
        target = _target(path, error)
        if target.exists() and not target.is_dir():
            raise error(f"{str(path)!r} is a file; give a directory")
        if Path.cwd().is_relative_to(target):
            raise error(f"{str(path)!r} is the current directory, which is not replaced; give a directory inside it")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _working_folder(target) as folder:
            scratch = folder / "new" / target.name
            scratch.mkdir(0o700)
            with _named(scratch, path):
                yield scratch
            os.chmod(scratch, 0o700 if private else 0o777 & ~umask())
            _move_folder(scratch, folder / "old" / target.name, target)


@contextmanager
def scratch_folder(place: str | os.PathLike[str], error: type[HeadwiseError] = HeadwiseError) -> Iterator[Path]:
    """A temporary folder inside `place`, removed at the end, or by the next write there if the process is killed."""
    with _failures(place, error), _working_folder(_target(place, error) / "scratch") as folder:
        yield folder / "new"


def remove_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Remove the working folders of killed processes from a folder; those of live processes are not touched."""
    try:
        names = [name for name in os.listdir(folder) if WORKING.fullmatch(name)]
    except (OSError, ValueError):  # the folder does not exist, may not be listed, or is no path
        return []
    return [name for name in names if _remove_if_dead(Path(folder, name))]


@contextmanager
def lock_output(path: str | os.PathLike[str], wait: float = 0.0) -> Iterator[None]:
    """Reserve an output folder, which need not exist, for this process: another one is refused while the body runs.

    wait: seconds to wait for the end of another process.

    Example:
        >>> with lock_output("atlas"):
        ...     ...
    """
    target = _target(path, CheckpointError)
    with _failures(path, CheckpointError):
        missing = [folder for folder in target.parents if not folder.exists()]
        beside = os.access(target.parent, os.W_OK) or not target.is_dir()
    lock = Lock(target.parent / f".{target.name}.lock" if beside else target / ".lock", path)
    try:
        lock.acquire(wait)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.path.unlink()  # while it is locked: a process that waits sees that the file is gone
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # the run wrote something
            for folder in missing:
                folder.rmdir()


class Lock:
    """A lock file of one run: exclusive, or shared by all its ranks. It dies with the process.

    Args:
        path: of the file; its folder is made.
        place: the folder that it reserves, as messages call it; by default the one that it is in.
    """

    def __init__(self, path: Path, place: str | os.PathLike[str] | None = None) -> None:
        self.path, self.handle = path, -1
        self.place = str(path.parent if place is None else os.fspath(place))

    def acquire(self, wait: float) -> None:
        """Lock it exclusively, after this many seconds at most: no process of another run is at work here."""
        end = time.monotonic() + wait
        while True:
            try:
                _make_folder(self.path.parent)
                self._open(os.O_CREAT)
            except CheckpointError as error:
                # the ranks of a killed agent may have finished, and removed the folder, between the two calls
                if not isinstance(error.__cause__, FileNotFoundError) or time.monotonic() > end:
                    raise
                continue
            locked = _try_lock(self.handle)
            if locked is None:
                warnings.warn(f"{self.place!r} cannot be locked here; start one run at a time", stacklevel=2)
                return
            if locked and os.fstat(self.handle).st_nlink:
                os.truncate(self.handle, 0)
                os.write(self.handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return
            if not locked and time.monotonic() > end:
                raise CheckpointError(self._in_use_message())
            self.release()  # the other run has removed the file at its end, or is still at work
            time.sleep(0.1)

    def share(self) -> None:
        """Lock it together with the other ranks of this run."""
        self._open(0)
        if _try_lock(self.handle, shared=True) is False:
            raise CheckpointError(self._in_use_message())

    def release(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _in_use_message(self) -> str:
        holder = ""
        with contextlib.suppress(OSError):
            holder = self.path.read_text(encoding="utf-8", errors="replace").strip()[:100]
        return (
            f"{self.place!r} is in use by another run ({holder or 'of unknown process'}); wait for its end, "
            "or give another folder"
        )

    def _open(self, flags: int) -> None:
        if self.handle < 0:
            try:
                self.handle = os.open(self.path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | flags, 0o666)
            except OSError as error:
                raise CheckpointError(
                    f"{self.place!r} cannot be locked: {str(self.path)!r} cannot be opened: {error.strerror or error}"
                ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be made: {error.strerror or error}") from error


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _target(path: str | os.PathLike[str], error: type[HeadwiseError]) -> Path:
    """The target of `path`, with links resolved: a link stays a link."""
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise error(f"{os.fspath(path)!r} cannot be written: it is not a path")
    return Path(os.path.realpath(os.fspath(path)))


@contextmanager
def _failures(path: str | os.PathLike[str], error: type[HeadwiseError], note: str = "") -> Iterator[None]:
    """Turn failures of the disk or the path into an `error` of one line."""
    try:
        yield
    except HeadwiseError:
        raise
    except OSError as exc:
        raise error(f"{str(path)!r} cannot be written: {exc.strerror or exc}{note}") from exc
    except Exception as exc:
        # "Error while serializing: I/O error: No space left on device (os error 28) at path ...", which is no OSError
        if type(exc).__name__ != "SafetensorError" or "I/O error" not in str(exc):
            raise
        words = re.sub(r".*I/O error: | \(os error.*", "", str(exc), flags=re.DOTALL)
        raise error(f"{str(path)!r} cannot be written: {words}{note}") from exc


@contextmanager
def _named(temporary: Path, path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors name `path`, which the user gave, in place of the temporary file or folder beside it."""
    try:
        yield
    except HeadwiseError as error:
        shown, wanted = (repr(str(name))[1:-1] for name in (temporary, os.fspath(path)))
        if shown not in str(error):
            raise
        raise type(error)(str(error).replace(shown, wanted)) from error


@contextmanager
def _working_folder(target: Path) -> Iterator[Path]:
    """A new, locked working folder next to the target, always removed at the end."""
    remove_leftovers(target.parent)
    folder, lock = _locked_folder(target)
    try:
        (folder / "new").mkdir(0o700)
        (folder / "old").mkdir(0o700)
        yield folder
    finally:
        if not _unfinished(folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(target: Path) -> tuple[Path, int]:
    while True:
        folder = target.parent / f".{target.name[:NAME_LENGTH]}.headwise-{_machine()}-{secrets.token_hex(8)}"
        folder.mkdir(0o700)
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # another process took the empty folder for a leftover
            continue
        except BaseException:
            os.rmdir(folder)
            raise
        try:
            if _try_lock(lock) is not False and os.fstat(lock).st_nlink:
                return folder, lock
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            raise
        os.close(lock)  # likewise taken for a leftover, before it was locked


def _try_lock(lock: int, *, shared: bool = False) -> bool | None:
    """Lock an open file without waiting; False: another process has it; None: there are no locks here."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@functools.cache
def _machine() -> str:
    """An id of the running kernel, whose processes, also those in containers, see each other's locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = socket.gethostname().encode()
    return hashlib.sha256(name).hexdigest()[:8]


def _remove_if_dead(folder: Path) -> bool:
    """Remove a working folder unless its process may be alive; a replacement before its last rename is finished."""
    match = WORKING.fullmatch(folder.name)
    same_machine = match is not None and match[1] == _machine()
    with contextlib.suppress(OSError):  # another user's, or another process is removing it
        if not same_machine and time.time() - folder.stat().st_mtime < OLD_AGE:
            return False
        try:
            lock = os.open(folder / "lock", os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:  # its process was killed before it made the lock, or during the removal
            if not _has_content(folder):
                os.rmdir(folder)
            else:
                shutil.rmtree(folder)
            return True
        try:
            locked = _try_lock(lock)
            if locked is False or (locked is None and time.time() - os.fstat(lock).st_mtime < OLD_AGE):
                return False
            _finish(folder)
            shutil.rmtree(folder)
            return True
        finally:
            os.close(lock)
    return False


def _has_content(folder: Path) -> bool:
    """Whether it contains `new` or `old`, which are made after the lock: without a lock they are being removed."""
    return any((folder / name).is_dir() for name in ("new", "old"))


def _unfinished(folder: Path) -> list[tuple[Path, Path]]:
    """(new, target) where a folder was moved away and its replacement was not moved in yet."""
    try:
        names = os.listdir(folder / "old")
    except OSError:
        return []
    pairs = [(folder / "new" / name, folder.parent / name) for name in names]
    return [(new, target) for new, target in pairs if new.is_dir() and not os.path.lexists(target)]


def _finish(folder: Path) -> None:
    for new, target in _unfinished(folder):
        os.rename(new, target)


def _move_folder(new: Path, old: Path, target: Path) -> None:
    """Rename a folder to its target; an existing target is restored if that fails."""
    if not target.exists():
        os.rename(new, target)
        return
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        if not target.exists():
            os.rename(old, target)
        raise
