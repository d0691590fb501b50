"""Checkpoints of a recovery: weights and optimizer state, with a header that says which run they belong to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, HeadwiseError
from ..files import write_atomically
from ..json_documents import parse_json
from ..models.fingerprint import batches_fingerprint, fingerprint
from .training_group import TrainingGroup

MOMENTS = ("exp_avg", "exp_avg_sq")  # the averages that AdamW keeps per parameter
FORMAT = "2"  # of a checkpoint; 1 did not say of which weights it was
# what identifies a run -> what to say where it differs
IDENTITY = {
    "full": "the full model has other weights",
    "pruned": "the pruned model has other weights or other heads",
    "texts": "the texts or their batches differ",
    "options": "the number of steps or the learning rate differs",
}


def run_identity(
    pruned: nn.Module, full: nn.Module, batches: list[Any], steps: int, rate: float, note: str
) -> dict[str, str]:
    """The identity of a run, by content, for the header of its checkpoints; other checkpoints belong to other runs.

    note: words of the caller's, which are kept but do not identify the run.
    """
    heads = getattr(pruned, "headwise_heads", None)  # which heads are left decides which weights stay zero
    return {
        "full": fingerprint(full),
        "pruned": f"{fingerprint(pruned)} {heads}",
        "texts": batches_fingerprint(batches),
        "options": json.dumps({"steps": steps, "rate": rate}),
        "note": note,
    }


def save_checkpoint(
    path: Path,
    identity: Mapping[str, str],
    step: int,
    losses: list[float],
    parameters: list[Any],
    optimizer: torch.optim.Optimizer,
    group: TrainingGroup,
) -> None:
    """Write the state after `step` steps; every process takes part, the first one writes."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        parts = {"weight": parameter, **{name: state[name] for name in MOMENTS if name in state}}
        tensors |= {f"{i}.{name}": group.gather(x).contiguous() for name, x in parts.items()}
    if not group.first:
        return
    header = {"headwise-recovery": FORMAT, **identity, "step": str(step), "losses": json.dumps(losses)}
    with write_atomically(path, CheckpointError) as file:
        try:
            save_file(tensors, file, header)
        except (OSError, SafetensorError) as error:  # a full disk is either
            raise CheckpointError(
                f"recovery stopped at step {step}: {str(path)!r} cannot be written ({error}); with more room, the same "
                "command resumes from the last checkpoint"
            ) from error


def load_checkpoint(
    path: Path | None,
    identity: Mapping[str, str],
    steps: int,
    parameters: list[Any],
    optimizer: torch.optim.Optimizer,
    group: TrainingGroup,
) -> tuple[int, list[float]]:
    """The step to go on from and the losses so far, with weights and optimizer state restored.

    (0, []) where there is no checkpoint. Everything is checked before anything is changed.
    """
    if path is None or not path.exists():
        return 0, []
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            _check_identity(path, header, identity)
            step, losses = _read_progress(header, steps)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            moments = [_saved_moments(i, parameter, shapes) for i, parameter in enumerate(parameters)]
            for name in shapes:
                if not torch.isfinite(file.get_tensor(name)).all():
                    raise ValueError(f"{name[:40]} is not finite")
            for i, (parameter, names) in enumerate(zip(parameters, moments, strict=True)):
                parameter.data.copy_(group.shard_like(parameter, file.get_tensor(f"{i}.weight")))
                if names:
                    state = {name: group.shard_like(parameter, file.get_tensor(f"{i}.{name}")) for name in names}
                    optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
            return step, losses
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HeadwiseError):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise CheckpointError(f"{str(path)!r} is broken ({reason}); delete it to start again") from error


def run_id(path: Path) -> str | None:
    """A name for the run that a checkpoint is of; None where there is no readable checkpoint."""
    header = _read_header(path)
    if header is None:
        return None
    return hashlib.sha256(json.dumps([header.get(part) for part in IDENTITY]).encode()).hexdigest()[:32]


def read_note(path: Path) -> str:
    """The note that the caller of a recovery left in its checkpoint; empty if there is none."""
    return (_read_header(path) or {}).get("note", "")


def _read_header(path: Path) -> dict[str, str] | None:
    """The header of a checkpoint of the current format; None if there is none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    return header if header.get("headwise-recovery") == FORMAT else None


def _check_identity(path: Path, header: Mapping[str, str], identity: Mapping[str, str]) -> None:
    version = header.get("headwise-recovery")
    if version != FORMAT:
        origin = f"of format {version!r}" if version else "of another version of headwise, or none of its files"
        raise CheckpointError(
            f"{str(path)!r} is {origin}, where format {FORMAT} is read; delete it to start the recovery again"
        )
    differences = [words for part, words in IDENTITY.items() if header.get(part) != identity[part]]
    if differences:
        raise CheckpointError(
            f"{str(path)!r} is an interrupted recovery of another run ({differences[0]}); it is left as it is: finish "
            "that one, or delete the file"
        )


def _read_progress(header: Mapping[str, str], steps: int) -> tuple[int, list[float]]:
    step, losses = int(header["step"]), parse_json(header["losses"])
    if not 0 < step <= steps:
        raise ValueError(f"it is at step {header['step'][:40]} of {steps}")
    if not isinstance(losses, list) or len(losses) != step:
        raise ValueError(f"{step} losses are expected")
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise ValueError("a loss is not a finite number")
    return step, losses


def _saved_moments(i: int, parameter: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The averages that are saved for a parameter: both or none; the shapes of all its tensors are checked."""
    moments = tuple(name for name in MOMENTS if f"{i}.{name}" in shapes)  # a pooler that the loss does not see has none
    if moments not in ((), MOMENTS):
        raise ValueError(f"it has {moments[0]} without the other average of parameter {i}")
    for name in ("weight", *moments):
        if shapes[f"{i}.{name}"] != tuple(parameter.shape):
            raise ValueError(f"{i}.{name} has shape {shapes[f'{i}.{name}']}, {tuple(parameter.shape)} is expected")
    return moments
