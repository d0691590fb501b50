"""Numbers of heads that come from elsewhere, to colour the map by: importance, an atlas of roles, a file, anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..attention.checkpoints.pretrained import read_json
from ..errors import HeadwiseError, ShapeError
from ..inspection.result import STATISTICS
from ..role_definitions import meaning
from .capture import Pass, Seen

MOST_HEADS = 10_000  # of a layer; a table is as wide as the highest number
WHAT = "{name: {kind: [[a number for each head] for each layer]}}, an atlas, or what headwise.importance gave"
Table = list[list[float | None] | None]  # a row a layer of the pass, None where there is nothing of it


@dataclass
class Given:
    """Tables of scores by name, and the roles that heads have."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> kind -> (layers, heads)
    about: dict[str, str] = field(default_factory=dict)  # name -> what it is
    equal: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> kind -> (layers,): equal attention's
    roles: list[dict[str, Any]] = field(default_factory=list)  # kind, layer, head, role, score, baseline, low, high


def given(scores: Any) -> Given:
    """From {name: {kind: (layers, heads)}}, importance, an atlas, or what any of them is as JSON."""
    if scores is None:
        return Given()
    if isinstance(scores, Given):
        return scores
    if not isinstance(scores, Mapping) and hasattr(scores, "to_json"):  # an Atlas: its file says all
        scores = scores.to_json()
    if not isinstance(scores, Mapping):
        raise HeadwiseError(f"scores must be {WHAT}; got {type(scores).__name__}")
    if scores.get("headwise") == "atlas":
        return _atlas(scores)
    if isinstance(scores.get("heads"), list) and isinstance(scores.get("score"), str):
        return _listed(scores)
    if scores and not any(isinstance(table, Mapping) for table in scores.values()):
        return Given({_free(str(getattr(scores, "name", "importance"))): dict(scores)})
    return Given({_free(str(name)): _kinds(name, kinds) for name, kinds in scores.items()})


def read(paths: Iterable[Path]) -> Given:
    """All that some files hold together."""
    found = Given()
    for path in paths:
        one = given(read_json(path))
        found.tables |= one.tables
        found.about |= one.about
        found.equal |= one.equal
        found.roles += one.roles
    return found


def _free(name: str, where: str = "given") -> str:
    """A name that is none of the text's own statistics."""
    return f"{name} ({where})" if name in STATISTICS else name


def _kinds(name: Any, kinds: Any) -> dict[str, Any]:
    if not isinstance(kinds, Mapping):
        raise HeadwiseError(f"scores must be {WHAT}; got {type(kinds).__name__} for {name!r}")
    return dict(kinds)


def _atlas(atlas: Mapping[str, Any]) -> Given:
    try:
        found = Given(roles=[dict(role) for role in atlas.get("roles", ())])
        texts = atlas.get("about", {}).get("texts")
        where = f"atlas of {atlas.get('model')}" + (f" over {texts:,} texts" if texts else "")
        for name, kinds in atlas["scores"].items():
            shown = _free(name, "atlas")
            found.tables[shown] = {kind: table["score"] for kind, table in kinds.items()}
            found.equal[shown] = {
                kind: [None if x is None else float(x) for x in table["baseline"]]
                for kind, table in kinds.items()
                if "baseline" in table
            }
            words = meaning(name)
            found.about[shown] = f"{words}; {where}" if words else where
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise HeadwiseError(f"this atlas is not as headwise writes it: {error!r} where its scores are") from None
    return found


def _listed(scores: Mapping[str, Any]) -> Given:
    """A line a head, as importance writes it."""
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
    name = _free(scores["score"])
    about = f"importance: {scores['objective']}" if scores.get("objective") else "importance"
    return Given({name: {kind: _square(rows) for kind, rows in tables.items()}}, {name: about})


def _square(rows: Mapping[int, Mapping[int, Any]]) -> list[list[Any]]:
    most = max(max(row) for row in rows.values()) + 1
    return [[rows[layer].get(head) for head in range(most)] for layer in sorted(rows)]


def beside(one: Pass, name: str, by_kind: Mapping[str, Any]) -> list[np.ndarray | None]:
    """A table a kind -> a row (H,) for each layer of a pass, in its order."""
    members: dict[str, list[Seen]] = {}
    for seen in one.layers:
        members.setdefault(seen.kind, []).append(seen)
    if one.pair and "self" in members and "encoder" in by_kind:  # the encoder alone was run: its attention is all
        by_kind = {"self": by_kind["encoder"]}
    tables = {}
    for kind, table in by_kind.items():
        if kind not in members:
            continue  # such as the decoder's, where the encoder alone was run
        try:
            tables[kind] = np.array(table, float)
        except (TypeError, ValueError, OverflowError):
            raise ShapeError(f"{name} of {kind} attention must be (layers, heads) of numbers") from None
        _check(name, kind, tables[kind], members[kind])
    if not tables:
        raise ShapeError(f"{name} has {', '.join(by_kind) or 'no'} attention; {one.name} has {', '.join(members)}")
    place = dict.fromkeys(members, -1)
    rows: list[np.ndarray | None] = []
    for seen in one.layers:
        place[seen.kind] += 1
        rows.append(tables[seen.kind][place[seen.kind], : seen.layer.heads.query] if seen.kind in tables else None)
    return rows


def _check(name: str, kind: str, table: np.ndarray, layers: Sequence[Seen]) -> None:
    most = max(seen.layer.heads.query for seen in layers)
    if table.shape != (len(layers), most):
        raise ShapeError(
            f"{name} of {kind} attention must be (layers, heads) = ({len(layers)}, {most}) here, got {table.shape}"
        )


def roles(one: Pass, given: Given) -> list[dict[str, Any]]:
    """The roles of the heads that this pass has, in the form of heads that stand out."""
    rows = {(seen.kind, seen.index): row for row, seen in enumerate(one.layers)}
    if one.pair:
        rows |= {("encoder", index): row for (kind, index), row in rows.items() if kind == "self"}
    found = []
    for role in given.roles:
        try:
            row, head = rows.get((role["kind"], role["layer"])), int(role["head"])
            if row is None or not 0 <= head < one.layers[row].layer.heads.query:
                continue
            words = (
                f"{role['score']:.2f} ({role['low']:.2f} to {role['high']:.2f}), equal attention {role['baseline']:.2f}"
            )
            found.append({"kind": str(role["role"]), "criterion": words, "head": [row, head], "score": role["score"]})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise HeadwiseError(f"this atlas is not as headwise writes it: {error!r} where its roles are") from None
    return found
