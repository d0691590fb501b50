"""The data of the page as one JSON value: texts, layers, every statistic, weights, and what they are computed from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from .. import errors
from ..inspection import PRONOUNS, STATISTICS, ImageTokens, Inspection
from ..models.watching import Reading
from . import capture, pack
from .baseline import EqualAttention
from .capture import LayerRecord, Pass, Text
from .overlays import Overlays, role_entries, rows_of_pass, to_overlays

NUMBER = re.compile("[0-9]{1,9}")  # "²" is a digit to str.isdigit, and no number to int
FORMAT = 1
STEPS = {"f32": 1 << 20, "u8": 1 << 19, "links": 1 << 18}  # bytes of q, k and v, by the form of the weights
NORMS = 1 << 17  # heads x tokens whose contributions are stored in full: norm, and component along the sum
PARTS = {"f32": 1 << 18, "u8": 1 << 17, "links": 1 << 15}  # bytes of the outputs of some heads through W_O
VISIBLE = 1 << 16  # entries of a mask that is stored
SIGNIFICANT = 6


def data(
    passes: Pass | Sequence[Pass],
    *,
    heads: Sequence[str] = (),
    scores: Any = None,
    live: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The data of the page for one or two passes.

    Args:
        passes: one pass, or two to compare.
        heads: such as "3.1"; the first is shown first, and all have their steps.
        scores: to colour the map by: {name: {kind: (layers, heads)}}, importance, or an atlas.
        live: what a server or notebook behind the page offers.
    """
    all_passes = [passes] if isinstance(passes, Pass) else list(passes)
    runs = [run(pass_, heads=heads, scores=scores) for pass_ in all_passes]
    return {"headwise": FORMAT, "runs": runs, "live": dict(live) if live else None}


def run(
    pass_: Pass,
    *,
    heads: Sequence[str] = (),
    scores: Any = None,
    live: bool = False,
) -> dict[str, Any]:
    """The data of one pass. live: whether the steps of other heads than the first can be requested later."""
    shapes = [_shape(record) for record in pass_.layers]
    size = pack.Size(
        sum(h * q for h, q, _ in shapes),
        sum(h * q * k for h, q, k in shapes),
        max(max(q, k) for _, q, k in shapes),
        pack.IMAGE_BYTES if pass_.texts[0].image else pack.BYTES,
    )
    equals = [EqualAttention(record, pass_.texts[record.target].delimiter) for record in pass_.layers]
    matrices: list[np.ndarray] = []  # (H, Tq, Tk) per layer, of short texts
    if size.form == "links":
        weights = _pack_links(pass_, shapes, size, equals)
    else:
        matrices = [
            np.concatenate([b for _, b in e.observe(s.blocks())], 1) for e, s in zip(equals, pass_.layers, strict=True)
        ]
        weights = [pack.pack_weights(array, size) for array in matrices]
    equal = [baseline.statistics() for baseline in equals]
    overlays = to_overlays(scores)
    stats = [capture.statistics(record) for record in pass_.layers]
    requested = [parse_head(pass_, head) for head in heads]
    standouts = _standouts(pass_, stats, equal)
    follow = _follow(pass_, matrices)
    followed = [tuple(follow["head"])] if follow else []
    order = list(dict.fromkeys([*requested, *followed, *_first_of_each_kind(standouts), (0, 0)]))
    return {
        "name": pass_.name,
        "text": pass_.text,
        "target": pass_.target,
        "pair": pass_.encoder_decoder,
        "notes": list(pass_.notes),
        "off": [
            [row, head]
            for row, record in enumerate(pass_.layers)
            for head in pass_.off.get((record.kind, record.index), [])
        ],
        "texts": [_text(text) for text in pass_.texts],
        "layers": [_layer(record) for record in pass_.layers],
        "statistics": {name: STATISTICS[name] for name in STATISTICS if any(name in row for row in stats)},
        "stats": {name: [number_row(row.get(name)) for row in stats] for name in STATISTICS},
        "equal": {name: [_number(row.get(name)) for row in equal] for name in STATISTICS}
        | _equal_scores(pass_, overlays),
        "scores": {
            name: [number_row(row) for row in rows_of_pass(pass_, name, kinds)]
            for name, kinds in overlays.tables.items()
        },
        "about": overlays.about,
        "signed": overlays.signed,
        "standouts": standouts,
        "roles": role_entries(pass_, overlays),
        "follow": follow,
        "chosen": [list(key) for key in requested],
        "weights": weights,
        "steps": _steps(pass_, order[:1] if live else order, STEPS[size.form], all_heads=not live),
        "output": _outputs(pass_, order[:1] if live else order, PARTS[size.form]),
    }


def _pack_links(
    pass_: Pass, shapes: Sequence[Any], size: pack.Size, equals: Sequence[EqualAttention]
) -> list[dict[str, Any]]:
    """Pack the links with one thread per layer: threads on the same block would wait for each other."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(
                pool.map(
                    lambda e, s, shape: pack.pack_links(e.observe(s.blocks()), shape, size),
                    equals,
                    pass_.layers,
                    shapes,
                )
            )
    finally:
        torch.set_num_threads(threads)


def _shape(record: LayerRecord) -> tuple[int, int, int]:
    _, heads, queries, _ = record.reading.q.shape
    reading = record.reading
    return heads, queries, reading.keys


def parse_head(pass_: Pass, head: str) -> tuple[int, int]:
    """A label such as "3.1", or "cross 3.1" with several kinds of attention -> (row among all layers, head)."""
    kind, _, name = head.strip().rpartition(" ")
    layer, _, number = name.partition(".")
    for row, record in enumerate(pass_.layers):
        if str(record.index) == layer and kind in ("", record.kind) and NUMBER.fullmatch(number):
            if int(number) < record.layer.heads.query:
                return row, int(number)
            raise errors.HeadwiseError(
                f"there is no head {head}; layer {layer} has heads 0 to {record.layer.heads.query - 1}"
            )
    if not (NUMBER.fullmatch(layer) and NUMBER.fullmatch(number)):
        raise errors.HeadwiseError(f"a head is written layer.head, such as 3.1, got {head!r}")
    raise errors.HeadwiseError(
        f"there is no layer {layer}; {pass_.name} has layers {', '.join(sorted({str(s.index) for s in pass_.layers}))}"
    )


def _text(text: Text) -> dict[str, Any]:
    word_of = [0] * len(text.pieces)
    for word, group in enumerate(text.words.pieces):
        for piece in group:
            word_of[piece] = word
    return {
        "pieces": list(text.pieces),
        "words": list(text.words.names),
        "of": word_of,
        "delimiter": [word for word, mark in enumerate(text.words.delimiter) if mark],
        "image": None if text.image is None else _image(text.image),
    }


def _image(image: ImageTokens) -> dict[str, Any]:
    return {"rows": image.rows, "columns": image.columns, "offset": image.offset, "picture": image.picture}


def _layer(record: LayerRecord) -> dict[str, Any]:
    heads = record.layer.heads
    return {
        "kind": record.kind,
        "index": record.index,
        "name": record.layer.name,
        "heads": heads.query,
        "kv": heads.kv,
        "dim": heads.dim,
        "width": heads.width,
        "from": record.source,
        "to": record.target,
    }


def number_row(values: np.ndarray | None) -> list[float | None] | None:
    """One number per head, as JSON."""
    return None if values is None else [_number(x) for x in values]


def _number(x: Any) -> float | None:
    """Six digits, the precision of float32 statistics; None for NaN, which JSON does not have."""
    if x is None or not np.isfinite(x):
        return None
    return float(f"{float(x):.{SIGNIFICANT}g}")


def _equal_scores(pass_: Pass, overlays: Overlays) -> dict[str, list[float | None]]:
    """Scores of uniform attention per layer, from an atlas."""
    scores = {}
    for name, kinds in overlays.equal.items():
        remaining = {kind: list(values) for kind, values in kinds.items()}
        scores[name] = [
            _number(remaining[record.kind].pop(0)) if remaining.get(record.kind) else None for record in pass_.layers
        ]
    return scores


def _inspections(pass_: Pass, stats: Sequence[Any], equal: Sequence[Any]) -> list[tuple[list[int], Inspection]]:
    """An `Inspection` per kind of attention with comparable positions, with its rows; it finds heads that stand out."""
    kinds: dict[str, list[int]] = {}
    for row, record in enumerate(pass_.layers):
        if "distance" in stats[row]:
            kinds.setdefault(record.kind, []).append(row)
    inspections = []
    for rows in kinds.values():
        text = pass_.texts[pass_.layers[rows[0]].source]
        largest = max(len(stats[row]["entropy"]) for row in rows)
        inspection = Inspection(
            text=pass_.text,
            model=pass_.name,
            words=text.words,
            layers=tuple(rows),
            stats={name: np.array([_pad(stats[row][name], largest) for row in rows]) for name in STATISTICS},
            weights=tuple(np.empty((len(stats[row]["entropy"]), 0, 0)) for row in rows),  # only their shapes are read
            equal={name: np.array([equal[row][name] for row in rows]) for name in STATISTICS},
            causal=_causal(pass_.layers[rows[0]]),
            tokens=len(text.pieces),
        )
        inspections.append((rows, inspection))
    return inspections


def _pad(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)), constant_values=np.nan)


def _causal(record: LayerRecord) -> bool:
    """Whether the first query attends only to itself."""
    return len(record.outputs[0]) > 1 and not record.rows([0])[:, 0, 1:].any()


def _standouts(pass_: Pass, stats: Sequence[Any], equal: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind.name,
            "criterion": inspection.criterion(kind),
            "head": [standout.layer, standout.head],
            "score": _number(standout.score),
            "equal": _number(standout.equal),
        }
        for _, inspection in _inspections(pass_, stats, equal)
        for kind in inspection.kinds
        for standout in inspection.standouts(kind)
    ]


def _first_of_each_kind(standouts: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The heads that stand out, the first of each kind before the second of any."""
    counts: dict[str, int] = {}
    order = []
    for place, standout in enumerate(standouts):
        kind = standout["kind"]
        counts[kind] = counts.get(kind, 0) + 1
        order.append((counts[kind], place, tuple(standout["head"])))
    return [head for _, _, head in sorted(order)]


def _follow(pass_: Pass, matrices: Sequence[np.ndarray]) -> dict[str, Any] | None:
    """A word to follow and the head that links it best: a pronoun to an earlier word, else the strongest link."""
    first = [(row, record) for row, record in enumerate(pass_.layers) if record.kind == pass_.layers[0].kind]
    if not matrices or pass_.layers[0].source != pass_.layers[0].target:
        return None
    words = pass_.texts[pass_.layers[0].source].words
    inspection = Inspection(
        text=pass_.text,
        model=pass_.name,
        words=words,
        layers=tuple(row for row, _ in first),
        stats={},
        equal={},
        weights=tuple(words.merge(matrices[row]) for row, _ in first),
        causal=_causal(first[0][1]),
        tokens=len(pass_.texts[pass_.layers[0].source].pieces),
    )
    image = pass_.texts[pass_.layers[0].source].image
    if image is not None and image.special:
        return _follow_special(image, inspection)
    [(place, reason)] = inspection.followed_words()
    links = inspection.links(place) or inspection.links(place, near=True)
    if words.names[place].casefold() in PRONOUNS:
        links = [link for link in links if link.target < place] or links
    if not links:
        return None
    best = links[0]
    return {"word": place, "to": best.target, "head": [best.layer, best.head], "why": reason.partition(";")[0]}


def _follow_special(image: ImageTokens, inspection: Inspection) -> dict[str, Any]:
    """The first special token, and the patch that any head gives the largest weight from it."""
    rows = {head: inspection.matrix(head)[0, image.offset :] for head in inspection.heads}
    head, row = max(rows.items(), key=lambda item: float(item[1].max()))
    return {"word": 0, "to": image.offset + int(row.argmax()), "head": list(head), "why": "the strongest patch"}


def _steps(
    pass_: Pass, order: Sequence[tuple[int, int]], limit: int, *, all_heads: bool
) -> list[dict[str, Any] | None]:
    """q, k and v per layer: of all heads if requested and small enough, else of the first heads in order that fit."""
    readings = [record.reading if isinstance(record.reading, Reading) else None for record in pass_.layers]
    total = sum(4 * (r.q[0].numel() + r.k[0].numel() + r.v[0].numel()) for r in readings if r is not None)
    heads_by_row: dict[int, list[int]] = {}
    if all_heads and total <= limit:
        heads_by_row = {row: list(range(r.q.shape[1])) for row, r in enumerate(readings) if r is not None}
    else:
        remaining = float(limit)
        for row, head in order:
            reading = readings[row]
            if reading is None:
                continue
            remaining -= 4 * (reading.q[0, 0].numel() + reading.k[0, 0].numel() + reading.v[0, 0].numel())
            if remaining >= 0 or not heads_by_row:  # the head that is shown first always has its steps
                heads_by_row.setdefault(row, []).append(head)
    return [
        steps(record, heads_by_row[row]) if row in heads_by_row else None for row, record in enumerate(pass_.layers)
    ]


def steps(record: LayerRecord, heads: Sequence[int]) -> dict[str, Any] | None:
    """q, k, v and options behind the weights of some heads; None if the model's own code computes them differently."""
    reading = record.reading
    if not isinstance(reading, Reading) or _has_more_options(reading):
        return None
    group = reading.q.shape[1] // reading.k.shape[1]
    pairs = sorted({head // group for head in heads})
    options = reading.options
    scale = options["scale"] if options["scale"] is not None else reading.q.shape[-1] ** -0.5
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
        "softcap": options["softcap"],
        "sinks": None if options["sinks"] is None else [float(x) for x in options["sinks"].flatten()[list(heads)]],
        "causal": bool(options["causal"]),
        "window": options["window"],
        "offset": int(options["offset"]),
        "mask": mask,
        "complete": complete,
    }


def _has_more_options(reading: Reading) -> bool:
    """Whether scores depend on options that the page does not support."""
    options = reading.options
    tensors = any(options.get(name) is not None for name in ("slopes", "gates", "starts", "lengths"))
    return tensors or options.get("keep_first", 0) != 0


def _bias(reading: Reading) -> tuple[dict[str, Any] | None, bool]:
    """The bias of the scores apart from causality and window, with -inf for hidden keys; and whether it is complete."""
    mask = reading.options["mask"]
    if reading.recipe is not None or (mask is not None and mask[0].numel() > VISIBLE):
        return None, False
    if mask is None:
        return None, True
    mask = mask[0].detach().cpu()
    bias = np.where(mask.numpy(), 0.0, -np.inf) if mask.dtype.is_floating_point is False else mask.float().numpy()
    return {"shape": list(bias.shape), "data": pack.f32(bias)}, True


def _outputs(pass_: Pass, order: Sequence[tuple[int, int]], limit: int) -> list[dict[str, Any] | None]:
    """What each head adds to the output of its layer through W_O, per token: norms, and the vectors of some heads."""
    small = sum(record.outputs.shape[0] * record.outputs.shape[1] for record in pass_.layers) <= NORMS
    remaining = float(limit)
    heads_by_row: dict[int, list[int]] = {}
    for row, head in order:
        remaining -= 4 * pass_.layers[row].outputs.shape[1] * pass_.layers[row].layer.heads.width
        if remaining >= 0:
            heads_by_row.setdefault(row, []).append(head)
    return [
        None if record.w_o is None else output(record, heads_by_row.get(row, []), along=small)
        for row, record in enumerate(pass_.layers)
    ]


def output(record: LayerRecord, heads: Sequence[int], *, along: bool = True) -> dict[str, Any]:
    """Contributions of the heads: norms (H, T), the norm (T,) of their sum with the bias, components along the sum."""
    assert record.w_o is not None
    matrix, bias = record.w_o
    outputs = torch.from_numpy(record.outputs)
    count, tokens, width = outputs.shape
    per_head = matrix.unflatten(0, (count, width))  # (H, Dv, width of the model)
    total = outputs.transpose(0, 1).flatten(1) @ matrix + (0 if bias is None else bias)  # (T, width of the model)
    size = total.norm(dim=-1)
    if tokens <= width:
        norms = (outputs @ per_head).norm(dim=-1)
    else:  # the same from the Gram matrix of W_O's rows, which is smaller
        norms = ((outputs @ (per_head @ per_head.transpose(1, 2))) * outputs).sum(-1).clamp(min=0).sqrt()
    result: dict[str, Any] = {
        "norms": pack.f32(norms.numpy()) if along else pack.share_words(norms.numpy()),  # long texts: half the bytes
        "total": pack.f32(size.numpy()),
        "bias": None if bias is None else _number(float(bias.norm())),
        "heads": list(heads),
        "parts": pack.f32((outputs[list(heads)] @ per_head[list(heads)]).numpy()) if heads else "",
    }
    if along:
        dots = (outputs * (total @ per_head.transpose(1, 2))).sum(-1)
        result["along"] = pack.f32((dots / size.clamp(min=1e-30)).numpy())
    return result
