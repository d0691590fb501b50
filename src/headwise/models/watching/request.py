"""The request of a `watch` call: what to record, as one validated value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from torch import Tensor, nn

from ...errors import HeadwiseError
from ..structure.selection import (
    HeadSelection,
    KeyClasses,
    LayerChoice,
    check_links,
    classes_by_kind,
    select_heads,
    select_rows,
)
from ..structure.sites import Site
from .call_reader import Reading
from .eager import EagerReading
from .layers import Layer

# called after every attention call: what was recorded of its layer so far, the call, which queries (B, Tq) are tokens
CallObserver = Callable[[Layer, Reading | EagerReading, Tensor | None], None]


class WatchOptions(TypedDict, total=False):
    """The options of `watch`, which documents them."""

    weights: LayerChoice
    outputs: LayerChoice
    rows: Iterable[int] | None
    links: int
    classes: Mapping[str, Any] | None
    exact: bool
    stats: bool
    each: CallObserver | None


@dataclass(frozen=True)
class Request:
    """What to record of each attention call."""

    weights: HeadSelection
    outputs: HeadSelection
    rows: list[int] | None  # the queries whose weights are kept; None for all
    links: int  # strongest keys per query
    classes: dict[str, KeyClasses]  # by kind of attention
    exact: bool  # the model's own attention function gives the output, bit for bit
    stats: bool
    observer: CallObserver | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sites: list[Site],
        *,
        weights: LayerChoice = None,
        outputs: LayerChoice = None,
        rows: Iterable[int] | None = None,
        links: int = 0,
        classes: Mapping[str, Any] | None = None,
        exact: bool = False,
        stats: bool = True,
        each: CallObserver | None = None,
    ) -> Request:
        """The options of `watch`, checked against the layers of a model."""
        weight_heads, output_heads = (select_heads(model, sites, choice) for choice in (weights, outputs))
        weight_rows = select_rows(rows)
        if weight_rows is not None and not weight_heads:
            raise HeadwiseError("rows says which rows of weights to keep, and no weights are; watch with weights=True")
        kinds = {site.kind for site in sites}
        return cls(
            weight_heads, output_heads, weight_rows, check_links(links), classes_by_kind(classes, kinds), exact,
            stats, each,
        )  # fmt: skip

    def with_all_heads(self) -> Request:
        """The same, with all heads of the chosen layers."""
        return replace(self, weights=self.weights.with_all_heads(), outputs=self.outputs.with_all_heads())
