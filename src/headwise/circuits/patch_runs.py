"""Runs of a model on pairs of inputs, with the activations and metrics that patching needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.batches import batch_size, run
from ..models.structure.sites import Site
from .activations import Kept, Visit, visit_activations
from .inputs import Pair, named_tensors
from .metric import Measure, tensors_of
from .positions import Positions


class Target(NamedTuple):
    """One head, whose activation is replaced."""

    site: Site
    head: int


class SiteShape(NamedTuple):
    """The activations of one layer in a run."""

    rows: int  # the prompts, unless the model reads them otherwise
    heads: int
    per_query_head: bool
    kept_bytes: int  # what must be kept of it
    bytes: int


class Baseline(NamedTuple):
    """Both runs of a pair without patches."""

    this: Tensor  # (B,) of the metric, or (1,) where it is one number per batch
    other: Tensor
    shapes: dict[Site, SiteShape]  # of the layers that were called
    repeatable: bool = False  # whether copies of the batch can run as one batch
    output_bytes: int = 0


@dataclass
class PatchRuns:
    """What is patched, in which model, on which pairs of inputs.

    The model runs on one input of each pair ("this"), with activations of the other put in.
    """

    model: nn.Module
    what: str
    direction: str
    sites: Sequence[Site]
    by_query_head: bool
    pairs: Sequence[Pair]
    measure: Measure
    positions: Positions
    means: Mapping[Site, Tensor] = field(default_factory=dict)  # (heads, width), instead of the other run's activations

    def this(self, number: int) -> Any:
        pair = self.pairs[number]
        return pair.corrupted if self.direction == "denoise" else pair.clean

    def other(self, number: int) -> Any:
        pair = self.pairs[number]
        return pair.clean if self.direction == "denoise" else pair.corrupted

    def visiting(self, visitor: Callable[[Visit], Tensor | None]) -> Any:
        """A context in which the activations of every chosen layer pass through a visitor, once per pass."""
        seen: set[Site] = set()

        def visit_once(visit: Visit) -> Tensor | None:
            if visit.site in seen:
                raise UnsupportedError(
                    f"{type(visit.site.module).__name__} (at {visit.site.place}) attends more than once per call, so "
                    f"it has no single {self.what} to patch; choose other layers with heads"
                )
            seen.add(visit.site)
            return visitor(visit)

        return visit_activations(self.model, self.what, visit_once, self.sites, by_query_head=self.by_query_head)

    def baseline(self, number: int) -> Baseline:
        """Both runs of a pair without patches."""
        shapes: dict[Site, SiteShape] = {}

        def visitor(visit: Visit) -> None:
            shapes[visit.site] = site_shape(visit)

        with torch.no_grad():
            other = self.measure(run(self.model, self.other(number)), number)[0]
            with self.visiting(visitor):
                output = run(self.model, self.this(number))
            this = self.measure(output, number)[0]
        if not shapes:
            raise HeadwiseError(f"none of the chosen layers of {type(self.model).__name__} was called")
        repeatable = is_repeatable(self.this(number), output)
        return Baseline(this, other, shapes, repeatable, sum(_bytes(x) for x in tensors_of(output)))

    def record(self, number: int, sites: Iterable[Site]) -> tuple[Any, dict[Site, Kept]]:
        """The output of the run on the other input of a pair, and the activations of some layers in it."""
        chosen, kept = set(sites), {}

        def visitor(visit: Visit) -> None:
            if visit.site in chosen and not self.means:
                kept[visit.site] = tuple(x.detach().clone() for x in visit.kept)

        with torch.no_grad(), self.visiting(visitor):
            output = run(self.model, self.other(number))
        return output, kept

    def replacement(self, visit: Visit, kept: Mapping[Site, Kept], copies: int = 1) -> Tensor:
        """(rows, T, heads, width), or with rows repeated for each copy: the activations to insert."""
        if self.means:
            mean = self.means[visit.site].to(visit.value)
            shape = (len(visit.value) // copies, *visit.value.shape[1:])
            return mean.expand(shape)
        return visit.substitute(kept[visit.site])

    def mask(self, visit: Visit, number: int, copies: int = 1) -> Tensor | None:
        """(rows, T) bool: the positions to patch at a layer, of one copy of the batch; None for all."""
        rows = len(visit.value) // copies
        size = batch_size(self.pairs[number].clean)
        if self.positions and rows != size:
            raise UnsupportedError(
                f"{visit.site} attends on {rows} sequences for {size} prompts; positions of their tokens are not known"
            )
        real = None if visit.real is None else visit.real[:rows]
        mask = self.positions.mask(number, (rows, visit.value.shape[1]), real, visit.site)
        return None if mask is None else mask.to(visit.value.device)


def site_shape(visit: Visit) -> SiteShape:
    rows, _, heads, _ = visit.value.shape
    return SiteShape(rows, heads, visit.per_query_head, sum(map(_bytes, visit.kept)), _bytes(visit.value))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def mean_activations(runs: PatchRuns, batches: Sequence[Any]) -> dict[Site, Tensor]:
    """The mean of each head's activation over all tokens of some batches: {site: (heads, width)}."""
    sums: dict[Site, Tensor] = {}
    counts: dict[Site, int] = {}

    def visitor(visit: Visit) -> None:
        tokens = visit.value.flatten(0, 1) if visit.real is None else visit.value[visit.real]
        sums[visit.site] = sums.get(visit.site, 0) + tokens.double().sum(0)
        counts[visit.site] = counts.get(visit.site, 0) + len(tokens)

    for batch in batches:
        with torch.no_grad(), runs.visiting(visitor):
            run(runs.model, batch)
    return {site: total / max(counts[site], 1) for site, total in sums.items()}


def is_repeatable(batch: Any, output: Any) -> bool:
    """Whether several copies of a batch can run as one batch: every tensor, in and out, has one row per prompt.

    A square matrix of numbers or flags beside other inputs may be a mask that all prompts share; one in the output may
    compare the prompts with each other.
    """
    size = batch_size(batch)
    inputs, outputs = list(named_tensors(batch).values()), tensors_of(output)
    for x in inputs:
        shared = len(inputs) > 1 and tuple(x.shape) == (size, size) and (x.is_floating_point() or x.dtype == torch.bool)
        by_axis = x.dim() == 3 and not x.is_floating_point()  # positions by time, height and width: (3, B, T)
        if shared or by_axis:
            return False
    matrix = any(tuple(x.shape) == (size, size) for x in outputs)
    return not matrix and all(x.dim() > 0 and len(x) == size for x in [*inputs, *outputs])


def repeat_batch(batch: Any, copies: int) -> Any:
    """Copies of a batch, one after the other, as one batch."""
    if copies == 1:
        return batch
    if isinstance(batch, Mapping):
        return {name: repeat_batch(x, copies) if isinstance(x, Tensor) else x for name, x in batch.items()}
    if isinstance(batch, tuple):
        return tuple(repeat_batch(x, copies) if isinstance(x, Tensor) else x for x in batch)
    return batch.repeat(copies, *[1] * (batch.dim() - 1))


def check_cacheless(batch: Any) -> None:
    """Refuse a batch with a cache, which every run would change."""
    if isinstance(batch, Mapping) and batch.get("past_key_values") is not None:
        raise HeadwiseError("a batch with past_key_values cannot run twice, as its cache grows; give whole prompts")
