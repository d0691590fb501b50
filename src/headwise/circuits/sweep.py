"""Exact patching of many heads: copies of a batch run together, in each of which one head is patched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.batches import batch_size, run
from ..models.structure.sites import Site
from .activations import Kept, Visit
from .patch_runs import Baseline, PatchRuns, SiteShape, Target, repeat_batch
from .sweep_file import SweepFile

Progress = Callable[[int, int], None]  # heads done, heads in all; once per pair of batches
HIDDEN_STATES = 24  # tensors of the size of a layer's heads that are alive at once in a pass, roughly
ROWS = 64  # sequences from which running more of them together gains nothing


def sweep(
    runs: PatchRuns,
    targets: Sequence[Target],
    baselines: Sequence[Baseline],
    *,
    memory: int,
    file: SweepFile | None = None,
    progress: Progress | None = None,
) -> list[dict[Target, Tensor]]:
    """The metric with one head patched, of each pair {head: (B,)}, or (1,) for a metric that is one number per batch.

    Args:
        runs: model, inputs and what is patched.
        targets: the heads, in the order of the model's layers.
        baselines: of the pairs, from the first on.
        memory: bytes that the copies of a batch and the activations that are kept may take, as estimated.
        file: stores results, and returns those of an earlier run.
        progress: called after every pass.
    """
    results: list[dict[Target, Tensor]] = []
    total = len(targets) * len(baselines)
    done = 0
    for number, baseline in enumerate(baselines):
        values = {} if file is None else file.known(number, targets)
        results.append(values)
        done += len(values)
        if progress is not None:
            progress(done, total)
        missing = [target for target in targets if target not in values]
        copies = _copies(runs.this(number), baseline, memory)
        for window in [missing] if runs.means else _windows(missing, baseline.shapes, memory):
            kept = {} if runs.means else runs.record(number, {target.site for target in window})[1]
            for first in range(0, len(window), copies):
                chunk = window[first : first + copies]
                new = dict(zip(chunk, _run_patched(runs, number, chunk, kept).cpu().unbind(0), strict=True))
                values |= new
                if file is not None:
                    file.add(number, new)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    return results


def _run_patched(runs: PatchRuns, number: int, targets: Sequence[Target], kept: Mapping[Site, Kept]) -> Tensor:
    """(copies, B): the metric of one copy of a batch per target, with one head patched in each."""
    copies = len(targets)
    places: dict[Site, list[tuple[int, int]]] = {}
    for copy, target in enumerate(targets):
        places.setdefault(target.site, []).append((copy, target.head))

    def visitor(visit: Visit) -> Tensor | None:
        if visit.site not in places:
            return None
        changed = visit.value.clone()
        by_copy = changed.unflatten(0, (copies, -1))  # (copies, B, T, heads, width)
        replacement = runs.replacement(visit, kept, copies).unflatten(0, (-1, by_copy.shape[1]))
        replacement = replacement.expand(by_copy.shape)
        mask = runs.mask(visit, number, copies)
        for copy, head in places[visit.site]:
            current, new = by_copy[copy, :, :, head], replacement[copy, :, :, head]
            current.copy_(new if mask is None else torch.where(mask[..., None], new, current))
        return changed

    with torch.no_grad(), runs.visiting(visitor):
        output = run(runs.model, repeat_batch(runs.this(number), copies))
        return runs.measure(output, number, copies)


def _copies(batch: Any, baseline: Baseline, memory: int) -> int:
    """How many copies of a batch to run at once."""
    shapes, size = baseline.shapes.values(), batch_size(batch)
    if not baseline.repeatable or any(shape.rows % size for shape in shapes):
        return 1
    # keys and values are kept in a cache by many models
    layer = max(shape.bytes for shape in shapes)
    estimate = 2 * baseline.output_bytes + (HIDDEN_STATES + 2 * len(shapes)) * layer
    return max(1, min(memory // 2 // estimate, ROWS // size))


def _windows(targets: Sequence[Target], shapes: Mapping[Site, SiteShape], memory: int) -> list[list[Target]]:
    """Heads of consecutive layers, whose activations of the other run fit into memory together."""
    windows: list[list[Target]] = []
    size, newest = 0, None
    for target in targets:
        if target.site is not newest:
            new = shapes[target.site].kept_bytes
            if not windows or size + new > memory // 2:
                windows.append([])
                size = 0
            size, newest = size + new, target.site
        windows[-1].append(target)
    return windows
