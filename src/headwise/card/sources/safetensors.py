"""The header of a safetensors file, or of all files of an index: names, dtypes and shapes, never the numbers."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .json_file import load_json

LONGEST_HEADER = 100 * 2**20  # the format's own limit
DTYPES = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Tensors = dict[str, Tensor]


def header(path: Path) -> Tensors:
    """Every tensor that one file names; the header is checked against the file's size before anything is read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(
                f"{path.name} has {size} bytes; a safetensors file starts with 8 that give its header's length"
            )
        (length,) = struct.unpack("<Q", start)
        if length > LONGEST_HEADER:
            raise CheckpointError(f"{path.name} claims a header of {length:,} bytes; the format allows 100 MB at most")
        if length > size - 8:
            raise CheckpointError(
                f"{path.name} claims a header of {length:,} bytes and has {size - 8:,}; it is cut short or damaged"
            )
        text = file.read(length)
    return _tensors(path.name, text, size - 8 - length)


def _tensors(name: str, text: bytes, data: int) -> Tensors:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {name} is no JSON ({str(error)[:80]}); it is damaged") from None
    if not isinstance(plain, dict):
        raise CheckpointError(f"the header of {name} must be an object of tensors, got {type(plain).__name__}")
    tensors = {}
    for key, entry in plain.items():
        if key != "__metadata__":
            tensors[key] = _tensor(name, key, entry, data)
    return tensors


def _tensor(name: str, key: str, entry: Any, data: int) -> Tensor:
    short = f"tensor {key[:60]!r} of {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{short} must have dtype, shape and data_offsets, got {type(entry).__name__}")
    shape, dtype, offsets = entry.get("shape"), entry.get("dtype"), entry.get("data_offsets")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**48 for n in shape) or len(shape) > 16:
        raise CheckpointError(f"{short} has no shape of whole numbers; the header is damaged")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{short} has dtype {str(dtype)[:20]!r}; known are {', '.join(DTYPES)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise CheckpointError(f"{short} must have two data_offsets; the header is damaged")
    tensor = Tensor(dtype, tuple(shape))
    begin, end = offsets
    if not 0 <= begin <= end or end - begin != -(-tensor.size * DTYPES[dtype] // 8):
        raise CheckpointError(f"{short} says bytes {begin:,} to {end:,}, which is not what its shape {shape} takes")
    if end > data:
        raise CheckpointError(f"{short} ends at byte {end:,} and the file has {data:,}; it is cut short")
    return tensor


def sharded(index: Path) -> Tensors:
    """All files that an index names, which must lie beside it."""
    table = load_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index.name} must have a weight_map of tensor to file")
    tensors: Tensors = {}
    for name in sorted(set(table.values())):
        file = index.parent / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index.name} names {name[:80]!r}; it must be a .safetensors file beside it")
        if not file.is_file():
            raise CheckpointError(f"{index.name} names {name}, which is not there; put all files into one folder")
        tensors |= header(file)
    missing = sorted(table.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{index.name} names {missing[0][:80]!r}, which is in no file")
    return tensors


def of_folder(folder: Path) -> Tensors | None:
    """The weights of a folder: by its index, else its one file; None where it has none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sharded(index)
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single in files:
        return header(single)
    return header(files[0]) if len(files) == 1 else None
