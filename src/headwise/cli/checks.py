"""What commands check before they begin to work."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import HeadwiseError

LARGEST_SEED = 2**32 - 1


def check_output_folder(path: Path) -> None:
    """Refuse what is not a directory and cannot become one, or cannot be written to; nothing is made."""
    shown = repr(str(path)) if len(str(path)) <= 200 else f"{str(path)[:60]!r}..."
    try:
        above = path.absolute()
        while not _is_there(above):
            above = above.parent
        if not above.is_dir():
            whose = "" if above == path.absolute() else f" cannot be made: {str(above)!r}"
            raise HeadwiseError(f"{shown}{whose} is not a directory; give one to write to")
        if not os.access(above, os.W_OK | os.X_OK):
            raise HeadwiseError(f"{shown} cannot be written: there is no permission to write in {str(above)!r}")
    except OSError as error:  # such as a name that is too long
        raise HeadwiseError(f"{shown} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, HeadwiseError):
            raise
        raise HeadwiseError(f"{shown} cannot be written: {error}") from None  # a NUL in the path


def _is_there(path: Path) -> bool:
    """As os.path.lexists, but for names that can never be."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(path: Path) -> None:
    """Make a directory to write to, with those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"{str(path)!r} cannot be made: {error.strerror or error}") from error
