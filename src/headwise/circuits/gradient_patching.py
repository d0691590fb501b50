"""Attribution patching: the effect of every head's patch to first order, from two forward passes and one backward.

With several steps the gradient is the mean over points between the two inputs (integrated gradients): what embeddings
give, and inputs that are floating-point numbers, are interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.batches import batch_size, run
from ..models.hooks import Hooks
from ..models.structure.sites import Site
from .activations import Kept, Visit
from .inputs import named_tensors
from .patch_runs import Baseline, PatchRuns, SiteShape, site_shape


class Estimate(NamedTuple):
    """The estimates for one pair."""

    baseline: Baseline
    changes: dict[Site, Tensor]  # (B, heads), or (1, heads): of the metric of this run, by each head's patch


def estimate_pair(runs: PatchRuns, number: int, steps: int) -> Estimate:
    """The first-order change of the metric by the patch of every head.

    Raises:
        HeadwiseError: for a metric without a gradient, or inputs that cannot be interpolated.
    """
    this, other = runs.this(number), runs.other(number)
    embeddings = _Embeddings(runs.model) if steps > 1 else None
    with nullcontext() if embeddings is None else embeddings.recording("other"):
        output, kept = runs.record(number, runs.sites)
    other_value = runs.measure(output, number)[0].detach()
    del output
    differences = _Differences(runs, number, kept)
    if embeddings is None:
        this_value, gradients = _gradients(runs, number, this, differences.add)
    else:
        with torch.no_grad(), runs.visiting(differences.add), embeddings.recording("this"):
            this_value = runs.measure(run(runs.model, this), number)[0]
        embeddings.check(this, other)
        gradients = {}
        for step in range(steps):
            share = (step + 0.5) / steps
            with embeddings.interpolated(share):
                _, new = _gradients(runs, number, _interpolate(this, other, share))
            gradients = {site: x / steps + gradients.get(site, 0) for site, x in new.items()}
    changes = {site: differences.times(site, gradient, len(this_value)) for site, gradient in gradients.items()}
    return Estimate(Baseline(this_value, other_value, differences.shapes), changes)


class _Differences:
    """Between the activations of the two runs of a pair."""

    def __init__(self, runs: PatchRuns, number: int, kept: Mapping[Site, Kept]) -> None:
        self.shapes: dict[Site, SiteShape] = {}
        self._runs, self._number, self._kept = runs, number, kept
        self._values: dict[Site, Tensor] = {}  # (B, T, heads, width)
        self._masks: dict[Site, Tensor | None] = {}

    @torch.no_grad()
    def add(self, visit: Visit) -> None:
        """Note the difference at a layer that runs on this input."""
        self.shapes[visit.site] = site_shape(visit)
        self._values[visit.site] = self._runs.replacement(visit, self._kept) - visit.value
        self._masks[visit.site] = self._runs.mask(visit, self._number)

    def times(self, site: Site, gradient: Tensor, rows: int) -> Tensor:
        """(rows, heads): the product with a gradient, summed over each prompt's tokens."""
        exact = torch.promote_types(gradient.dtype, torch.float32)
        product = (self._values[site].to(exact) * gradient.to(exact)).sum(-1)  # (B, T, heads)
        mask = self._masks[site]
        if mask is not None:
            product = torch.where(mask[..., None], product, 0)  # a fully masked row may be NaN
        size = batch_size(self._runs.this(self._number))
        if len(product) % size:
            raise UnsupportedError(f'{site} attends on {len(product)} sequences for {size} prompts; use method="exact"')
        return product.sum(1).unflatten(0, (rows, -1)).sum(1)


def _gradients(
    runs: PatchRuns, number: int, batch: Any, note: Callable[[Visit], None] | None = None
) -> tuple[Tensor, dict[Site, Tensor]]:
    """The metric (B,), and its gradient with respect to every layer's activations; note: sees these too."""
    values: dict[Site, Tensor] = {}

    def visitor(visit: Visit) -> Tensor:
        value = visit.value
        if not value.requires_grad:  # nothing before it needs a gradient
            value = value.detach().requires_grad_()
        values[visit.site] = value
        if note is not None:
            note(visit)
        return value

    with torch.enable_grad():
        with runs.visiting(visitor):
            metric = runs.measure(run(runs.model, batch), number)[0]
        if not metric.requires_grad:
            raise HeadwiseError(
                f"the metric ({runs.measure.words}) gives no gradient, so the effect of patches cannot be estimated; "
                'use method="exact"'
            )
        gradients = torch.autograd.grad(metric.sum(), list(values.values()), allow_unused=True)
    return metric.detach(), {
        site: torch.zeros_like(values[site]) if gradient is None else gradient
        for site, gradient in zip(values, gradients, strict=True)
    }


class _Embeddings:
    """The outputs of a model's embeddings in the two runs, in the order of their calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._outputs: dict[str, list[Tensor]] = {}

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        outputs = self._outputs[name] = []

        def record(_: nn.Module, args: Any, output: Tensor) -> None:
            outputs.append(output.detach().clone())

        with self._hooked(record):
            yield

    @contextmanager
    def interpolated(self, share: float) -> Iterator[None]:
        """Inside, embeddings give a point between the two runs."""
        this, other = self._outputs["this"], self._outputs["other"]
        pairs = iter(zip(this, other, strict=True))

        def replace(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            a, b = next(pairs)
            return torch.lerp(a, b, share)

        with self._hooked(replace):
            yield

    def check(self, this: Any, other: Any) -> None:
        """Refuse inputs between which nothing was interpolated."""
        floats = [
            not torch.equal(x, y)
            for x, y in zip(named_tensors(this).values(), named_tensors(other).values(), strict=True)
            if x.is_floating_point()
        ]
        embeddings = [not torch.equal(x, y) for x, y in zip(*self._outputs.values(), strict=True)]
        if not any(floats + embeddings):
            raise UnsupportedError(
                f"between the inputs of {type(self._model).__name__} there is nothing to interpolate: no nn.Embedding "
                "gives different outputs; use steps=1"
            )

    @contextmanager
    def _hooked(self, function: Any) -> Iterator[None]:
        hooks = Hooks(self._model, [], "patch")

        def set_hooks() -> None:
            for module in self._modules:
                hooks.after(module, function)

        try:
            hooks.set(None, set_hooks)
            yield
        finally:
            hooks.remove()


def _interpolate(this: Any, other: Any, share: float) -> Any:
    """A batch whose floating-point tensors are between those of two batches."""
    if isinstance(this, Mapping):
        return {name: _interpolate(x, other[name], share) for name, x in this.items()}
    if isinstance(this, tuple):
        return tuple(_interpolate(x, y, share) for x, y in zip(this, other, strict=True))
    if not isinstance(this, Tensor) or not this.is_floating_point():
        return this
    return torch.where(this == other, this, torch.lerp(this, other, share))  # -inf of a mask stays -inf
