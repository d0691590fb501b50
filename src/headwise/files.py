"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import HeadwiseError


@contextmanager
def written(path: str | os.PathLike[str], error: type[HeadwiseError] = HeadwiseError) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it takes the place of `path` when the body ends without an error."""
    target = Path(path)
    made = None
    try:
        handle, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
        os.close(handle)
        yield Path(made)
        os.chmod(made, target.stat().st_mode if target.exists() else 0o666 & ~umask())
        os.replace(made, target)
    except OSError as why:
        raise error(f"{str(path)!r} cannot be written: {why.strerror or why}") from why
    finally:
        if made and os.path.exists(made):
            os.unlink(made)


def umask() -> int:
    """What this process takes from the rights of new files; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
