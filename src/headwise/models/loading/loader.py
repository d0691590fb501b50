"""Models and tokenizers by name: whole, in eval mode, from safetensors, or one line that says what is wrong."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...attention.checkpoints.pretrained import open_safetensors, read_json, weight_files
from ...attention.validation import shown
from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from .locate import DEFAULT, directory, missing

NUMBER = re.compile(r"\d+")
COUNTS = re.compile(r"(num_|n_)?(\w+_)?(layers?|blocks|stages|depth|experts)")  # what a model has in numbers
FEW_LAYERS = 512  # one module may serve many layers
DEEPEST = 5  # sub-configs
PACKED = 8  # numbers that a quantized file may hold in one
SPARE = 1 << 27  # numbers that may be missing, such as an output head's: 512 MB
SENTENCE = 400  # characters of another library's words


def load(
    name: str | os.PathLike[str] = DEFAULT,
    *,
    attn_implementation: str | None = None,
    dtype: Any = None,
    trust_remote_code: bool = False,
    distributed: Any = None,
) -> Any:
    """A transformers model in eval mode: of an embedded name, a directory (pruned ones too), a GGUF file or a hub id.

    The class is the one the checkpoint was saved from; dtype None keeps the file's. Every weight comes from the file:
    one that is missing, or does not fit the config, is an error. Only safetensors are read, and a model's own code is
    run only with trust_remote_code=True. distributed is transformers' DistributedConfig; headwise.scale gives one.
    """
    folder = directory(name, code=trust_remote_code)
    how = {"attn_implementation": attn_implementation, "dtype": dtype, "distributed_config": distributed}
    how = {key: value for key, value in how.items() if value is not None}
    with _one_line(folder):
        _check_files(folder)
        if not (folder / "config.json").exists():
            raise CheckpointError(f"{str(folder)!r} has no config.json; give a directory with one and safetensors")
        config = read_json(folder / "config.json")
        opened = [open_safetensors(folder / file, "cpu") for file in weight_files(folder)]
        _check_counts(config, sum(len(file.keys()) for file in opened))
        if trust_remote_code:
            how["trust_remote_code"] = True
        else:
            _check_size(_class(config, False), folder, opened)
        from ..surgery.pruned_directory import read_record, rebuilt, remember

        pruned = read_record(folder)
        if pruned is not None and pruned["form"] == "compact":
            return rebuilt(_class(config, trust_remote_code), folder, pruned, how).eval()
        model = _whole(_class(config, trust_remote_code), folder, how).eval()
        return model if pruned is None else remember(model, pruned)


def tokenizer(name: str | os.PathLike[str] = DEFAULT, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that belongs to a model of this name."""
    folder = directory(name, weights=False, code=trust_remote_code)
    with _one_line(folder):
        _check_files(folder)
        if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            raise CheckpointError(f"{str(folder)!r} has no tokenizer (tokenizer.json); give a directory that has one")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, **({"trust_remote_code": True} if trust_remote_code else {}))


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Whatever transformers raises on a bad checkpoint, as an error of ours; its bars and reports kept back."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise missing(error) from error
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    except HeadwiseError:
        raise
    except ImportError as error:
        raise missing(error) from error
    except BaseException as error:  # transformers fails in many ways on the files of others
        # a panic in a Rust library is no Exception; interrupts and the like go on
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{str(folder)!r} cannot be loaded: {_first_sentence(error)}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _first_sentence(error: BaseException) -> str:
    first = re.split(r"(?<=[.!?])\s|(?<!:)\n", str(error).strip() or type(error).__name__)[0]
    return " ".join(first.split())[:SENTENCE]


def _check_files(folder: Path) -> None:
    """No pipe or device, on which a reader would wait for ever."""
    for entry in os.scandir(folder):
        with suppress(OSError):  # a link to nothing
            mode = entry.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise CheckpointError(f"{entry.path!r} is a device, socket or pipe; a model is made of files")


def _check_counts(config: Any, tensors: int, depth: int = 0) -> None:
    """No more layers than a file of so many tensors can fill: all of them would be built before anything is read."""
    if not isinstance(config, dict) or depth > DEEPEST:
        return
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(value, tensors, depth + 1)
        elif isinstance(value, int) and COUNTS.fullmatch(str(name)) and value > max(tensors, FEW_LAYERS):
            shown_value = value if abs(value) < 10**15 else "a number of many digits"
            raise CheckpointError(f"config.json says {name} {shown_value}, but the file has {tensors} tensors in all")


def _check_size(cls: Any, folder: Path, opened: list[Any]) -> None:
    """Not far more numbers than the file has: what is missing would be made, and might take all memory."""
    import torch
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    held = sum(math.prod(file.get_slice(name).get_shape()) for file in opened for name in file.keys())  # noqa: SIM118
    config = AutoConfig.from_pretrained(folder)
    build = getattr(cls, "_from_config", None) or cls.from_config
    with torch.device("meta"), no_init_weights():
        try:
            model = build(config)
        except Exception:  # said better when it is loaded
            return
    wanted = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    if wanted > PACKED * held + SPARE:
        raise CheckpointError(f"config.json describes a model of {wanted:,} numbers, but the file has {held:,}")


def _class(config: dict[str, Any], trust: bool) -> Any:
    """The class that a checkpoint was saved from, or transformers' choice for its model_type."""
    import transformers

    kind = config.get("model_type")
    custom = config.get("auto_map")
    if isinstance(custom, dict) and custom:
        if not trust and kind not in transformers.CONFIG_MAPPING:
            raise UnsupportedError(
                f"model_type {kind!r} runs code of its own; load(..., trust_remote_code=True) allows it"
            )
        if trust:
            return getattr(transformers, next((key for key in custom if key.startswith("AutoModel")), "AutoModel"))
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if getattr(getattr(found, "config_class", None), "model_type", None) == kind and kind:
            return found
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type {kind!r} is not known to transformers {transformers.__version__}; "
            "is this config.json a model's, and is transformers new enough?"
        )
    return transformers.AutoModel


def _whole(cls: Any, folder: Path, how: dict[str, Any]) -> Any:
    """The model with every weight from the file; without the output head or pooler that the file has not."""
    import transformers

    model, lost = _read(cls, folder, how)
    if lost and cls is not transformers.AutoModel and _outside_body(model, lost):
        model, lost = _read(transformers.AutoModel, folder, how)  # saved without its head, as bare encoders are
    if lost and all(key.startswith("pooler.") for key in lost):
        model, lost = _read(type(model), folder, {**how, "add_pooling_layer": False})
    if lost:
        raise CheckpointError(f"{str(folder)!r} lacks {_some(lost)}: these weights would be random")
    return model


def _read(cls: Any, folder: Path, how: dict[str, Any]) -> tuple[Any, list[str]]:
    """A model and the weights it misses; tensors of another shape than the config's, or of more layers, are refused."""
    model, info = cls.from_pretrained(
        folder,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **how,
    )
    wrong = sorted(info["mismatched_keys"])
    if wrong:
        name, found, expected = wrong[0]
        more = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise CheckpointError(f"tensor {name!r} is {shown(found)}, config.json says {shown(expected)}{more}")
    kinds = {NUMBER.sub("{}", key) for key in model.state_dict()}
    extra = [key for key in info["unexpected_keys"] if NUMBER.search(key) and NUMBER.sub("{}", key) in kinds]
    if extra:
        raise CheckpointError(
            f"the checkpoint has {_some(extra)}, which config.json has not: do its layers fit the file?"
        )
    if info["error_msgs"]:
        raise CheckpointError(str(info["error_msgs"][0]))
    return model, sorted(info["missing_keys"])


def _outside_body(model: Any, keys: Iterable[str]) -> bool:
    body = model.base_model_prefix + "."
    return all(key.removeprefix(body).startswith("pooler.") or not key.startswith(body) for key in keys)


def _some(names: list[str]) -> str:
    first = ", ".join(repr(name) for name in sorted(names)[:2])
    return f"tensor{'s' * (len(names) > 1)} {first}" + (f" and {len(names) - 2} more" if len(names) > 2 else "")
