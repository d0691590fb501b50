"""The needs of finished batches in a folder, from which an interrupted `context_need` is resumed.

A file is named by a hash of the model's weights, the settings and the batch: results of another model, of other
windows or of other texts may lie in the same folder and are never mixed in. Processes may share a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CheckpointError
from ..models.fingerprint import batches_fingerprint, fingerprint
from .context_need_result import ContextNeed

VERSION = 1  # of what is measured; results of another one are measured again
PREFIX = "need-"


class NeedFiles:
    """One file per measured batch.

    Args:
        folder: it is made if there is none.
        model: its weights are a part of every file's name.
        settings: all that decides what is measured of a batch, as JSON.
    """

    def __init__(self, folder: str | os.PathLike[str], model: nn.Module, settings: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = json.dumps([VERSION, fingerprint(model), settings], sort_keys=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{str(folder)!r} cannot be made: {error.strerror or error}") from error

    def path(self, batch: Any) -> Path:
        """Where the need of a batch is saved."""
        content = f"{self.identity} {batches_fingerprint([batch])}"
        return self.folder / f"{PREFIX}{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"

    def load(self, batch: Any) -> ContextNeed | None:
        """The need of a batch that was measured before; None where it was not."""
        path = self.path(batch)
        if not path.exists():
            return None
        try:
            return ContextNeed.load(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove the file to measure it again") from error

    def save(self, batch: Any, need: ContextNeed) -> None:
        need.save(self.path(batch))
