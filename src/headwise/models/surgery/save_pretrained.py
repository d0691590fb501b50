"""`save_pretrained` and `push_to_hub` of a pruned model, which write what headwise.save writes.

What transformers' own write cannot be read, or is uploaded with a card that does not say how to load it.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import CheckpointError, HeadwiseError
from ...files import scratch_folder
from ..structure.wrappers import is_peft_model
from .kept_heads import is_cut
from .model_card import README, is_model_card

# what an earlier save may have left in the same directory
STALE = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")


def attach(model: nn.Module) -> None:
    """Give a model whose heads were cut out, and each whole model inside it, methods that write what can be loaded."""
    for module in model.modules():
        changed = not is_peft_model(module) and any(is_cut(part) for part in module.modules())
        for function in (save_pretrained, push_to_hub):
            name = function.__name__
            if changed and hasattr(type(module), name):
                # a partial, not a bound method: it is copied and pickled together with its model
                vars(module)[name] = functools.partial(function, module)
            else:
                vars(module).pop(name, None)


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

    if _has_adapters(model):
        type(model).save_pretrained(
            model, save_directory, is_main_process, state_dict, push_to_hub=push_to_hub, variant=variant, **options
        )
        return
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


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
    **options: Any,
) -> Any:
    """Upload what `save_pretrained` writes, with the card that says how to load it; another README there stays."""
    commit: dict[str, Any] = {
        "commit_message": commit_message or "Upload model",
        "commit_description": commit_description,
        "create_pr": create_pr,
        "revision": revision,
    }
    if _has_adapters(model):
        return type(model).push_to_hub(model, repo_id, private=private, token=token, tags=tags, **commit, **options)
    from huggingface_hub import HfApi, ModelCard

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_pretrained(model, folder)
        if api.file_exists(repo_id, README, revision=revision) and not is_model_card(
            Path(api.hf_hub_download(repo_id, README, revision=revision))
        ):
            (folder / README).unlink()  # the user's own
        elif tags:
            card = ModelCard.load(folder / README)
            card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
            card.save(folder / README)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, **commit)


def _has_adapters(model: Any) -> bool:
    """Whether transformers' add_adapter was called: its own methods then write the adapters alone."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


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
