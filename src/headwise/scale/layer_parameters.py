"""The parameters of one decoder layer by their shapes, from a card's counts. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..card import Card, Counts, Layer
from ..errors import HeadwiseError, UnsupportedError
from ..heads import Heads


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one layer that are used for every token.

    Args:
        heads: of its attention.
        inner: width inside the feed-forward layer; 0 where the feed-forward layer is not a plain one.
        gated: whether the feed-forward layer has a gate.
        qkv_bias, out_bias, ffn_bias: whether these have biases.
        head_norms: whether queries and keys are normalized per head.
        norms: vectors of the layer's width in its norms.
        rest: parameters of which only the number is known.
    """

    heads: Heads
    inner: int = 0
    gated: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_norms: bool = False
    norms: int = 0
    rest: int = 0

    @property
    def matrices(self) -> int:
        """Numbers that tokens are multiplied by: all but biases and norms."""
        return self.rest + matrix_numbers(self.shapes())

    @property
    def total(self) -> int:
        return self.rest + sum(map(math.prod, self.shapes()))

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """The shape of every parameter."""
        return self.partial_shapes(self.heads.query * self.heads.dim, self.heads.kv * self.heads.dim, self.inner)

    def partial_shapes(self, query_rows: int, kv_rows: int, inner: int) -> Iterator[tuple[int, ...]]:
        """Shapes with some rows of W_Q, of W_K and of the feed-forward layer's first weights, and the others to match.

        Norms and the biases of W_O and of the feed-forward layer's last weight are whole.
        """
        heads, width = self.heads, self.heads.width
        for rows in (query_rows, kv_rows, kv_rows * heads.value_dim // heads.dim):
            yield rows, width
            if self.qkv_bias:
                yield (rows,)
        yield width, query_rows * heads.value_dim // heads.dim
        if self.out_bias:
            yield (width,)
        if self.head_norms:
            yield from ((heads.dim,), (heads.dim,))
        yield from self.feed_forward_shapes(inner)
        if self.inner and self.ffn_bias:
            yield (width,)
        yield from [(width,)] * self.norms

    def feed_forward_shapes(self, inner: int) -> Iterator[tuple[int, ...]]:
        """Shapes of what is split of a feed-forward layer; none where it is not a plain one."""
        if self.inner:
            for _ in range(1 + self.gated):
                yield inner, self.heads.width
                if self.ffn_bias:
                    yield (inner,)
            yield self.heads.width, inner


def matrix_numbers(shapes: Iterable[tuple[int, ...]]) -> int:
    """Numbers in the matrices among these parameters."""
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def first_layer(card: Card) -> Layer:
    """The first layer with attention of plain heads."""
    layers = [layer for layer in card.attention.layers if layer.sharing in ("MHA", "GQA", "MQA")]
    if not layers:
        raise UnsupportedError(f"{card.name} has no attention of plain heads to split")
    return layers[0]


def layer_parameters(card: Card) -> LayerParameters:
    """The parameters of a layer of a model: exact for a decoder of equal layers, otherwise the mean of its layers.

    A card counts attention, feed-forward layers and norms; which weights and biases these are follows from the numbers.
    """
    counts, layers = card.parameters, len(card.attention.layers)
    if not isinstance(counts, Counts):
        raise HeadwiseError(f"the parameters of {card.name} are not known: {counts}")
    heads = first_layer(card).heads
    inner = card.main.numbers.get("ffn") or 0
    mean = max(1, counts.norms // layers // heads.width)
    norms = 1 << mean.bit_length() - 1  # one, two or four vectors: a layer has one norm or two, with a bias or without
    others = counts.norms - layers * norms * heads.width  # a norm before or after all layers, and those of heads
    head_norms = others > 2 * heads.width or others % heads.width != 0
    for biases in itertools.product((False, True), repeat=4):
        plain = LayerParameters(heads, inner, *biases)
        if inner and plain.total * layers == counts.attention + counts.ffn:
            return replace(plain, head_norms=head_norms, norms=norms)
    rest = (counts.attention + counts.ffn - counts.idle) // layers - LayerParameters(heads).total
    return LayerParameters(heads, norms=norms, rest=rest)
