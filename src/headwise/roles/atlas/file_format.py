"""atlas.json: what is written, and the checks of what is read. The sums lie in a second file beside it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import HeadwiseError
from ...files import write_atomically
from ...json_documents import (
    anything,
    brief,
    count,
    finite,
    finite_or_none,
    in_words,
    items,
    mapping,
    other_format,
    parse_json,
    string,
)
from ...role_definitions import ANY
from ...terminal import escape_controls
from .from_sums import is_from_sums
from .result import DIGITS, Atlas, HeadRole, round_digits

if TYPE_CHECKING:
    from ..relations.result import Relations

FORMAT = 1
SUMS = ".sums.safetensors"  # after the atlas's own name: the file that merging needs
TALLY, REPETITION = "tally", "probe"  # names of two tallies in that file, as in all earlier ones
PROBE = "probe-"  # before the name of each further one
TABLES = {"scores": "score", "low": "low", "high": "high", "spread": "spread", "baseline": "baseline"}  # in the JSON


def to_json(atlas: Atlas) -> dict[str, Any]:
    """See Atlas.to_json."""
    tables = {
        name: {
            kind: {key: _plain(getattr(atlas, field)[name][kind]) for field, key in TABLES.items()} for kind in kinds
        }
        for name, kinds in atlas.scores.items()
    }
    roles = [
        dict(zip(HeadRole._fields, (*role[:4], *map(round_digits, role[4:])), strict=True)) for role in atlas.roles
    ]
    return {
        "headwise": "atlas", "format": FORMAT, "model": atlas.model, "about": atlas.about, "ways": atlas.ways,
        "layers": atlas.layers, "heads": atlas.heads, "unnamed": round(atlas.unnamed, DIGITS),
        "resting": round(atlas.sink_only, DIGITS), "roles": roles, "scores": tables,
        **({"relations": atlas.relations.to_json()} if atlas.relations else {}),
    }  # fmt: skip


def _plain(table: np.ndarray) -> Any:
    return [_plain(row) for row in table] if table.ndim > 1 else [round_digits(x) for x in table]


def save(atlas: Atlas, path: str | os.PathLike[str], *, sums: bool = False) -> None:
    """See Atlas.save."""
    if sums and atlas.tally is None:
        raise HeadwiseError("this atlas was opened without its sums; they cannot be saved")
    text = json.dumps(to_json(atlas), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    sums_file = Path(os.fspath(path) + SUMS)
    with write_atomically(path) as file:
        file.write_text(escape_controls(text) + "\n", encoding="utf-8")  # names may hold what UTF-8 cannot encode
        # those of an earlier atlas at this path; first, so that a run that is killed now leaves no mixture
        sums_file.unlink(missing_ok=True)
    if sums:
        from .checkpoint import save_tallies

        probes = {PROBE + name: tally for name, tally in atlas.probes.items()}
        save_tallies(sums_file, {TALLY: atlas.tally, REPETITION: atlas.repetition, **probes}, {})


def load(path: str | os.PathLike[str]) -> Atlas:
    """See Atlas.load."""
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HeadwiseError(f"atlas {str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise HeadwiseError(f"{str(path)!r} is no atlas: it is not JSON ({in_words(error)})") from None
    try:
        atlas = from_json(data)
    except HeadwiseError as error:
        raise HeadwiseError(f"{str(path)!r} cannot be read: {error}") from error
    sums_file = os.fspath(path) + SUMS
    if not os.path.exists(sums_file):
        return atlas
    from .checkpoint import load_tallies

    tallies = load_tallies(sums_file).tallies
    tally, repetition = tallies.get(TALLY), tallies.get(REPETITION)
    probes = {name.removeprefix(PROBE): probe for name, probe in tallies.items() if name.startswith(PROBE)}
    if tally is None or not is_from_sums(atlas, tally, (repetition, *probes.values())):
        raise HeadwiseError(f"{sums_file!r} holds the sums of another atlas than {str(path)!r}; remove it")
    return replace(atlas, tally=tally, repetition=repetition, probes=probes)


def from_json(data: Any) -> Atlas:
    """See Atlas.from_json."""
    if not isinstance(data, dict) or data.get("headwise") != "atlas":
        raise HeadwiseError("this is no atlas; headwise atlas --out DIR writes one")
    if data.get("format") != FORMAT:
        raise HeadwiseError(f"this atlas's {other_format(data.get('format'), FORMAT)}")
    try:
        return _parse_atlas(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise HeadwiseError(f"this atlas is damaged: {in_words(error)}") from error


def _parse_atlas(data: dict[str, Any]) -> Atlas:
    """An atlas of what a JSON file holds; an error where its parts do not fit each other."""
    layers = mapping(data["layers"], "layers", lambda x, path: items(x, path, count))
    heads = mapping(data["heads"], "heads", lambda x, path: items(x, path, _original_heads))
    ways = mapping(data["ways"], "ways", string)
    if not layers or not layers.keys() == heads.keys() == ways.keys():
        raise ValueError(f"layers, heads and ways must be of the same kinds of attention, got {brief([*layers])}")
    for kind, numbers in layers.items():
        if not numbers or sorted(set(numbers)) != numbers or len(heads[kind]) != len(numbers):
            raise ValueError(f"layers of {kind!r} must be different numbers in order, with heads for each")
        if ways[kind] not in ANY:
            raise ValueError(f"{kind!r} must attend one of {', '.join(ANY)}, got {brief(ways[kind])}")
    shapes = {kind: (len(rows), max(map(len, rows))) for kind, rows in heads.items()}
    tables: dict[str, Any] = {field: {} for field in TABLES}
    for name, kinds in mapping(data["scores"], "scores", lambda x, path: mapping(x, path, anything)).items():
        for kind, parts in kinds.items():
            for field, key in TABLES.items():
                shape = shapes[kind][:1] if field == "baseline" else shapes[kind]
                tables[field].setdefault(name, {})[kind] = _table(parts[key], f"{name} {kind} {key}", shape)
    about = _parse_about(data["about"], layers, heads)
    relations = _relations(data["relations"]) if "relations" in data else None
    return Atlas(string(data["model"], "model"), layers, heads, ways, **tables, about=about, relations=relations)


def _original_heads(value: Any, path: str) -> list[int | None]:
    numbers = items(value, path, lambda x, item_path: None if x is None else count(x, item_path))
    if not numbers:
        raise ValueError(f"{path} has no heads")
    return numbers


def _parse_about(value: Any, layers: dict[str, list[int]], heads: dict[str, list[list[int | None]]]) -> dict[str, Any]:
    about = mapping(value, "about", anything)
    for key in ("texts", "tokens"):
        count(about[key], key)
    count(about.get("cut", 0), "cut")
    items(about.get("notes", []), "notes", string)
    mapping(about.get("fingerprint", {}), "fingerprint", string)
    mapping(about.get("probes", {}), "probes", lambda x, path: mapping(x, path, anything))
    for kind, similarity in mapping(
        about.get("likeness", {}), "likeness", lambda x, path: mapping(x, path, anything)
    ).items():
        for point in items(similarity["map"], f"map of {kind}", lambda x, path: mapping(x, path, anything)):
            for axis in "xy":
                finite(point[axis], axis)
            row = layers[string(point["kind"], "kind")].index(count(point["layer"], "layer"))
            if count(point["head"], "head") >= len(heads[point["kind"]][row]):
                raise ValueError(f"there is no head {point['layer']}.{point['head']} of {kind}")
    return about


def _table(rows: Any, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of this shape, None where nothing was measured."""
    nested = [rows] if len(shape) == 1 else items(rows, path, anything)
    table = [items(row, path, finite_or_none) for row in nested]
    if len(nested) != (1 if len(shape) == 1 else shape[0]) or any(len(row) != shape[-1] for row in table):
        raise ValueError(f"{path} must have the shape {shape}")
    return np.array(table[0] if len(shape) == 1 else table, dtype=float)


def _relations(data: Any) -> Relations:
    from ..relations.result import Relations

    return Relations.from_json(data)
