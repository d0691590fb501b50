"""recover: a short distillation of a pruned model from the full one, on the user's text; it can be interrupted."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import CheckpointError, HeadwiseError
from ..files import written
from ..json_documents import parse_json
from ..models.fingerprint import batches_fingerprint, fingerprint
from ..models.intervene.head_outputs import run
from ..models.structure import sites
from ..models.structure.projections import row_dim
from ..models.surgery.dummy_inputs import outputs
from ..models.surgery.removal import head_count

EVERY = 25  # steps between checkpoints
RATE = 1e-4
MOMENTS = ("exp_avg", "exp_avg_sq")  # the averages that AdamW keeps per parameter
FORMAT = "2"  # of a checkpoint; 1 did not say of which weights it was
# what tells one run from another -> how that is said
PARTS = {
    "full": "the full model has other weights",
    "pruned": "the pruned model has other weights or other heads",
    "texts": "the texts or their batches differ",
    "options": "the number of steps or the learning rate differs",
}


class Alone:
    """One process that trains. headwise.scale gives the same for several, of which each takes a part of every batch."""

    rank, count = 0, 1
    first = True  # the one that writes

    def wrapped(self, model: Any) -> Any:
        """The model as it is trained; `model` holds what was learned after `done`."""
        return model

    def done(self, model: Any) -> None:
        """What was learned is in `model`, also where it was trained in another form."""

    def part(self, batch: Any) -> tuple[Any, float]:
        """The examples of a batch that are this process's, and what they count: 0 where it only keeps in step."""
        return batch, 1.0

    def total(self, x: Tensor) -> Tensor:
        """The sum of everyone's x."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """All of a parameter, or of an average of its gradients."""
        return x.detach()

    def like(self, x: Tensor, whole: Tensor) -> Tensor:
        """What this process holds of `whole`, as it does of x."""
        return whole.to(x)


def recover(
    pruned: Any,
    full: nn.Module,
    batches: list[Any],
    steps: int,
    *,
    checkpoint: Path | None = None,
    keep: bool = False,
    note: str = "",
    rate: float = RATE,
    crew: Alone | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Train a pruned model, in place, to give the full model's outputs; the loss of every step.

    With a checkpoint file an interrupted run goes on where it stopped; a checkpoint of other weights, texts or options
    is refused. The file is removed when the recovery is done; with keep it stays, finished, until the caller has the
    result in a safe place and removes it. note: words of the caller's that the checkpoint holds, for `kept_note`.
    crew: those who share the work, as headwise.scale gives them.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise HeadwiseError(f"steps of recovery must be a whole number of at least 1, got {steps!r}")
    crew = crew or Alone()
    wanted = {parameter: parameter.requires_grad for parameter in pruned.parameters() if parameter.is_floating_point()}
    for parameter in wanted:
        parameter.requires_grad_(True)
    key = {**_key(pruned, full, batches, steps, rate), "note": note} if checkpoint else {}
    model = crew.wrapped(pruned)
    trained = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    zeros = _zeros(getattr(model, "module", model))
    step = safe = 0  # safe: the last step that the checkpoint holds
    try:
        first, losses = _resume(checkpoint, key, steps, trained, optimizer, crew)
        step = safe = first
        for step in range(first, steps):
            losses.append(_step(model, full, batches[step % len(batches)], optimizer, rate * (1 - step / steps), crew))
            for weight, alive in zeros:
                weight.data.mul_(crew.like(weight, alive))
            if progress:
                progress(step + 1, steps)
            if checkpoint and (step + 1) % EVERY == 0 and step + 1 < steps:
                _keep(checkpoint, key, step + 1, losses, trained, optimizer, crew)
                safe = step + 1
        if checkpoint and keep and safe < steps:
            optimizer.state.clear()  # no step will need the averages, and a third of the room is enough
            with suppress(CheckpointError):  # the model itself may still fit where its checkpoint does not
                _keep(checkpoint, key, steps, losses, trained, optimizer, crew)
                safe = steps
        crew.done(pruned)
    except KeyboardInterrupt:
        if safe:  # the step at hand may be half done: back to the last whole one kept
            raise KeyboardInterrupt(
                f"recovery was interrupted at step {step} of {steps}; the same command goes on from step {safe}"
            ) from None
        raise
    finally:
        for parameter, want in wanted.items():
            parameter.requires_grad_(want)
            parameter.grad = None
    if checkpoint and crew.first and not keep:
        checkpoint.unlink(missing_ok=True)
    return losses


def _step(
    pruned: Any, full: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, rate: float, crew: Alone
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    batch, weight = crew.part(batch)
    with torch.no_grad():
        target = run(full, batch)
    with torch.enable_grad():
        loss = distilled(run(pruned, batch), target, batch, weight, crew.total)
        optimizer.zero_grad()
        (loss * crew.count).backward()  # a crew averages its gradients
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    return float(crew.total(loss.detach()))


def distilled(
    out: Any, target: Any, batch: Any, weight: float = 1.0, total: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """KL of the logits, or the squared distance of the last layer against its own size; over real tokens.

    weight: what these examples count; total sums over all who have a part of them, of whose losses this is one.
    """
    if hasattr(out, "logits"):
        new, old = out.logits.float().log_softmax(-1), target.logits.float().log_softmax(-1)
        each = (old.exp() * (old - new)).sum(-1)
    else:
        a, b = (next(outputs(x)).float() for x in (out, target))
        size = total(weight * b.square().sum()) / total(torch.tensor(weight * b.numel(), device=b.device))
        each = F.mse_loss(a, b, reduction="none").mean(-1) / size
    found = (
        [batch.get(name) for name in ("decoder_attention_mask", "attention_mask")] if isinstance(batch, dict) else []
    )
    mask = next((x for x in found if x is not None and x.shape == each.shape), torch.ones_like(each))
    return weight * (each * mask).sum() / total(weight * mask.sum())


def _zeros(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """W_O of layers with heads of zeros, which must stay zeros: (weight, 1 or 0 for each of its columns)."""
    found: list[tuple[Tensor, Tensor]] = []
    for site in sites.sites(model):
        kept = getattr(site.module, "headwise_kept", None)
        if kept is None or None not in kept.query:
            continue
        _, out = sites.w_o(model, site)
        weight, dim = out.get_parameter("weight"), 1 - row_dim(out)
        alive = torch.tensor([float(number is not None) for number in kept.query], device=weight.device)
        columns = alive.repeat_interleave(weight.shape[dim] // head_count(model, site))
        found.append((weight, (columns[None] if dim else columns[:, None]).to(weight.dtype).expand(weight.shape)))
    return found


def _key(pruned: nn.Module, full: nn.Module, batches: list[Any], steps: int, rate: float) -> dict[str, str]:
    """What a run is of, by content: a checkpoint of anything else is another run's."""
    heads = getattr(pruned, "headwise_heads", None)  # which heads are left says which stay zero
    return {
        "full": fingerprint(full),
        "pruned": f"{fingerprint(pruned)} {heads}",
        "texts": batches_fingerprint(batches),
        "options": json.dumps({"steps": steps, "rate": rate}),
    }


def _keep(
    path: Path,
    key: Mapping[str, str],
    step: int,
    losses: list[float],
    trained: list[Any],
    optimizer: Any,
    crew: Alone,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(trained):
        state = optimizer.state[parameter]
        held = {"weight": parameter, **{name: state[name] for name in MOMENTS if name in state}}
        tensors |= {f"{i}.{name}": crew.whole(x).contiguous() for name, x in held.items()}
    if not crew.first:
        return
    with written(path, CheckpointError) as made:
        try:
            save_file(
                tensors, made, {"headwise-recovery": FORMAT, **key, "step": str(step), "losses": json.dumps(losses)}
            )
        except (OSError, SafetensorError) as error:  # a full disk is either
            raise CheckpointError(
                f"recovery stopped at step {step}: {str(path)!r} cannot be written ({error}); with more room, the same "
                "command goes on from what was kept before"
            ) from error


def _resume(
    path: Path | None, key: Mapping[str, str], steps: int, trained: list[Any], optimizer: Any, crew: Alone
) -> tuple[int, list[float]]:
    """The step to go on from, with weights and optimizer as they were then; all is checked before any is changed."""
    if path is None or not path.exists():
        return 0, []
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as opened:
            about = opened.metadata() or {}
            _check_run(path, about, key)
            step, losses = _progress(about, steps)
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            states = [_names(i, parameter, shapes) for i, parameter in enumerate(trained)]
            for name in shapes:
                if not torch.isfinite(opened.get_tensor(name)).all():
                    raise ValueError(f"{name[:40]} is not finite")
            for i, (parameter, moments) in enumerate(zip(trained, states, strict=True)):
                parameter.data.copy_(crew.like(parameter, opened.get_tensor(f"{i}.weight")))
                if moments:
                    found = {name: crew.like(parameter, opened.get_tensor(f"{i}.{name}")) for name in moments}
                    optimizer.state[parameter] = {"step": torch.tensor(float(step)), **found}
            return step, losses
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise CheckpointError(f"{str(path)!r} is broken ({_words(error)}); delete it to start again") from error


def run_id(path: Path) -> str | None:
    """A name for the recovery that a checkpoint is of; None where there is no checkpoint that can be read."""
    about = _about(path)
    if about is None:
        return None
    return hashlib.sha256(json.dumps([about.get(part) for part in PARTS]).encode()).hexdigest()[:32]


def kept_note(path: Path) -> str:
    """What the caller of a recovery had written into its checkpoint; empty where there is none."""
    return (_about(path) or {}).get("note", "")


def _about(path: Path) -> dict[str, str] | None:
    """The header of a checkpoint that this version wrote; None where there is none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as opened:
            about: dict[str, str] = opened.metadata() or {}
    except (OSError, SafetensorError):
        return None
    return about if about.get("headwise-recovery") == FORMAT else None


def _check_run(path: Path, about: Mapping[str, str], key: Mapping[str, str]) -> None:
    version = about.get("headwise-recovery")
    if version != FORMAT:
        told = f"of format {version!r}" if version else "of another version of headwise, or none of its files"
        raise CheckpointError(
            f"{str(path)!r} is {told}, where format {FORMAT} is read; delete it to start the recovery again"
        )
    other = [words for part, words in PARTS.items() if about.get(part) != key[part]]
    if other:
        raise CheckpointError(
            f"{str(path)!r} is an interrupted recovery of another run ({other[0]}); it is left as it is: finish that "
            "one, or delete the file"
        )


def _progress(about: Mapping[str, str], steps: int) -> tuple[int, list[float]]:
    step, losses = int(about["step"]), parse_json(about["losses"])
    if not 0 < step <= steps:
        raise ValueError(f"it is at step {about['step'][:40]} of {steps}")
    if not isinstance(losses, list) or len(losses) != step:
        raise ValueError(f"{step} losses are expected")
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise ValueError("a loss is not a finite number")
    return step, losses


def _names(i: int, parameter: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The averages that are there for a parameter, after a look at the shapes of all that is."""
    there = tuple(name for name in MOMENTS if f"{i}.{name}" in shapes)  # a pooler that the loss does not see has none
    if there not in ((), MOMENTS):
        raise ValueError(f"it has {there[0]} without the other average of parameter {i}")
    for name in ("weight", *there):
        if shapes[f"{i}.{name}"] != tuple(parameter.shape):
            raise ValueError(f"{i}.{name} has shape {shapes[f'{i}.{name}']}, {tuple(parameter.shape)} is expected")
    return there


def _words(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)[:200]
