"""The JSONL file of a training log: whole lines appended to it, and its repair when a run resumes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import HeadwiseError
from ..files import write_atomically
from .alarms import LayerKey
from .training_log import LogEntry, LoggedLayer, LogHeader, TrainingLog, encode_line


class LogFile:
    """A training log that is being written. The file is made with the first entry."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.header: LogHeader | None = None  # as the file has it

    def begin(self) -> None:
        """Start a new log; a file with anything in it is refused."""
        if self._size():
            raise HeadwiseError(
                f"{str(self.path)!r} exists; give resume=True to continue its run, another path=, or remove it"
            )
        _check_folder(self.path)
        self.header = None

    def resume(self, model: str, fingerprint: str, step: int | None) -> TrainingLog | None:
        """Continue a log; a torn last line and entries after a step are removed from the file.

        Args:
            model: the class of the model that is trained.
            fingerprint: of the model's structure.
            step: the last optimizer step of the run that is continued; None for that of the last entry.

        Returns:
            The log as it is now; None where there is no file, or not one whole line in it.

        Raises:
            HeadwiseError: for a log of another model, or a file that is damaged or no log.
        """
        self.header = None
        if not self._size() or b"\n" not in self.path.read_bytes():  # killed while the first lines were written
            _check_folder(self.path)
            self.path.unlink(missing_ok=True)
            return None
        log = TrainingLog.load(self.path)
        if log.header.fingerprint != fingerprint:
            raise HeadwiseError(
                f"{str(self.path)!r} is the log of another model ({log.header.model}, structure "
                f"{log.header.fingerprint[:8]}) than this one ({model}, {fingerprint[:8]}); give another path="
            )
        entries = tuple(entry for entry in log.entries if step is None or entry.step <= step)
        if log.torn or len(entries) < len(log.entries):
            lines = [encode_line(log.header.to_json()), *(encode_line(entry.to_json()) for entry in entries)]
            with write_atomically(self.path) as file:
                file.write_bytes(b"".join(lines))
        self.header = log.header
        return TrainingLog(log.header, entries)

    @property
    def _layers_by_key(self) -> dict[LayerKey, LoggedLayer]:
        return {} if self.header is None else {layer.key: layer for layer in self.header.layers}

    def check_layers(self, layers: Iterable[LoggedLayer]) -> None:
        """Refuse layers with other numbers of heads than those in the file: parameters may have the same shapes."""
        for layer in layers:
            logged = self._layers_by_key.get(layer.key, layer)
            if logged.heads != layer.heads:
                raise HeadwiseError(
                    f"{str(self.path)!r} is the log of a model with {logged.heads} heads in {layer.kind} layer "
                    f"{layer.index}, and this one has {layer.heads}; give another path="
                )

    def append(self, header: LogHeader, entry: LogEntry) -> None:
        """Append an entry; the header too where the file has none, and again where the model has further layers.

        Raises:
            OSError: where the disk is full or the file cannot be written; the file then ends with a whole line.
        """
        if self.header is not None and not {layer.key for layer in header.layers} <= self._layers_by_key.keys():
            self._replace_header(header)
        text = encode_line(entry.to_json())
        if self.header is None:
            text = encode_line(header.to_json()) + text
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            size = os.fstat(file).st_size
            try:
                written = os.write(file, text)
                while written < len(text):
                    written += os.write(file, text[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
        self.header = self.header or header

    def _replace_header(self, header: LogHeader) -> None:
        """Layers that the header does not have were called for the first time."""
        layers = tuple((self._layers_by_key | {layer.key: layer for layer in header.layers}).values())
        extended = LogHeader(header.model, header.fingerprint, layers, header.every, header.thresholds)
        entries = self.path.read_bytes().split(b"\n", 1)[1]
        with write_atomically(self.path) as file:
            file.write_bytes(encode_line(extended.to_json()) + entries)
        self.header = extended

    def _size(self) -> int:
        try:
            return self.path.stat().st_size if self.path.is_file() else self._refuse_other()
        except OSError as error:
            raise HeadwiseError(f"{str(self.path)!r} cannot be read: {error.strerror or error}") from error

    def _refuse_other(self) -> int:
        if self.path.exists():
            raise HeadwiseError(f"{str(self.path)!r} is not a file; give the path= of one")
        return 0


def _check_folder(path: Path) -> None:
    """Refuse a file that could not be made, before the training begins."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise HeadwiseError(f"{str(path)!r} cannot be written: {str(folder)!r} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HeadwiseError(f"{str(path)!r} cannot be written: there is no permission to write in {str(folder)!r}")
