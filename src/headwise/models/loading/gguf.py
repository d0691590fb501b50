"""GGUF files: converted once to safetensors in the user's cache, in a directory named by the file's hash."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, HeadwiseError
from ...files import write_folder_atomically
from ...json_documents import parse_json
from ...terminal import echo
from .gguf_tensors import (
    ARCHITECTURES,
    CONFIG_KEY,
    INTERLEAVED,
    RECORD_KEY,
    copy_fields,
    is_rotated,
    separate,
    state_name,
)
from .locate import cache, missing, sha256

MAGIC = b"GGUF"
MANIFEST = "manifest.json"  # in a converted directory: the hashes of its source and of its files
LONGEST_MESSAGE = 300  # characters of another library's message
FORMAT = 1  # of a converted directory; another number converts again


def is_gguf(path: Path) -> bool:
    """Whether a file begins with the magic bytes of GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def converted_directory(path: Path, check: Callable[[Path], None] | None = None, *, weights: bool = True) -> Path:
    """The directory that a GGUF file was converted into, now or before: fp32 safetensors, config and tokenizer.

    A cached directory is used only if this user wrote it and its files are unchanged.

    Args:
        path: the GGUF file.
        check: run on the file before it is converted.
        weights: False checks only the files that a tokenizer needs.
    """
    source = file_hash(path)
    folder = _private_folder(cache() / "gguf") / source
    if _is_valid(folder, source, weights):
        return folder
    if check:
        check(path)
    try:
        with write_folder_atomically(folder, CheckpointError, private=True) as scratch:
            convert(path, scratch)
            _write_manifest(scratch, source)
            if _is_valid(folder, source, weights):  # converted by another process meanwhile, which may be reading it
                raise _AlreadyConvertedError
    except _AlreadyConvertedError:
        return folder
    except CheckpointError as error:
        raise _cache_error(folder.parent, error.__cause__) if isinstance(error.__cause__, OSError) else error from None
    return folder


class _AlreadyConvertedError(Exception):
    """Another process converted the same file."""


def _cache_error(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the cache {str(folder)!r} cannot be written ({error.strerror or error}); "
        "set XDG_CACHE_HOME to a directory with room"
    )


def _private_folder(folder: Path) -> Path:
    """A directory of our cache that only this user can write to, created where it is missing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for place in (folder.parent, folder):
            status = place.lstat()
            if not stat.S_ISDIR(status.st_mode) or _is_of_another_user(status):
                raise _foreign(place)
            if status.st_mode & 0o022:  # created under a loose umask: others could put a model there
                place.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
    except OSError as error:
        raise _cache_error(folder, error) from error
    return folder


def _is_of_another_user(status: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and status.st_uid != os.geteuid()


def _foreign(place: Path) -> CheckpointError:
    return CheckpointError(
        f"{str(place)!r} in the cache is a link or belongs to another user, so that it is not used; "
        "remove it, or set XDG_CACHE_HOME to a directory of your own"
    )


def _is_valid(folder: Path, source: str, weights: bool) -> bool:
    """Whether a converted directory is complete and unchanged; one that another user wrote is refused."""
    try:
        places = [folder, *folder.rglob("*")]
        statuses = [place.lstat() for place in places]
    except FileNotFoundError:  # it does not exist, or is being replaced at this moment
        return False
    for place, status in zip(places, statuses, strict=True):
        plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
        if not plain or _is_of_another_user(status):
            raise _foreign(place)
    files = {str(place.relative_to(folder)) for place in places if place.is_file()} - {MANIFEST}
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = manifest["files"]
        same_source = (manifest["format"], manifest["source"], set(expected)) == (FORMAT, source, files)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # from an older version, or damaged
        return False
    names_to_check = [name for name in files if weights or not name.endswith(".safetensors")]
    return same_source and all(file_hash(folder / name) == expected[name] for name in names_to_check)


def _write_manifest(folder: Path, source: str) -> None:
    files = {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    text = json.dumps({"format": FORMAT, "source": source, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, computed once per process and state of the file: a model and its tokenizer share it."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    return _hash_of_state(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@functools.lru_cache(maxsize=64)
def _hash_of_state(path: Path, state: tuple[int, ...]) -> str:
    return sha256(path)


def convert(path: Path, folder: Path, *, quiet: bool = False) -> None:
    """Write the model and the tokenizer of a GGUF file as transformers does, or as headwise's own keys in it say."""
    try:
        import accelerate  # noqa: F401  # transformers needs both for GGUF
        import gguf
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise missing(error) from error
    if not quiet:
        echo(f"headwise: converting {path.name} to safetensors, once (kept in {cache() / 'gguf'})", err=True)
    try:
        reader = gguf.GGUFReader(path)
        if CONFIG_KEY in reader.fields and RECORD_KEY in reader.fields:
            _convert_own(reader, folder)
            tokenizer = _read_tokenizer(reader, folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
            _without_quantization(model).save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.save_pretrained(folder)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # the reader raises any kind of error on a broken file
        words = _header_problem(path) or " ".join(str(error).split())[:LONGEST_MESSAGE] or type(error).__name__
        raise CheckpointError(f"{str(path)!r} cannot be read as GGUF: {words}") from error


def _header_problem(path: Path) -> str:
    """What is wrong with the header of a GGUF file, in words; "" where it can be read."""
    from ...card.sources.gguf import read

    try:
        read(path)
    except HeadwiseError as problem:
        return str(problem)
    return ""


def _convert_own(reader: Any, folder: Path) -> None:
    """Write the directory of a model that headwise.save wrote as GGUF; `load` checks what it says."""
    import gguf
    import torch
    from safetensors.torch import save_file

    config, record = (parse_json(reader.fields[key].contents()) for key in (CONFIG_KEY, RECORD_KEY))
    if not isinstance(config, dict) or not isinstance(record, dict):
        raise CheckpointError(f"{CONFIG_KEY} and {RECORD_KEY} in a GGUF file must be objects in JSON")
    architecture = reader.fields["general.architecture"].contents()
    head_dim = int(reader.fields[f"{architecture}.attention.key_length"].contents())
    weights = {}
    for tensor in reader.tensors:
        name = state_name(tensor.name)
        if name is None:
            raise CheckpointError(f"the file has a tensor {tensor.name[:80]!r}, which headwise does not write")
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if is_rotated(name) and architecture in INTERLEAVED:
            array = separate(array, head_dim)
        weights[name] = torch.from_numpy(array.copy())
    for name, content in (("config.json", config), ("headwise.json", record)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _read_tokenizer(reader: Any, folder: Path) -> Any:
    """The tokenizer of a file of ours; transformers looks for it by the architecture, of which it knows fewer."""
    import gguf
    from transformers import AutoTokenizer

    model_type = parse_json(reader.fields[CONFIG_KEY].contents()).get("model_type")
    file = folder / "tokenizer.gguf"
    writer = gguf.GGUFWriter(file, ARCHITECTURES.get(model_type, "llama"))
    copy_fields(reader, writer, ("tokenizer.",))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    finally:
        file.unlink()


def _without_quantization(model: Any) -> Any:
    """The same model, no longer marked as quantized: its weights are fp32, but transformers would not save it."""
    from transformers import AutoModelForCausalLM

    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    return plain
