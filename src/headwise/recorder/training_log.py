"""A training log as a value: what `Recorder` wrote to a JSONL file, read and checked.

The first line is the header: format, model and layers. Every further line is one entry: the statistics of all heads in
one optimizer step, and the alarms that began there. A killed run may leave a torn last line, which is not an entry.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HeadwiseError
from ..json_documents import anything, count, finite, in_words, items, mapping, other_format, parse_json, string
from .alarms import Alarm, LayerKey, Values, number_or_nan
from .statistics import STATISTICS

FORMAT, VERSION = "headwise training log", 1
MAX_HEADS = 1 << 16  # of a layer, in a file that can be trusted


@dataclass(frozen=True)
class LoggedLayer:
    """One attention layer of the model."""

    kind: str
    index: int
    name: str  # the module's path
    heads: int
    kv_heads: int

    @property
    def key(self) -> LayerKey:
        return self.kind, self.index

    def to_json(self) -> dict[str, Any]:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads}
        return {"kind": self.kind, "layer": self.index, "name": self.name, **sizes}

    @classmethod
    def from_json(cls, data: Any, path: str) -> LoggedLayer:
        layer = mapping(data, path, anything)
        heads = count(layer["heads"], f"{path}.heads")
        if not 0 < heads <= MAX_HEADS:
            raise ValueError(f"{path}.heads must be from 1 to {MAX_HEADS}, got {heads}")
        return cls(
            string(layer["kind"], f"{path}.kind"),
            count(layer["layer"], f"{path}.layer"),
            string(layer["name"], f"{path}.name"),
            heads,
            count(layer["kv_heads"], f"{path}.kv_heads"),
        )


@dataclass(frozen=True)
class LogHeader:
    """The header of a log: what it records."""

    model: str  # the model's class
    fingerprint: str  # of the model's structure: class, config, names and shapes of the parameters
    layers: tuple[LoggedLayer, ...]
    every: int
    thresholds: Mapping[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "version": VERSION, "model": self.model, "fingerprint": self.fingerprint,
            "every": self.every, "thresholds": dict(self.thresholds),
            "layers": [layer.to_json() for layer in self.layers],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> LogHeader:
        header = mapping(data, "the header", anything)
        if header.get("format") != FORMAT:
            raise ValueError("its first line is not the header of a training log")
        if header.get("version") != VERSION:
            raise ValueError(f"its {other_format(header.get('version'), VERSION)}")
        layers = items(header["layers"], "layers", LoggedLayer.from_json)
        if len({layer.key for layer in layers}) < len(layers):
            raise ValueError("two of its layers have the same kind and number")
        return cls(
            string(header["model"], "model"),
            string(header["fingerprint"], "fingerprint"),
            tuple(layers),
            count(header["every"], "every"),
            mapping(header["thresholds"], "thresholds", lambda x, path: None if x is None else finite(x, path)),
        )


@dataclass(frozen=True)
class LogEntry:
    """The statistics of every head in one optimizer step."""

    step: int
    time: float  # seconds since 1970
    passes: int  # forward passes of the step, over all ranks
    ranks: int
    values: Mapping[LayerKey, Values]  # by layer: name -> one number per head, NaN if there is none
    twins: Mapping[LayerKey, list[int]]  # by layer: the most similar head of the layer, for every head
    queries: Mapping[LayerKey, int]  # by layer: how many queries were counted
    alarms: tuple[Alarm, ...] = ()  # those that began in this step

    def to_json(self) -> dict[str, Any]:
        layers = []
        for (kind, index), values in self.values.items():
            layer: dict[str, Any] = {"kind": kind, "layer": index, "queries": self.queries[kind, index]}
            layer |= {name: [_rounded(x) for x in row] for name, row in values.items()}
            if (kind, index) in self.twins:
                layer["twin_of"] = self.twins[kind, index]
            layers.append(layer)
        counts = {"step": self.step, "time": round(self.time, 3), "passes": self.passes, "ranks": self.ranks}
        return {**counts, "layers": layers, "alarms": [alarm.to_json() for alarm in self.alarms]}

    @classmethod
    def from_json(cls, data: Any) -> LogEntry:
        entry = mapping(data, "the entry", anything)
        step = count(entry["step"], "step")
        values: dict[LayerKey, Values] = {}
        twins: dict[LayerKey, list[int]] = {}
        queries: dict[LayerKey, int] = {}
        for number, layer in enumerate(items(entry["layers"], "layers", anything)):
            path = f"layers[{number}]"
            mapping(layer, path, anything)
            key = string(layer["kind"], f"{path}.kind"), count(layer["layer"], f"{path}.layer")
            rows = {name: _numbers(layer[name], f"{path}.{name}") for name in STATISTICS if name in layer}
            if len({len(row) for row in rows.values()}) > 1:
                raise ValueError(f"{path} has statistics of different numbers of heads")
            values[key] = rows
            queries[key] = count(layer["queries"], f"{path}.queries")
            if "twin_of" in layer:
                twins[key] = items(layer["twin_of"], f"{path}.twin_of", count)
        return cls(
            step,
            finite(entry["time"], "time"),
            count(entry["passes"], "passes"),
            count(entry["ranks"], "ranks"),
            values,
            twins,
            queries,
            tuple(items(entry["alarms"], "alarms", lambda x, path: Alarm.from_json(x, step, path))),
        )


def _numbers(values: Any, path: str) -> list[float]:
    """A JSON list of finite numbers and nulls, which are NaN. There are millions of them: the usual case is quick."""
    if isinstance(values, list) and all(type(x) is float and math.isfinite(x) for x in values):
        return values
    return items(values, path, number_or_nan)


def head_values(entry: LogEntry, name: str, layers: Sequence[LoggedLayer]) -> np.ndarray:
    """(layers, heads) of one statistic; NaN if there is none."""
    table = np.full((len(layers), max(layer.heads for layer in layers)), np.nan)
    for line, layer in zip(table, layers, strict=True):
        values = entry.values.get(layer.key, {}).get(name, [])
        line[: len(values)] = values
    return table


def _rounded(x: float) -> float | None:
    """A number to the precision of float32; None, which is JSON's null, where it is not finite."""
    return float(f"{x:.7g}") if math.isfinite(x) else None


def encode_line(document: dict[str, Any]) -> bytes:
    """One whole line of a log."""
    return (json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class TrainingLog:
    """A whole training log.

    Example:
        >>> log = headwise.recorder.TrainingLog.load("heads.jsonl")
        >>> log.steps, log.table("entropy", step=log.steps[-1])  # (layers, heads)
    """

    header: LogHeader
    entries: tuple[LogEntry, ...]
    torn: bool = False  # whether the last line is incomplete, as a kill leaves it

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainingLog:
        """Read a JSONL file.

        Raises:
            HeadwiseError: for a file that is missing, of another kind, or damaged before its last line.
        """
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise HeadwiseError(f"{os.fspath(path)!r} cannot be read: {error.strerror or error}") from error
        *whole, rest = lines  # rest: what follows the last newline, "" unless the last line is torn
        try:
            header, entries = _parse(whole)
        except (ValueError, KeyError) as error:
            raise HeadwiseError(f"{os.fspath(path)!r} is no training log that can be read: {in_words(error)}") from None
        return cls(header, entries, torn=bool(rest))

    @property
    def steps(self) -> list[int]:
        """The optimizer steps that were recorded."""
        return [entry.step for entry in self.entries]

    @property
    def kinds(self) -> list[str]:
        """The kinds of attention, in the order of the model."""
        return list(dict.fromkeys(layer.kind for layer in self.header.layers))

    @property
    def names(self) -> list[str]:
        """The statistics that were recorded of any layer."""
        present = {name for entry in self.entries for values in entry.values.values() for name in values}
        return [name for name in STATISTICS if name in present]

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms, in the order of their steps."""
        return [alarm for entry in self.entries for alarm in entry.alarms]

    def layers(self, kind: str | None = None) -> list[LoggedLayer]:
        """The layers of one kind; of the first kind by default."""
        kind = self.kinds[0] if kind is None else kind
        return [layer for layer in self.header.layers if layer.kind == kind]

    def entry(self, step: int | None = None) -> LogEntry:
        """The entry of a step; the last one by default."""
        if not self.entries:
            raise HeadwiseError("the log has no entry yet")
        for entry in self.entries if step is not None else self.entries[-1:]:
            if step is None or entry.step == step:
                return entry
        near = min(self.steps, key=lambda other: abs(other - (step or 0)))
        raise HeadwiseError(f"step {step} was not recorded; the nearest step that was is step={near}")

    def table(self, name: str, kind: str | None = None, step: int | None = None) -> np.ndarray:
        """(layers, heads): one statistic in one step; NaN if it was not recorded."""
        if name not in STATISTICS:
            raise HeadwiseError(f"no statistic {name!r}; there are {', '.join(STATISTICS)}")
        return head_values(self.entry(step), name, self.layers(kind))

    def to_json(self) -> dict[str, Any]:
        """Header and entries as one JSON document."""
        return {**self.header.to_json(), "entries": [entry.to_json() for entry in self.entries]}


def _parse(lines: list[bytes]) -> tuple[LogHeader, tuple[LogEntry, ...]]:
    """The header and the entries of whole lines; the ValueError for a damaged line names it."""
    if not lines:
        raise ValueError("it has no whole line")
    header, entries = LogHeader.from_json(_parse_line(lines[0], 1)), list[LogEntry]()
    heads = {layer.key: layer.heads for layer in header.layers}
    for number, line in enumerate(lines[1:], start=2):
        document = _parse_line(line, number)
        try:
            entry = LogEntry.from_json(document)
            for key, values in entry.values.items():
                if any(len(row) != heads.get(key) for row in values.values()):
                    raise ValueError(f"it has heads of {key[0]} layer {key[1]} that the header does not have")
            if entries and entry.step <= entries[-1].step:
                raise ValueError(f"step {entry.step} follows step {entries[-1].step}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is damaged: {in_words(error)}") from None
        entries.append(entry)
    return header, tuple(entries)


def _parse_line(line: bytes, number: int) -> Any:
    try:
        return parse_json(line.decode())
    except ValueError as error:
        raise ValueError(f"line {number} is damaged: {in_words(error)}") from None
