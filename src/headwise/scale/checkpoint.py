"""State dicts of split modules in torch.distributed.checkpoint: written by some ranks, read by any other number.

The files are safetensors, each shard with its place in the whole in its header; nothing is pickled.
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
from .parallel_linear import Piece, pieces
from .ranks import ranks_of


def state_of(module: nn.Module, owned: bool = False) -> dict[str, Any]:
    """A module's state dict as torch.distributed.checkpoint takes it: every part knows its place in the whole.

    owned: without the copies of KV heads that another rank writes. What this rank has nothing of is not there.
    """
    known = pieces(module)
    placed = {name: _placed(x, known.get(name), owned) for name, x in module.state_dict().items()}
    return {name: x for name, x in placed.items() if x is not None}


def save_state(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's parameters into a directory, each rank its own part; load_state reads them on any count."""
    writing = _storage("HuggingFaceStorageWriter")
    ranks, target = ranks_of(), Path(path)

    def empty() -> str:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{str(path)!r} exists and is not empty; give another directory")
        return str(path)

    ranks.agree("where to save", empty)
    if ranks.first:
        target.mkdir(parents=True, exist_ok=True)
    writer = writing(str(target), save_distributed=True)
    with _in_words("written", path):
        dcp.save(state_of(module, owned=True), storage_writer=writer, no_dist=ranks.count == 1)


def load_state(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read what save_state wrote, on as many ranks as there are now, into a module of the same shape."""
    reading = _storage("HuggingFaceStorageReader")
    ranks, source = ranks_of(), Path(path)
    wanted = state_of(module)

    def there() -> str:
        if not any(source.glob("*.safetensors")):
            raise CheckpointError(f"{str(path)!r} holds no safetensors; give a directory that save_state wrote")
        found = reading(str(source)).read_metadata().state_dict_metadata
        for name, x in wanted.items():
            if name not in found:
                raise CheckpointError(f"{str(path)!r} has no {name}; it is a checkpoint of another module")
            size = getattr(found[name], "size", None)
            if tuple(size or ()) != tuple(x.shape):
                raise CheckpointError(
                    f"{str(path)!r} has {name} of {tuple(size or ())}, and this module one of {tuple(x.shape)}"
                )
        return str(path)

    ranks.agree("what to load", there)
    with _in_words("read", path):
        dcp.load(wanted, storage_reader=reading(str(source)), no_dist=ranks.count == 1)


def _storage(name: str) -> Any:
    """Safetensors under torch.distributed.checkpoint; older versions of PyTorch would write pickles."""
    try:
        from torch.distributed.checkpoint import hf_storage

        return getattr(hf_storage, name)
    except (ImportError, AttributeError):
        raise UnsupportedError(f"torch {torch.__version__} writes no sharded safetensors; 2.9 does") from None


@contextmanager
def _in_words(what: str, path: Any) -> Iterator[None]:
    """torch.distributed.checkpoint's error is no Exception, and would end the process past everyone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # one process alone is no mistake
            yield
    except CheckpointException as error:
        rank, (why, *_) = next(iter(error.failures.items()))
        raise CheckpointError(f"{str(path)!r} cannot be {what}: rank {rank} has {why}") from error


def _placed(x: Tensor, piece: Piece | None, owned: bool) -> Any:
    """A part that is no DTensor yet, as one that says where it lies."""
    if piece is None or piece.even or isinstance(x, DTensor):
        return x
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    part = piece.owned if owned else piece.held
    if not part:
        return None
    held = x.detach().narrow(piece.dim, part.start - piece.held.start, len(part))
    place = [0] * len(piece.whole)
    place[piece.dim] = part.start
    shards = LocalShardsWrapper([held], [tuple(place)])
    strides = torch.empty(piece.whole, device="meta").stride()
    shape = torch.Size(piece.whole)
    return DTensor.from_local(shards, piece.mesh, [Shard(piece.dim)], run_check=False, shape=shape, stride=strides)
