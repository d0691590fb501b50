"""Where a loaded model came from: the name that a user gave and, for GGUF, the file and its hash."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .locate import gguf_file

_SOURCE = "headwise_source"  # on a model; an attribute, so that it stays with copies


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The origin of a loaded model."""

    name: str  # as the user gave it
    gguf: Path | None = None  # the file, absolute
    sha256: str | None = None  # of its content


def set_source(model: Any, name: str | os.PathLike[str], folder: Path) -> None:
    """Note where a model was loaded from; folder: the directory that it was read from, a GGUF file's converted one."""
    file = gguf_file(name)
    digest = folder.name if file is not None else None  # a converted directory is named by its file's hash
    setattr(model, _SOURCE, ModelSource(os.fspath(name), file.resolve() if file else None, digest))


def model_source(model: Any) -> ModelSource | None:
    """Where a model was loaded from; None for a model that `load` did not load."""
    source: ModelSource | None = getattr(model, _SOURCE, None)
    return source
