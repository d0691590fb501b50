"""recover: a short distillation of a pruned model from the full one, on the user's texts; it can be interrupted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import CheckpointError, HeadwiseError
from ..models.batches import run
from ..models.structure.heads import query_heads, w_o
from ..models.structure.linear_layers import row_dim
from ..models.structure.sites import attention_sites
from ..models.surgery.dummy_inputs import output_tensors
from ..models.surgery.kept_heads import kept_heads
from .objective import softmax_divergence, token_mask
from .recovery_checkpoint import load_checkpoint, run_identity, save_checkpoint
from .training_group import TrainingGroup

CHECKPOINT_STEPS = 25  # steps between checkpoints
LEARNING_RATE = 1e-4
LARGEST_GRADIENT = 1.0  # the norm that gradients are clipped to


def recover(
    pruned: Any,
    full: nn.Module,
    batches: list[Any],
    steps: int,
    *,
    checkpoint: Path | None = None,
    keep: bool = False,
    note: str = "",
    rate: float = LEARNING_RATE,
    group: TrainingGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Train a pruned model, in place, to reproduce the full model's outputs.

    Args:
        pruned: the result of `prune_heads` or `group_kv_heads`; padded heads stay zero.
        full: the model it was pruned from; it is not changed.
        batches: model inputs, taken in turn.
        steps: the number of training steps, one batch each.
        checkpoint: a file in which the state is saved periodically. If it exists, the run resumes from it; a checkpoint
            of other weights, texts or options is refused. It is removed when the recovery is done.
        keep: keep the finished checkpoint until the caller has saved the model and removes it.
        note: a text to store in the checkpoint; `recovery_checkpoint.read_note` reads it.
        rate: the learning rate of AdamW at the start; it falls linearly to 0.
        group: the processes that share the work, as headwise.scale gives them.
        progress: called with the number of finished steps and their total number.

    Returns:
        The loss of every step.

    Raises:
        CheckpointError: for a checkpoint of another run, a broken one, or one that cannot be written.

    Example:
        >>> smaller = headwise.prune_heads(model, plan)
        >>> losses = headwise.prune.recover(smaller, model, batches, steps=200)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise HeadwiseError(f"steps of recovery must be a whole number of at least 1, got {steps!r}")
    group = group or TrainingGroup()
    gradient_flags = {p: p.requires_grad for p in pruned.parameters() if p.is_floating_point()}
    for parameter in gradient_flags:
        parameter.requires_grad_(True)
    identity = run_identity(pruned, full, batches, steps, rate, note) if checkpoint else {}
    model = group.wrap(pruned)
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    zeroed_columns = _zeroed_columns(getattr(model, "module", model))
    step = saved_step = 0

    def save(step: int) -> None:
        assert checkpoint is not None
        save_checkpoint(checkpoint, identity, step, losses, parameters, optimizer, group)

    try:
        start, losses = load_checkpoint(checkpoint, identity, steps, parameters, optimizer, group)
        step = saved_step = start
        for step in range(start, steps):
            batch = batches[step % len(batches)]
            losses.append(_step(model, full, batch, optimizer, rate * (1 - step / steps), group))
            for weight, alive in zeroed_columns:
                weight.data.mul_(group.shard_like(weight, alive))
            if progress:
                progress(step + 1, steps)
            if checkpoint and (step + 1) % CHECKPOINT_STEPS == 0 and step + 1 < steps:
                save(step + 1)
                saved_step = step + 1
        if checkpoint and keep and saved_step < steps:
            optimizer.state.clear()  # no step needs the averages any more, and the file has a third of the size
            with suppress(CheckpointError):  # the model itself may still fit where its checkpoint does not
                save(steps)
                saved_step = steps
        group.finish(pruned)
    except KeyboardInterrupt:
        if saved_step:  # the current step may be half done: a new run resumes from the last saved one
            raise KeyboardInterrupt(
                f"recovery was interrupted at step {step} of {steps}; the same command resumes from step {saved_step}"
            ) from None
        raise
    finally:
        for parameter, requires_grad in gradient_flags.items():
            parameter.requires_grad_(requires_grad)
            parameter.grad = None
    if checkpoint and group.first and not keep:
        checkpoint.unlink(missing_ok=True)
    return losses


def _step(
    pruned: Any, full: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, rate: float, group: TrainingGroup
) -> float:
    """One training step; the loss over all processes."""
    for options in optimizer.param_groups:
        options["lr"] = rate
    batch, weight = group.local_batch(batch)
    with torch.no_grad():
        target = run(full, batch)
    with torch.enable_grad():
        loss = distillation_loss(run(pruned, batch), target, batch, weight, group.all_sum)
        optimizer.zero_grad()
        (loss * group.count).backward()  # processes average their gradients
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
    optimizer.step()
    return float(group.all_sum(loss.detach()))


def distillation_loss(
    out: Any, target: Any, batch: Any, weight: float = 1.0, all_sum: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """KL divergence of the logits, or the squared distance of the last layer relative to its size; over real tokens.

    Args:
        out, target: outputs of the pruned and of the full model.
        batch: the inputs, for their attention mask.
        weight: of these examples; 0 where a process only keeps in step.
        all_sum: sums over the processes, whose losses add up to that of the whole batch.
    """
    if hasattr(out, "logits"):
        per_token = softmax_divergence(out.logits, target.logits)
    else:
        a, b = (next(output_tensors(x)).float() for x in (out, target))
        mean_square = all_sum(weight * b.square().sum()) / all_sum(torch.tensor(weight * b.numel(), device=b.device))
        per_token = F.mse_loss(a, b, reduction="none").mean(-1) / mean_square
    mask = token_mask(batch, per_token.shape)
    if mask is None:
        mask = torch.ones_like(per_token)
    return weight * (per_token * mask).sum() / all_sum(weight * mask.sum())


def _zeroed_columns(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """W_O of layers with padded heads, which must stay zero: (weight, 1 or 0 for each of its entries)."""
    masks: list[tuple[Tensor, Tensor]] = []
    for site in attention_sites(model):
        retained = kept_heads(site.module)
        if retained is None or None not in retained.query:
            continue
        _, out = w_o(model, site)
        weight, dim = out.get_parameter("weight"), 1 - row_dim(out)
        alive = torch.tensor([float(number is not None) for number in retained.query], device=weight.device)
        columns = alive.repeat_interleave(weight.shape[dim] // query_heads(model, site))
        masks.append((weight, (columns[None] if dim else columns[:, None]).to(weight.dtype).expand(weight.shape)))
    return masks
