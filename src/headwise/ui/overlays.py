"""Scores per head from outside the pass, to colour the map by: importance, an atlas of roles, a file, any table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..attention.checkpoints.pretrained import read_json
from ..circuits.effects import Effects
from ..errors import HeadwiseError, ShapeError
from ..inspection import STATISTICS
from ..role_definitions import meaning
from .capture import LayerRecord, Pass

MOST_HEADS = 10_000  # of a layer; a table is as wide as the highest number
EXPECTED_FORM = (
    "{name: {kind: [[a number for each head] for each layer]}}, an atlas, effects, or what headwise.importance gave"
)


@dataclass
class Overlays:
    """Tables of scores by name, and the roles of the heads."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> kind -> (layers, heads)
    about: dict[str, str] = field(default_factory=dict)  # name -> what it is
    equal: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> kind -> (layers,): uniform attention's
    roles: list[dict[str, Any]] = field(default_factory=list)  # kind, layer, head, role, score, baseline, low, high
    signed: list[str] = field(default_factory=list)  # names whose sign matters: 0 has the neutral colour

    def add(self, other: Overlays) -> None:
        """Add the tables and roles of another; tables of the same name are replaced."""
        self.tables |= other.tables
        self.about |= other.about
        self.equal |= other.equal
        self.roles += other.roles
        self.signed += [name for name in other.signed if name not in self.signed]


def to_overlays(scores: Any) -> Overlays:
    """Overlays from {name: {kind: (layers, heads)}}, importance, effects, an atlas, or the JSON of any of them."""
    if scores is None:
        return Overlays()
    if isinstance(scores, Overlays):
        return scores
    if isinstance(scores, Effects):
        return _from_effects(scores)
    if not isinstance(scores, Mapping) and hasattr(scores, "to_json"):  # an Atlas
        scores = scores.to_json()
    if not isinstance(scores, Mapping):
        raise HeadwiseError(f"scores must be {EXPECTED_FORM}; got {type(scores).__name__}")
    if scores.get("headwise") == "atlas":
        return _from_atlas(scores)
    if scores.get("headwise") == "effects":
        return _from_effects(Effects.from_json(scores))
    if isinstance(scores.get("heads"), list) and isinstance(scores.get("score"), str):
        return _from_importance(scores)
    if scores and not any(isinstance(table, Mapping) for table in scores.values()):
        return Overlays({_unique_name(str(getattr(scores, "name", "importance"))): dict(scores)})
    return Overlays({_unique_name(str(name)): _tables_by_kind(name, kinds) for name, kinds in scores.items()})


def read_overlays(paths: Iterable[Path]) -> Overlays:
    """The overlays of several files, together."""
    overlays = Overlays()
    for path in paths:
        overlays.add(to_overlays(read_json(path)))
    return overlays


def _unique_name(name: str, source: str = "given") -> str:
    """A name that differs from the statistics of the text."""
    return f"{name} ({source})" if name in STATISTICS else name


def _tables_by_kind(name: Any, kinds: Any) -> dict[str, Any]:
    if not isinstance(kinds, Mapping):
        raise HeadwiseError(f"scores must be {EXPECTED_FORM}; got {type(kinds).__name__} for {name!r}")
    return dict(kinds)


def _from_atlas(atlas: Mapping[str, Any]) -> Overlays:
    try:
        overlays = Overlays(roles=[dict(role) for role in atlas.get("roles", ())])
        texts = atlas.get("about", {}).get("texts")
        source = f"atlas of {atlas.get('model')}" + (f" over {texts:,} texts" if texts else "")
        for name, kinds in atlas["scores"].items():
            unique = _unique_name(name, "atlas")
            overlays.tables[unique] = {kind: table["score"] for kind, table in kinds.items()}
            overlays.equal[unique] = {
                kind: [None if x is None else float(x) for x in table["baseline"]]
                for kind, table in kinds.items()
                if "baseline" in table
            }
            words = meaning(name)
            overlays.about[unique] = f"{words}; {source}" if words else source
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise HeadwiseError(f"this atlas is not as headwise writes it: {error!r} where its scores are") from None
    return overlays


def _from_importance(scores: Mapping[str, Any]) -> Overlays:
    """The JSON of importance: one entry per head."""
    tables: dict[str, dict[int, dict[int, float]]] = {}
    try:
        if scores.get("unit", "head") != "head":
            raise HeadwiseError(f"these scores are of {scores['unit']} units; the map shows heads (unit='head')")
        for row in scores["heads"]:
            head = int(row["head"])
            if not 0 <= head < MOST_HEADS:
                raise HeadwiseError(f"a head of these scores has the number {head}; a layer has up to {MOST_HEADS:,}")
            tables.setdefault(str(row["kind"]), {}).setdefault(int(row["layer"]), {})[head] = row["score"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise HeadwiseError(f"these scores are not as headwise writes them: {error!r} where its heads are") from None
    name = _unique_name(scores["score"])
    about = f"importance: {scores['objective']}" if scores.get("objective") else "importance"
    return Overlays({name: {kind: _rectangular(rows) for kind, rows in tables.items()}}, {name: about})


def _from_effects(effects: Effects) -> Overlays:
    about = effects.about
    if about.unit != "head":
        raise HeadwiseError(f"{about.name!r} has effects of {about.unit} heads; the map shows query heads")
    name = _unique_name(about.name)
    words = f"{about.method}; {about.metric} = {about.value:.4g}"
    return Overlays({name: dict(effects)}, {name: words}, signed=[name])


def _rectangular(rows: Mapping[int, Mapping[int, Any]]) -> list[list[Any]]:
    widest = max(max(row) for row in rows.values()) + 1
    return [[rows[layer].get(head) for head in range(widest)] for layer in sorted(rows)]


def rows_of_pass(pass_: Pass, name: str, by_kind: Mapping[str, Any]) -> list[np.ndarray | None]:
    """One table per kind -> one row (H,) per layer of the pass, in its order."""
    members: dict[str, list[LayerRecord]] = {}
    for record in pass_.layers:
        members.setdefault(record.kind, []).append(record)
    if pass_.encoder_decoder and "self" in members and "encoder" in by_kind:  # the encoder ran alone
        by_kind = {"self": by_kind["encoder"]}
    tables = {}
    for kind, table in by_kind.items():
        if kind not in members:
            continue  # such as the decoder's, where the encoder ran alone
        try:
            tables[kind] = np.array(table, float)
        except (TypeError, ValueError, OverflowError):
            raise ShapeError(f"{name} of {kind} attention must be (layers, heads) of numbers") from None
        _check(name, kind, tables[kind], members[kind])
    if not tables:
        raise ShapeError(f"{name} has {', '.join(by_kind) or 'no'} attention; {pass_.name} has {', '.join(members)}")
    place = dict.fromkeys(members, -1)
    rows: list[np.ndarray | None] = []
    for record in pass_.layers:
        place[record.kind] += 1
        table = tables.get(record.kind)
        rows.append(None if table is None else table[place[record.kind], : record.layer.heads.query])
    return rows


def _check(name: str, kind: str, table: np.ndarray, layers: Sequence[LayerRecord]) -> None:
    widest = max(record.layer.heads.query for record in layers)
    if table.shape != (len(layers), widest):
        raise ShapeError(
            f"{name} of {kind} attention must be (layers, heads) = ({len(layers)}, {widest}) here, got {table.shape}"
        )


def role_entries(pass_: Pass, overlays: Overlays) -> list[dict[str, Any]]:
    """The roles of the heads of this pass, in the form of heads that stand out."""
    rows = {(record.kind, record.index): row for row, record in enumerate(pass_.layers)}
    if pass_.encoder_decoder:
        rows |= {("encoder", index): row for (kind, index), row in rows.items() if kind == "self"}
    entries = []
    for role in overlays.roles:
        try:
            row, head = rows.get((role["kind"], role["layer"])), int(role["head"])
            if row is None or not 0 <= head < pass_.layers[row].layer.heads.query:
                continue
            criterion = (
                f"{role['score']:.2f} ({role['low']:.2f} to {role['high']:.2f}), "
                f"uniform attention {role['baseline']:.2f}"
            )
            name, score = str(role["role"]), role["score"]
            entries.append({"kind": name, "criterion": criterion, "head": [row, head], "score": score})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise HeadwiseError(f"this atlas is not as headwise writes it: {error!r} where its roles are") from None
    return entries
