"""The file of an unfinished sweep: the metric for every head that was patched so far."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files import write_atomically
from ..json_documents import finite, in_words, items, mapping, parse_json, string
from ..models.fingerprint import batches_fingerprint, fingerprint
from .patch_runs import Baseline, PatchRuns, Target

FORMAT = 1
SAME = 1e-2  # rounding of other processors and thread counts is below, another metric above
# what identifies a sweep -> what to say where it differs
IDENTITY = {
    "model": "the model has other weights",
    "inputs": "the inputs differ",
    "metric": "the metric differs",
    "options": "what, direction, positions or mean_of differ",
}


class SweepFile:
    """Values by pair of batches and head, written after every pass.

    Raises:
        CheckpointError: if the file belongs to another sweep, or is none.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, str], baseline: Sequence[Baseline]) -> None:
        """baseline: of every pair; a function that is the metric is known by its values."""
        self._path, self._identity = Path(path), dict(identity)
        self._baseline = [float(x) for pair in baseline for rows in (pair.this, pair.other) for x in rows]
        self._values: dict[str, dict[str, list[float]]] = {}
        if self._path.exists():
            self._values = self._read()

    def known(self, number: int, targets: Iterable[Target]) -> dict[Target, Tensor]:
        """The results of earlier runs."""
        values = self._values.get(str(number), {})
        return {
            target: torch.tensor(values[_name(target)], dtype=torch.float64)
            for target in targets
            if _name(target) in values
        }

    def add(self, number: int, values: Mapping[Target, Tensor]) -> None:
        """Keep what was measured, and write the file."""
        self._values.setdefault(str(number), {}).update(
            {_name(target): value.double().tolist() for target, value in values.items()}
        )
        document = {"headwise": "patching", "format": FORMAT, **self._identity, "baseline": self._baseline}
        document["values"] = self._values
        with write_atomically(self._path, CheckpointError) as file:
            file.write_text(json.dumps(document) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, dict[str, list[float]]]:
        try:
            document = parse_json(self._path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or document.get("headwise") != "patching":
                raise ValueError('"headwise": "patching" is missing')
            identity = {name: string(document[name], name) for name in IDENTITY}
            baseline = items(document["baseline"], "baseline", finite)
            values = mapping(document["values"], "values", _values_by_head)
        except OSError as error:
            raise CheckpointError(f"{str(self._path)!r} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{str(self._path)!r} is not the file of a sweep: {in_words(error)}; give another path as work"
            ) from None
        difference = next((words for name, words in IDENTITY.items() if identity[name] != self._identity[name]), None)
        if len(baseline) != len(self._baseline) or not np.allclose(baseline, self._baseline, SAME, SAME):
            difference = difference or "the metric has other values"
        if difference is not None:
            raise CheckpointError(
                f"{str(self._path)!r} is the file of another sweep: {difference}; delete it, or give another path as "
                "work"
            )
        return values


def sweep_identity(runs: PatchRuns, positions: Any, mean_of: list[Any] | None) -> dict[str, str]:
    """The identity of a sweep, by content; positions and mean_of as the user passed them."""
    options = [runs.what, runs.direction, runs.by_query_head, positions, mean_of]
    return {
        "model": fingerprint(runs.model),
        "inputs": batches_fingerprint([tuple(pair) for pair in runs.pairs]),
        "metric": runs.measure.words,
        "options": batches_fingerprint(options),
    }


def _name(target: Target) -> str:
    return f"{target.site.kind} {target.site.index} {target.head}"


def _values_by_head(value: Any, path: str) -> dict[str, list[float]]:
    return mapping(value, path, lambda numbers, place: items(numbers, place, finite))
