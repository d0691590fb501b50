"""Checks of output directories and files, before a command begins to work."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import HeadwiseError


def check_output_folder(path: Path) -> None:
    """Refuse a path that cannot become a directory to write to; nothing is made."""
    name = repr(str(path)) if len(str(path)) <= 200 else f"{str(path)[:60]!r}..."
    try:
        above = path.absolute()
        while not _exists(above):
            above = above.parent
        if not above.is_dir():
            obstacle = "" if above == path.absolute() else f" cannot be made: {str(above)!r}"
            raise HeadwiseError(f"{name}{obstacle} is not a directory; give one to write to")
        if not os.access(above, os.W_OK | os.X_OK):
            raise HeadwiseError(f"{name} cannot be written: there is no permission to write in {str(above)!r}")
    except OSError as error:  # such as a name that is too long
        raise HeadwiseError(f"{name} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, HeadwiseError):
            raise
        raise HeadwiseError(f"{name} cannot be written: {error}") from None  # a NUL in the path


def check_output_file(path: Path) -> None:
    """Refuse a path to which no file can be written; nothing is made."""
    if path.is_dir():
        raise HeadwiseError(f"{str(path)!r} is a directory; give a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise HeadwiseError(f"{str(path)!r} cannot be written: {str(folder)!r} is no directory")
    check_output_folder(folder)


def check_not_replaced(out: Path, inputs: dict[str, Path | None]) -> None:
    """Refuse to replace a directory that holds one of the inputs."""
    for name, path in inputs.items():
        if path is not None and os.path.exists(path) and path.resolve().is_relative_to(out.resolve()):
            raise HeadwiseError(
                f"{name} {str(path)!r} lies in {str(out)!r}, which would be replaced; give another --out"
            )


def _exists(path: Path) -> bool:
    """Like os.path.lexists, but an impossible name raises an error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(path: Path) -> None:
    """Make a directory to write to, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"{str(path)!r} cannot be made: {error.strerror or error}") from error
