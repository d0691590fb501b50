"""Sums in a file: arrays as safetensors, the rest as JSON in its header. Written whole or not at all."""

from __future__ import annotations

import json
import os
from typing import Any

from ..errors import CheckpointError
from ..files import written
from .tally import Tally

FORMAT = "1"


def save_tallies(path: str | os.PathLike[str], tallies: dict[str, Tally | None], more: dict[str, Any]) -> None:
    """Tallies by name, None left out, and anything else that JSON can hold."""
    from safetensors.numpy import save_file

    there = {name: tally for name, tally in tallies.items() if tally is not None}
    arrays = {f"{name}/{key}": x for name, tally in there.items() for key, x in tally.arrays().items()}
    facts = {"tallies": {name: tally.facts() for name, tally in there.items()}, "more": more}
    with written(path, CheckpointError) as made:
        save_file(arrays, made, {"headwise-sums": FORMAT, "facts": json.dumps(facts)})


def load_tallies(path: str | os.PathLike[str]) -> tuple[dict[str, Tally], dict[str, Any]]:
    """What `save_tallies` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("headwise-sums") != FORMAT:
                raise CheckpointError(f"{str(path)!r} holds no sums of an atlas that this version reads")
            facts = json.loads(about["facts"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # this is no dict
        tallies = {
            name: Tally.of(
                found, {key.removeprefix(name + "/"): x for key, x in arrays.items() if key.startswith(name + "/")}
            )
            for name, found in facts["tallies"].items()
        }
        return tallies, facts["more"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}; remove it to begin again") from error
