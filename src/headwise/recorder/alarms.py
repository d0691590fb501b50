"""Alarms: heads whose statistics pass a threshold. Each is raised once, and again only after the head recovered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import HeadwiseError
from ..json_documents import anything, brief, count, mapping, string

if TYPE_CHECKING:
    from .training_log import LogEntry

LayerKey = tuple[str, int]  # kind and number
AlarmKey = tuple[str, LayerKey, int, int | None]  # kind, layer, head, second head
Values = Mapping[str, list[float]]  # name of a statistic -> one number per head

ENTROPY, LOGIT, DEAD, DUPLICATE, NOT_FINITE = (
    "entropy collapse", "logit growth", "dead head", "duplicate heads", "not finite",
)  # fmt: skip
LISTED = 6  # heads of one kind of alarm in a line of the log


@dataclass(frozen=True)
class Thresholds:
    """Thresholds at which a head is reported. None switches an alarm off.

    Args:
        entropy: in nats; a head below it attends to single tokens. Low entropy precedes divergence (Zhai et al. 2023,
            arXiv 2303.06296). Of the 342 heads of the bundled models one is below the default: it attends to the first
            token only.
        max_logit: Kimi K2 clips W_Q and W_K of heads above 100 (arXiv 2507.20534); runs with logits above 10^4 diverged
            (Wortsman et al. 2023, arXiv 2309.14322).
        sink: share of the weight on the first token, or on a learned sink, at which a head does nothing else (Xiao et
            al. 2023, arXiv 2309.17453).
        output: norm of the output as a share of its layer's mean; heads with small outputs can be removed, which is a
            more reliable criterion than their weights (Sandoval-Segura et al. 2025, arXiv 2504.03889).
        twin: correlation of the weights of two heads of a layer, without the first token; such heads are redundant
            (Bian et al. 2021, "On Attention Redundancy"). Heads that are dead are not compared.
    """

    entropy: float | None = 0.1
    max_logit: float | None = 100.0
    sink: float | None = 0.95
    output: float | None = 0.01
    twin: float | None = 0.95

    def __post_init__(self) -> None:
        for name, bound in asdict(self).items():
            if bound is not None and (isinstance(bound, bool) or not math.isfinite(bound)):
                raise HeadwiseError(f"the threshold {name} must be a number or None, got {bound!r}")

    def relaxed(self) -> Thresholds:
        """The thresholds that a head must satisfy before it is reported again, against flickering alarms."""
        factors = {"entropy": 1.5, "max_logit": 0.7, "sink": 0.9, "output": 1.5, "twin": 0.9}
        bounds = asdict(self)
        return Thresholds(**{name: None if x is None else x * factors[name] for name, x in bounds.items()})

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True)
class Alarm:
    """One head that passed a threshold."""

    kind: str  # "entropy collapse", "logit growth", "dead head", "duplicate heads" or "not finite"
    step: int
    layer: LayerKey
    head: int
    statistic: str
    value: float
    bound: float
    other: int | None = None  # of duplicate heads, the second one

    @property
    def key(self) -> AlarmKey:
        """The identity of an alarm, constant as long as it lasts."""
        return self.kind, self.layer, self.head, self.other

    @property
    def place(self) -> str:
        """The head, or both heads, as "self 3.5"."""
        other = "" if self.other is None else f" and {self.layer[1]}.{self.other}"
        return f"{self.layer[0]} {self.layer[1]}.{self.head}{other}"

    def __str__(self) -> str:
        bound = "" if self.kind == NOT_FINITE else f", threshold {self.bound:g}"
        return f"{self.place}: {self.kind} ({self.statistic} {self.value:.3g}{bound})"

    def to_json(self) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else None
        bound = self.bound if math.isfinite(self.bound) else None
        place = {"layer_kind": self.layer[0], "layer": self.layer[1], "head": self.head}
        other = {} if self.other is None else {"other": self.other}
        return {"kind": self.kind, **place, **other, "statistic": self.statistic, "value": value, "bound": bound}

    @classmethod
    def from_json(cls, data: Any, step: int, path: str) -> Alarm:
        alarm = mapping(data, path, anything)
        return cls(
            string(alarm["kind"], f"{path}.kind"),
            step,
            (string(alarm["layer_kind"], f"{path}.layer_kind"), count(alarm["layer"], f"{path}.layer")),
            count(alarm["head"], f"{path}.head"),
            string(alarm["statistic"], f"{path}.statistic"),
            number_or_nan(alarm["value"], f"{path}.value"),
            number_or_nan(alarm["bound"], f"{path}.bound"),
            None if alarm.get("other") is None else count(alarm["other"], f"{path}.other"),
        )


def number_or_nan(value: Any, path: str) -> float:
    """A finite number of any size; NaN for null, which stands for what was not finite or not measured."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{path} must be a finite number or null, got {brief(value)}")
    return float(value)


def conditions(entry: LogEntry, thresholds: Thresholds) -> list[Alarm]:
    """Every head of an entry that is past a threshold."""
    return [alarm for key in entry.values for alarm in _layer_conditions(entry, key, thresholds)]


class AlarmState:
    """Which alarms last. An alarm is raised when it begins, and ends when the head is well within the threshold."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._relaxed = thresholds.relaxed()
        self.active: set[AlarmKey] = set()

    def update(self, entry: LogEntry) -> list[Alarm]:
        """The alarms that begin with an entry."""
        current = conditions(entry, self.thresholds)
        new = [alarm for alarm in current if alarm.key not in self.active]
        remaining = {alarm.key for alarm in conditions(entry, self._relaxed)} & self.active
        self.active = remaining | {alarm.key for alarm in current}
        return new


def _layer_conditions(entry: LogEntry, key: LayerKey, thresholds: Thresholds) -> Iterator[Alarm]:
    values = entry.values[key]

    def alarm(kind: str, head: int, name: str, bound: float) -> Alarm:
        return Alarm(kind, entry.step, key, head, name, values[name][head], bound)

    dead: set[int] = set()
    for head in range(len(next(iter(values.values()), []))):
        if entry.queries[key] and "entropy" in values and not math.isfinite(values["entropy"][head]):
            yield alarm(NOT_FINITE, head, "entropy", math.nan)
            continue
        reason = _death(values, head, thresholds)
        if reason is not None:
            dead.add(head)
            yield alarm(DEAD, head, *reason)
        elif _below(values, "entropy", head, thresholds.entropy):
            yield alarm(ENTROPY, head, "entropy", thresholds.entropy or 0.0)
        if _above(values, "max_logit", head, thresholds.max_logit):
            yield alarm(LOGIT, head, "max_logit", thresholds.max_logit or 0.0)
    for (first, second), correlation in _twin_pairs(entry, key, thresholds.twin).items():
        if first not in dead and second not in dead:
            bound = thresholds.twin or 0.0
            yield Alarm(DUPLICATE, entry.step, key, first, "twin", correlation, bound, second)


def _death(values: Values, head: int, thresholds: Thresholds) -> tuple[str, float] | None:
    """The statistic that shows a head to be dead, and its threshold."""
    for name in ("first", "sink"):
        if _above(values, name, head, thresholds.sink):
            return name, thresholds.sink or 0.0
    if _below(values, "output", head, thresholds.output):
        return "output", thresholds.output or 0.0
    return None


def _twin_pairs(entry: LogEntry, key: LayerKey, bound: float | None) -> dict[tuple[int, int], float]:
    """Pairs of heads of a layer that attend alike, each once, and their correlation."""
    values, twins = entry.values[key], entry.twins.get(key, [])
    return {
        (min(head, twin), max(head, twin)): values["twin"][head]
        for head, twin in enumerate(twins)
        if _above(values, "twin", head, bound)
    }


def _below(values: Values, name: str, head: int, bound: float | None) -> bool:
    return bound is not None and name in values and values[name][head] < bound


def _above(values: Values, name: str, head: int, bound: float | None) -> bool:
    return bound is not None and name in values and values[name][head] >= bound


def summarize(alarms: list[Alarm], limit: int = LISTED) -> list[str]:
    """One line per kind of alarm and statistic: its heads with their values, the first few of many."""
    groups: dict[tuple[str, str], list[Alarm]] = {}
    for alarm in alarms:
        groups.setdefault((alarm.kind, alarm.statistic), []).append(alarm)
    lines = []
    for (kind, statistic), members in groups.items():
        bound = "" if kind == NOT_FINITE else f", threshold {members[0].bound:g}"
        heads = ", ".join(f"{alarm.place} {alarm.value:.3g}" for alarm in members[:limit])
        rest = f" and {len(members) - limit} more" if len(members) > limit else ""
        lines.append(f"step {members[0].step}: {kind} ({statistic}{bound}): {heads}{rest}")
    return lines
