"""Checkpoints of split modules by torch.distributed.checkpoint: written and read by any number of ranks.

The files are safetensors, each shard with its offset in the whole in its header; nothing is pickled.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard

from ..errors import CheckpointError, UnsupportedError
from .parallel_linear import ParameterPart, parameter_parts
from .ranks import ranks_of


def sharded_state(module: nn.Module, owned: bool = False) -> dict[str, Any]:
    """A module's state dict for torch.distributed.checkpoint: every shard knows its offset in the whole.

    Args:
        module: split or whole.
        owned: leave out the copies of KV heads that another rank writes. A parameter of which then nothing is left on
            this rank is absent.
    """
    parts = parameter_parts(module)
    shards = {name: _shard(x, parts.get(name), owned) for name, x in module.state_dict().items()}
    return {name: x for name, x in shards.items() if x is not None}


def save_state(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's parameters into a directory, each rank its own part. All ranks must call it.

    Args:
        module: split by `split_heads`, or whole.
        path: of a directory that is empty or does not exist, and that all ranks share.

    Raises:
        CheckpointError: on all ranks, where the directory is not empty or cannot be written.

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
    with _checkpoint_errors("written", path):
        dcp.save(sharded_state(module, owned=True), storage_writer=writer, no_dist=ranks.count == 1)


def load_state(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a checkpoint of `save_state`, written by any number of ranks, into a module of the same shape, in place.

    Args:
        module: split by `split_heads` over the ranks there are now, or whole.
        path: of the directory.

    Raises:
        CheckpointError: on all ranks, where the checkpoint is of another module or cannot be read.
    """
    reader_class = _storage_class("HuggingFaceStorageReader")
    ranks, source = ranks_of(), Path(path)
    state = sharded_state(module)

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


def _shard(x: Tensor, part: ParameterPart | None, owned: bool) -> Any:
    """A split parameter as a DTensor with its offset in the whole; None where nothing of it is left to write."""
    if part is None or part.even or isinstance(x, DTensor):
        return x
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    indices = part.owned if owned else part.local
    if not indices:
        return None
    local = x.detach().narrow(part.dim, indices.start - part.local.start, len(indices))
    offset = [0] * len(part.shape)
    offset[part.dim] = indices.start
    shards = LocalShardsWrapper([local], [tuple(offset)])
    strides = torch.empty(part.shape, device="meta").stride()
    shape = torch.Size(part.shape)
    return DTensor.from_local(shards, part.mesh, [Shard(part.dim)], run_check=False, shape=shape, stride=strides)
