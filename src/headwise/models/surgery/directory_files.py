"""The files beside the weights in a saved model's directory: tokenizer, code, licence and README."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

from ..streaming.saved_plan import FILE as PLAN_FILE
from ..structure.sites import attention_sites
from .kept_heads import kept_heads, pruned_layers
from .pruned_directory import FILE

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".pkl", ".pickle", ".ot",
)  # fmt: skip
WRITTEN_BY_SAVE = ("config.json", "generation_config.json", FILE, PLAN_FILE)
# files that are also true of a pruned model: its tokenizer and processor, its code and its licence
SAME_WHEN_PRUNED = (
    "*token*", "vocab*", "merges*.txt", "*.model", "*.tiktoken", "*chat_template*", "*.jinja", "*processor*", "*.py",
    "licen[cs]e*", "notice*", "copying*",
)  # fmt: skip
SKIPPED_FOLDERS = ("onnx", "openvino", "coreml", "__pycache__")


def copy_other_files(model: Any, folder: Path) -> None:
    """Copy the tokenizer and other files of the model's own directory, without weights and their descriptions.

    A pruned model gets only files that are also true of the pruned model, and a README of its own.
    """
    pruned = bool(pruned_layers(model))
    source = Path(getattr(model, "name_or_path", "") or "?")
    if pruned:
        (folder / "README.md").write_text(readme(model, source.name), encoding="utf-8")
    if not source.is_dir():
        return
    for file in sorted(source.rglob("*")):
        path = file.relative_to(source)
        if not file.is_file() or (folder / path).exists() or not _is_copied(path, pruned):
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / path)


def _is_copied(path: Path, pruned: bool) -> bool:
    """Whether a file of the original directory belongs into the new one."""
    hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in path.parts)
    weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
    if hidden or weights or str(path) in WRITTEN_BY_SAVE:
        return False
    return not pruned or any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in SAME_WHEN_PRUNED)


def readme(model: Any, name: str) -> str:
    """The README of a pruned model's directory."""
    name = "".join(letter if letter.isalnum() or letter in " .-" else "_" for letter in name) or "a model"
    rows = [
        f"| {site} | {', '.join(map(str, record.removed))} |"
        for site in attention_sites(model)
        if (record := kept_heads(site.module)) is not None
    ]
    head = f"# {name}, without some of its attention heads\n\nMade by headwise, which also reads it: "
    load = "`headwise.load` with the path of this directory.\n\n| layer | heads removed |\n|---|---|\n"
    return head + load + "\n".join(rows) + "\n"
