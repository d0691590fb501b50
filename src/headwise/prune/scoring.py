"""What a score function works on, and the passes over the batches that several scores share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.batches import batch_size, run
from ..models.intervene.head_outputs import head_outputs
from ..models.structure.heads import w_o
from ..models.structure.linear_layers import QUANTIZED, whole_weight, wrapping_problem
from ..models.structure.sites import Site
from ..models.watching.watcher import watch
from .attention_layers import AttentionLayer
from .objective import Objective

Progress: TypeAlias = Callable[[int, int], None]  # finished steps, total number of steps
SEED_STEP = 1_000_003  # between the seeds of two batches


@dataclass(frozen=True)
class ScoringRun:
    """One call of `importance`, as its score function receives it.

    The model is in eval mode, its parameters take no gradients, and heads that the caller masked are masked.
    """

    model: nn.Module
    sites: list[Site]
    layers: list[AttentionLayer]  # of the sites, in the same order
    batches: list[Any]
    objective: Objective  # the loss: its gradient, and the damage of a change
    unit: str  # "head", "kv" or "layer"
    random: torch.Generator
    progress: Progress
    options: Mapping[str, float]
    batch_numbers: Sequence[int]  # of the batches, in a larger whole of which they may be a part

    def batch_random(self, step: int) -> torch.Generator:
        """A generator for one batch alone: its numbers do not depend on which other batches there are."""
        return torch.Generator().manual_seed(self.random.initial_seed() + SEED_STEP * (1 + self.batch_numbers[step]))

    def row(self, site: Site) -> int:
        """The position of a site among `sites` and `layers`."""
        return next(i for i, layer in enumerate(self.layers) if layer.key == site.key)

    def units(self, layer: AttentionLayer) -> list[list[int]]:
        """The query heads of each unit of a layer."""
        return layer.units(self.unit)

    def sum_units(self, parts: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Per layer its parts (examples, heads), joined, and summed over the heads of each unit."""
        sums = []
        for layer, layer_parts in zip(self.layers, parts, strict=True):
            rows = np.concatenate(layer_parts) if layer_parts else np.zeros((1, layer.query))
            sums.append(np.stack([rows[:, heads].sum(1) for heads in self.units(layer)], 1))
        return sums


def refuse_quantized(model: nn.Module) -> None:
    """Refuse layers without gradients: the heads before them would seem not to matter."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise UnsupportedError(
                f"{type(module).__name__} (at {path}) is quantized and has no gradient; use the score ablation, "
                "confidence or sink"
            )


def output_weights(scoring: ScoringRun, site: Site) -> Tensor:
    """The columns of W_O that belong to each head: (H, width, head_dim)."""
    path, out = w_o(scoring.model, site)
    weight: Any = getattr(out, "weight", None)
    problem = wrapping_problem(out, values=False)
    if problem is not None and problem is not QUANTIZED:  # an adapter's layer shows the weight without the adapter
        reason, remedy = problem
        raise UnsupportedError(
            f"W_O ({type(out).__name__} at {path}) is more than its weight ({reason}); {remedy}, or use the score "
            "ablation, confidence or sink, which does without it"
        )
    # torchao's tensors are of other classes
    plain = type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "device_mesh")
    if not plain or not weight.is_floating_point() or weight.is_meta or weight.dim() != 2:
        raise UnsupportedError(
            f"the weights of {type(out).__name__} (at {path}) are not plain numbers in memory (quantized, packed "
            "or offloaded); use the score ablation, confidence or sink, which does without them"
        )
    heads = scoring.layers[scoring.row(site)].query
    return in_rows(out, whole_weight(out).float()).unflatten(1, (heads, -1)).permute(1, 0, 2)


def in_rows(linear: nn.Module, weight: Tensor) -> Tensor:
    """A weight with one row per output feature; GPT-2's Conv1D stores the transpose."""
    return weight.T if type(linear).__name__ == "Conv1D" else weight


def mean_over_tokens(scoring: ScoringRun, measure: Callable[[Site, Tensor], Tensor]) -> list[np.ndarray]:
    """Per layer the mean over each example's tokens of `measure(site, head outputs (..., H, head_dim)) -> (..., H)`."""
    parts: list[list[np.ndarray]] = [[] for _ in scoring.layers]
    for step, batch in enumerate(scoring.batches):
        size = batch_size(batch)

        def tap(site: Site, heads: Tensor, real: Tensor | None, size: int = size) -> None:
            values = measure(site, heads.float())
            if real is not None:
                mean = (values * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
            else:
                mean = values.reshape(size, -1, values.shape[-1]).mean(1)
            parts[scoring.row(site)].append(mean.double().cpu().numpy())

        with torch.no_grad(), head_outputs(scoring.model, tap):
            run(scoring.model, batch)
        scoring.progress(step + 1, len(scoring.batches))
    return scoring.sum_units(parts)


def mean_statistic(
    scoring: ScoringRun, name: str, convert: Callable[[np.ndarray], np.ndarray] = lambda values: values
) -> list[np.ndarray]:
    """Per layer a statistic of HeadStats for each example and head, passed through `convert`."""
    parts: list[list[np.ndarray]] = [[] for _ in scoring.layers]
    for step, batch in enumerate(scoring.batches):
        with torch.no_grad(), watch(scoring.model) as seen:
            run(scoring.model, batch)
        for site in scoring.sites:
            values = torch.as_tensor(seen[site.key].stats.per_sequence(name)).double().cpu().numpy()
            parts[scoring.row(site)].append(convert(np.nan_to_num(values)))
        scoring.progress(step + 1, len(scoring.batches))
    return scoring.sum_units(parts)
