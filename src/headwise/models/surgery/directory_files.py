"""The files of a model's own directory that a saved model's directory gets: tokenizer, code and licence."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...attention.checkpoints.pretrained import open_safetensors, weight_files
from ...errors import HeadwiseError
from ...json_documents import parse_json
from ..loading.gguf import MANIFEST
from ..streaming.saved_plan import FILE as PLAN_FILE
from .pruned_directory import FILE

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".pkl", ".pickle", ".ot",
)  # fmt: skip
WRITTEN_BY_SAVE = ("config.json", "generation_config.json", FILE, MANIFEST, PLAN_FILE)
# files that are also true of a changed model: its tokenizer and processor, its code and its licence
SAME_WHEN_CHANGED = (
    "*token*", "vocab*", "merges*.txt", "*.model", "*.tiktoken", "*chat_template*", "*.jinja", "*processor*", "*.py",
    "licen[cs]e*", "notice*", "copying*",
)  # fmt: skip
# sentence-transformers loads what transformers loads, by these
SENTENCE_FILES = ("modules.json", "sentence_*config.json", "config_sentence_transformers.json", "[0-9]*_*/config.json")
SKIPPED_FOLDERS = ("onnx", "openvino", "coreml", "__pycache__")


def source_folder(model: Any) -> Path:
    """The directory that a model was loaded from; one that does not exist if there is none."""
    return Path(getattr(model, "name_or_path", "") or "?")


def copy_other_files(model: Any, folder: Path, *, changed: bool, plain: bool) -> None:
    """Copy the tokenizer and other files of the model's own directory that are also true of the new one.

    Args:
        model: the model that was saved.
        folder: the new directory.
        changed: the new directory's model is another than the old one's: files that may describe it do not fit.
        plain: transformers loads the new directory, and so does sentence-transformers, whose files then fit.
    """
    source = source_folder(model)
    if not source.is_dir():
        return
    keep_sentence_files = plain and _has_whole_modules(source)
    for file in sorted(source.rglob("*")):
        path = file.relative_to(source)
        if not file.is_file() or (folder / path).exists() or _is_replaced(path):
            continue
        if _matches(str(path), SENTENCE_FILES):
            fits = keep_sentence_files
        else:
            fits = not changed or _matches(path.name, SAME_WHEN_CHANGED)
        if fits:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / path)


def has_source_weights(model: Any) -> bool:
    """Whether a model's weights are, number by number, those of the directory that it was loaded from."""
    source = source_folder(model)
    try:
        files = [open_safetensors(source / name, "cpu") for name in weight_files(source)]
    except (HeadwiseError, OSError):
        return False
    state = model.state_dict()
    stored = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118  # a file is no dict
    if not {name for name, _ in stored} <= set(state):
        return False
    return all(_is_same(file.get_tensor(name), state[name].detach().cpu()) for name, file in stored)


def _is_same(stored: Tensor, tensor: Tensor) -> bool:
    return stored.dtype == tensor.dtype and torch.equal(stored, tensor)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name.lower(), pattern) for pattern in patterns)


def _is_replaced(path: Path) -> bool:
    """Whether a file of the original directory holds weights, or is written again."""
    hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in path.parts)
    weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
    return hidden or weights or str(path) in WRITTEN_BY_SAVE


def _has_whole_modules(source: Path) -> bool:
    """Whether the modules of sentence-transformers in a directory have no weights, which are not copied."""
    try:
        modules = parse_json((source / "modules.json").read_text(encoding="utf-8"))
        folders = [str(module["path"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    files = [file for name in folders if name for file in (source / name).glob("*")]
    return not any(file.suffix in WEIGHT_SUFFIXES for file in files)
