"""GGUF files: dequantised once and kept as safetensors in the user's cache, named by the file's content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import folder_written
from ..terminal import echo
from .places import cache, missing, sha256

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def converted(path: Path, check: Callable[[Path], None] | None = None) -> Path:
    """The directory that a GGUF file was converted into, now or before: fp32 safetensors, config and tokenizer.

    check is run on the file before it is first converted; after that its hash names what came of it.
    """
    folder = cache() / "gguf" / sha256(path)
    if folder.exists():
        return folder
    if check:
        check(path)
    try:
        with folder_written(folder, CheckpointError, private=True) as made:
            _convert(path, made)
    except CheckpointError as error:
        if folder.exists():  # another process was faster, and its work is as good
            return folder
        if isinstance(error.__cause__, OSError):
            raise CheckpointError(
                f"the cache {str(folder.parent)!r} cannot be written ({error.__cause__.strerror}); "
                "set XDG_CACHE_HOME to a directory with room"
            ) from error
        raise
    return folder


def _convert(path: Path, made: Path) -> None:
    try:
        import accelerate  # noqa: F401  # transformers reads no GGUF without these two
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise missing(error) from error
    echo(f"headwise: converting {path.name} to safetensors, once (kept in {made.parent})", err=True)
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
