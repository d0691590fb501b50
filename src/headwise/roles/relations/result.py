"""Relations: which head follows which relation, as a plain value. It opens without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CheckpointError
from ...files import write_atomically
from ...json_documents import (
    anything,
    brief,
    count,
    finite,
    finite_or_none,
    flag,
    in_words,
    items,
    mapping,
    parse_json,
    string,
)

if TYPE_CHECKING:
    from rich.table import Table

Head = tuple[str, int, int]  # kind, layer, head
MARGIN = 0.10  # accuracy above the best fixed answer that a head needs (Voita et al. 2019)
FOUND, BETTER, NOT_FOUND, TOO_FEW = "found", "above the offset", "not found", "too few links"
FORMAT = "headwise relations 1"
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Relation:
    """The head that was chosen for one relation, on links that it was not chosen on.

    Intervals are at a level that holds for all relations together; `gain` is accuracy above the best fixed answer.
    """

    name: str
    kind: str
    layer: int
    head: int
    links: int  # evaluated on
    chosen_by: int  # links of the half for choosing; 0 where the head was chosen by another relation or corpus
    visible: float  # share of all links that the model can follow; a causal one only those to earlier words
    accuracy: float
    weight: float  # mean weight on the gold word
    fixed: str  # the best answer that ignores meaning: "-1" is the word before
    fixed_accuracy: float
    median: float  # accuracy of a random head: the median of all heads
    high_heads: float  # the accuracy that one head in twenty exceeds
    low: float = float("nan")  # of accuracy
    high: float = float("nan")
    weight_low: float = float("nan")
    weight_high: float = float("nan")
    gain_low: float = float("nan")
    gain_high: float = float("nan")

    @property
    def gain(self) -> float:
        return self.accuracy - self.fixed_accuracy

    @property
    def label(self) -> str:
        return f"{self.layer}.{self.head}"

    @property
    def enough(self) -> bool:
        return not np.isnan(self.gain_low)

    @property
    def verdict(self) -> str:
        """FOUND: at least MARGIN above the best fixed answer, with an interval that lies above it."""
        if not self.enough:
            return TOO_FEW
        if self.gain_low <= 0:
            return NOT_FOUND
        return FOUND if self.gain >= MARGIN else BETTER


@dataclass(frozen=True)
class Relations:
    """All relations of a corpus in one model: the result of `headwise.relations`.

    It prints as a table.

    Attributes:
        model: the name of the model.
        causal: whether tokens see only earlier tokens.
        sentences: the number of sentences used for evaluation.
        level: the level of each interval, chosen so that all intervals hold jointly at 0.05.
        rows: one per relation and direction.
        shuffled: the same with shuffled gold links, which should find nothing.
        heads: (kind, layer, head) of every head, in the order of `scores`.
        scores: relation -> accuracy of every head on the half for evaluation, (heads,).
        notes: remarks about the numbers.
        record: the results link by link; not saved.

    Example:
        >>> relations = headwise.Relations.load("relations.json")
        >>> relations["object > verb"].verdict, relations["object > verb"].label
        ('found', '4.11')
        >>> relations.best("object > verb", count=1)  # ((kind, layer, head), accuracy)
        [(('self', 4, 5), 0.6133333333333333)]
    """

    model: str
    causal: bool
    sentences: int
    level: float
    rows: tuple[Relation, ...]
    shuffled: tuple[Relation, ...]
    heads: tuple[Head, ...]
    scores: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()
    record: Any = field(default=None, repr=False, compare=False)

    def __getitem__(self, name: str) -> Relation:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def found(self) -> tuple[Relation, ...]:
        return tuple(row for row in self.rows if row.verdict == FOUND)

    def best(self, name: str, count: int = 5) -> list[tuple[Head, float]]:
        """The best heads of a relation on the evaluation half; for exploration only, since they are chosen on it."""
        order = np.argsort(self.scores[name])[::-1][:count]
        return [(self.heads[i], float(self.scores[name][i])) for i in order]

    def summary(self) -> list[str]:
        """The result in a few lines."""
        judged = [row for row in self.rows if row.enough]
        counts = {verdict: sum(row.verdict == verdict for row in judged) for verdict in (FOUND, BETTER, NOT_FOUND)}
        false = [row for row in self.shuffled if row.enough]
        lines = [
            f"{self.model}: {len(judged)} relations judged on {self.sentences:,} texts, "
            + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            + f"; {len(self.rows) - len(judged)} with too few links",
            f"shuffled gold: {sum(row.verdict == FOUND for row in false)} of {len(false)} found",
        ]
        if self.causal:
            lines.append("a causal model: links to later words cannot be followed; `visible` is the share that can")
        return [*lines, *self.notes]

    def table(self, rows: Iterable[Relation] | None = None) -> Table:
        """A table for the terminal."""
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in (
            "relation",
            "head",
            "accuracy",
            "interval",
            "fixed",
            "its accuracy",
            "random head",
            "weight",
            "links",
        ):
            table.add_column(title, justify="left" if title in ("relation", "fixed") else "right")
        table.add_column("")
        for row in self.rows_by_verdict() if rows is None else rows:
            table.add_row(*_cells(row), style=None if row.verdict == FOUND else "dim")
        return table

    def rows_by_verdict(self) -> list[Relation]:
        """By verdict and gain, without those that have too few links."""
        rank = {FOUND: 0, BETTER: 1, NOT_FOUND: 2}
        return sorted((row for row in self.rows if row.enough), key=lambda row: (rank[row.verdict], -row.gain))

    def __str__(self) -> str:
        from ...terminal import console

        screen = console(width=130, color_system=None)
        with screen.capture() as captured:
            screen.print(self.table())
            for line in self.summary():
                screen.print(line, soft_wrap=True)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def markdown(self, rows: Iterable[Relation] | None = None) -> str:
        """The table in Markdown."""
        header = (
            "| relation | head | accuracy | interval | best fixed | its accuracy | median head | weight | links "
            "| visible | |"
        )
        lines = [header, "|" + "---|" * (header.count("|") - 1)]
        for row in self.rows_by_verdict() if rows is None else rows:
            name, label, accuracy, interval, fixed, fixed_accuracy, median, weight, links, verdict = _cells(row)
            cells = (
                name,
                label,
                accuracy,
                interval,
                fixed,
                fixed_accuracy,
                median,
                weight,
                links,
                f"{row.visible:.0%}",
                verdict,
            )
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def frame(self) -> Any:
        """A pandas DataFrame with one row per relation."""
        from ..atlas.export import pandas

        return pandas().DataFrame([_plain(row) for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "causal": self.causal,
            "sentences": self.sentences,
            "level": self.level,
            "notes": list(self.notes),
            "heads": [list(head) for head in self.heads],
            "rows": [_plain(row) for row in self.rows],
            "shuffled": [_plain(row) for row in self.shuffled],
            "scores": {name: [_round(float(x)) for x in scores] for name, scores in self.scores.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Relations:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = brief(data.get("format") if isinstance(data, dict) else data)
            raise CheckpointError(f"these are no relations: their format is {got}, not {FORMAT!r}")
        try:
            heads = tuple(items(data["heads"], "heads", read_head))
            scores = mapping(data["scores"], "scores", lambda x, name: np.array(items(x, name, finite_or_none)))
            if wrong := [name for name, accuracies in scores.items() if len(accuracies) != len(heads)]:
                raise ValueError(f"scores of {brief(wrong[0])} must be {len(heads)}, one for each head")
            return cls(
                model=string(data["model"], "model"),
                causal=flag(data["causal"], "causal"),
                sentences=count(data["sentences"], "sentences"),
                level=finite(data["level"], "level"),
                rows=tuple(items(data["rows"], "rows", _row)),
                shuffled=tuple(items(data["shuffled"], "shuffled", _row)),
                heads=heads,
                scores=scores,
                notes=tuple(items(data["notes"], "notes", string)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"these relations are damaged: {in_words(error)}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        with write_atomically(path) as file:
            file.write_text(json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Relations:
        try:
            data = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read as saved relations: {in_words(error)}") from error
        return cls.from_json(data)


def _round(x: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if np.isnan(x) else round(x, DIGITS)


def _plain(row: Relation) -> dict[str, Any]:
    """Plain values, with gain and verdict from the rounded numbers, as they are when read again."""
    values: dict[str, Any] = {name: _round(x) if isinstance(x, float) else x for name, x in asdict(row).items()}
    accuracy, fixed_accuracy = values["accuracy"], values["fixed_accuracy"]
    gain = None if accuracy is None or fixed_accuracy is None else _round(accuracy - fixed_accuracy)
    return values | {"gain": gain, "verdict": row.verdict}


def _row(value: Any, path: str) -> Relation:
    values = mapping(value, path, anything)
    fields_read: dict[str, Any] = {}
    for column in fields(Relation):
        if column.default is MISSING or column.name in values:
            fields_read[column.name] = READERS[str(column.type)](values[column.name], f"{path}.{column.name}")
    return Relation(**fields_read)


READERS = {"str": string, "int": count, "float": finite_or_none}  # field type -> its reader


def read_head(value: Any, path: str) -> Head:
    kind, layer, head = items(value, path, anything)
    return string(kind, path), count(layer, path), count(head, path)


def _cells(row: Relation) -> tuple[str, ...]:
    return (
        row.name,
        row.label,
        f"{row.accuracy:.1%}",
        f"{row.low:.1%} to {row.high:.1%}" if row.enough else "",
        row.fixed,
        f"{row.fixed_accuracy:.1%}",
        f"{row.median:.1%}",
        f"{row.weight:.2f}",
        f"{row.links:,}",
        row.verdict,
    )
