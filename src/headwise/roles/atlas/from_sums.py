"""Sums over texts -> an atlas; sums of several atlases -> one atlas of all their texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import HeadwiseError
from .result import DIGITS, Atlas, Tables
from .sums import Key, Sums, Tally

TABLES, BASELINE = ("scores", "low", "high", "spread"), "baseline"


def atlas_from_sums(
    tally: Tally,
    repetition: Tally | None,
    model: str,
    original_heads: dict[Key, list[int | None]],
    about: dict[str, Any],
    probes: dict[str, Tally] | None = None,
) -> Atlas:
    """See Atlas.from_sums."""
    probes = probes or {}
    layers: dict[str, list[int]] = {}
    for kind, layer in tally.sums:
        layers.setdefault(kind, []).append(layer)
    layers = {kind: sorted(numbers) for kind, numbers in layers.items()}
    heads = {
        kind: [original_heads.get((kind, i)) or list(range(tally.sums[kind, i].top.shape[1] - 1)) for i in numbers]
        for kind, numbers in layers.items()
    }
    tables: dict[str, Any] = {part: {} for part in (*TABLES, BASELINE)}
    for source in filter(None, (tally, repetition, *probes.values())):
        _add_tables(tables, source, layers, heads)
    return Atlas(model, layers, heads, dict(tally.ways), **tables, about={**_counts(tally), **about},
                 tally=tally, repetition=repetition, probes=probes)  # fmt: skip


def _add_tables(
    tables: dict[str, Tables], source: Tally, layers: dict[str, list[int]], heads: dict[str, list[list[int | None]]]
) -> None:
    """Add the scores of some sums to the tables of an atlas."""
    for kind, names in source.names.items():
        rows = [_tables(source.sums[kind, i], heads[kind][row]) for row, i in enumerate(layers[kind])]
        for number, name in enumerate(names):
            for part in TABLES:
                tables[part].setdefault(name, {})[kind] = _stack([row[part][number, :-1] for row in rows])
            tables[BASELINE].setdefault(name, {})[kind] = np.array([row["scores"][number, -1] for row in rows])


def with_probes(atlas: Atlas, tallies: dict[str, Tally], facts: dict[str, dict[str, Any]]) -> Atlas:
    """An atlas with the scores of further probes. facts: about each probe that was requested."""
    tables: dict[str, Any] = {
        part: {name: dict(kinds) for name, kinds in getattr(atlas, part).items()} for part in (*TABLES, BASELINE)
    }
    for source in tallies.values():
        _add_tables(tables, source, atlas.layers, atlas.heads)
    about = {**atlas.about, "probes": {**atlas.about.get("probes", {}), **facts}}
    return replace(atlas, **tables, about=about, probes={**atlas.probes, **tallies})


def _counts(tally: Tally) -> dict[str, int]:
    return {"texts": tally.texts, "tokens": tally.tokens, "cut": tally.cut, "replicates": tally.replicates}


def _tables(sums: Sums, heads: list[int | None]) -> dict[str, np.ndarray]:
    """The tables of one layer, each (scores, heads + 1)."""
    low, high = sums.interval()
    # rounded as in a file, or a head at the very border could gain a role by being saved
    tables = {
        name: table.round(DIGITS)
        for name, table in (("scores", sums.means()), ("low", low), ("high", high), ("spread", sums.spread()))
    }
    padding = [head for head, original in enumerate(heads) if original is None]
    for table in tables.values():
        table[:, padding] = np.nan
    return tables


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    """(layers, heads), NaN where a layer has fewer heads."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def is_from_sums(atlas: Atlas, tally: Tally, others: Iterable[Tally | None]) -> bool:
    """Whether these sums give this atlas. others: those of the repetition and of the probes."""
    if any(atlas.about.get(key, value) != value for key, value in _counts(tally).items()) or tally.ways != atlas.ways:
        return False
    if sorted(tally.sums) != sorted((kind, i) for kind, layers in atlas.layers.items() for i in layers):
        return False
    return all(
        _has_layer(atlas, kind, layer, source.names[kind], sums.means())
        for source in filter(None, (tally, *others))
        for (kind, layer), sums in source.sums.items()
    )


def _has_layer(atlas: Atlas, kind: str, layer: int, names: tuple[str, ...], means: np.ndarray) -> bool:
    """Whether an atlas has these means, (scores, heads + 1), in one layer."""
    if layer not in atlas.layers.get(kind, ()):
        return False
    row = atlas.layers[kind].index(layer)
    heads = atlas.heads[kind][row]
    if means.shape[1] != len(heads) + 1:
        return False
    real = [head for head, original in enumerate(heads) if original is not None]
    for name, mean in zip(names, means, strict=True):
        table = atlas.scores.get(name, {}).get(kind)
        if table is None or not np.allclose(table[row, real], mean[real], 0, 10.0**-DIGITS, True):
            return False
    return True


def merge(first: Atlas, *others: Atlas) -> Atlas:
    """One atlas of the texts of all, by adding their sums."""
    tally, repetition, notes = first.tally, first.repetition, list(first.about.get("notes", ()))
    probes, probe_facts = dict(first.probes), dict(first.about.get("probes", {}))
    for other in others:
        if tally is None or other.tally is None:
            raise HeadwiseError("merging needs the sums behind an atlas; save it with sums=True")
        tally = tally.plus(other.tally)
        if other.heads != first.heads:
            raise HeadwiseError("these are atlases of models pruned differently; they cannot be merged")
        repetition = repetition or other.repetition  # the same for all: random tokens, not texts
        probes, probe_facts = other.probes | probes, other.about.get("probes", {}) | probe_facts  # likewise
        _check_same_model(first.about.get("fingerprint", {}), other.about.get("fingerprint", {}))
        if other.about.get("counts") != first.about.get("counts"):
            notes.append("rare tokens: each part against its own counts")
    assert tally is not None
    heads = {
        (kind, i): row for kind in first.layers for i, row in zip(first.layers[kind], first.heads[kind], strict=True)
    }
    omitted = ("texts", "tokens", "cut", "replicates", "part", "likeness")
    about = {key: x for key, x in first.about.items() if key not in omitted}
    if any(other.about.get("fingerprint") != first.about.get("fingerprint") for other in others):
        about["fingerprint"] = {key: x for key, x in about.get("fingerprint", {}).items() if key != "texts"}
    about["notes"] = list(dict.fromkeys(notes))
    if probe_facts:
        about["probes"] = probe_facts
    merged = atlas_from_sums(tally, repetition, first.model, heads, about, probes)
    return replace(merged, relations=first.relations)


def _check_same_model(first: dict[str, str], second: dict[str, str]) -> None:
    """Atlases of versions that wrote no fingerprint are taken as they are."""
    for key, words in (("weights", "other weights"), ("tokenizer", "another tokenizer")):
        if key in first and key in second and first[key] != second[key]:
            raise HeadwiseError(
                f"these atlases were measured with {words} (fingerprints {first[key][:8]} and {second[key][:8]}); "
                "only atlases of one model can be merged"
            )
