"""The report of a streaming run: loss, needle answers, cache and time, against full attention and random choice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..plans import StreamPlan
from ..resampling import RESAMPLES, bootstrap_counts, interval, share_interval
from ..timing import machine_summary
from .document import Block, Document, Items, Preformatted, Section, Table, write_document
from .other_levers import COMBINING, Int8, int8_words
from .quality import LossChange
from .report import NOTICEABLE
from .sequence_losses import loss_heads, plan_of
from .verdicts import (
    LARGEST_STREAMING_LOSS,
    LEAST_NEEDLES,
    STREAMING_RULE,
    cache_verdict,
    choice_verdict,
    loss_verdict,
    needle_verdict,
)

REPORT_NAME = "streaming"  # .md, .html and .json
FULL, PLAN, ALL, RANDOM = "full attention", "the plan", "all heads streaming", "random choice"
VARIANTS = (FULL, PLAN, ALL, RANDOM)


@dataclass(frozen=True)
class StreamOptions:
    """The user's choices, as `headwise stream` names them."""

    share: float | None = None
    cache_bytes: int | None = None
    max_loss: float | None = None
    window: int = 256
    keep_first: int = 4
    length: int = 4096
    limit: int | None = None  # tokens of text in each half
    needles: int = 8  # prompts per depth
    draws: int = 10
    contexts: tuple[int, ...] = (1024, 4096, 16384, 32768)
    seed: int = 0


class NeedleResult(NamedTuple):
    """One needle prompt under one variant."""

    depth: float
    right: bool


@dataclass
class StreamReport:
    """Everything that one run measured."""

    model: str
    options: StreamOptions
    plan: StreamPlan
    chosen_on: str  # the texts, in words
    reported_on: str
    trained_length: int | None
    losses: dict[str, np.ndarray]  # by variant: (pieces,); by RANDOM: (draws, pieces)
    needles: dict[str, list[NeedleResult]]  # by variant
    needle_length: int
    decoding: dict[int, dict[str, float] | str]  # by context: seconds per token by variant, or why not
    prefill: dict[str, float]  # seconds by variant, at options.length
    levers: list[str]
    int8: Int8 | str
    machine: dict[str, Any]
    command: str = ""
    notes: list[str] = field(default_factory=list)

    def change(self, variant: str) -> LossChange:
        """The change of the loss against full attention, paired over the pieces; of random choice its mean draw's."""
        full, own = self.losses[FULL], self.losses[variant]
        own = own.mean(0) if variant == RANDOM else own
        ratios = self._resampled(own) / self._resampled(full) - 1
        low, high = interval(ratios) if len(full) > 1 else (np.nan, np.nan)
        return LossChange(float(own.mean() / full.mean() - 1), float(low), float(high))

    def random_range(self) -> tuple[float, float]:
        """The smallest and the largest change of the loss among the random draws."""
        changes = self.losses[RANDOM].mean(1) / self.losses[FULL].mean() - 1
        return float(changes.min()), float(changes.max())

    def against_random(self) -> LossChange | None:
        """The plan's increase of the loss as a share of random choice's, with its interval; None where that has none.

        Pieces and draws are resampled.
        """
        full, plan, draws = self.losses[FULL], self.losses[PLAN], self.losses[RANDOM]
        if not len(draws) or draws.mean() <= full.mean():
            return None
        value = (plan.mean() - full.mean()) / (draws.mean() - full.mean())
        pieces = bootstrap_counts(len(full), RESAMPLES) / len(full)
        draw_counts = bootstrap_counts(len(draws), RESAMPLES, 1) / len(draws)
        random = ((draw_counts @ draws) * pieces).sum(1) - pieces @ full
        ratios = (pieces @ (plan - full)) / np.where(random > 0, random, np.nan)
        low, high = np.nanpercentile(ratios, (2.5, 97.5))
        return LossChange(float(value), float(low), float(high))

    def _resampled(self, values: np.ndarray) -> np.ndarray:
        """The mean over each resampled set of pieces, the same sets for all variants."""
        means: np.ndarray = bootstrap_counts(len(values), RESAMPLES) @ values / len(values)
        return means

    def accuracy(self, variant: str) -> float | None:
        results = self.needles.get(variant)
        return sum(result.right for result in results) / len(results) if results else None

    def cache_bytes(self, variant: str, context: int) -> int:
        """Bytes of the cache of one sequence; random choice streams as many heads as the plan."""
        plan = self.plan
        if variant in (FULL, ALL):
            heads = loss_heads(True, plan.layers) if variant == ALL else []
            plan = plan_of(heads, plan.layers, plan.window, plan.keep_first)
        return plan.cache_bytes(context)

    def verdict(self) -> str:
        """Whether the plan is worth its cost, by the rules of verdicts.py."""
        change, ratio = self.change(PLAN), self.against_random()
        share = self.plan.cache_ratio(self.options.length)
        problems = (
            cache_verdict(share),
            loss_verdict(change.value, LARGEST_STREAMING_LOSS),
            choice_verdict(None if ratio is None or not self.plan.streaming else ratio.high),
            needle_verdict(self.accuracy(FULL), self.accuracy(PLAN)),
        )
        reasons = [reason for reason in problems if reason is not None]
        if reasons:
            return f"Not worth it: {'; '.join(reasons)}."
        return (
            f"Worth it by the rule below: at {self.options.length:,} tokens the cache is {share:.2f} of the full one, "
            f"and the loss changes by {_interval_words(change)}."
        )

    def speed(self) -> list[str]:
        """Whether decoding with the plan is faster, one line per context."""
        lines = []
        for context, times in self.decoding.items():
            if isinstance(times, str):
                continue
            ratio = times[PLAN] / times[FULL]
            words = f"{1000 * times[FULL]:.1f} ms per token with full attention, {1000 * times[PLAN]:.1f} with the plan"
            faster = f"faster at {context:,} tokens: {words} ({ratio:.2f} of the time)"
            lines.append(faster if ratio <= NOTICEABLE else f"not faster at {context:,} tokens: {words}")
        return lines

    def to_json(self) -> dict[str, Any]:
        ratio = self.against_random()
        return {
            "model": self.model,
            "asked": asdict(self.options),
            "command": self.command,
            "plan": self.plan.to_json(),
            "texts": {"chosen_on": self.chosen_on, "reported_on": self.reported_on},
            "trained_length": self.trained_length,
            "losses": {variant: values.tolist() for variant, values in self.losses.items()},
            "loss_change": {variant: _finite(self.change(variant).to_json()) for variant in self.losses},
            "random_range": self.random_range(),
            "increase_against_random": None if ratio is None else _finite(ratio.to_json()),
            "needles": {name: [result._asdict() for result in results] for name, results in self.needles.items()},
            "needle_accuracy": {variant: self.accuracy(variant) for variant in self.needles},
            "needle_length": self.needle_length,
            "cache_bytes": {
                str(context): {variant: self.cache_bytes(variant, context) for variant in VARIANTS}
                for context in self.options.contexts
            },
            "cache_share": self.plan.cache_ratio(self.options.length),
            "decoding_seconds": {str(context): times for context, times in self.decoding.items()},
            "prefill_seconds": self.prefill,
            "other_levers": self.levers,
            "int8": self.int8 if isinstance(self.int8, str) else self.int8.to_json(),
            "verdict": self.verdict(),
            "speed": self.speed(),
            "rule": STREAMING_RULE,
            "machine": self.machine,
            "notes": self.notes,
        }


def stream_document(report: StreamReport) -> Document:
    """The report as sections."""
    plan, options = report.plan, report.options
    title = f"{report.model}, {plan.streaming} of {plan.total} KV heads streaming"
    summary: list[Block] = [report.verdict(), _loss_table(report), *_loss_words(report)]
    summary += [Items(report.speed()), STREAMING_RULE]
    measured: list[str] = [
        f"KV heads were chosen on {report.chosen_on}. Everything here was measured on {report.reported_on}, which "
        "shares no text with them.",
        "Intervals of the loss are 95 %, by bootstrap over the pieces, paired with full attention; those of the "
        "needles are Wilson's.",
        "Times are processor time of one thread, the best of interleaved rounds, with random keys and values. Full "
        "attention is the model as it is loaded, with transformers' DynamicCache; the others are headwise's attention "
        "and HeadCache.",
        machine_summary(report.machine),
        *([f"Command: {report.command}"] if report.command else []),
        *report.notes,
    ]
    sections = [
        Section("", summary),
        Section("Needle retrieval by depth", _needle_blocks(report)),
        Section("Cache and decoding time by context", _cost_blocks(report)),
        Section("The plan", [Preformatted(str(plan))]),
        Section("Other ways to a smaller model", [Items([*report.levers, int8_words(report.int8), COMBINING])]),
        Section("How it was measured", [Items(measured)]),
    ]
    if report.trained_length is not None and max(options.contexts) > report.trained_length:
        beyond = (
            f"The model was trained on {report.trained_length:,} tokens: beyond that, cache and time are measured, and "
            "nothing is said about quality."
        )
        sections[2].blocks.append(beyond)
    return Document(title, sections)


def write_stream_report(report: StreamReport, folder: Path) -> None:
    """streaming.md, streaming.html and streaming.json in a directory."""
    write_document(stream_document(report), report.to_json(), folder, REPORT_NAME)


def _loss_table(report: StreamReport) -> Table:
    length = report.options.length
    header = ("", "KV heads streaming", f"cache at {length:,} tokens", "loss", "change of the loss", "needle answers")
    whole = report.cache_bytes(FULL, length)
    eligible = loss_heads(True, report.plan.layers)
    streaming = {FULL: 0, PLAN: report.plan.streaming, ALL: len(eligible), RANDOM: report.plan.streaming}
    rows = []
    for variant in VARIANTS:
        accuracy = report.accuracy(variant)
        rows.append(
            (
                variant,
                f"{streaming[variant]} of {report.plan.total}",
                f"{report.cache_bytes(variant, length) / whole:.2f}" if whole else "none",
                f"{report.losses[variant].mean():.4f}",
                "" if variant == FULL else _interval_words(report.change(variant)),
                "not measured" if accuracy is None else f"{accuracy:.0%} of {len(report.needles[variant])}",
            )
        )
    return Table(header, rows)


def _loss_words(report: StreamReport) -> list[Block]:
    """What the random draws span, and the plan's increase as a share of theirs."""
    low, high = report.random_range()
    words = f"Random choice: {len(report.losses[RANDOM])} draws on the same pieces, from {low:+.2%} to {high:+.2%}."
    ratio = report.against_random()
    if ratio is not None:
        words += (
            f" The plan's increase is {ratio.value:.2f} of their mean ({ratio.low:.2f} to {ratio.high:.2f}, pieces and "
            "draws resampled)."
        )
    return [words]


def _needle_blocks(report: StreamReport) -> list[Block]:
    if not report.needles:
        return ["No needle prompts were measured."]
    depths = sorted({result.depth for results in report.needles.values() for result in results})
    header = ("", *(f"depth {depth:g}" for depth in depths), "all")
    rows = []
    for variant, results in report.needles.items():
        cells = [_share([r.right for r in results if r.depth == depth]) for depth in depths]
        rows.append((variant, *cells, _share([result.right for result in results])))
    blocks: list[Block] = [
        Table(header, rows),
        f"Prompts of at most {report.needle_length:,} tokens with one sentence hidden at a depth, 0 at the beginning "
        "and 1 at the end, and a question about it; right where every token of the answer is the most likely one.",
    ]
    accuracy = report.accuracy(FULL)
    if accuracy is not None and accuracy < LEAST_NEEDLES:
        blocks.append(f"Full attention itself answers {accuracy:.0%}: the other rows prove nothing.")
    return blocks


def _cost_blocks(report: StreamReport) -> list[Block]:
    rows: list[tuple[str, ...]] = []
    for context in report.options.contexts:
        times = report.decoding.get(context, "not measured")
        for variant in VARIANTS:
            cache = report.cache_bytes(variant, context)
            rows.append(
                (
                    f"{context:,} tokens, {variant}",
                    f"{cache:,}",
                    f"{cache / max(report.cache_bytes(FULL, context), 1):.2f}",
                    *_time_cells(times, variant),
                )
            )
    header = ("context", "cache, bytes", "of full", "ms per decoded token", "of full")
    blocks: list[Block] = [Table(header, rows)]
    blocks += [f"{context:,} tokens: {words}." for context, words in report.decoding.items() if isinstance(words, str)]
    if report.prefill:
        full = report.prefill[FULL]
        parts = [
            f"{name} {seconds:.2f} s" + ("" if name == FULL else f" ({seconds / full:.2f})")
            for name, seconds in report.prefill.items()
        ]
        blocks.append(f"Prefill of {report.options.length:,} tokens: {', '.join(parts)}.")
    return blocks


def _time_cells(times: dict[str, float] | str, variant: str) -> tuple[str, str]:
    if isinstance(times, str) or variant not in times:
        return "", ""
    return f"{1000 * times[variant]:.2f}", f"{times[variant] / times[FULL]:.2f}"


def _share(right: list[bool]) -> str:
    low, high = share_interval(sum(right), len(right))
    return f"{sum(right)} of {len(right)} ({low:.0%} to {high:.0%})"


def _interval_words(change: LossChange) -> str:
    return f"{change.value:+.2%}" if np.isnan(change.low) else str(change)


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """NaN is not JSON: an interval over one piece has no ends."""
    return {name: None if np.isnan(value) else value for name, value in values.items()}
