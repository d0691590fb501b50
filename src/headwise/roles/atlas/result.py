"""Atlas: what every head of a model does, measured on a corpus. A plain value; it opens without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import HeadwiseError
from ...json_documents import whole_number
from ...role_definitions import RoleDefinition, all_roles, definition, sink_roles
from .sums import Key, Tally

if TYPE_CHECKING:
    from ..relations.result import Relations
    from .diff import Changes

DIGITS = 5  # after the point, in a file and in memory
Tables = dict[str, dict[str, np.ndarray]]  # name -> kind -> (layers, heads)


class HeadRole(NamedTuple):
    """A role of one head, with the numbers that decide it."""

    kind: str
    layer: int
    head: int
    role: str
    score: float
    baseline: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """The head, as layer.head."""
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, eq=False, repr=False)
class Atlas:
    """What every head of a model does on a corpus, as measured by `headwise.atlas`.

    Iterating gives every head as (kind, layer, head); printing gives a table by role. Arrays are (layers, heads) in
    the order of `layers`, NaN where a layer has fewer heads.

    Attributes:
        model: the name of the model.
        layers: kind of attention -> the model's own layer numbers.
        heads: kind -> per layer, the number of each head before any pruning; None for zeroed heads that pad a group.
        ways: kind -> "both ways", "causal" or "cross".
        scores: name -> kind -> array: every role's score and every statistic, the mean over tokens.
        low, high: in the same form, the ends of the 95 % bootstrap interval over texts.
        spread: in the same form, the standard deviation over texts.
        baseline: name -> kind -> (layers,): the score of uniform attention to all visible tokens.
        about: corpus, counts and settings.
        tally: the sums behind the atlas, which merging needs; in a file only if it was saved with sums=True.
        repetition: the same sums for random tokens repeated once, for induction.
        probes: the same sums for each requested probe, by name.
        relations: which heads follow which relation between words, if gold links were given.

    Example:
        >>> atlas = headwise.Atlas.load("atlas.json")
        >>> [head.name for head in atlas.heads_with("induction")][:3]
        ['18.6', '17.3', '17.4']
        >>> atlas.scores["previous"]["self"].shape           # (layers, heads)
        (30, 9)
        >>> print(atlas.diff(headwise.Atlas.load("finetuned/atlas.json")))
    """

    model: str
    layers: dict[str, list[int]]
    heads: dict[str, list[list[int | None]]]
    ways: dict[str, str]
    scores: Tables
    low: Tables
    high: Tables
    spread: Tables
    baseline: dict[str, dict[str, np.ndarray]]
    about: dict[str, Any] = field(default_factory=dict)
    tally: Tally | None = None
    repetition: Tally | None = None
    relations: Relations | None = None
    probes: dict[str, Tally] = field(default_factory=dict)

    @classmethod
    def from_sums(
        cls,
        tally: Tally,
        repetition: Tally | None,
        model: str,
        original_heads: dict[Key, list[int | None]],
        about: dict[str, Any],
        probes: dict[str, Tally] | None = None,
    ) -> Atlas:
        """The atlas of sums over texts. original_heads: for pruned layers, the head numbers before pruning."""
        from .from_sums import atlas_from_sums

        return atlas_from_sums(tally, repetition, model, original_heads, about, probes)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Every head as (kind, layer, head), without the zeroed heads that pad a group."""
        for kind, layers in self.layers.items():
            for row, layer in enumerate(layers):
                for head, original in enumerate(self.heads[kind][row]):
                    if original is not None:
                        yield kind, layer, head

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # --- roles ---

    @property
    def roles(self) -> list[HeadRole]:
        """Every role of every head, role by role, the best head first."""
        return [role for definition in all_roles() for role in self.heads_with(definition)]

    def heads_with(self, role: str | RoleDefinition) -> list[HeadRole]:
        """The heads that have a role, the best first."""
        wanted_role = definition(role) if isinstance(role, str) else role
        heads = [
            head for head in self.rank_heads(wanted_role) if wanted_role.is_met(head.score, head.baseline, head.low)
        ]
        if not wanted_role.unless:
            return heads
        excluded = {head[:3] for name in wanted_role.unless for head in self.heads_with(name)}
        return [head for head in heads if head[:3] not in excluded]

    def rank_heads(self, role: str | RoleDefinition) -> list[HeadRole]:
        """Every head of the kinds of attention that a role applies to, by score, whether it has the role or not."""
        wanted_role = definition(role) if isinstance(role, str) else role
        heads = []
        for kind, table in self.scores.get(wanted_role.score, {}).items():
            if self.ways[kind] not in wanted_role.ways:
                continue
            low, high, baseline = (tables[wanted_role.score][kind] for tables in (self.low, self.high, self.baseline))
            for row, layer in enumerate(self.layers[kind]):
                for head, _ in enumerate(self.heads[kind][row]):
                    numbers = (table[row, head], baseline[row], low[row, head], high[row, head])
                    if not np.isnan(numbers[0]):
                        heads.append(HeadRole(kind, layer, head, wanted_role.name, *map(float, numbers)))
        return sorted(heads, key=lambda head: -head.score)

    def roles_of(self, head: str | tuple[Any, ...]) -> list[HeadRole]:
        """The roles of one head: "3.1", "cross 3.1", (3, 1) or ("cross", 3, 1)."""
        key = self.head_key(head)
        return [role for role in self.roles if role[:3] == key]

    def head_key(self, head: str | tuple[Any, ...]) -> tuple[str, int, int]:
        """(kind, layer, head) of a head in any of its spellings; raises an error for an unknown head."""
        if isinstance(head, str):
            kind, layer, number = parse_head(head)
            head = (kind or next(iter(self.layers)), layer, number)
        key = head if len(head) == 3 else (next(iter(self.layers)), *head)
        if key not in set(self):
            kind, layer, number = key
            raise HeadwiseError(
                f"there is no head {layer}.{number} of {kind} attention in this atlas of {self.model}, which has "
                f"{len(self)} heads"
            )
        return key

    @property
    def unnamed(self) -> float:
        """The share of heads without a clean role; attention distance does not count as a role."""
        return 1 - len({role[:3] for role in self._clean_roles()}) / max(len(self), 1)

    @property
    def sink_only(self) -> float:
        """The share of heads whose only roles are attention sinks: first token, delimiters, punctuation."""
        roles, sinks = self._clean_roles(), sink_roles()
        heads_with_other_roles = {role[:3] for role in roles if role.role not in sinks}
        return len({role[:3] for role in roles} - heads_with_other_roles) / max(len(self), 1)

    def _clean_roles(self) -> list[HeadRole]:
        return [role for wanted in all_roles() if not wanted.reach_only for role in self.heads_with(wanted)]

    # --- other atlases ---

    def merge(self, *others: Atlas) -> Atlas:
        """Merge with atlases of the same model over other texts, as if all texts had been measured in one run."""
        from .from_sums import merge

        return merge(self, *others)

    def diff(self, other: Atlas) -> Changes:
        """What another atlas has gained and lost compared with this one, such as after fine-tuning or pruning."""
        from .diff import changes

        return changes(self, other)

    # --- files ---

    def to_json(self) -> dict[str, Any]:
        """Everything but the sums, as plain values."""
        from .file_format import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, data: Any) -> Atlas:
        """Restore the result of `to_json`; an error names what is wrong."""
        from .file_format import from_json

        return from_json(data)

    def save(self, path: str | os.PathLike[str], *, sums: bool = False) -> None:
        """Write JSON. With sums, also write the sums to a file next to it, so that the atlas can be merged later."""
        from .file_format import save

        save(self, path, sums=sums)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Atlas:
        """Load a saved atlas, with its sums if their file exists. Needs no torch."""
        from .file_format import load

        return load(path)

    # --- tables ---

    def rows(self) -> Iterable[dict[str, Any]]:
        """Every number of every head, one per row."""
        for name, kinds in self.scores.items():
            for kind, table in kinds.items():
                for row, layer in enumerate(self.layers[kind]):
                    for head, original in enumerate(self.heads[kind][row]):
                        if original is not None:
                            yield {
                                "kind": kind, "layer": layer, "head": head, "original": original, "score": name,
                                "value": round_digits(table[row, head]),
                                "low": round_digits(self.low[name][kind][row, head]),
                                "high": round_digits(self.high[name][kind][row, head]),
                                "spread": round_digits(self.spread[name][kind][row, head]),
                                "baseline": round_digits(self.baseline[name][kind][row]),
                            }  # fmt: skip

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Every number of every head, one per row."""
        from .export import to_csv

        to_csv(self.rows(), path)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """The same rows as Parquet; needs pandas and pyarrow."""
        from .export import to_parquet

        to_parquet(self.rows(), path)

    def frame(self) -> Any:
        """A pandas DataFrame with one row per head and one column per score."""
        from .export import frame

        return frame(self.rows())

    def roles_frame(self) -> Any:
        """A pandas DataFrame with one row per role of a head."""
        from .export import pandas

        return pandas().DataFrame([role._asdict() for role in self.roles], columns=list(HeadRole._fields))

    def __str__(self) -> str:
        from .export import text

        return text(self)

    __repr__ = __str__


def round_digits(x: float) -> float | None:
    """A number with DIGITS after the point; None for NaN, which JSON does not have."""
    return None if np.isnan(x) else round(float(x), DIGITS)


def parse_head(text: str) -> tuple[str, int, int]:
    """ "cross 3.1" as ("cross", 3, 1); the kind of "3.1" is empty."""
    kind, _, name = text.strip().rpartition(" ")
    layer, number = (whole_number(side) for side in (name.partition(".")[0], name.partition(".")[2]))
    if layer is None or number is None:
        raise HeadwiseError(f"a head is written layer.head, such as 3.1, got {text[:60]!r}")
    return kind, layer, number
