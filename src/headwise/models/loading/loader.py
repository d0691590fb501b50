"""load and tokenizer: models and tokenizers by name, complete and from safetensors, or an error of one line."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...attention.checkpoints.pretrained import open_safetensors, read_json, weight_files
from ...attention.validation import shown
from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from .locate import DEFAULT, directory, missing
from .quiet import quiet_transformers
from .source import set_source

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase
    from transformers.distributed import DistributedConfig

NUMBER = re.compile(r"\d+")
COUNT_KEYS = re.compile(r"(num_|n_)?(\w+_)?(layers?|blocks|stages|depth|experts)")  # config keys of numbers of parts
ALWAYS_ALLOWED = 512  # layers, however few tensors a file has: one module may serve many layers
DEEPEST = 5  # levels of sub-configs
PACKED = 8  # weights that a quantized file may store in one number
MISSING_WEIGHTS = 1 << 27  # weights that a file may lack, such as an output head's: 512 MB
MODULE_FORMS = ("stack", "modules")  # of models that are not transformers'
LONGEST_SENTENCE = 400  # characters of another library's message


def load(
    name: str | os.PathLike[str] = DEFAULT,
    *,
    attn_implementation: str | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    distributed: DistributedConfig | None = None,
    into: torch.nn.Module | None = None,
) -> Any:
    """Load a model in eval mode, with every weight from its file: from transformers or headwise.save.

    The class is the one that the checkpoint was saved from. Weights are read only from safetensors and GGUF files. A
    plan that was saved with the model, by headwise.save(model, path, plan=plan), becomes its attribute `stream_plan`,
    which headwise.streaming(model) uses.

    Args:
        name: a bundled name ("minilm", "smollm2"), a directory (also one that headwise.save wrote), a GGUF file, or a
            hub id.
        attn_implementation: transformers' name of the attention function, such as "sdpa", "eager" or "headwise".
        dtype: the dtype of the weights; that of the file by default.
        trust_remote_code: whether a model's own Python code may run.
        distributed: transformers' DistributedConfig; `headwise.scale.load_split` makes one.
        into: the model before any pruning, needed for a directory that headwise.save wrote for a class that headwise
            cannot build. The result is a copy of this model with the heads and weights of the file.

    Returns:
        The model.

    Raises:
        CheckpointError: for a checkpoint that is missing, incomplete, or does not fit its config.
        UnsupportedError: for a model type that transformers does not know.

    Example:
        >>> model = headwise.load("smollm2")
    """
    dtype = _parse_dtype(dtype)
    folder = directory(name, code=trust_remote_code)
    options: dict[str, Any] = {
        "attn_implementation": attn_implementation,
        "dtype": dtype,
        "distributed_config": distributed,
    }
    options = {key: value for key, value in options.items() if value is not None}
    with _errors_in_one_line(folder):
        from ..streaming.saved_plan import attach_saved_plan

        model = _load_directory(folder, options, trust_remote_code, into)
        model = attach_saved_plan(model, folder)
    set_source(model, name, folder)
    return model


def _parse_dtype(dtype: Any) -> torch.dtype | None:
    """A dtype, or its name; None, and transformers' "auto", for the file's own."""
    if dtype is None or dtype == "auto":
        return None
    import torch

    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise HeadwiseError(f"dtype must be one of floating point, such as torch.bfloat16 or its name, got {dtype!r}")
    return parsed


def _load_directory(folder: Path, options: dict[str, Any], trust_remote_code: bool, into: Any) -> Any:
    _check_files(folder)
    from ..surgery.pruned_directory import read_record, rebuild, restore_records

    pruned = read_record(folder)
    if pruned is not None and pruned["form"] in MODULE_FORMS:
        return _load_modules(
            folder, pruned, into, options.get("dtype"), {**options, "trust_remote_code": trust_remote_code}
        )
    if into is not None:
        raise HeadwiseError(f"{str(folder)!r} is a transformers model's; into= is for what headwise.save wrote")
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{str(folder)!r} is an adapter of peft's without its model: load that with headwise.load, and the adapter "
            "with peft.PeftModel.from_pretrained(model, directory)"
        )
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{str(folder)!r} has no config.json; give a directory with one and safetensors")
    config = read_json(folder / "config.json")
    files = [open_safetensors(folder / file, "cpu") for file in weight_files(folder)]
    _check_counts(config, sum(len(file.keys()) for file in files))
    if trust_remote_code:
        options["trust_remote_code"] = True
    else:
        _check_size(_class(config, False), folder, files)
    if pruned is not None and pruned["form"] == "compact":
        model = rebuild(_class(config, trust_remote_code), folder, pruned, options)
    else:
        model = _load_complete(_class(config, trust_remote_code), folder, options)
        model = model if pruned is None else restore_records(model, pruned)
    model.eval()
    return model


def _load_modules(folder: Path, record: dict[str, Any], into: Any, dtype: Any, options: dict[str, Any]) -> Any:
    """A model that is not transformers', from what headwise.save wrote."""
    import torch

    from ..surgery.module_directory import read_model

    others = [name for name, value in options.items() if value and name != "dtype"]
    if others:
        raise HeadwiseError(f"{others[0]} is for transformers models, and {str(folder)!r} holds another; leave it out")
    model = read_model(folder, record, into)
    return model if dtype is None else model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def tokenizer(name: str | os.PathLike[str] = DEFAULT, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        name: a name as in `load`.
        trust_remote_code: whether a tokenizer's own Python code may run.

    Returns:
        transformers' tokenizer.

    Raises:
        CheckpointError: for a directory without a tokenizer.

    Example:
        >>> inputs = headwise.tokenizer("smollm2")("The animal was tired.", return_tensors="pt")
    """
    folder = directory(name, weights=False, code=trust_remote_code)
    with _errors_in_one_line(folder):
        _check_files(folder)
        if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            if (folder / "config.json").exists() and "image_size" in read_json(folder / "config.json"):
                raise CheckpointError(f"{str(folder)!r} has no tokenizer: it is a vision model's; give image=FILE")
            raise CheckpointError(f"{str(folder)!r} has no tokenizer (tokenizer.json); give a directory that has one")
        from transformers import AutoTokenizer

        options = {"trust_remote_code": True} if trust_remote_code else {}
        return AutoTokenizer.from_pretrained(folder, **options)


def image_processor(name: str | os.PathLike[str]) -> Any:
    """The image processor of a vision model, by its preprocessor_config.json; None if there is none."""
    folder = directory(name, weights=False)
    with _errors_in_one_line(folder):
        _check_files(folder)
        processor = folder / "processor_config.json"  # of a processor for images and text
        nested = processor.exists() and "image_processor" in read_json(processor)
        if not nested and not (folder / "preprocessor_config.json").exists():
            return None
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(folder)


@contextmanager
def _errors_in_one_line(folder: Path) -> Iterator[None]:
    """Errors of transformers as CheckpointErrors of one line; its progress bars and reports are off."""
    try:
        with quiet_transformers():
            yield
    except HeadwiseError:
        raise
    except ImportError as error:
        raise missing(error) from error
    except BaseException as error:  # transformers fails in many ways on bad files
        # a panic in a Rust library is not an Exception; interrupts and the like go on
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{str(folder)!r} cannot be loaded: {_first_sentence(error)}") from error


def _first_sentence(error: BaseException) -> str:
    first = re.split(r"(?<=[.!?])\s|(?<!:)\n", str(error).strip() or type(error).__name__)[0]
    return " ".join(first.split())[:LONGEST_SENTENCE]


def _check_files(folder: Path) -> None:
    """Refuse pipes and devices, on which a reader would wait forever."""
    for entry in os.scandir(folder):
        with suppress(OSError):  # a link to nothing
            mode = entry.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise CheckpointError(f"{entry.path!r} is a device, socket or pipe; a model is made of files")


def _check_counts(config: Any, tensors: int, depth: int = 0) -> None:
    """Refuse more layers than the file's tensors can fill: all of them would be built before anything is read."""
    if not isinstance(config, dict) or depth > DEEPEST:
        return
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(value, tensors, depth + 1)
        elif isinstance(value, int) and COUNT_KEYS.fullmatch(str(name)) and value > max(tensors, ALWAYS_ALLOWED):
            shown_value = value if abs(value) < 10**15 else "a number of many digits"
            raise CheckpointError(f"config.json says {name} {shown_value}, but the file has {tensors} tensors in all")


def _check_size(cls: Any, folder: Path, files: list[Any]) -> None:
    """Refuse a config of far more weights than the file has: they would be allocated, and might take all memory."""
    import torch
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    stored_numbers = sum(math.prod(file.get_slice(name).get_shape()) for file in files for name in file.keys())  # noqa: SIM118
    config = AutoConfig.from_pretrained(folder)
    build = getattr(cls, "_from_config", None) or cls.from_config
    with torch.device("meta"), no_init_weights():
        try:
            model = build(config)
        except Exception:  # loading it gives a better message
            return
    described_numbers = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    if described_numbers > PACKED * stored_numbers + MISSING_WEIGHTS:
        raise CheckpointError(
            f"config.json describes a model of {described_numbers:,} numbers, but the file has {stored_numbers:,}"
        )


def _class(config: dict[str, Any], trust: bool) -> Any:
    """The class that a checkpoint was saved from, or transformers' choice for its model_type."""
    import transformers

    model_type = config.get("model_type")
    own_code = config.get("auto_map")
    if isinstance(own_code, dict) and own_code:
        if not trust and model_type not in transformers.CONFIG_MAPPING:
            raise UnsupportedError(
                f"model_type {model_type!r} runs code of its own; load(..., trust_remote_code=True) allows it"
            )
        if trust:
            return getattr(transformers, next((key for key in own_code if key.startswith("AutoModel")), "AutoModel"))
    for name in config.get("architectures") or ():
        cls = getattr(transformers, str(name), None)
        if getattr(getattr(cls, "config_class", None), "model_type", None) == model_type and model_type:
            return cls
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type {model_type!r} is not known to transformers {transformers.__version__}; "
            "is this config.json a model's, and is transformers new enough?"
        )
    return transformers.AutoModel


def _load_complete(cls: Any, folder: Path, options: dict[str, Any]) -> Any:
    """The model with every weight from the file; without its output head or pooler where the file has none."""
    import transformers

    model, missing_keys = _read(cls, folder, options)
    if missing_keys and cls is not transformers.AutoModel and _outside_body(model, missing_keys):
        model, missing_keys = _read(transformers.AutoModel, folder, options)  # saved without an output head
    if missing_keys and all(key.startswith("pooler.") for key in missing_keys):
        model, missing_keys = _read(type(model), folder, {**options, "add_pooling_layer": False})
    if missing_keys:
        raise CheckpointError(f"{str(folder)!r} lacks {_describe_tensors(missing_keys)}: these weights would be random")
    return model


def _read(cls: Any, folder: Path, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """A model and the weights it lacks; tensors of other shapes than the config's, or of more layers, are refused."""
    model, info = cls.from_pretrained(
        folder,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, shape, expected = mismatched[0]
        note = f", and {len(mismatched) - 1} more tensors" if len(mismatched) > 1 else ""
        raise CheckpointError(f"tensor {name!r} is {shown(shape)}, config.json says {shown(expected)}{note}")
    patterns = {NUMBER.sub("{}", key) for key in model.state_dict()}
    extra = [key for key in info["unexpected_keys"] if NUMBER.search(key) and NUMBER.sub("{}", key) in patterns]
    if extra:
        raise CheckpointError(
            f"the checkpoint has {_describe_tensors(extra)}, which config.json has not: do its layers fit the file?"
        )
    if info["error_msgs"]:
        raise CheckpointError(str(info["error_msgs"][0]))
    return model, sorted(info["missing_keys"])


def _outside_body(model: Any, keys: Iterable[str]) -> bool:
    """Whether all of these weights belong to an output head or a pooler."""
    body = model.base_model_prefix + "."
    return all(key.removeprefix(body).startswith("pooler.") or not key.startswith(body) for key in keys)


def _describe_tensors(names: list[str]) -> str:
    first = ", ".join(repr(name) for name in sorted(names)[:2])
    return f"tensor{'s' * (len(names) > 1)} {first}" + (f" and {len(names) - 2} more" if len(names) > 2 else "")
