"""Arrays packed for a page: all weights of short texts; the strongest links and a reduced matrix of long ones.

Everything is little-endian and base64. A byte stores the square root of a weight, top * (byte / 255)^2, so that small
weights stay precise; the page shows the error of a number.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXACT = 1 << 20  # bytes of the weights of all layers as float32; up to here they are stored exactly
BYTES = 2 << 20  # weights of all layers; up to here one byte per weight
IMAGE_BYTES = 8 << 20  # the same for images, whose patches are all seen at once: a ViT-B of 197 tokens has 5.6 million
LINKS = 12 << 20  # bytes of the strongest links of long inputs
MOST_LINKS = 8  # per query
SIDES = ((300, 43), (1000, 64))  # (tokens, cells per side of the reduced matrix of a text of up to these tokens)
LARGEST_SIDE = 128


def b64(array: np.ndarray) -> str:
    little_endian = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little_endian.tobytes()).decode()


def f32(array: Any) -> str:
    return b64(np.asarray(array, np.float32))


def share_words(array: np.ndarray) -> dict[str, Any]:
    """Non-negative numbers in two bytes each: their share of the largest."""
    top = float(array.max(initial=0.0))
    return {"top": top, "data": b64(np.rint(array * (65535 / max(top, 1e-30))).astype("<u2"))}


def root_bytes(weights: np.ndarray) -> tuple[list[float], np.ndarray]:
    """(H, ...) -> the largest weight per head, and one byte per weight: the root of its share of the largest."""
    flat = weights.reshape(len(weights), -1)
    top = flat.max(1, initial=0.0).astype(np.float32)
    share = np.sqrt(flat / np.maximum(top, np.float32(1e-30))[:, None])
    return [float(x) for x in top], np.rint(share * 255).astype(np.uint8).reshape(weights.shape)


@dataclass(frozen=True)
class Size:
    """How much there is to store."""

    rows: int  # of all heads of all layers
    weights: int
    longest: int  # tokens of the longest side
    limit: int = BYTES  # weights up to which all are stored

    @property
    def form(self) -> str:
        if self.weights * 4 <= EXACT:
            return "f32"
        return "u8" if self.weights <= self.limit else "links"

    @property
    def links(self) -> int:
        """Links per query: fewer if there are very many queries."""
        return max(1, min(MOST_LINKS, LINKS // max(1, self.rows * (2 + self.number().itemsize))))

    def number(self) -> np.dtype[Any]:
        """The smallest integer type for the index of a token."""
        return np.dtype("<u1" if self.longest <= 1 << 8 else "<u2" if self.longest <= 1 << 16 else "<u4")

    @property
    def cell(self) -> int:
        """Tokens per side of one cell of the reduced matrix."""
        side = next((largest_side for tokens, largest_side in SIDES if self.longest <= tokens), LARGEST_SIDE)
        return -(-self.longest // side)


def pack_weights(weights: np.ndarray, size: Size) -> dict[str, Any]:
    """All weights (H, Tq, Tk) of one layer."""
    if size.form == "f32":
        return {"form": "f32", "data": f32(weights)}
    top, coded = root_bytes(weights)
    return {"form": "u8", "top": top, "data": b64(coded)}


def pack_links(blocks: Iterator[tuple[int, np.ndarray]], shape: tuple[int, int, int], size: Size) -> dict[str, Any]:
    """The strongest links of one layer, shape (H, Tq, Tk), and its reduced matrix, from blocks of rows."""
    heads, queries, count = *shape[:2], min(size.links, shape[2])
    keys = np.empty((heads, queries, count), size.number())
    weights = np.empty((heads, queries, count), "<u2")
    reduced = Reduced(shape, size.cell)
    for first, block in blocks:
        rows = slice(first, first + block.shape[1])
        places, strengths = strongest_keys(block, count)
        keys[:, rows] = places
        weights[:, rows] = np.rint(strengths * 65535)
        reduced.add(first, block)
    return {
        "form": "links",
        "k": count,
        "number": size.number().itemsize,
        "keys": b64(keys),
        "weights": b64(weights),
        "reduced": reduced.to_json(),
    }


def strongest_keys(block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(H, rows, Tk) -> the k strongest keys of each row and their weights, strongest first: (H, rows, k) each."""
    top = torch.from_numpy(block).topk(k, -1)  # partial selection in C++
    return top.indices.numpy(), top.values.numpy()


class Reduced:
    """The largest and the mean weight per square of tokens, accumulated over blocks of rows."""

    def __init__(self, shape: tuple[int, int, int], cell: int) -> None:
        heads, queries, keys = shape
        self.shape, self.cell = shape, cell
        self.rows, self.columns = -(-queries // cell), -(-keys // cell)
        self.largest = np.zeros((heads, self.rows, self.columns), np.float32)
        self.sums = np.zeros((heads, self.rows, self.columns), np.float64)

    def add(self, first: int, block: np.ndarray) -> None:
        """Add a block (H, rows, Tk) whose first row has the index `first`."""
        squares = torch.from_numpy(block)
        row, last = first, first + block.shape[1]
        while row < last:
            place = row // self.cell
            end = min((place + 1) * self.cell, last)
            part = squares[:, row - first : end - first]  # rows first: contiguous sums are fast
            np.maximum(self.largest[:, place], self._wide(part.amax(1)).amax(-1).numpy(), out=self.largest[:, place])
            self.sums[:, place] += self._wide(part.sum(1)).sum(-1).numpy()
            row = end

    def _wide(self, row: Tensor) -> Tensor:
        """(H, Tk) -> (H, columns, cell). Weights are never negative, so that padding with zeros changes nothing."""
        padding = self.columns * self.cell - self.shape[2]
        return torch.nn.functional.pad(row, (0, padding)).unflatten(-1, (self.columns, self.cell))

    @property
    def mean(self) -> np.ndarray:
        """(H, rows, columns), over the tokens of each cell: the last ones have fewer."""
        _, queries, keys = self.shape
        high = np.diff(np.append(np.arange(0, queries, self.cell), queries))
        wide = np.diff(np.append(np.arange(0, keys, self.cell), keys))
        return (self.sums / (high[:, None] * wide)).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"cell": self.cell, "rows": self.rows, "columns": self.columns}
        for name, values in (("max", self.largest), ("mean", self.mean)):
            top, coded = root_bytes(values)
            value[name] = {"top": top, "data": b64(coded)}
        return value
