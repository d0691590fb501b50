"""GGUF files: dequantised once and kept as safetensors in the user's cache, named by the file's content."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files import folder_written
from ...terminal import echo
from .locate import cache, missing, sha256

MAGIC = b"GGUF"
MANIFEST = "manifest.json"  # of a converted folder: what it was made from, and the SHA-256 of its files
FORMAT = 1  # of what is kept; another number converts anew


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def converted(path: Path, check: Callable[[Path], None] | None = None, *, weights: bool = True) -> Path:
    """The directory that a GGUF file was converted into, now or before: fp32 safetensors, config and tokenizer.

    check is run on the file before it is first converted; after that its hash names what came of it. What is in the
    cache is used only if this user wrote it and it is as it was written; weights=False: only what a tokenizer needs.
    """
    source = _hash(path)
    folder = _private(cache() / "gguf") / source
    if _usable(folder, source, weights):
        return folder
    if check:
        check(path)
    try:
        with folder_written(folder, CheckpointError, private=True) as made:
            _convert(path, made)
            _write_manifest(made, source)
            if _usable(folder, source, weights):  # by another process meanwhile, and somebody may be reading it
                raise _AlreadyThereError
    except _AlreadyThereError:
        return folder
    except CheckpointError as error:
        raise _cache_error(folder.parent, error.__cause__) if isinstance(error.__cause__, OSError) else error from None
    return folder


class _AlreadyThereError(Exception):
    """Another process converted the same file."""


def _cache_error(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the cache {str(folder)!r} cannot be written ({error.strerror or error}); "
        "set XDG_CACHE_HOME to a directory with room"
    )


def _private(folder: Path) -> Path:
    """A folder of our cache that only this user can write in, made where it is missing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for place in (folder.parent, folder):
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or _of_another(found):
                raise _foreign(place)
            if found.st_mode & 0o022:  # made under a loose umask: others could put a model there
                place.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    except OSError as error:
        raise _cache_error(folder, error) from error
    return folder


def _of_another(found: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and found.st_uid != os.geteuid()


def _foreign(place: Path) -> CheckpointError:
    return CheckpointError(
        f"{str(place)!r} in the cache is a link or belongs to another user, so that it is not used; "
        "remove it, or set XDG_CACHE_HOME to a directory of your own"
    )


def _usable(folder: Path, source: str, weights: bool) -> bool:
    """Whether a folder of the cache is whole and as it was written; what another user put there is refused."""
    try:
        places = [folder, *folder.rglob("*")]
        kinds = [place.lstat() for place in places]
    except FileNotFoundError:  # or it is being replaced at this moment
        return False
    for place, found in zip(places, kinds, strict=True):
        if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)) or _of_another(found):
            raise _foreign(place)
    files = {str(place.relative_to(folder)) for place in places if place.is_file()} - {MANIFEST}
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = manifest["files"]
        same = (manifest["format"], manifest["source"], set(expected)) == (FORMAT, source, files)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of an older version, or damaged
        return False
    wanted = [name for name in files if weights or not name.endswith(".safetensors")]
    return same and all(_hash(folder / name) == expected[name] for name in wanted)


def _write_manifest(folder: Path, source: str) -> None:
    files = {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    text = json.dumps({"format": FORMAT, "source": source, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _hash(path: Path) -> str:
    """The SHA-256 of a file, once per process and state of the file: a model and its tokenizer ask for the same."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    return _hash_of(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@functools.lru_cache(maxsize=64)
def _hash_of(path: Path, state: tuple[int, ...]) -> str:
    return sha256(path)


def _convert(path: Path, made: Path) -> None:
    try:
        import accelerate  # noqa: F401  # transformers reads no GGUF without these two
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise missing(error) from error
    echo(f"headwise: converting {path.name} to safetensors, once (kept in {cache() / 'gguf'})", err=True)
    try:
        unpacked = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except OSError:
        raise
    except Exception as error:  # the reader fails in every way a program can on a file that is broken
        raise CheckpointError(f"{str(path)!r} cannot be read as GGUF: {error or type(error).__name__}") from error
    _plain(unpacked).save_pretrained(made)
    tokenizer.save_pretrained(made)


def _plain(unpacked: Any) -> Any:
    """The same model, no longer marked as quantised: its weights are fp32 by now, but it would not be saved."""
    from transformers import AutoModelForCausalLM

    del unpacked.config.quantization_config
    plain = AutoModelForCausalLM.from_config(unpacked.config)
    plain.load_state_dict(unpacked.state_dict())
    return plain
