"""Reading a card: from a config.json, a directory, a dict, safetensors, GGUF, a famous name or a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, HeadwiseError, UnsupportedError
from .card import Card, from_config, from_tensors
from .sources.json_file import load_json

if TYPE_CHECKING:
    from .sources.pruned import PruningRecord
    from .sources.safetensors import Tensors

FILE_ENDINGS = (".json", ".safetensors", ".gguf")
HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"


def read(source: Any) -> Card:
    """Read the card of a model.

    Args:
        source: A config.json, .safetensors or .gguf file, a directory with them, a config as a dict, a famous name such
            as "llama3-8b", or a hub id ("owner/name"). The hub is queried only if no such path exists; this needs
            huggingface_hub.

    Returns:
        The card: heads per layer, parameter counts, and where each number comes from.

    Raises:
        CheckpointError: The file is missing, damaged or no model, or the name is unknown.
        UnsupportedError: `source` is of another type.

    Example:
        >>> card = headwise.card.read("llama3-8b")
        >>> card.attention.kind, card.parameters.total
        ('GQA', 8030261248)
    """
    if isinstance(source, dict):
        return from_config(source, "config")
    if not isinstance(source, str | Path):
        raise UnsupportedError(f"a card is read from a path, a dict or a famous name, got {type(source).__name__}")
    name = str(source)
    if not name:
        raise CheckpointError("the name of a model is empty; give a path, a hub id (owner/name) or a famous name")
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _folder(path)
        if path.exists():
            return _file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise CheckpointError(f"{name[:120]!r} cannot be read: {str(error)[:120]}") from None
    from .sources.presets import FAMOUS

    if name in FAMOUS:
        return from_config(FAMOUS[name], name)
    if isinstance(source, str) and re.fullmatch(HUB_ID, source):
        return from_config(load_json(_from_hub(source)), source)
    if os.path.dirname(name) or path.suffix in FILE_ENDINGS:  # meant as a path: no list of names helps
        raise CheckpointError(f"there is no {name[:120]!r}; give a config.json, its folder, a .safetensors or a .gguf")
    import difflib

    alike = difflib.get_close_matches(name, FAMOUS, 3)
    raise CheckpointError(
        f"{name[:120]!r} is neither a file or folder that exists, nor a hub id (owner/name), nor a famous name; "
        + (f"did you mean {' or '.join(alike)}?" if alike else f"those are {', '.join(FAMOUS)}")
    )


def _file(path: Path) -> Card:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is no regular file; give a config.json, a .safetensors or a .gguf")
    if path.suffix == ".gguf" or _starts_with(path, b"GGUF"):
        from . import weights_check
        from .sources import gguf

        header, tensors = gguf.read(path)
        config = gguf.config(header, tensors, path.name)
        counts, names = weights_check.counts(tensors), gguf.key_names(header)
        return from_config(config, path.name, counts=counts, key_names=names)
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return _weights(path)
    if path.name == "config.json" and (path.parent / "headwise.json").is_file():
        return _folder(path.parent)  # a pruned model's remaining heads are listed beside its config
    return from_config(load_json(path), path.name)


def _pruning_record(file: Path) -> PruningRecord | None:
    """The record that headwise.save wrote next to a file; checked before the import, since most models have none."""
    if not file.with_name("headwise.json").is_file():
        return None
    from .sources.pruned import read as read_pruned

    return read_pruned(file.parent)


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _weights(path: Path) -> Card:
    """The card of weights, with the heads of a config.json beside them where there is one."""
    from .sources import safetensors

    tensors: Tensors = safetensors.header(path) if path.suffix == ".safetensors" else safetensors.sharded(path)
    config = path.with_name("config.json")
    if config.is_file():
        return from_config(
            load_json(config), path.parent.name or path.name, weights=tensors, pruned=_pruning_record(path)
        )
    return from_tensors(tensors, path.name)


def _folder(path: Path) -> Card:
    from .sources import safetensors

    name = path.resolve().name
    config, tensors = path / "config.json", safetensors.of_folder(path)
    if config.is_file():
        return from_config(load_json(config), name, weights=tensors, pruned=_pruning_record(config))
    if tensors is not None:
        return from_tensors(tensors, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0])
    raise CheckpointError(
        f"{name} has neither a config.json nor safetensors nor one GGUF file; give the folder of a model"
    )


def _from_hub(name: str) -> Path:
    """Fetch the config.json of a hub model; the user named it, so the network may be used."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UnsupportedError(
            f"{name} looks like a hub id; `pip install huggingface_hub` to read cards from there"
        ) from None
    from .. import hub

    offline = hub.unreachable()
    try:
        with hub.quiet():
            return Path(hf_hub_download(name, "config.json", local_files_only=offline))
    except Exception as error:  # network, permissions, missing repository: each library version has its own classes
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        reason = "it cannot be reached" if offline else reason
        raise CheckpointError(
            f"{name} cannot be fetched from the hub ({reason}); give the path of a config.json instead"
        ) from None
