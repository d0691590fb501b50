"""Finished pieces of a long run: values in JSON files, found again by the content that they were measured on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import write_atomically
from ..json_documents import parse_json

VERSION = 1  # increased when what a piece measures changes, so that old ones are not reused


def pieces_folder(out: Path) -> Path:
    """The folder of a run's pieces, beside the directory of its result."""
    return out.parent / f".{out.name}.pieces"


class Pieces:
    """A folder of finished pieces.

    Args:
        folder: where they are; made with the first piece.
        content: hashes of what every piece of the run is measured on, such as the model's and the texts' fingerprints.
    """

    def __init__(self, folder: Path, content: Mapping[str, Any]) -> None:
        self.folder, self.content = folder, dict(content)
        self.new: list[str] = []  # the pieces that were measured now

    def piece(self, name: str, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """The JSON value of a piece, read, or measured and written.

        Args:
            name: of the kind of piece, as in its file's name.
            key: further values that it depends on.
            measure: gives the value.
        """
        path = self.place(name, key)
        if path.exists():
            try:
                return parse_json(path.read_text(encoding="utf-8"))["value"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{str(path)!r} cannot be read ({error}); delete it to measure again") from error
        value = measure()
        self.new.append(name)
        with write_atomically(path, CheckpointError) as file:
            file.write_text(json.dumps({"key": dict(key), "value": value}) + "\n", encoding="utf-8")
        return value

    def place(self, name: str, key: Mapping[str, Any], ending: str = ".json") -> Path:
        """The file of a piece, or of something that is needed until the piece is finished; its folder is made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{str(self.folder)!r} cannot be made: {error.strerror or error}") from error
        text = json.dumps([VERSION, self.content, name, dict(key)], sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}{ending}"

    def remove(self) -> None:
        """Remove the folder, once the result is saved."""
        shutil.rmtree(self.folder, ignore_errors=True)
