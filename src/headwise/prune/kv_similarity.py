"""Which KV heads of a layer are alike, by their weights or by their keys and values on batches, and groups of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..models.batches import run
from ..models.evaluation import evaluating
from ..models.structure.linear_layers import row_dim
from ..models.structure.projections import Projection, Projections

Groups = list[list[int]]  # for each new KV head the old ones that form it
ROLES = ("k", "v")


def contiguous_groups(kv: int, count: int) -> Groups:
    """Neighbouring KV heads in groups of equal size."""
    size = kv // count
    return [list(range(first, first + size)) for first in range(0, kv, size)]


def similar_groups(distances: Tensor, count: int) -> Groups:
    """KV heads in groups of equal size, chosen greedily by their squared distances (kv, kv).

    A group begins with the closest pair that is left, and takes in the head with the least mean distance to its
    members until it is full. Groups and their members are in the order of the old heads.
    """
    size, distance = len(distances) // count, distances.tolist()
    if size == 1:
        return [[i] for i in range(count)]
    free = set(range(len(distance)))
    groups: Groups = []
    while free:
        closest = min(combinations(sorted(free), 2), key=lambda pair: distance[pair[0]][pair[1]])
        group = [*closest]
        free -= {*closest}
        while len(group) < size:
            nearest = min(sorted(free), key=lambda i: sum(distance[i][j] for j in group))
            group.append(nearest)
            free.remove(nearest)
        groups.append(sorted(group))
    return sorted(groups)


def weight_distances(layers: Sequence[Projections]) -> list[Tensor]:
    """For each layer the squared distances (kv, kv) between its KV heads' rows of W_K and W_V, with their biases."""
    grams = [{role: torch.zeros(layer.kv, layer.kv, dtype=torch.float64) for role in ROLES} for layer in layers]
    for gram, layer in zip(grams, layers, strict=True):
        for part in layer.parts:
            weight = part.linear.get_parameter("weight").detach()
            rows = weight.T if row_dim(part.linear) else weight
            bias = part.linear._parameters.get("bias")
            rows = rows if bias is None else torch.cat((rows, bias.detach()[:, None]), 1)
            _add_products(gram, layer, part, rows.T)
    return [_distances(gram) for gram in grams]


def activation_distances(model: nn.Module, layers: Sequence[Projections], batches: Iterable[Any]) -> list[Tensor]:
    """Like weight_distances, but between the keys and values of the heads on the real tokens of some batches.

    Keys are taken before their rotation, which is the same for all heads and changes no distance.
    """
    grams = [{role: torch.zeros(layer.kv, layer.kv, dtype=torch.float64) for role in ROLES} for layer in layers]
    real: Tensor | None = None  # (B, T) of the running batch: which positions are tokens and not padding

    def observe(gram: dict[str, Tensor], layer: Projections, part: Projection) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Tensor) -> None:
            if real is not None and real.shape == output.shape[:-1]:
                rows = output[real.to(output.device)]
            else:
                rows = output.flatten(0, -2)
            _add_products(gram, layer, part, rows)

        return hook

    handles = [
        part.linear.register_forward_hook(observe(gram, layer, part))
        for gram, layer in zip(grams, layers, strict=True)
        for part in layer.parts
    ]
    try:
        with torch.no_grad(), evaluating(model):
            for batch in batches:
                mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
                real = mask.bool() if isinstance(mask, Tensor) else None
                run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [_distances(gram) for gram in grams]


def _add_products(gram: dict[str, Tensor], layer: Projections, part: Projection, rows: Tensor) -> None:
    """Add the inner products between KV heads; rows (n, outputs of the linear layer)."""
    for role, places in _kv_blocks(layer, part):
        blocks = rows.unflatten(1, (len(part.layout(layer.query, layer.kv)), -1))[:, places]  # (n, kv, size)
        x = blocks.transpose(0, 1).flatten(1).to("cpu", torch.float64)
        gram[role] += x @ x.T


def _kv_blocks(layer: Projections, part: Projection) -> Iterator[tuple[str, list[int]]]:
    """For keys and for values, where a linear layer makes them: the place of each KV head among its blocks of rows."""
    blocks = part.layout(layer.query, layer.kv)
    for role in ROLES:
        if (role, 0) in blocks:
            yield role, [blocks.index((role, i)) for i in range(layer.kv)]


def _distances(gram: dict[str, Tensor]) -> Tensor:
    """(kv, kv): squared distances of keys and of values, each relative to the layer's total, added."""
    total = torch.zeros_like(gram["k"])
    for products in gram.values():
        norms = products.diagonal()
        squares = (norms[:, None] + norms[None] - 2 * products).clamp(min=0)
        total += squares / norms.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return total
