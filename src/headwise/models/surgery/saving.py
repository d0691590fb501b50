"""headwise.save: write a model to a directory, atomically, in the first form that loses nothing."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.checkpoints.pretrained import open_safetensors
from ...attention.nn.stack import Decoder, Transformer
from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from ...files import remove_leftovers, umask, write_folder_atomically
from ...plans import StreamPlan
from ..loading.quiet import quiet_transformers
from ..multihead import plain_class
from ..streaming.saved_plan import FILE as PLAN_FILE
from ..streaming.saved_plan import plan_to_save
from ..structure.linear_layers import wrapping_problem
from ..structure.partition import check_whole_weights
from ..structure.sites import attention_sites, require_sites
from ..structure.wrappers import is_transformers_model
from .directory_files import copy_other_files, has_source_weights, source_folder
from .dummy_inputs import TOKENS, close, difference, dummy_inputs
from .gguf_model import Precision, check_precision, write_gguf
from .kept_heads import pruned_layers
from .model_card import README, Loading, Quality, check_quality, model_card
from .module_directory import STACK, WEIGHTS, write_model
from .offloading import check_present, in_memory, is_offloaded
from .onnx_model import write_onnx
from .plain_config import empty_model, full_config, plain_config
from .pruned_directory import tied_names, write_record
from .restored_heads import restore_heads

Form = Literal["plain", "zeroed", "compact"]
FORMS: tuple[Form, ...] = ("plain", "zeroed", "compact")
FILE_FORMS = (".gguf", ".onnx")


@dataclass(frozen=True)
class SaveResult:
    """What headwise.save did."""

    path: str
    form: Form | Literal["gguf", "onnx"]
    why: str  # this form
    load: str  # the line of Python that loads it
    difference: float | None  # of the reloaded model's outputs, relative to the largest; None: only weights compared

    def __str__(self) -> str:
        check = "weights compared" if self.difference is None else f"reloaded, outputs differ by {self.difference:.1e}"
        return f"{self.path}: {self.form} ({self.why}); {check}; load it with {self.load}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Target(NamedTuple):
    """How a model is written."""

    form: Form
    why: str
    cls: Any
    config: Any


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    form: Form | None = None,
    plan: StreamPlan | None = None,
    overwrite: bool = False,
    quality: Quality | None = None,
    precision: Precision | None = None,
    source: str | os.PathLike[str] | None = None,
) -> SaveResult:
    """Write a model, pruned or not, with its tokenizer, a model card and other files, into a directory.

    Weights are written as safetensors to a temporary directory, which is read back, compared with the model and then
    moved into place. A path that ends in .gguf produces one file for llama.cpp, with head counts per layer, for Llama,
    Mistral, Qwen2 and Qwen3; it is read back and compared in the same way. A path that ends in .onnx produces one file
    for any ONNX runtime, whose outputs in onnxruntime are compared with the model's.

    Args:
        model: a transformers model, one of headwise's stacks, or any other with attention that is known.
        path: the directory, new or empty; or a file whose name ends in .gguf or .onnx.
        form: "plain", which transformers loads; "compact", which headwise.load reads; "zeroed", with zeros in place of
            removed heads, which transformers loads and which is not smaller. By default "plain" if a transformers
            config can describe the model (also if heads were only zeroed), else "compact". A model that is not a
            transformers model is always "compact"; if headwise cannot build its class, load it with headwise.load(path,
            into=model), where model is the model before any pruning.
        plan: the KV heads that stream. It is written next to the weights, and `headwise.streaming` finds it on a model
            loaded with headwise.load; a model that was loaded with a plan is saved with it.
        overwrite: replace what is in the directory.
        quality: what you measured, for the model card: {measure: (before, after)}, such as
            {"perplexity": (12.1, 12.9)}.
        precision: the precision of the weights in a GGUF file: "f32", "f16", "bf16" or "q8_0"; the model's own by
            default.
        source: the GGUF file to copy the tokenizer from; by default the file that the model was loaded from.

    Returns:
        The form, why it was chosen, and how to load the model.

    Raises:
        HeadwiseError: for a directory that is not empty, or a form that the model does not have.
        UnsupportedError: for quantized, wrapped or incomplete models.
        CheckpointError: if the reloaded model differs, or the directory cannot be written.

    Example:
        >>> print(headwise.save(smaller, "smaller"))
    """
    if form is not None and form not in FORMS:
        raise HeadwiseError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    check_quality(quality)
    check_precision(precision)
    folder = Path(os.fspath(path)).expanduser()
    if folder.suffix in FILE_FORMS:
        _check_file(folder, overwrite, quality, plan)
        if folder.suffix == ".gguf":
            return _save_gguf(model, folder, str(path), form, precision, source)
        if form is not None:
            raise HeadwiseError(f"an ONNX file has no {form} form: leave form= out")
    if precision is not None or source is not None:
        raise HeadwiseError("precision and source are for a GGUF file: give a path that ends in .gguf")
    if folder.suffix == ".onnx":
        return _save_onnx(model, folder, str(path))
    _check_folder(folder, overwrite)
    if not is_transformers_model(model):
        return _save_modules(model, folder, str(path), form, plan, quality)
    _check_weights(model)
    model = in_memory(model) if is_offloaded(model) else model
    target = _choose_form(model, form)
    with write_folder_atomically(folder, CheckpointError) as scratch, quiet_transformers():
        _write(model, scratch, target)
        write_record(scratch, model, target.form)
        written, distance = _compare(model, scratch, target.form)
        _write_other_files(model, written, scratch, _loading(target), quality)
        _write_plan(model, scratch, plan)
        _make_readable(scratch)
    loader = "headwise.load" if target.form == "compact" else f"{target.cls.__name__}.from_pretrained"
    return SaveResult(str(path), target.form, target.why, f"{loader}({str(path)!r})", distance)


def _check_file(file: Path, overwrite: bool, quality: Quality | None, plan: StreamPlan | None) -> None:
    if os.path.exists(file) and not overwrite:
        raise HeadwiseError(f"{str(file)!r} exists; give another name, or say overwrite=True")
    if quality is not None:
        raise HeadwiseError("quality is for the model card of a directory; a file has none, leave it out")
    if plan is not None:
        raise HeadwiseError("a stream plan is saved in a directory; a file has no place for it, leave plan= out")


def _save_gguf(
    model: Any, file: Path, path: str, form: Form | None, precision: Precision | None, source: Any
) -> SaveResult:
    """Save a model as a GGUF file."""
    if form not in (None, "zeroed"):
        raise HeadwiseError(f"a GGUF file has no {form} form: leave form= out, or give form='zeroed'")
    if not is_transformers_model(model):
        raise UnsupportedError(f"{type(model).__name__} cannot be written as GGUF: it is no transformers model")
    _check_weights(model)
    model = in_memory(model) if is_offloaded(model) else model
    restored = restore_heads(model) if form == "zeroed" else model
    tokenizer = None if source is None else Path(os.fspath(source)).expanduser()
    target, distance = write_gguf(model, restored, file, form or "compact", precision, tokenizer)
    why = f"{target.describe()}; headwise.load has read it, and llama.cpp reads this architecture"
    return SaveResult(path, "gguf", why, f"headwise.load({path!r})", distance)


def _save_onnx(model: Any, file: Path, path: str) -> SaveResult:
    """Save a model as an ONNX file."""
    _check_plain_modules(model)
    if is_offloaded(model):
        model = in_memory(model)
    check_present(model)
    target, distance = write_onnx(model, file)
    why = f"{target.describe()}; onnxruntime has run it"
    return SaveResult(path, "onnx", why, f"onnxruntime.InferenceSession({path!r})", distance)


def _loading(target: Target) -> Loading:
    """How a transformers model is loaded, as its card says it."""
    name = target.cls.__name__
    if target.form == "compact":
        why = f"headwise.load reads it and plain transformers does not; {target.why}"
        return Loading("headwise", target.form, why, 'import headwise\n\nmodel = headwise.load("DIRECTORY")')
    why = f"plain transformers loads it; {target.why}"
    code = f'from transformers import {name}\n\nmodel = {name}.from_pretrained("DIRECTORY")'
    return Loading("transformers", target.form, why, code)


def _write_other_files(model: Any, written: Any, folder: Path, loading: Loading, quality: Quality | None) -> None:
    """Copy the files that still fit, and write README.md where the model's own does not."""
    changed = bool(pruned_layers(model)) or not has_source_weights(model)
    copy_other_files(model, folder, changed=changed, plain=loading.library == "transformers")
    if changed or quality or not (folder / README).exists():
        text = model_card(model, written, source_folder(model), loading, quality)
        (folder / README).write_text(text, encoding="utf-8")


def _save_modules(
    model: nn.Module, folder: Path, path: str, form: Form | None, plan: StreamPlan | None, quality: Quality | None
) -> SaveResult:
    """Save a model that is not transformers'."""
    name = plain_class(model).__name__
    require_sites(model)
    if form not in (None, "compact"):
        raise HeadwiseError(f"{name} is no transformers model, so it has no {form} form; leave form= out")
    _check_plain_modules(model)
    check_present(model)
    with write_folder_atomically(folder, CheckpointError) as scratch:
        is_stack = write_model(model, scratch) == STACK
        written, distance = _compare_modules(model, scratch) if is_stack else _compare_tensors(model, scratch)
        why = "a stack of headwise's own"
        if not is_stack:
            why = f"headwise cannot build {name}: give it the model before any pruning"
        argument = "" if is_stack else f", into={name}(...)"
        code = f'import headwise\n\nmodel = headwise.load("DIRECTORY"{argument})'
        _write_other_files(model, written, scratch, Loading("headwise", "compact", why, code), quality)
        _write_plan(model, scratch, plan)
        _make_readable(scratch)
    return SaveResult(path, "compact", why, f"headwise.load({path!r}{argument})", distance)


def _write_plan(model: nn.Module, folder: Path, plan: StreamPlan | None) -> None:
    """Write the plan that belongs to a model, where there is one."""
    plan = plan_to_save(model, plan)
    if plan is not None:
        plan.save(folder / PLAN_FILE)


def _compare_tensors(model: nn.Module, folder: Path) -> tuple[nn.Module, None]:
    """Compare the tensors of the file with the model's."""
    file = open_safetensors(folder / WEIGHTS, "cpu")
    state = model.state_dict()
    for name in file.keys():  # noqa: SIM118  # this is no dict
        _check_equal(name, file.get_tensor(name), state[name])
    return model, None


def _compare_modules(model: nn.Module, folder: Path) -> tuple[nn.Module, float | None]:
    """Read a stack again and compare its outputs; the stack that was read, and the difference."""
    from ..loading.loader import load

    reloaded: Any = load(folder)
    theirs = reloaded.state_dict()
    for name, tensor in model.state_dict().items():
        _check_equal(name, theirs[name], tensor)
    shape: Any = model.shape
    ids = torch.arange(TOKENS, device=next(model.parameters()).device)[None] % shape.vocab
    ids = ids[:, : shape.max_length] if shape.max_length else ids
    inputs = (ids, ids[:, :2]) if isinstance(model, Transformer) else (ids,)
    if isinstance(model, Decoder) and shape.decoder_layers:
        return reloaded, None  # it needs a memory
    distance = difference(model, reloaded.to(ids.device), inputs)
    if not distance <= close(model):
        raise CheckpointError(f"the model read again gives other outputs, off by {distance:.2g}; nothing was kept")
    return reloaded, distance


def _check_equal(name: str, written: Tensor, tensor: Tensor) -> None:
    if not torch.equal(written, tensor.detach().to(written.device)):
        raise CheckpointError(f"what was written differs from the model in {name!r}; nothing was kept")


def _check_folder(folder: Path, overwrite: bool) -> None:
    if os.path.isfile(folder):
        raise HeadwiseError(f"{str(folder)!r} is a file; give a directory")
    remove_leftovers(folder)
    if os.path.isdir(folder) and any(folder.iterdir()) and not overwrite:
        raise HeadwiseError(f"{str(folder)!r} is not empty; give another directory, or say overwrite=True")


def _check_plain_modules(model: nn.Module) -> None:
    """Refuse a model whose state dict, under the names of its class, is not all that it computes with."""
    check_whole_weights(model, attention_sites(model), "save")
    own = _own_parametrizations(model)
    for path, module in model.named_modules():
        if path not in own and (problem := wrapping_problem(module)):
            reason, remedy = problem
            raise UnsupportedError(
                f"{type(model).__name__} cannot be saved: {path or 'it'} ({type(module).__name__}) is not plain "
                f"({reason}); {remedy}"
            )


def _own_parametrizations(model: nn.Module) -> set[str]:
    """Paths of the modules that a class of transformers parametrizes itself, as Wav2Vec2 does: a new model has them."""
    paths = {path for path, module in model.named_modules() if nn.utils.parametrize.is_parametrized(module)}
    if not paths or not is_transformers_model(model):
        return set()
    try:
        fresh: nn.Module = empty_model(type(model), model.config)
    except Exception:  # a class that cannot be built from its config alone
        return set()
    return {path for path, x in fresh.named_modules() if path in paths and nn.utils.parametrize.is_parametrized(x)}


def _check_weights(model: Any) -> None:
    """Refuse a model that cannot be saved as transformers' are."""
    _check_plain_modules(model)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedError(f"{type(model).__name__} cannot be saved: it is quantized; give the plain model")
    if not is_offloaded(model):
        check_present(model)


def _choose_form(model: Any, form: Form | None) -> Target:
    """The requested form, or the first that loses nothing."""
    records = pruned_layers(model).values()
    is_cut = any(not record.zeroed for record in records)
    added_biases = _added_biases(model) if records else []
    if not is_cut and not added_biases:
        if form == "compact":
            return Target("compact", "as asked", type(model), model.config)
        reason = "its heads were zeroed, every shape is as before" if records else "nothing was removed"
        return Target("plain", reason, type(model), model.config)
    plain, reason = (None, "as asked") if form in ("zeroed", "compact") else plain_config(model)
    if plain is not None:
        cls, config = plain
        other_type = f", as {config.model_type}" if config.model_type != model.config.model_type else ""
        return Target("plain", f"its config says the new number of heads{other_type}", cls, config)
    if form == "plain":
        raise HeadwiseError(f"this model has no plain form: {reason}; use form='compact' or 'zeroed'")
    if form == "zeroed":
        if added_biases:
            raise HeadwiseError(
                f"this model has no zeroed form: {added_biases[0]} was added to hold the outputs of removed heads"
            )
        return Target("zeroed", "as asked: zeros where heads were, so it is not smaller", type(model), model.config)
    return Target("compact", reason, *full_config(model))


def _added_biases(model: Any) -> list[str]:
    """Output biases that the architecture does not have: compensation added them."""
    try:
        names = set(empty_model(type(model), model.config).state_dict())
    except Exception:  # a class that cannot be built from its config alone is compared when it is read again
        return []
    return sorted(name for name in set(model.state_dict()) - names if name.endswith(".bias"))


def _write(model: Any, folder: Path, target: Target) -> None:
    """Write config and weights."""
    if target.form == "compact":
        from safetensors.torch import save_file

        target.config.save_pretrained(folder)
        _write_class_name(folder, target.cls)
        save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)
        return
    source = restore_heads(model) if target.form == "zeroed" else model
    from transformers.initialization import no_init_weights

    with no_init_weights():
        fresh = target.cls._from_config(copy.deepcopy(target.config), **_class_arguments(model))
    fresh.load_state_dict(_without_ties(source.state_dict()), assign=True)
    fresh.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder)


def _class_arguments(model: Any) -> dict[str, Any]:
    return {"add_pooling_layer": False} if hasattr(model, "pooler") and model.pooler is None else {}


def _write_class_name(folder: Path, cls: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["architectures"] = [cls.__name__]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _weights(model: Any) -> dict[str, Tensor]:
    """Every tensor once: tensors that the model's class ties are under their first name."""
    try:
        names = tied_names(empty_model(type(model), model.config))
    except Exception:  # a class that cannot be built from its config alone
        names = tied_names(model)
    tied_later_names = {name for name, first in names.items() if name != first}
    weights = model.state_dict()
    return {name: x.detach().cpu().contiguous().clone() for name, x in weights.items() if name not in tied_later_names}


def _without_ties(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values; where several names share one memory, a copy for every name after the first."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in weights.items():
        separate[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
        addresses.add(tensor.data_ptr())
    return separate


def _compare(model: Any, folder: Path, form: Form) -> tuple[Any, float | None]:
    """Reload what was written and compare it with the model; a difference is an error, and nothing is kept.

    Returns the model that was read, and the difference of its outputs where they could be compared.
    """
    from ..loading.loader import load

    reloaded = load(folder, attn_implementation=model.config._attn_implementation)
    experts = getattr(model.config, "_experts_implementation", None)
    # another implementation rounds differently, or does not take the model's dtype
    if experts != getattr(reloaded.config, "_experts_implementation", experts):
        reloaded.set_experts_implementation(experts)
    if form != "zeroed":
        theirs = reloaded.state_dict()
        for name, tensor in model.state_dict().items():
            if name not in theirs:
                raise CheckpointError(f"what was written lacks {name!r} of the model; nothing was kept")
            _check_equal(name, theirs[name], tensor)
    inputs = dummy_inputs(model)
    if inputs is None:
        return reloaded, None
    distance = difference(model, reloaded, inputs)
    if not distance <= close(model):
        raise CheckpointError(f"the model read again gives other outputs, off by {distance:.2g}; nothing was kept")
    return reloaded, distance


def _make_readable(folder: Path) -> None:
    """Set the usual permissions: safetensors makes files that only their owner can read."""
    for file in folder.rglob("*.safetensors"):
        os.chmod(file, 0o666 & ~umask())
