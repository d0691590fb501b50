"""An atlas as a printed table, CSV, Parquet or DataFrames."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...errors import HeadwiseError
from ...files import write_atomically
from ...role_definitions import RoleDefinition, all_roles

if TYPE_CHECKING:
    from .result import Atlas, HeadRole

BEST = 4  # heads per role
REASON, WORDS = "not measured", "words"  # keys of the facts about a probe
SINKS = "the first token, special tokens or punctuation"


def text(atlas: Atlas, best: int = BEST) -> str:
    """One line per role with its best heads, and the share of heads without a role."""
    lines = [_title(atlas), ""]
    width = max(len(role.name) for role in all_roles())
    with_kind = len(atlas.layers) > 1
    for role in all_roles():
        if not any(way in role.ways for way in atlas.ways.values()) or role.score not in atlas.scores:
            continue
        heads = atlas.heads_with(role)
        if not heads and role.name.startswith("offset"):
            continue  # ten lines of nothing would hide the rest
        names = ", ".join(_head(head, with_kind) for head in heads[:best]) + (", ..." if len(heads) > best else "")
        lines.append(f"{role.name:<{width}}  {len(heads):>4}  {names or _nearest(atlas, role, with_kind)}")
    lines += [
        "",
        f"{atlas.unnamed:.0%} of the {len(atlas)} heads have no clean role.",
        f"{atlas.sink_only:.0%} attend only to sinks: {SINKS}.",
    ]
    lines.append("A head: score [95 % interval over texts], and what uniform attention has on the same tokens.")
    lines += [f"Note: {note}." for note in atlas.about.get("notes", ())]
    lines += probe_lines(atlas)
    if atlas.relations is not None:
        lines += ["", "Relations between words, on gold links that no head was chosen by:", str(atlas.relations)]
    return "\n".join(lines)


def probe_lines(atlas: Atlas) -> list[str]:
    """What was found beside the scores of each probe, or why it was not measured."""
    lines = []
    for name, facts in atlas.about.get("probes", {}).items():
        if REASON in facts:
            lines.append(f"{name} was not measured: {facts[REASON]}.")
        elif WORDS in facts:
            lines.append(f"{name}: {facts[WORDS]}.")
    return lines and ["", "Probes, on inputs of their own:", *(f"  {line}" for line in lines)]


def _title(atlas: Atlas) -> str:
    about = atlas.about
    sizes = ", ".join(
        f"{'' if len(atlas.layers) == 1 else kind + ' '}{len(layers)} layers, {atlas.ways[kind]}"
        for kind, layers in atlas.layers.items()
    )
    truncated = f", {about['cut']:,} of them cut" if about.get("cut") else ""
    return (
        f"{atlas.model}: {len(atlas)} heads ({sizes}); {about['texts']:,} texts, {about['tokens']:,} tokens{truncated}"
    )


def _head(role: HeadRole, with_kind: bool) -> str:
    kind = f"{role.kind} " if with_kind else ""
    return f"{kind}{role.name} {role.score:.2f} [{role.low:.2f}–{role.high:.2f}] ({role.baseline:.2f})"


def _nearest(atlas: Atlas, role: RoleDefinition, with_kind: bool) -> str:
    candidates = [head for head in atlas.rank_heads(role) if not role.is_met(head.score, head.baseline, head.low)]
    if not candidates:
        return "cannot tell: nothing in these texts shows it"
    return f"none; nearest is {_head(candidates[0], with_kind)}, {role.level(candidates[0].baseline):.2f} needed"


def to_csv(rows: Iterable[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    all_rows = list(rows)
    with write_atomically(path) as target, open(target, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, all_rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(all_rows)


def to_parquet(rows: Iterable[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    table = pandas().DataFrame(list(rows))
    with write_atomically(path) as target:
        try:
            table.to_parquet(target, index=False)
        except ImportError:
            raise HeadwiseError(
                "Parquet needs pyarrow; get it with: pip install 'headwise[tables]', or use to_csv"
            ) from None


def frame(rows: Iterable[dict[str, Any]]) -> Any:
    """A DataFrame with one row per head and one column per score."""
    long = pandas().DataFrame(list(rows))
    return long.pivot(index=["kind", "layer", "head"], columns="score", values="value")


def pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise HeadwiseError("DataFrames need pandas: pip install 'headwise[tables]', or use to_csv") from None
    return pandas
