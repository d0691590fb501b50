"""Tallies in a file: arrays as safetensors, the rest as JSON in its header. Written atomically."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError
from ...files import write_atomically
from ...json_documents import anything, in_words, mapping, parse_json
from .sums import Tally

FORMAT = "1"
WITH_PROBES = "2"  # has tallies that versions that read only format 1 would drop silently when they merge
TALLIES_OF_FORMAT_1 = ("tally", "probe")
EXTRA = "extra/"  # prefix of arrays that belong to no tally


class SavedSums(NamedTuple):
    """The content of a file of sums."""

    tallies: dict[str, Tally]
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def save_tallies(
    path: str | os.PathLike[str],
    tallies: dict[str, Tally | None],
    facts: dict[str, Any],
    arrays: dict[str, np.ndarray] | None = None,
) -> None:
    """Write tallies by name, without those that are None; facts: any JSON; arrays: further ones."""
    from safetensors.numpy import save_file

    present = {name: tally for name, tally in tallies.items() if tally is not None}
    all_arrays = {f"{name}/{key}": x for name, tally in present.items() for key, x in tally.arrays().items()}
    all_arrays |= {EXTRA + key: x for key, x in (arrays or {}).items()}
    format_number = FORMAT if present.keys() <= {*TALLIES_OF_FORMAT_1} else WITH_PROBES
    about = {"tallies": {name: tally.facts() for name, tally in present.items()}, "more": facts}
    with write_atomically(path, CheckpointError) as file:
        save_file(
            {key: np.ascontiguousarray(x) for key, x in all_arrays.items()},
            file,
            {"headwise-sums": format_number, "facts": json.dumps(about)},
        )


def load_tallies(path: str | os.PathLike[str]) -> SavedSums:
    """Read what `save_tallies` wrote; an error where its parts do not fit each other."""
    from safetensors import SafetensorError, safe_open

    try:
        if not os.path.isfile(path):
            raise ValueError("it is not a file")
        with safe_open(os.fspath(path), framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("headwise-sums") not in (FORMAT, WITH_PROBES):
                raise CheckpointError(f"{str(path)!r} holds no sums of an atlas that this version reads")
            facts = parse_json(about["facts"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # this is no dict
        extra = {key.removeprefix(EXTRA): arrays.pop(key) for key in list(arrays) if key.startswith(EXTRA)}
        tallies = {}
        for name, tally_facts in mapping(facts["tallies"], "tallies", anything).items():
            tally_arrays = {
                key.removeprefix(name + "/"): arrays.pop(key) for key in list(arrays) if key.startswith(name + "/")
            }
            tallies[name] = Tally.of(tally_facts, tally_arrays)
        if arrays:
            raise ValueError(f"array {next(iter(arrays))!r} belongs to no sums")
        return SavedSums(tallies, mapping(facts["more"], "more", anything), extra)
    except CheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {in_words(error)}; remove it to begin again") from error
