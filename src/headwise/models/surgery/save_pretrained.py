"""`save_pretrained` of a pruned model: it writes what headwise.save writes, since transformers' own cannot be read."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import CheckpointError, HeadwiseError
from ...files import scratch_folder
from .kept_heads import is_cut
from .model_card import README, is_model_card

# what an earlier save may have left in the same directory
STALE = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")


def attach(model: nn.Module) -> None:
    """Give a model whose heads were cut out, and each whole model inside it, a `save_pretrained` that can be loaded."""
    for module in model.modules():
        saves = hasattr(type(module), "save_pretrained")
        if saves and any(is_cut(part) for part in module.modules()):
            # a partial, not a bound method: it is copied and pickled together with its model
            vars(module)["save_pretrained"] = functools.partial(save_pretrained, module)
        else:
            vars(module).pop("save_pretrained", None)


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    push_to_hub: bool = False,
    safe_serialization: bool = True,
    variant: str | None = None,
    **options: Any,
) -> None:
    """As headwise.save, but the directory's other files stay, as with transformers; read it with headwise.load."""
    from .saving import save

    if not is_main_process:
        return
    if push_to_hub or variant is not None or not safe_serialization:
        raise HeadwiseError(
            "a pruned model is saved as safetensors in a directory: without push_to_hub, variant or "
            "safe_serialization=False; model.push_to_hub(name) uploads it"
        )
    folder = Path(save_directory).expanduser()
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise HeadwiseError(f"{str(save_directory)!r} is a file; give a directory")
    source = model if state_dict is None else _with_weights(model, state_dict)
    if not os.path.exists(folder):
        save(source, folder)
        return
    with scratch_folder(folder, CheckpointError) as scratch:
        save(source, scratch / "model")
        _move_files(scratch / "model", folder)


def _with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    """A copy with the weights that a trainer gathered."""
    duplicate = copy.deepcopy(model)
    try:
        duplicate.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        words = " ".join(str(error).split())[:160]
        raise HeadwiseError(f"state_dict does not fit this pruned model: {words}") from error
    return duplicate


def _move_files(source: Path, folder: Path) -> None:
    files = [file.relative_to(source) for file in sorted(source.rglob("*")) if file.is_file()]
    if (folder / README).exists() and not is_model_card(folder / README):
        files.remove(Path(README))  # the user's own, or a trainer's
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / file, folder / file)
    for stale in {path for pattern in STALE for path in folder.glob(pattern)} - {folder / file for file in files}:
        stale.unlink()
