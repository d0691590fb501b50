"""`headwise.composition`: how strongly the queries, keys and values of later heads read the output of a head."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CheckpointError, HeadwiseError
from ..files import write_atomically
from ..json_documents import anything, count, finite_or_none, items, load_document, mapping, other_format, string
from ..models.structure.sites import Site, require_sites
from ..models.text_inputs import is_encoder_decoder
from .layer_factors import LayerFactors, layer_factors
from .stream_norms import LISTS, stream_norms

COMPONENTS = ("query", "key", "value")
VERSION = 1
DECIMALS = 7  # of a score: float32 has no more
BLOCK = 1 << 24  # entries of Gram matrices at a time
Head = tuple[str, int, int]  # kind, layer number, query head


@dataclass(frozen=True)
class HeadPair:
    """An earlier and a later head, and how strongly one part of the later head reads what the earlier one writes."""

    component: str  # "query", "key" or "value"
    earlier: Head
    later: Head
    score: float  # above the value for random heads
    deviation: float  # the same in standard deviations of random heads with these singular values


@dataclass(frozen=True, eq=False)
class Composition:
    """Q-, K- and V-composition between all pairs of heads of a model, minus the value for random heads.

    `scores["key"][u, v]` is norm(QK_v OV_u) / (norm(QK_v) norm(OV_u)) - 1 / sqrt(d) for the heads `heads[u]` and
    `heads[v]`; "query" has QK_v transposed, "value" has OV_v. NaN where v does not read what u writes: it is not in a
    later layer of the same stack, or one of the two is a head of zeros. 1 / sqrt(d) is the root mean square of the
    ratio when one of the two matrices is rotated at random, whatever its singular values.

    Attributes:
        model: its class.
        heads: (kind, layer, head) of every head, in the order of the arrays.
        widths: for each head, the width d of the residual stream that it writes into.
        scores: "query", "key", "value" -> (earlier heads, later heads).
        unevenness: of the same names, (heads,): how uneven a head's squared singular values are (those of QK for
            "query" and "key", of OV for "value"), as sum of squares / square of sum - 1 / d.
        notes: remarks about the numbers.

    Example:
        >>> composition = headwise.composition(model)
        >>> composition.strongest(10, "key")  # pairs of heads: the later one's keys read what the earlier one writes
    """

    model: str
    heads: tuple[Head, ...]
    widths: tuple[int, ...]
    scores: dict[str, np.ndarray]
    unevenness: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> np.ndarray:
        """(heads,): the value for random heads, which was subtracted from the scores of each earlier head."""
        return 1 / np.sqrt(np.array(self.widths, dtype=float))

    def deviations(self, component: str) -> np.ndarray:
        """(earlier heads, later heads): how many standard deviations of random heads a squared ratio is above theirs.

        Random heads have the singular values of these heads and directions drawn at random.

        Raises:
            HeadwiseError: for an unknown component.
        """
        _check_component(component)
        widths = np.array(self.widths, dtype=float)[:, None]
        ratios = self.scores[component] + self.baseline[:, None]
        uneven = self.unevenness["value"][:, None] * self.unevenness[component][None]
        spread = np.sqrt(2 * uneven / ((widths - 1) * (widths + 2)))
        with np.errstate(divide="ignore", invalid="ignore"):
            deviations: np.ndarray = (ratios**2 - 1 / widths) / spread
        return deviations

    def strongest(self, n: int = 10, component: str | None = None) -> list[HeadPair]:
        """The n pairs with the largest scores, of one component or of all three, the strongest first.

        Args:
            n: how many pairs, at most.
            component: "query", "key" or "value"; None for all.

        Raises:
            HeadwiseError: for an n below 1 or an unknown component.

        Example:
            >>> for pair in headwise.composition(model).strongest(5, "key"):
            ...     print(pair.earlier, "->", pair.later, pair.score)
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise HeadwiseError(f"n must be a number of pairs from 1 on, got {n!r}")
        pairs: list[HeadPair] = []
        for name in COMPONENTS if component is None else (component,):
            _check_component(name)
            scores = self.scores[name]
            order = np.argsort(np.where(np.isnan(scores), -np.inf, scores), axis=None)[::-1][:n]
            deviations = self.deviations(name)
            for place in order:
                u, v = np.unravel_index(place, scores.shape)
                if not np.isnan(scores[u, v]):
                    score, deviation = float(scores[u, v]), float(deviations[u, v])
                    pairs.append(HeadPair(name, self.heads[u], self.heads[v], score, deviation))
        return sorted(pairs, key=lambda pair: -pair.score)[:n]

    def to_json(self) -> dict[str, Any]:
        """The scores as plain JSON values; null if there is none."""

        def rows(array: np.ndarray) -> Any:
            values = array.astype(object)
            values[np.isnan(array)] = None
            return values.tolist()

        return {
            "headwise_composition": VERSION,
            "model": self.model,
            "notes": list(self.notes),
            "heads": [
                {"kind": kind, "layer": layer, "head": head, "width": width}
                for (kind, layer, head), width in zip(self.heads, self.widths, strict=True)
            ],
            "unevenness": {name: rows(self.unevenness[name]) for name in COMPONENTS},
            "scores": {name: rows(self.scores[name]) for name in COMPONENTS},
        }

    @classmethod
    def from_json(cls, document: Any) -> Composition:
        """Restore the result of `to_json`; anything else raises a one-line CheckpointError."""
        if not isinstance(document, dict) or "headwise_composition" not in document:
            raise CheckpointError("this is not a composition that headwise wrote: it has no 'headwise_composition'")
        if document["headwise_composition"] != VERSION:
            raise CheckpointError(f"this composition's {other_format(document['headwise_composition'], VERSION)}")
        try:
            return _read(document)
        except ValueError as error:
            raise CheckpointError(f"this is not a composition that headwise wrote: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, to a temporary file that is then moved into place."""
        with write_atomically(path, CheckpointError) as file:
            file.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Composition:
        """Read a file that `save` wrote."""
        return load_document(path, "composition", cls.from_json)

    def __repr__(self) -> str:
        pairs = int(np.isfinite(self.scores["query"]).sum())
        baselines = ", ".join(f"{1 / math.sqrt(width):.3f}" for width in sorted(set(self.widths)))
        lines = [
            f"composition of {len(self.heads)} heads of {self.model}: {pairs} pairs, less {baselines} for random heads"
        ]
        several_kinds = len({kind for kind, *_ in self.heads}) > 1
        for pair in self.strongest(5):
            earlier, later = (_head_name(head, several_kinds) for head in (pair.earlier, pair.later))
            size = f"{pair.score:+.3f} ({pair.deviation:+.0f} standard deviations)"
            lines.append(f"  {earlier} -> {pair.component} of {later}: {size}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def composition(model: nn.Module, *, fold_norm: bool | None = None) -> Composition:
    """How strongly the queries, keys and values of each head read the output of each earlier head, from weights alone.

    For an earlier head u and a later head v: K-composition is norm(QK_v OV_u), Q-composition norm(QK_v^T OV_u) and
    V-composition norm(OV_v OV_u), each divided by the product of the two norms (Elhage et al. 2021), minus 1 / sqrt(d),
    the value for random matrices. QK is without rotation; norms are folded in as in `head_matrices`. Heads of one layer
    do not compose. The effect of feed-forward blocks and norms between the heads is not included.

    Args:
        model: any PyTorch model whose projections are known; it is not changed.
        fold_norm: as in `head_matrices`.

    Returns:
        A Composition: scores of all pairs, `.strongest(n)`, `.save(path)`.

    Raises:
        HeadwiseError: for a model without attention.
        UnsupportedError: if the matrices of a layer are not known.

    Example:
        >>> result = headwise.composition(headwise.load("smollm2"))
        >>> result.strongest(5, "key")
        >>> result.save("composition.json")
    """
    sites = require_sites(model)
    norms = stream_norms(model)
    with torch.no_grad():
        layers = [layer_factors(model, site, norms, fold_norm=fold_norm) for site in sites]
        counts = [len(layer.query) for layer in layers]
        readers = [_readers(layer) for layer in layers]
        uneven = {name: torch.cat([_unevenness(reader[name]) for reader in readers]) for name in COMPONENTS}
        scores = _scores(model, sites, layers, readers)
    heads = tuple((site.kind, site.index, i) for site, heads in zip(sites, counts, strict=True) for i in range(heads))
    widths = tuple(layer.output.shape[1] for layer, heads in zip(layers, counts, strict=True) for _ in range(heads))
    notes = _notes(sites, layers, norms.before)
    return Composition(
        type(model).__name__, heads, widths, scores,
        {name: _round(values.double().cpu().numpy()) for name, values in uneven.items()}, notes,
    )  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """One matrix per head as root(gram) @ factor: its norm, and that of its products, is that of the whole matrix."""

    factor: Tensor  # (H, r, d): reads the stream
    gram: Tensor  # (H, r, r): of the other factor

    @property
    def squared_norms(self) -> Tensor:
        """(H,): tr(gram @ factor @ factor^T)."""
        return (self.gram * (self.factor @ self.factor.mT)).sum((1, 2))


def _readers(layer: LayerFactors) -> dict[str, Reader]:
    """QK transposed, QK and OV of a layer's heads."""
    query, output = layer.query, layer.output
    key, value = (_per_query_head(layer, x) for x in (layer.key, layer.value))
    return {
        "query": Reader(query, key @ key.mT),
        "key": Reader(key, query @ query.mT),
        "value": Reader(value, output.mT @ output),
    }


def _per_query_head(layer: LayerFactors, factor: Tensor) -> Tensor:
    return factor if layer.group == 1 else factor.repeat_interleave(layer.group, 0)


def _writer(layer: LayerFactors) -> Reader:
    """OV of a layer's heads, transposed."""
    value = _per_query_head(layer, layer.value)
    return Reader(layer.output.mT, value @ value.mT)


def _unevenness(reader: Reader) -> Tensor:
    """(H,): sum of the 4th powers of the singular values / square of the sum of their squares - 1 / d."""
    product = reader.gram.double() @ (reader.factor @ reader.factor.mT).double()
    width = reader.factor.shape[2]
    total = product.diagonal(dim1=1, dim2=2).sum(1)
    return ((product * product.mT).sum((1, 2)) / total**2 - 1 / width).clamp(min=0)


def _scores(
    model: nn.Module, sites: list[Site], layers: list[LayerFactors], readers: list[dict[str, Reader]]
) -> dict[str, np.ndarray]:
    writers = [_writer(layer) for layer in layers]
    counts = [len(layer.query) for layer in layers]
    first = np.concatenate(([0], np.cumsum(counts)))
    total = int(first[-1])
    scores = {name: np.full((total, total), np.nan) for name in COMPONENTS}
    for width in sorted({writer.factor.shape[2] for writer in writers}):
        sending = [i for i, writer in enumerate(writers) if writer.factor.shape[2] == width]
        places = [(name, i) for name in COMPONENTS for i in range(len(layers))]
        receiving = [(name, i) for name, i in places if readers[i][name].factor.shape[2] == width]
        if not receiving:  # nobody reads what these layers write as it is, as in Zamba
            continue
        squares = _products([writers[i] for i in sending], [readers[i][name] for name, i in receiving], width)
        rows = np.concatenate(([0], np.cumsum([counts[i] for i in sending])))
        columns = np.concatenate(([0], np.cumsum([counts[i] for _, i in receiving])))
        for a, u in enumerate(sending):
            for b, (name, v) in enumerate(receiving):
                if _reads(model, sites[u], sites[v], name):
                    ratios = np.sqrt(squares[rows[a] : rows[a + 1], columns[b] : columns[b + 1]])
                    block = scores[name][first[u] : first[u + 1], first[v] : first[v + 1]]
                    block[:] = _round(ratios - 1 / math.sqrt(width))
    return scores


def _products(writers: Sequence[Reader], readers: Sequence[Reader], width: int) -> np.ndarray:
    """(writing heads, reading heads): the squared norms of all products, divided by both squared norms.

    The squared norm of A B is the inner product of A^T A and B B^T, d x d matrices that exist in blocks of rows; of
    those, which are symmetric, only the half from the diagonal on.
    """
    sizes = [torch.cat([x.squared_norms for x in side]) for side in (writers, readers)]
    heads = sum(map(len, sizes))
    step = max(1, min(width, BLOCK // (heads * width)))
    total = sizes[0].new_zeros(len(sizes[0]), len(sizes[1]))
    for start in range(0, width, step):
        stop = min(start + step, width)
        writer_rows = torch.cat([_gram_rows(writer, start, stop) for writer in writers])  # (heads, rows, d - start)
        writer_rows[:, :, stop - start :] *= 2  # for the half that is left out
        reader_rows = torch.cat([_gram_rows(reader, start, stop) for reader in readers])
        total.addmm_(writer_rows.flatten(1), reader_rows.flatten(1).T)
    ratios = total.double() / (sizes[0].double()[:, None] * sizes[1].double()[None])
    return ratios.clamp(min=0).cpu().numpy()


def _gram_rows(reader: Reader, start: int, stop: int) -> Tensor:
    """(H, rows, d - start): rows of factor^T gram factor, from the diagonal on."""
    return (reader.factor[:, :, start:stop].mT @ reader.gram) @ reader.factor[:, :, start:]


def _reads(model: nn.Module, earlier: Site, later: Site, component: str) -> bool:
    """Whether a part of the later layer's heads reads the stream that the earlier layer writes into, after it did."""
    is_cross = later.kind.endswith("cross")
    if is_cross and component != "query":
        return is_encoder_decoder(model) and earlier.kind == "encoder"
    same_stream = _stack(model, earlier) == _stack(model, later)
    return same_stream and _place(earlier) < _place(later)


def _place(site: Site) -> tuple[int, bool]:
    """The order of layers in a stream: cross-attention follows self-attention."""
    return site.index, site.kind.endswith("cross")


def _stack(model: nn.Module, site: Site) -> str:
    """The path of the outermost list of layers around an attention module, beside which others have other streams."""
    parts = site.name.split(".")
    for length in range(1, len(parts)):
        path = ".".join(parts[:length])
        if parts[length].isdigit() and isinstance(model.get_submodule(path), LISTS):
            return path
    return ""


def _notes(sites: list[Site], layers: list[LayerFactors], before: dict[tuple[str, str], str]) -> tuple[str, ...]:
    notes = []
    if not any((site.name, "q") in before for site in sites):
        notes.append("no norm is folded in; norms between the layers, as in post-norm models, are left out")
    if any("rotary" in layer.rotation for layer in layers):
        notes.append("QK is without rotation")
    return (*notes, *dict.fromkeys(note for layer in layers for note in layer.notes))


def _round(values: np.ndarray) -> np.ndarray:
    rounded: np.ndarray = np.round(values, DECIMALS)
    return rounded


def _head_name(head: Head, with_kind: bool) -> str:
    kind, layer, number = head
    return f"{kind} {layer}.{number}" if with_kind else f"{layer}.{number}"


def _check_component(component: Any) -> None:
    if component not in COMPONENTS:
        raise HeadwiseError(f"component must be one of {', '.join(COMPONENTS)}, got {component!r}")


def _read(document: dict[str, Any]) -> Composition:
    rows = items(document.get("heads"), "heads", lambda row, path: mapping(row, path, anything))
    heads: list[Head] = []
    widths: list[int] = []
    for i, row in enumerate(rows):
        layer, head, width = (count(row.get(name), f"heads[{i}].{name}") for name in ("layer", "head", "width"))
        heads.append((string(row.get("kind"), f"heads[{i}].kind"), layer, head))
        widths.append(max(width, 1))
    total = len(heads)

    def vector(value: Any, path: str) -> list[float]:
        numbers = items(value, path, finite_or_none)
        if len(numbers) != total:
            raise ValueError(f"{path} has {len(numbers)} numbers for {total} heads")
        return numbers

    def matrix(value: Any, path: str) -> np.ndarray:
        lines = items(value, path, vector)
        if len(lines) != total:
            raise ValueError(f"{path} has {len(lines)} rows for {total} heads")
        return np.array(lines, dtype=float).reshape(total, total)

    parts = {name: mapping(document.get(name), name, anything) for name in ("scores", "unevenness")}
    return Composition(
        string(document.get("model"), "model"), tuple(heads), tuple(widths),
        {name: matrix(parts["scores"].get(name), f"scores.{name}") for name in COMPONENTS},
        {name: np.array(vector(parts["unevenness"].get(name), f"unevenness.{name}")) for name in COMPONENTS},
        tuple(items(document.get("notes"), "notes", string)),
    )  # fmt: skip
