"""The scores that one rank has computed so far, batch by batch, in a file that all ranks read at the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..errors import CheckpointError, HeadwiseError
from ..files import write_atomically
from ..prune import HeadScores
from .ranks import Ranks

SAVE_INTERVAL = 30.0  # seconds between checkpoints


class ScoreCheckpoint:
    """One rank's scores per batch; a file that an interrupted run left is resumed.

    Args:
        folder: of the run, which all ranks share.
        ranks: that score the batches together.
        run_id: a digest of what the run scores; a file of another run is refused.
    """

    def __init__(self, folder: Path, ranks: Ranks, run_id: str) -> None:
        self.folder, self.ranks, self.run_id = folder, ranks, run_id
        self.file = self._file_of(ranks.rank)
        self.rows: dict[int, list[np.ndarray]] = {}  # by batch number: each layer's scores, one row per example
        self.objective = ""
        self.saved_at = time.monotonic()
        if self.file.exists():
            self.rows, self.objective = self._read(self.file)

    def _file_of(self, rank: int) -> Path:
        return self.folder / f"scores-{rank}-of-{self.ranks.count}.safetensors"

    def add(self, number: int, scores: HeadScores) -> None:
        """Add the scores of one batch, and save all every 30 seconds."""
        self.rows[number], self.objective = scores.examples, scores.objective
        if time.monotonic() - self.saved_at > SAVE_INTERVAL:
            self.save()

    @contextmanager
    def save_at_exit(self) -> Iterator[None]:
        """Save when the body ends, also by an exception."""
        try:
            yield
        finally:
            self.save()

    def save(self) -> None:
        from safetensors.numpy import save_file

        arrays = {
            f"{number}/{layer}": np.ascontiguousarray(x)
            for number, layers in self.rows.items()
            for layer, x in enumerate(layers)
        }
        metadata = {"asked": self.run_id, "objective": self.objective, "batches": json.dumps(sorted(self.rows))}
        with write_atomically(self.file, CheckpointError) as file:
            save_file(arrays, file, metadata)
        self.saved_at = time.monotonic()

    def _read(self, path: Path) -> tuple[dict[int, list[np.ndarray]], str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="numpy") as reader:
                metadata = reader.metadata() or {}
                if metadata.get("asked") != self.run_id:
                    raise HeadwiseError(f"{str(path)!r} was left by another run; remove it to begin again")
                arrays = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118  # this is no dict
            layers = 1 + max((int(key.split("/")[1]) for key in arrays), default=-1)
            rows = {
                number: [arrays[f"{number}/{i}"] for i in range(layers)] for number in json.loads(metadata["batches"])
            }
            return rows, metadata["objective"]
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            if isinstance(error, HeadwiseError):
                raise
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}; remove it to begin again") from error

    def merge_all(self, count: int) -> list[np.ndarray]:
        """Every rank's scores, one array per layer: all examples in the order of the `count` batches."""
        rows_by_batch: dict[int, list[np.ndarray]] = {}
        for rank in range(self.ranks.count):
            rows, _ = self._read(self._file_of(rank))
            duplicates = rows_by_batch.keys() & rows.keys()
            assert not duplicates, f"batches {duplicates} were scored twice"
            rows_by_batch |= rows
        assert sorted(rows_by_batch) == list(range(count))
        return [
            np.concatenate([rows_by_batch[n][layer] for n in range(count)]) for layer in range(len(rows_by_batch[0]))
        ]
