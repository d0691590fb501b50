"""What commands check before they begin to work."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import HeadwiseError

LARGEST_SEED = 2**32 - 1


def check_output_folder(path: Path) -> None:
    """Refuse what is not a directory and cannot become one, or cannot be written to; nothing is made."""
    try:
        if "\0" in str(path):
            raise HeadwiseError(f"{str(path)!r} is not a path; give a directory to write to")
        if os.path.lexists(path) and not path.is_dir():
            raise HeadwiseError(f"{str(path)!r} is not a directory; give one to write to")
        above = path.absolute()
        while not os.path.lexists(above):
            above = above.parent
        if not above.is_dir():
            raise HeadwiseError(f"{str(path)!r} cannot be made: {str(above)!r} is not a directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise HeadwiseError(f"{str(path)!r} cannot be written: there is no permission to write in {str(above)!r}")
    except OSError as error:
        raise HeadwiseError(f"{str(path)[:60]!r} cannot be written: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make a directory to write to, with those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"{str(path)!r} cannot be made: {error.strerror or error}") from error
