"""The report of a pruning run: its values, the table that every form of it shows, and the files it is written to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..files import write_atomically
from ..plans import Plan
from .output_directory import REPORT
from .quality import Quality, Size

if TYPE_CHECKING:
    from ..models.surgery.saving import SaveResult
    from .head_scores import HeadScores
    from .rank_scores import ScoreComparison

NOTICEABLE = 0.97  # a pruned model is faster where it takes at most this share of the full model's time
Rows = list[tuple[str, str, str]]


@dataclass(frozen=True)
class PruneOptions:
    """The user's choices, as `headwise prune` names them."""

    keep: float | dict[str, float] = 0.6
    score: str = "michel"
    budget: str = "heads"
    unit: str = "head"
    per: str = "model"
    steps: int = 1
    zero: bool = False
    compensate: str | None = None
    allow_empty: bool = False
    recover: int = 0
    batch: int = 16
    length: int = 128
    seed: int = 0
    compare: bool = False


@dataclass(frozen=True)
class Latency:
    """Milliseconds per pass of the full and of the pruned model, measured in turn."""

    batch: int
    length: int
    full: float
    pruned: float

    @property
    def ratio(self) -> float:
        return self.pruned / self.full


@dataclass
class PruneReport:
    """Everything that one run measured."""

    model: str
    options: PruneOptions
    plan: Plan
    before: Size
    after: Size
    quality: dict[str, Quality]  # "full", "pruned" and, after a recovery, "recovered"
    latency: list[Latency]
    attention_share: float  # of the full model's time, at the user's batch and length: the most that heads can save
    scored: int  # texts that heads were scored on
    measured: int  # texts that quality was measured on
    saved: SaveResult | None = None
    exports: dict[str, SaveResult | str] = field(default_factory=dict)  # further forms; a string: why there is none
    losses: list[float] = field(default_factory=list)  # of the recovery, step by step
    scores: HeadScores | None = None  # by which the heads were chosen
    comparison: ScoreComparison | None = None
    recovery_run: str | None = None  # which recovery, as its checkpoint names it

    def verdict(self) -> list[str]:
        """Whether the pruned model is faster, one line per measured batch."""
        lines = []
        for latency in self.latency:
            size = f"batch {latency.batch} x {latency.length} tokens"
            times = f"{latency.full:.1f} ms before, {latency.pruned:.1f} ms after"
            if latency.ratio > NOTICEABLE:
                lines.append(f"not faster at {size}: {times}")
            else:
                lines.append(f"faster at {size}: {times} ({latency.ratio:.2f} of the time)")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "asked": asdict(self.options),
            "plan": self.plan.to_json(),
            "most_that_heads_can_save": {
                "parameters": self.before.of_heads,
                "of": self.before.parameters,
                "share_of_time_in_attention_layers": self.attention_share,
            },
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "quality": {name: measurement.to_json() for name, measurement in self.quality.items()},
            "latency_ms": [asdict(measurement) | {"ratio": measurement.ratio} for measurement in self.latency],
            "verdict": self.verdict(),
            "texts": {"scored": self.scored, "measured": self.measured},
            "recovery_losses": self.losses,
            "recovery_run": self.recovery_run,
            "scores": self.scores.to_json() if self.scores is not None else None,
            "against_ablation": self.comparison.to_json() if self.comparison else None,
            "saved": self.saved.to_json() if self.saved else None,
            "exports": {name: x if isinstance(x, str) else x.to_json() for name, x in self.exports.items()},
        }


def savings_limit(report: PruneReport) -> str:
    """A description of the most that removing heads can save."""
    before, latency = report.before, report.latency[0]
    words = (
        f"all heads together are {before.of_heads:,} of {before.parameters:,} parameters "
        f"({before.of_heads / before.parameters:.0%}); the attention layers take {report.attention_share:.0%} "
        f"of the time at batch {latency.batch} x {latency.length} tokens: no plan can save more than that"
    )
    return words + (f"; the KV cache is {before.cache:,} bytes per token" if before.cache else "")


def comparison_rows(report: PruneReport) -> Rows:
    """(name, before, after) of everything that pruning changes."""
    before, after, full = report.before, report.after, report.quality["full"]
    rows: Rows = [
        ("heads", f"{report.plan.total}", f"{report.plan.total - report.plan.removed}"),
        ("parameters", f"{before.parameters:,}", with_share(after.parameters, before.parameters)),
    ]
    if before.cache:
        rows.append(("KV cache, bytes per token", f"{before.cache:,}", with_share(after.cache, before.cache)))
    for name, label in (("pruned", full.name), ("recovered", f"{full.name}, after recovery")):
        if name in report.quality:
            rows.append((label, with_interval(full), with_interval(report.quality[name])))
    for latency in report.latency:
        label = f"ms per pass, batch {latency.batch} x {latency.length}"
        rows.append((label, f"{latency.full:.1f}", f"{latency.pruned:.1f} ({latency.ratio:.2f})"))
    return rows


def card_quality(report: PruneReport) -> dict[str, tuple[str, str]]:
    """What the model card says about quality: {measure: (before, after)}."""
    if "full" not in report.quality:
        return {}
    full = report.quality["full"]
    texts = f"95 % interval over {report.measured} texts"
    labels = {"pruned": f"{full.name} ({texts})", "recovered": f"{full.name} after recovery ({texts})"}
    return {
        label: (with_interval(full), with_interval(report.quality[name]))
        for name, label in labels.items()
        if name in report.quality
    }


def export_lines(report: PruneReport) -> list[str]:
    """The result of each further form, one line each."""
    return [f"no model.{name}: {x}" if isinstance(x, str) else str(x) for name, x in report.exports.items()]


def score_rows(comparison: ScoreComparison) -> Rows:
    """(score, rank correlation with ablation, seconds), ablation itself last."""
    rows = [(row.score, f"{row.correlation:.2f}", f"{row.seconds:.1f}") for row in comparison.rows]
    return [*rows, ("ablation", "1.00", f"{comparison.seconds:.1f}")]


def recovery_summary(report: PruneReport) -> str:
    """What the recovery did to its loss and to the quality on texts that it did not see."""
    last = report.losses[-10:]
    full, pruned, recovered = (report.quality[name] for name in ("full", "pruned", "recovered"))
    return (
        f"{len(report.losses)} steps of distillation from the full model; its loss went from {report.losses[0]:.4g} to "
        f"{sum(last) / len(last):.4g} (mean of the last ten steps). {full.name} on texts that it did not see: "
        f"{with_interval(full)} in full, {with_interval(pruned)} pruned, {with_interval(recovered)} recovered."
    )


def write_report(report: PruneReport, folder: Path, picture: bool = False) -> None:
    """pruning.md, pruning.html and pruning.json in a directory; picture: curve.png is there too."""
    from .report_html import page
    from .report_markdown import markdown

    for name, content in (
        ("pruning.md", markdown(report)),
        ("pruning.html", page(report, picture)),
        (REPORT, json.dumps(report.to_json(), indent=2) + "\n"),
    ):
        with write_atomically(folder / name, CheckpointError) as file:
            file.write_text(content, encoding="utf-8")


def with_share(after: int, before: int) -> str:
    return f"{after:,} ({after / before:.1%})"


def with_interval(quality: Quality) -> str:
    return f"{quality.value:.4g} ({quality.low:.4g} to {quality.high:.4g})"
