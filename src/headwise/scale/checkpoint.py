"""Checkpoints of modules and optimizers by torch.distributed.checkpoint: written and read by any number of ranks.

The files are safetensors, each shard with its offset in the whole in its header, and JSON for an optimizer's settings;
nothing is pickled.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from ..errors import CheckpointError, UnsupportedError
from ..files import write_atomically
from .ranks import ranks_of

OPTIMIZER = "optimizer."  # before the names of an optimizer's tensors
SETTINGS = "optimizer.json"  # file of the settings of an optimizer's groups of parameters


def save_state(module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None) -> None:
    """Write a module's parameters into a directory, each rank its own part. All ranks must call it.

    Args:
        module: split by `split_heads`, sharded by FSDP2, both, or neither.
        path: a directory that is empty or does not exist, and that all ranks share.
        optimizer: an optimizer of the module's parameters, whose state is written too.

    Raises:
        CheckpointError: on all ranks, if the directory is not empty or cannot be written.

    Example:
        >>> headwise.scale.save_state(block, "checkpoint")
        >>> headwise.scale.load_state(block, "checkpoint")  # on any number of ranks
    """
    writer_class = _storage_class("HuggingFaceStorageWriter")
    ranks, target = ranks_of(), Path(path)

    def make_directory() -> str:
        if os.path.exists(target) and (not os.path.isdir(target) or any(target.iterdir())):
            raise CheckpointError(f"{str(path)!r} exists and is not empty; give another directory")
        try:
            target.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
            raise CheckpointError(f"{str(path)!r} cannot be made: {error}") from error
        return str(path)

    ranks.agree("where to save", make_directory)
    writer = writer_class(str(target), save_distributed=True)
    state, settings = _state_of(module, optimizer)
    with _checkpoint_errors("written", path):
        dcp.save(state, storage_writer=writer, no_dist=ranks.count == 1)
    if optimizer is not None and ranks.first:
        with write_atomically(target / SETTINGS, CheckpointError) as file:
            file.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    ranks.barrier("the end of saving")


def load_state(module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None) -> None:
    """Read a checkpoint of `save_state`, written by any number of ranks, into a module of the same shape, in place.

    Args:
        module: split by `split_heads` over the current ranks, sharded by FSDP2, both, or neither.
        path: the directory.
        optimizer: an optimizer of the module's parameters, whose state is read too.

    Raises:
        CheckpointError: on all ranks, if the checkpoint belongs to another module or cannot be read.
    """
    reader_class = _storage_class("HuggingFaceStorageReader")
    ranks, source = ranks_of(), Path(path)
    state, _ = _state_of(module, optimizer)

    def check_contents() -> str:
        if not any(source.glob("*.safetensors")):
            raise CheckpointError(f"{str(path)!r} holds no safetensors; give a directory that save_state wrote")
        saved_tensors = reader_class(str(source)).read_metadata().state_dict_metadata
        for name, x in state.items():
            if name not in saved_tensors:
                raise CheckpointError(f"{str(path)!r} has no {name}; it is a checkpoint of another module")
            size = getattr(saved_tensors[name], "size", None)
            if tuple(size or ()) != tuple(x.shape):
                raise CheckpointError(
                    f"{str(path)!r} has {name} of {tuple(size or ())}, and this module one of {tuple(x.shape)}"
                )
        return str(path)

    ranks.agree("what to load", check_contents)
    with _checkpoint_errors("read", path):
        dcp.load(state, storage_reader=reader_class(str(source)), no_dist=ranks.count == 1)
    if optimizer is not None:
        _set_optimizer_state(module, optimizer, state, json.loads((source / SETTINGS).read_text(encoding="utf-8")))


def _state_of(module: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tensors of a module and its optimizer by name, and the settings of the optimizer's groups of parameters."""
    state = dict(module.state_dict())
    if optimizer is None:
        return state, []
    optimizer_state: Any = get_optimizer_state_dict(module, optimizer)
    for parameter, values in optimizer_state["state"].items():
        state |= {f"{OPTIMIZER}{parameter}.{name}": torch.as_tensor(x) for name, x in values.items()}
    return state, optimizer_state["param_groups"]


def _set_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], settings: list[dict[str, Any]]
) -> None:
    by_parameter: dict[str, dict[str, Any]] = {}
    for path, x in state.items():
        if path.startswith(OPTIMIZER):
            parameter, name = path.removeprefix(OPTIMIZER).rsplit(".", 1)
            by_parameter.setdefault(parameter, {})[name] = x
    groups = [{name: tuple(x) if name == "betas" else x for name, x in group.items()} for group in settings]
    new_state: Any = {"state": by_parameter, "param_groups": groups}
    set_optimizer_state_dict(module, optimizer, new_state)


def _storage_class(name: str) -> Any:
    """A class of torch.distributed.checkpoint for safetensors; older versions of PyTorch would write pickles."""
    try:
        from torch.distributed.checkpoint import hf_storage

        return getattr(hf_storage, name)
    except (ImportError, AttributeError):
        raise UnsupportedError(f"torch {torch.__version__} writes no sharded safetensors; 2.9 does") from None


@contextmanager
def _checkpoint_errors(action: str, path: Any) -> Iterator[None]:
    """torch.distributed.checkpoint's error is no Exception, so no handler would catch it: make it one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # a single process is a valid use
            yield
    except CheckpointException as error:
        rank, (reason, *_) = next(iter(error.failures.items()))
        raise CheckpointError(f"{str(path)!r} cannot be {action}: rank {rank} has {reason}") from error
