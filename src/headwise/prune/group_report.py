"""The report of a grouping run: quality and cache against the number of KV heads, and the model that was saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plans import LayerKey
from .document import Block, Document, Items, Picture, Preformatted, Section, Table, write_document
from .output_directory import GROUP_REPORT
from .quality import LossChange, Quality, Size
from .recovery import LEARNING_RATE
from .report import Rows, with_interval, with_share
from .verdicts import GROUPING_RULE, cache_verdict, loss_verdict

if TYPE_CHECKING:
    from ..models.surgery.saving import SaveResult
    from .grouping import GroupedHeads

PICTURE = "grouping.png"


@dataclass(frozen=True)
class GroupOptions:
    """The user's choices, as `headwise group` names them."""

    kv_heads: int
    grouping: str = "similar"
    recover: int = 0
    batch: int = 16
    length: int = 128
    rate: float = LEARNING_RATE


@dataclass(frozen=True)
class Measurement:
    """The quality of one grouped model, and its loss relative to the full model's where it predicts text."""

    quality: Quality
    change: LossChange | None

    def to_json(self) -> dict[str, Any]:
        return {"quality": self.quality.to_json(), "loss_change": self.change.to_json() if self.change else None}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Measurement:
        change = document["loss_change"]
        return cls(Quality(**document["quality"]), None if change is None else LossChange(**change))


@dataclass(frozen=True)
class Point:
    """One number of KV heads and one grouping."""

    kv_heads: int
    grouping: str
    size: Size
    merged: Measurement
    recovered: Measurement | None  # None without --recover

    @property
    def final(self) -> Measurement:
        return self.recovered or self.merged

    def to_json(self) -> dict[str, Any]:
        return {
            "kv_heads": self.kv_heads,
            "grouping": self.grouping,
            "size": self.size.to_json(),
            "merged": self.merged.to_json(),
            "recovered": self.recovered.to_json() if self.recovered else None,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Point:
        recovered = document["recovered"]
        return cls(
            document["kv_heads"],
            document["grouping"],
            Size(**document["size"]),
            Measurement.from_json(document["merged"]),
            None if recovered is None else Measurement.from_json(recovered),
        )


@dataclass
class GroupReport:
    """Everything that one run measured."""

    model: str
    options: GroupOptions
    before: Size
    kv_heads_before: list[int]  # per layer
    full: Quality
    points: list[Point]  # the most KV heads first
    mapping: dict[LayerKey, GroupedHeads]  # of the saved model
    trained: int  # texts for similarity and recovery
    measured: int  # texts that quality was measured on
    losses: list[float] = field(default_factory=list)  # of the saved model's recovery
    recovery_run: str | None = None
    saved: SaveResult | None = None
    card_cache: int | None = None  # bytes per token, as the card of the saved model says

    @property
    def chosen(self) -> Point:
        """The point that was saved."""
        options = self.options
        return next(p for p in self.points if (p.kv_heads, p.grouping) == (options.kv_heads, options.grouping))

    def cache_share(self, point: Point) -> float | None:
        return point.size.cache / self.before.cache if self.before.cache else None

    def verdict(self) -> str:
        """Whether the saved model is worth its cost, by the rules of verdicts.py."""
        point, change = self.chosen, self.chosen.final.change
        problems = (cache_verdict(self.cache_share(point)), loss_verdict(change.value if change else None))
        reasons = [reason for reason in problems if reason is not None]
        if reasons:
            return f"Not worth it: {'; '.join(reasons)}."
        cost = f"its loss changes by {change}" if change else f"{point.final.quality}"
        return f"Worth it by the rule below: the cache is {self.cache_share(point):.2f} of the full one, and {cost}."

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "asked": asdict(self.options),
            "kv_heads_before": self.kv_heads_before,
            "before": self.before.to_json(),
            "full": self.full.to_json(),
            "points": [point.to_json() for point in self.points],
            "verdict": self.verdict(),
            "rule": GROUPING_RULE,
            "heads": [
                {"layer": key, "query": list(heads.query), "kv": [list(group) for group in heads.kv]}
                for key, heads in self.mapping.items()
            ],
            "texts": {"trained": self.trained, "measured": self.measured},
            "recovery_losses": self.losses,
            "recovery_run": self.recovery_run,
            "card_cache_bytes_per_token": self.card_cache,
            "saved": self.saved.to_json() if self.saved else None,
        }


def group_document(report: GroupReport, picture: bool = False) -> Document:
    """The report as sections; picture: PICTURE lies beside it."""
    options, before = report.options, "/".join(map(str, sorted(set(report.kv_heads_before))))
    title = f"{report.model}, {before} KV heads per layer merged into {options.kv_heads}"
    summary: list[Block] = [
        report.verdict(),
        Table(("", "before", "after"), _comparison(report, before)),
        GROUPING_RULE,
    ]
    curve: list[Block] = [_curve(report)]
    if picture:
        curve.append(Picture(PICTURE, f"{report.full.name} against the number of KV heads"))
    curve.append(_method(report))
    sections = [
        Section("", summary),
        Section("Quality against the number of KV heads", curve),
        Section("Which heads were merged", [Preformatted(_groups(report.mapping))]),
    ]
    if report.saved is not None:
        words = [str(report.saved)]
        if report.card_cache:
            words.append(f"The card of the saved model gives a KV cache of {report.card_cache:,} bytes per token.")
        sections.append(Section("Saved", [Items(words)]))
    return Document(title, sections)


def write_group_report(report: GroupReport, folder: Path, picture: bool = False) -> None:
    """grouping.md, grouping.html and grouping.json in a directory; picture: PICTURE is there too."""
    write_document(group_document(report, picture), report.to_json(), folder, GROUP_REPORT.removesuffix(".json"))


def _comparison(report: GroupReport, before: str) -> Rows:
    point = report.chosen
    rows: Rows = [
        ("KV heads per layer", before, str(point.kv_heads)),
        ("parameters", f"{report.before.parameters:,}", with_share(point.size.parameters, report.before.parameters)),
    ]
    if report.before.cache:
        rows.append(
            ("KV cache, bytes per token", f"{report.before.cache:,}", with_share(point.size.cache, report.before.cache))
        )
    rows.append((report.full.name, with_interval(report.full), with_interval(point.merged.quality)))
    if point.recovered is not None:
        rows.append(
            (
                f"{report.full.name}, after {report.options.recover} steps of recovery",
                with_interval(report.full),
                with_interval(point.recovered.quality),
            )
        )
    return rows


def _curve(report: GroupReport) -> Table:
    """One row per number of KV heads and grouping, the full model first."""
    recovery = bool(report.options.recover)
    header: tuple[str, ...] = ("KV heads, grouping", "cache", report.full.name, "change of the loss")
    header += (f"{report.full.name}, recovered", "change of the loss") if recovery else ()
    full = ("all", "1.00", with_interval(report.full), "", *(("", "") if recovery else ()))
    rows = [full]
    for point in report.points:
        share = report.cache_share(point)
        cells = [f"{point.kv_heads}, {point.grouping}", "none" if share is None else f"{share:.2f}"]
        for measurement in (point.merged, point.recovered)[: 1 + recovery]:
            assert measurement is not None
            cells += [with_interval(measurement.quality), str(measurement.change) if measurement.change else ""]
        rows.append(tuple(cells))
    return Table(header, rows)


def _method(report: GroupReport) -> str:
    words = (
        f"Each KV head is the mean of a group: of neighbours (contiguous), or of heads whose keys and values are close "
        f"on {report.trained} texts (similar). Measured on {report.measured} other texts; 95 % intervals by bootstrap "
        "over texts, those of the change paired text by text."
    )
    if report.options.recover:
        words += (
            f" Recovery: {report.options.recover} steps of distillation from the full model on the first texts, "
            f"{report.options.batch} texts of at most {report.options.length} tokens per step, learning rate "
            f"{report.options.rate:g}, in every row."
        )
    return words


def _groups(mapping: dict[LayerKey, GroupedHeads]) -> str:
    lines = []
    for key, heads in mapping.items():
        name = f"{key[0]} {key[1]}" if isinstance(key, tuple) else f"layer {key}"
        lines.append(f"{name:>12}  " + "  ".join("+".join(map(str, group)) for group in heads.kv))
    return "\n".join(lines)
