"""What the view shows, as one JSON value: texts, layers, every statistic, weights, and the numbers behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from .. import errors
from ..inspection.result import PRONOUNS, STATISTICS, Inspection
from ..models.watching.call_reader import Reading
from . import capture, pack
from .baseline import Equal
from .capture import Pass, Seen, Text
from .overlays import Given, beside, given, roles

NUMBER = re.compile("[0-9]{1,9}")  # "²" is a digit to str.isdigit, and no number to int
FORMAT = 1
STEPS = {"f32": 1 << 20, "u8": 1 << 19, "links": 1 << 18}  # bytes of q, k and v, by how the weights are stored
NORMS = 1 << 17  # heads x tokens whose parts of the output are told in full: the norm, and how much lies along the sum
PARTS = {"f32": 1 << 18, "u8": 1 << 17, "links": 1 << 15}  # bytes of what W_O makes of some heads' outputs
VISIBLE = 1 << 16  # entries of a mask that is shown
SIGNIFICANT = 6


def data(
    passes: Pass | Sequence[Pass],
    *,
    heads: Sequence[str] = (),
    scores: Any = None,
    live: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One or two passes for the view. heads: "3.1", the first is the one that is shown first, and all have their steps.

    scores: to colour the map by: {name: {kind: (layers, heads)}}, what importance gave, or an atlas.
    live: what a server or notebook behind the view can do.
    """
    several = [passes] if isinstance(passes, Pass) else list(passes)
    runs = [run(one, heads=heads, scores=scores) for one in several]
    return {"headwise": FORMAT, "runs": runs, "live": dict(live) if live else None}


def run(
    one: Pass,
    *,
    heads: Sequence[str] = (),
    scores: Any = None,
    live: bool = False,
) -> dict[str, Any]:
    """One pass. live: whether the numbers behind other heads than the first can be asked for later."""
    shapes = [_shape(seen) for seen in one.layers]
    size = pack.Size(
        sum(h * q for h, q, _ in shapes), sum(h * q * k for h, q, k in shapes), max(max(q, k) for _, q, k in shapes)
    )
    equals = [Equal(seen, one.texts[seen.target].delimiter) for seen in one.layers]
    held: list[np.ndarray] = []  # (H, Tq, Tk) of each layer, where they are few
    if size.form == "links":
        weights = _linked(one, shapes, size, equals)
    else:
        held = [
            np.concatenate([b for _, b in e.passing(s.blocks())], 1) for e, s in zip(equals, one.layers, strict=True)
        ]
        weights = [pack.whole(array, size) for array in held]
    equal = [told.statistics() for told in equals]
    more = given(scores)
    stats = [capture.statistics(seen) for seen in one.layers]
    chosen = [named(one, head) for head in heads]
    shown = _standouts(one, stats, equal)
    follow = _follow(one, held)
    order = list(dict.fromkeys([*chosen, *([tuple(follow["head"])] if follow else []), *_best(shown), (0, 0)]))
    return {
        "name": one.name,
        "text": one.text,
        "target": one.target,
        "pair": one.pair,
        "notes": list(one.notes),
        "off": [
            [row, head] for row, seen in enumerate(one.layers) for head in one.off.get((seen.kind, seen.index), [])
        ],
        "texts": [_text(text) for text in one.texts],
        "layers": [_layer(seen) for seen in one.layers],
        "statistics": {name: STATISTICS[name] for name in STATISTICS if any(name in row for row in stats)},
        "stats": {name: [_row(row.get(name)) for row in stats] for name in STATISTICS},
        "equal": {name: [_number(row.get(name)) for row in equal] for name in STATISTICS} | _equal(one, more),
        "scores": {name: [_row(row) for row in beside(one, name, kinds)] for name, kinds in more.tables.items()},
        "about": more.about,
        "standouts": shown,
        "roles": roles(one, more),
        "follow": follow,
        "chosen": [list(at) for at in chosen],
        "weights": weights,
        "steps": _steps(one, order[:1] if live else order, STEPS[size.form], whole=not live),
        "output": _outputs(one, order[:1] if live else order, PARTS[size.form]),
    }


def _linked(one: Pass, shapes: Sequence[Any], size: pack.Size, equals: Sequence[Equal]) -> list[dict[str, Any]]:
    """A thread a layer: several threads on one block would wait for each other again and again."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(
                pool.map(
                    lambda e, s, shape: pack.linked(e.passing(s.blocks()), shape, size), equals, one.layers, shapes
                )
            )
    finally:
        torch.set_num_threads(threads)


def _shape(seen: Seen) -> tuple[int, int, int]:
    _, heads, queries, _ = seen.reading.q.shape
    reading = seen.reading
    return heads, queries, reading.keys


def named(one: Pass, head: str) -> tuple[int, int]:
    """ "3.1" -> (row among all layers, head); in a model of several kinds, "cross 3.1"."""
    kind, _, name = head.strip().rpartition(" ")
    layer, _, number = name.partition(".")
    for row, seen in enumerate(one.layers):
        if str(seen.index) == layer and kind in ("", seen.kind) and NUMBER.fullmatch(number):
            if int(number) < seen.layer.heads.query:
                return row, int(number)
            raise errors.HeadwiseError(
                f"there is no head {head}; layer {layer} has heads 0 to {seen.layer.heads.query - 1}"
            )
    if not (NUMBER.fullmatch(layer) and NUMBER.fullmatch(number)):
        raise errors.HeadwiseError(f"a head is written layer.head, such as 3.1, got {head!r}")
    raise errors.HeadwiseError(
        f"there is no layer {layer}; {one.name} has layers {', '.join(sorted({str(s.index) for s in one.layers}))}"
    )


def _text(text: Text) -> dict[str, Any]:
    of = [0] * len(text.pieces)
    for word, group in enumerate(text.words.pieces):
        for piece in group:
            of[piece] = word
    return {
        "pieces": list(text.pieces),
        "words": list(text.words.names),
        "of": of,
        "delimiter": [word for word, mark in enumerate(text.words.delimiter) if mark],
    }


def _layer(seen: Seen) -> dict[str, Any]:
    heads = seen.layer.heads
    return {
        "kind": seen.kind,
        "index": seen.index,
        "name": seen.layer.name,
        "heads": heads.query,
        "kv": heads.kv,
        "dim": heads.dim,
        "width": heads.width,
        "from": seen.source,
        "to": seen.target,
    }


def _row(values: np.ndarray | None) -> list[float | None] | None:
    return None if values is None else [_number(x) for x in values]


def _number(x: Any) -> float | None:
    """Six digits: what float32 statistics have. JSON knows no NaN."""
    if x is None or not np.isfinite(x):
        return None
    return float(f"{float(x):.{SIGNIFICANT}g}")


def _equal(one: Pass, more: Given) -> dict[str, list[float | None]]:
    """What equal attention would score, for each layer, where an atlas says it."""
    found = {}
    for name, kinds in more.equal.items():
        left = {kind: list(values) for kind, values in kinds.items()}
        found[name] = [_number(left[seen.kind].pop(0)) if left.get(seen.kind) else None for seen in one.layers]
    return found


def _inspections(one: Pass, stats: Sequence[Any], equal: Sequence[Any]) -> list[tuple[list[int], Inspection]]:
    """Each kind of attention whose positions compare, with its rows: an Inspection judges what stands out."""
    kinds: dict[str, list[int]] = {}
    for row, seen in enumerate(one.layers):
        if "distance" in stats[row]:
            kinds.setdefault(seen.kind, []).append(row)
    found = []
    for rows in kinds.values():
        text = one.texts[one.layers[rows[0]].source]
        most = max(len(stats[row]["entropy"]) for row in rows)
        table = {
            name: np.array([np.pad(stats[row][name], (0, most - len(stats[row][name])), constant_values=np.nan)
                            for row in rows])
            for name in STATISTICS
        }  # fmt: skip
        found.append((rows, Inspection(
            text=one.text, model=one.name, words=text.words, layers=tuple(rows), stats=table,
            weights=tuple(np.empty((len(stats[row]["entropy"]), 0, 0)) for row in rows),  # only counted here
            equal={name: np.array([equal[row][name] for row in rows]) for name in STATISTICS},
            causal=_causal(one.layers[rows[0]]), tokens=len(text.pieces),
        )))  # fmt: skip
    return found


def _causal(seen: Seen) -> bool:
    """Whether the first query sees none but itself."""
    return len(seen.outputs[0]) > 1 and not seen.rows([0])[:, 0, 1:].any()


def _standouts(one: Pass, stats: Sequence[Any], equal: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind.name,
            "criterion": judge.criterion(kind),
            "head": [each.layer, each.head],
            "score": _number(each.score),
            "equal": _number(each.equal),
        }
        for _, judge in _inspections(one, stats, equal)
        for kind in judge.kinds
        for each in judge.standouts(kind)
    ]


def _best(standouts: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The heads that stand out, the first of each kind before the second of any."""
    seen: dict[str, int] = {}
    ranked = []
    for place, one in enumerate(standouts):
        seen[one["kind"]] = seen.get(one["kind"], -1) + 1
        ranked.append((seen[one["kind"]], place, tuple(one["head"])))
    return [head for _, _, head in sorted(ranked)]


def _follow(one: Pass, held: Sequence[np.ndarray]) -> dict[str, Any] | None:
    """A word worth following and the head that links it best: a pronoun to an earlier word, else the strongest link."""
    first = [(row, seen) for row, seen in enumerate(one.layers) if seen.kind == one.layers[0].kind]
    if not held or one.layers[0].source != one.layers[0].target:
        return None
    words = one.texts[one.layers[0].source].words
    judge = Inspection(
        text=one.text, model=one.name, words=words, layers=tuple(row for row, _ in first), stats={}, equal={},
        weights=tuple(words.merge(held[row]) for row, _ in first),
        causal=_causal(first[0][1]), tokens=len(one.texts[one.layers[0].source].pieces),
    )  # fmt: skip
    [(place, why)] = judge.followed()
    links = judge.links(place) or judge.links(place, near=True)
    if words.names[place].casefold() in PRONOUNS:
        links = [link for link in links if link.target < place] or links
    if not links:
        return None
    best = links[0]
    return {"word": place, "to": best.target, "head": [best.layer, best.head], "why": why.partition(";")[0]}


def _steps(one: Pass, order: Sequence[tuple[int, int]], limit: int, *, whole: bool) -> list[dict[str, Any] | None]:
    """q, k and v of each layer: if whole, of all heads where they are small; else of the first in order that fit."""
    readings = [seen.reading if isinstance(seen.reading, Reading) else None for seen in one.layers]
    total = sum(4 * (r.q[0].numel() + r.k[0].numel() + r.v[0].numel()) for r in readings if r is not None)
    kept: dict[int, list[int]] = {}
    if whole and total <= limit:
        kept = {row: list(range(r.q.shape[1])) for row, r in enumerate(readings) if r is not None}
    else:
        left = float(limit)
        for row, head in order:
            reading = readings[row]
            if reading is None:
                continue
            left -= 4 * (reading.q[0, 0].numel() + reading.k[0, 0].numel() + reading.v[0, 0].numel())
            if left >= 0 or not kept:  # the head that is shown first has its steps, whatever they take
                kept.setdefault(row, []).append(head)
    return [steps(seen, kept[row]) if row in kept else None for row, seen in enumerate(one.layers)]


def steps(seen: Seen, heads: Sequence[int]) -> dict[str, Any] | None:
    """What some heads' weights are made of; None where the model's own code makes them in its own way."""
    reading = seen.reading
    if not isinstance(reading, Reading):
        return None
    group = reading.q.shape[1] // reading.k.shape[1]
    pairs = sorted({head // group for head in heads})
    how = reading.options
    scale = how["scale"] if how["scale"] is not None else reading.q.shape[-1] ** -0.5
    mask, complete = _bias(reading)
    return {
        "heads": list(heads),
        "kv": pairs,
        "q": pack.f32(reading.q[0, list(heads)].detach().float().cpu().numpy()),
        "k": pack.f32(reading.k[0, pairs].detach().float().cpu().numpy()),
        "v": pack.f32(reading.v[0, pairs].detach().float().cpu().numpy()),
        "dim": reading.q.shape[-1],
        "value": reading.v.shape[-1],
        "scale": float(scale),
        "softcap": how["softcap"],
        "sinks": None if how["sinks"] is None else [float(x) for x in how["sinks"].flatten()[list(heads)]],
        "causal": bool(how["causal"]),
        "window": how["window"],
        "offset": int(how["offset"]),
        "mask": mask,
        "complete": complete,
    }


def _bias(reading: Reading) -> tuple[dict[str, Any] | None, bool]:
    """What is added to the scores beside a band: float32 with -inf for hidden; and whether that is all."""
    mask = reading.options["mask"]
    if reading.recipe is not None or (mask is not None and mask[0].numel() > VISIBLE):
        return None, False
    if mask is None:
        return None, True
    mask = mask[0].detach().cpu()
    added = np.where(mask.numpy(), 0.0, -np.inf) if mask.dtype.is_floating_point is False else mask.float().numpy()
    return {"shape": list(added.shape), "data": pack.f32(added)}, True


def _outputs(one: Pass, order: Sequence[tuple[int, int]], limit: int) -> list[dict[str, Any] | None]:
    """What each head adds to the output of its layer by W_O, for every token: norms, and some heads' own vectors."""
    small = sum(seen.outputs.shape[0] * seen.outputs.shape[1] for seen in one.layers) <= NORMS
    left = float(limit)
    wanted: dict[int, list[int]] = {}
    for row, head in order:
        left -= 4 * one.layers[row].outputs.shape[1] * one.layers[row].layer.heads.width
        if left >= 0:
            wanted.setdefault(row, []).append(head)
    return [
        None if seen.w_o is None else output(seen, wanted.get(row, []), along=small)
        for row, seen in enumerate(one.layers)
    ]


def output(seen: Seen, heads: Sequence[int], *, along: bool = True) -> dict[str, Any]:
    """Norms (H, T) of the heads' parts, the norm (T,) of their sum with the bias, how much of each lies along it."""
    assert seen.w_o is not None
    matrix, bias = seen.w_o
    outputs = torch.from_numpy(seen.outputs)
    count, tokens, width = outputs.shape
    each = matrix.unflatten(0, (count, width))  # (H, Dv, width of the model)
    total = outputs.transpose(0, 1).flatten(1) @ matrix + (0 if bias is None else bias)  # (T, width of the model)
    size = total.norm(dim=-1)
    if tokens <= width:
        norms = (outputs @ each).norm(dim=-1)
    else:  # the same by the products of W_O's rows, which are fewer than tokens
        norms = ((outputs @ (each @ each.transpose(1, 2))) * outputs).sum(-1).clamp(min=0).sqrt()
    found: dict[str, Any] = {
        "norms": pack.f32(norms.numpy()) if along else pack.shares(norms.numpy()),  # long texts: half of the bytes
        "total": pack.f32(size.numpy()),
        "bias": None if bias is None else _number(float(bias.norm())),
        "heads": list(heads),
        "parts": pack.f32((outputs[list(heads)] @ each[list(heads)]).numpy()) if heads else "",
    }
    if along:
        dots = (outputs * (total @ each.transpose(1, 2))).sum(-1)
        found["along"] = pack.f32((dots / size.clamp(min=1e-30)).numpy())
    return found
