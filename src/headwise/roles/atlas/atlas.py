"""Atlas: what every head of a model does, measured on a corpus. A plain value; it opens without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import HeadwiseError
from ...files import written
from ...json_documents import (
    anything,
    brief,
    count,
    finite,
    finite_or_none,
    in_words,
    items,
    mapping,
    parse_json,
    string,
    whole_number,
)
from ...terminal import neutralised
from .roles import ANY, RESTING, ROLES, Definition, definition
from .sums import Key, Sums, Tally

if TYPE_CHECKING:
    from ..relations.result import Relations
    from .diff import Changes

FORMAT = 1
DIGITS = 5
SUMS = ".sums.safetensors"  # beside the atlas: what merging needs
PARTS = ("scores", "low", "high", "spread")
TABLES = {"scores": "score", "low": "low", "high": "high", "spread": "spread", "baseline": "baseline"}  # in the JSON
Tables = dict[str, dict[str, np.ndarray]]  # name -> kind -> (layers, heads)


class Role(NamedTuple):
    """A head that has a role, with the number that says so."""

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
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, eq=False, repr=False)
class Atlas:
    """What every head does. Arrays are (layers, heads) in the order of `layers`, NaN where a layer has fewer heads."""

    model: str
    layers: dict[str, list[int]]  # kind -> the model's own layer numbers
    heads: dict[str, list[list[int | None]]]  # kind -> for each layer what its heads were numbered before any pruning
    ways: dict[str, str]  # kind -> "both ways", "causal" or "cross"
    scores: Tables  # every role's score and every statistic: the mean over tokens
    low: Tables  # the ends of its 95 % interval, by bootstrap over texts
    high: Tables
    spread: Tables  # standard deviation over texts
    baseline: dict[str, dict[str, np.ndarray]]  # name -> kind -> (layers,): what equal attention has on the same tokens
    about: dict[str, Any] = field(default_factory=dict)  # corpus, counts, settings
    tally: Tally | None = None  # the sums behind it, for merging; only in memory unless saved with sums=True
    probe: Tally | None = None  # the same for repeated random tokens
    relations: Relations | None = None  # which heads follow which relation between words, where gold links were given

    @classmethod
    def of(cls, tally: Tally, probe: Tally | None, model: str, heads: dict[Key, list[int | None]], about: Any) -> Atlas:
        """From sums. heads: for pruned layers, what their heads were."""
        layers: dict[str, list[int]] = {}
        for kind, layer in tally.sums:
            layers.setdefault(kind, []).append(layer)
        layers = {kind: sorted(found) for kind, found in layers.items()}
        before = {
            kind: [heads.get((kind, i)) or list(range(tally.sums[kind, i].top.shape[1] - 1)) for i in found]
            for kind, found in layers.items()
        }
        tables: dict[str, Any] = {part: {} for part in PARTS}
        baseline: Tables = {}
        for source in (tally, probe):
            for kind, names in ({} if source is None else source.names).items():
                assert source is not None
                rows = [_measured(source.sums[kind, i], before[kind][row]) for row, i in enumerate(layers[kind])]
                for number, name in enumerate(names):
                    for part in PARTS:
                        tables[part].setdefault(name, {})[kind] = _stacked([row[part][number, :-1] for row in rows])
                    baseline.setdefault(name, {})[kind] = np.array([row["scores"][number, -1] for row in rows])
        facts = {"texts": tally.texts, "tokens": tally.tokens, "cut": tally.cut, "replicates": tally.replicates}
        return cls(model, layers, before, dict(tally.ways), **tables, baseline=baseline, about={**facts, **about},
                   tally=tally, probe=probe)  # fmt: skip

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Every head: kind, layer, head; zeros that even out groups are none."""
        for kind, layers in self.layers.items():
            for row, layer in enumerate(layers):
                for head, before in enumerate(self.heads[kind][row]):
                    if before is not None:
                        yield kind, layer, head

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def roles(self) -> list[Role]:
        """Every role that a head has, role by role, the best first."""
        return [role for one in ROLES for role in self.having(one)]

    def having(self, role: str | Definition) -> list[Role]:
        """The heads that have a role, best first."""
        one = definition(role) if isinstance(role, str) else role
        found = [role for role in self.ranked(one) if one.held(role.score, role.baseline, role.low)]
        if not one.unless:
            return found
        taken = {(other.kind, other.layer, other.head) for name in one.unless for other in self.having(name)}
        return [role for role in found if (role.kind, role.layer, role.head) not in taken]

    def ranked(self, role: str | Definition) -> list[Role]:
        """Every head by its score for a role, whether it has it or not; without those for which it means nothing."""
        one = definition(role) if isinstance(role, str) else role
        found = []
        for kind, table in self.scores.get(one.score, {}).items():
            if self.ways[kind] not in one.ways:
                continue
            low, high, base = (tables[one.score][kind] for tables in (self.low, self.high, self.baseline))
            for row, layer in enumerate(self.layers[kind]):
                for head, _ in enumerate(self.heads[kind][row]):
                    numbers = (table[row, head], base[row], low[row, head], high[row, head])
                    if not np.isnan(numbers[0]):
                        found.append(Role(kind, layer, head, one.name, *map(float, numbers)))
        return sorted(found, key=lambda at: -at.score)

    def of_head(self, head: str | tuple[Any, ...]) -> list[Role]:
        """The roles of one head: "3.1", "cross 3.1", (3, 1) or ("cross", 3, 1)."""
        kind, layer, number = self.at(head)
        return [role for role in self.roles if (role.kind, role.layer, role.head) == (kind, layer, number)]

    def at(self, head: str | tuple[Any, ...]) -> tuple[str, int, int]:
        if isinstance(head, str):
            kind, _, name = head.strip().rpartition(" ")
            layer, number = (whole_number(side) for side in (name.partition(".")[0], name.partition(".")[2]))
            if layer is None or number is None:
                raise HeadwiseError(f"a head is written layer.head, such as 3.1, got {head[:60]!r}")
            head = (kind or next(iter(self.layers)), layer, number)
        at = head if len(head) == 3 else (next(iter(self.layers)), *head)
        if at not in set(self):
            of, row, number = at
            raise HeadwiseError(
                f"there is no head {row}.{number} of {of} attention in this atlas of {self.model}, which has "
                f"{len(self)} heads"
            )
        return at

    @property
    def unnamed(self) -> float:
        """The share of heads without a clean role."""
        return 1 - len({role[:3] for role in self.roles}) / max(len(self), 1)

    @property
    def resting(self) -> float:
        """The share of heads that have a role, but none other than resting on the first token or on delimiters."""
        roles = self.roles
        busy = {role[:3] for role in roles if role.role not in RESTING}
        return len({role[:3] for role in roles} - busy) / max(len(self), 1)

    def merge(self, *others: Atlas) -> Atlas:
        """This one and others of the same model over other texts: as if all texts had been measured in one run."""
        tally, probe, notes = self.tally, self.probe, list(self.about.get("notes", ()))
        for other in others:
            if tally is None or other.tally is None:
                raise HeadwiseError("merging needs the sums behind an atlas; save it with sums=True")
            tally = tally.plus(other.tally)
            if other.heads != self.heads:
                raise HeadwiseError("these are atlases of models pruned differently; they cannot be merged")
            probe = probe or other.probe
            _check_same_model(self.about.get("fingerprint", {}), other.about.get("fingerprint", {}))
            if other.about.get("counts") != self.about.get("counts"):
                notes.append("rare tokens: each part against its own counts")
        assert tally is not None
        heads = {
            (kind, i): row for kind in self.layers for i, row in zip(self.layers[kind], self.heads[kind], strict=True)
        }
        left_out = ("texts", "tokens", "cut", "replicates", "part", "likeness")
        kept = {key: x for key, x in self.about.items() if key not in left_out}
        if any(other.about.get("fingerprint") != self.about.get("fingerprint") for other in others):
            kept["fingerprint"] = {key: x for key, x in kept.get("fingerprint", {}).items() if key != "texts"}
        made = Atlas.of(tally, probe, self.model, heads, {**kept, "notes": list(dict.fromkeys(notes))})
        return replace(made, relations=self.relations)

    def diff(self, other: Atlas) -> Changes:
        """What another atlas has gained and lost beside this one, such as after fine-tuning or pruning."""
        from .diff import changes

        return changes(self, other)

    # files

    def to_json(self) -> dict[str, Any]:
        tables = {
            name: {
                kind: {
                    "score": _plain(self.scores[name][kind]), "low": _plain(self.low[name][kind]),
                    "high": _plain(self.high[name][kind]), "spread": _plain(self.spread[name][kind]),
                    "baseline": _plain(self.baseline[name][kind]),
                }
                for kind in kinds
            }
            for name, kinds in self.scores.items()
        }  # fmt: skip
        return {
            "headwise": "atlas", "format": FORMAT, "model": self.model, "about": self.about, "ways": self.ways,
            "layers": self.layers, "heads": self.heads, "unnamed": round(self.unnamed, DIGITS),
            "resting": round(self.resting, DIGITS),
            "roles": [dict(zip(Role._fields, (*role[:4], *map(_round, role[4:])), strict=True)) for role in self.roles],
            "scores": tables, **({"relations": self.relations.to_json()} if self.relations else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Atlas:
        if not isinstance(data, dict) or data.get("headwise") != "atlas":
            raise HeadwiseError("this is no atlas; headwise atlas --out DIR writes one")
        if data.get("format") != FORMAT:
            raise HeadwiseError(f"this atlas has format {brief(data.get('format'))}; this version reads {FORMAT}")
        try:
            return _checked(cls, data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise HeadwiseError(f"this atlas is damaged: {in_words(error)}") from error

    def save(self, path: str | os.PathLike[str], *, sums: bool = False) -> None:
        """As JSON. sums: also the sums behind it, in a file beside it, so that it can be merged later."""
        if sums and self.tally is None:
            raise HeadwiseError("this atlas was opened without its sums; they cannot be saved")
        text = json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        beside = Path(os.fspath(path) + SUMS)
        with written(path) as made:
            made.write_text(neutralised(text) + "\n", encoding="utf-8")  # a file's name may hold what UTF-8 has not
            # those of an atlas that was here before; first, so that a run that is killed now leaves no mixture
            beside.unlink(missing_ok=True)
        if sums:
            from .checkpoint import save_tallies

            save_tallies(beside, {"tally": self.tally, "probe": self.probe}, {})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Atlas:
        """An atlas that was saved, with its sums where they are beside it. Needs no torch."""
        try:
            data = parse_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HeadwiseError(f"atlas {str(path)!r} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise HeadwiseError(f"{str(path)!r} is no atlas: it is not JSON ({in_words(error)})") from None
        atlas = cls.from_json(data)
        beside = os.fspath(path) + SUMS
        if not os.path.exists(beside):
            return atlas
        from .checkpoint import load_tallies

        tallies = load_tallies(beside).tallies
        if "tally" not in tallies or not atlas.is_of(tallies["tally"], tallies.get("probe")):
            raise HeadwiseError(f"{beside!r} holds the sums of another atlas than {str(path)!r}; remove it")
        return cls(**{**vars(atlas), "tally": tallies["tally"], "probe": tallies.get("probe")})

    def is_of(self, tally: Tally, probe: Tally | None) -> bool:
        """Whether these sums give this atlas."""
        facts = {"texts": tally.texts, "tokens": tally.tokens, "cut": tally.cut, "replicates": tally.replicates}
        if any(self.about.get(key, value) != value for key, value in facts.items()) or tally.ways != self.ways:
            return False
        if sorted(tally.sums) != sorted((kind, i) for kind, layers in self.layers.items() for i in layers):
            return False
        for source in (tally, probe):
            for (kind, layer), sums in ({} if source is None else source.sums).items():
                assert source is not None
                if layer not in self.layers.get(kind, ()):
                    return False
                row = self.layers[kind].index(layer)
                heads, means = self.heads[kind][row], sums.means()
                alive = [head for head, before in enumerate(heads) if before is not None]
                if means.shape[1] != len(heads) + 1:
                    return False
                for name, mean in zip(source.names[kind], means, strict=True):
                    known = self.scores.get(name, {}).get(kind)
                    if known is None or not np.allclose(known[row, alive], mean[alive], 0, 10.0**-DIGITS, True):
                        return False
        return True

    # tables

    def rows(self) -> Iterable[dict[str, Any]]:
        """Every number of every head, one a row."""
        for name, kinds in self.scores.items():
            for kind, table in kinds.items():
                for row, layer in enumerate(self.layers[kind]):
                    for head, before in enumerate(self.heads[kind][row]):
                        if before is not None:
                            at = (row, head)
                            yield {
                                "kind": kind, "layer": layer, "head": head, "original": before, "score": name,
                                "value": _round(table[at]), "low": _round(self.low[name][kind][at]),
                                "high": _round(self.high[name][kind][at]),
                                "spread": _round(self.spread[name][kind][at]),
                                "baseline": _round(self.baseline[name][kind][row]),
                            }  # fmt: skip

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Every number of every head, one a row."""
        from .export import to_csv

        to_csv(self.rows(), path)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """The same rows, for whoever has pandas and pyarrow."""
        from .export import to_parquet

        to_parquet(self.rows(), path)

    def frame(self) -> Any:
        """A pandas DataFrame: a row a head, a column a score."""
        from .export import frame

        return frame(self.rows())

    def roles_frame(self) -> Any:
        """A pandas DataFrame of the roles, one a row."""
        from .export import pandas

        return pandas().DataFrame([role._asdict() for role in self.roles], columns=list(Role._fields))

    def __str__(self) -> str:
        from .export import text

        return text(self)

    __repr__ = __str__


def _check_same_model(one: dict[str, str], other: dict[str, str]) -> None:
    """Atlases of versions that wrote no fingerprint are taken as they are."""
    for key, words in (("weights", "other weights"), ("tokenizer", "another tokenizer")):
        if key in one and key in other and one[key] != other[key]:
            raise HeadwiseError(
                f"these atlases were measured with {words} (fingerprints {one[key][:8]} and {other[key][:8]}); "
                "only atlases of one model can be merged"
            )


def _checked(cls: type[Atlas], data: dict[str, Any]) -> Atlas:
    """An atlas of what a JSON file holds; an error where its parts do not fit each other."""
    layers = mapping(data["layers"], "layers", lambda x, what: items(x, what, count))
    heads = mapping(data["heads"], "heads", lambda x, what: items(x, what, _numbers_before))
    ways = mapping(data["ways"], "ways", string)
    if not layers or not layers.keys() == heads.keys() == ways.keys():
        raise ValueError(f"layers, heads and ways must be of the same kinds of attention, got {brief([*layers])}")
    for kind, numbers in layers.items():
        if not numbers or sorted(set(numbers)) != numbers or len(heads[kind]) != len(numbers):
            raise ValueError(f"layers of {kind!r} must be different numbers in order, with heads for each")
        if ways[kind] not in ANY:
            raise ValueError(f"{kind!r} must attend one of {', '.join(ANY)}, got {brief(ways[kind])}")
    shapes = {kind: (len(rows), max(map(len, rows))) for kind, rows in heads.items()}
    tables: dict[str, Any] = {part: {} for part in TABLES}
    for name, kinds in mapping(data["scores"], "scores", lambda x, what: mapping(x, what, anything)).items():
        for kind, parts in kinds.items():
            for part, field_name in TABLES.items():
                shape = shapes[kind][:1] if part == "baseline" else shapes[kind]
                table = _table(parts[field_name], f"{name} {kind} {field_name}", shape)
                tables[part].setdefault(name, {})[kind] = table
    about = _checked_about(data["about"], layers, heads)
    found = _relations(data["relations"]) if "relations" in data else None
    return cls(string(data["model"], "model"), layers, heads, ways, **tables, about=about, relations=found)


def _numbers_before(value: Any, what: str) -> list[int | None]:
    numbers = items(value, what, lambda x, at: None if x is None else count(x, at))
    if not numbers:
        raise ValueError(f"{what} has no heads")
    return numbers


def _checked_about(
    value: Any, layers: dict[str, list[int]], heads: dict[str, list[list[int | None]]]
) -> dict[str, Any]:
    about = mapping(value, "about", anything)
    for key in ("texts", "tokens"):
        count(about[key], key)
    count(about.get("cut", 0), "cut")
    items(about.get("notes", []), "notes", string)
    mapping(about.get("fingerprint", {}), "fingerprint", string)
    for kind, one in mapping(about.get("likeness", {}), "likeness", lambda x, what: mapping(x, what, anything)).items():
        for place in items(one["map"], f"map of {kind}", lambda x, what: mapping(x, what, anything)):
            for axis in "xy":
                finite(place[axis], axis)
            row = layers[string(place["kind"], "kind")].index(count(place["layer"], "layer"))
            if count(place["head"], "head") >= len(heads[place["kind"]][row]):
                raise ValueError(f"there is no head {place['layer']}.{place['head']} of {kind}")
    return about


def _relations(data: Any) -> Relations:
    from ..relations.result import Relations

    return Relations.from_json(data)


def _measured(sums: Sums, heads: list[int | None]) -> dict[str, np.ndarray]:
    low, high = sums.interval()
    # rounded as in a file, or a head at the very border could gain a role by being saved
    found = {
        name: table.round(DIGITS)
        for name, table in (("scores", sums.means()), ("low", low), ("high", high), ("spread", sums.spread()))
    }
    gone = [head for head, before in enumerate(heads) if before is None]
    for table in found.values():
        table[:, gone] = np.nan  # zeros that even out groups of heads
    return found


def _stacked(rows: list[np.ndarray]) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def _round(x: float) -> float | None:
    """To what is meant; None for what is not there, for JSON knows no NaN."""
    return None if np.isnan(x) else round(float(x), DIGITS)


def _plain(table: np.ndarray) -> Any:
    return [_plain(row) for row in table] if table.ndim > 1 else [_round(x) for x in table]


def _table(rows: Any, what: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of this shape, None where nothing was measured."""
    nested = [rows] if len(shape) == 1 else items(rows, what, anything)
    table = [items(row, what, finite_or_none) for row in nested]
    if len(nested) != (1 if len(shape) == 1 else shape[0]) or any(len(row) != shape[-1] for row in table):
        raise ValueError(f"{what} must have the shape {shape}")
    return np.array(table[0] if len(shape) == 1 else table, dtype=float)
