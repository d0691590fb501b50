"""headwise.save: a model in a directory, whole or not at all, in the first form that loses nothing."""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from ...files import folder_written, remove_leftovers, umask
from ..structure import sites as anatomy
from ..structure.projections import projections, wrapped
from .dummy_inputs import close, difference, probe
from .offloading import check_present, in_memory, is_offloaded
from .pruned_directory import FILE, ties, write_record
from .removal import Kept, reshape
from .shared_biases import pick_shared

FORMS = ("plain", "zeroed", "compact")
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".pkl", ".pickle", ".ot",
)  # fmt: skip
OWN = ("config.json", "generation_config.json", FILE)
# files that are as true of a pruned model as of the first: its tokenizer and the like, its code and its licence
SAME_WHEN_PRUNED = (
    "*token*", "vocab*", "merges*.txt", "*.model", "*.tiktoken", "*chat_template*", "*.jinja", "*processor*", "*.py",
    "licen[cs]e*", "notice*", "copying*",
)  # fmt: skip
SKIPPED = ("onnx", "openvino", "coreml")


@dataclass(frozen=True)
class Saved:
    """What headwise.save did."""

    path: str
    form: str  # "plain", "zeroed" or "compact"
    why: str
    load: str  # the line that loads it
    difference: float | None  # of the reloaded model's outputs, as a share of the largest; None: weights compared only

    def __str__(self) -> str:
        checked = (
            "weights compared" if self.difference is None else f"reloaded, outputs differ by {self.difference:.1e}"
        )
        return f"{self.path}: {self.form} ({self.why}); {checked}; load it with {self.load}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def save(model: nn.Module, path: str | os.PathLike[str], *, form: str | None = None, overwrite: bool = False) -> Saved:
    """Write a model, pruned or not, with its tokenizer and other files; tells the form, and why that one.

    form None: "plain" where transformers' own config can say it, as for a model whose heads were only zeroed; else
    "compact", which headwise.load reads. "zeroed" puts zeros where heads were: loads anywhere, and is not smaller.
    Only safetensors are written, beside the target and moved into place after they were read again and compared.
    """
    if form is not None and form not in FORMS:
        raise HeadwiseError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if not hasattr(model, "save_pretrained"):
        raise HeadwiseError(f"only transformers models are saved so; {type(model).__name__} has no save_pretrained")
    target = Path(os.fspath(path)).expanduser()
    _check_target(target, overwrite)
    _check_weights(model)
    model = in_memory(model) if is_offloaded(model) else model
    chosen, why, cls, config = _choose(model, form)
    with folder_written(target, CheckpointError) as made, _quiet():
        _write(model, made, chosen, cls, config)
        write_record(made, model, chosen)
        _copy_others(model, made)
        far = _compare(model, made, chosen, cls)
        _let_others_read(made)
    load = f"headwise.load({str(path)!r})" if chosen == "compact" else f"{cls.__name__}.from_pretrained({str(path)!r})"
    return Saved(str(path), chosen, why, load, far)


def _check_target(target: Path, overwrite: bool) -> None:
    if os.path.isfile(target):
        raise HeadwiseError(f"{str(target)!r} is a file; give a directory")
    remove_leftovers(target)
    if os.path.isdir(target) and any(target.iterdir()) and not overwrite:
        raise HeadwiseError(f"{str(target)!r} is not empty; give another directory, or say overwrite=True")


def _check_weights(model: Any) -> None:
    """All that the model computes with is in its state dict, under the names of its class."""
    for path, module in model.named_modules():
        if problem := wrapped(module):
            why, remedy = problem
            raise UnsupportedError(
                f"{type(model).__name__} cannot be saved: {path or 'it'} ({type(module).__name__}) is not plain "
                f"({why}); {remedy}"
            )
    if not hasattr(model, "_from_config") or getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be saved: it is quantized or wraps a model; give the plain model"
        )
    if not is_offloaded(model):
        check_present(model)


def _choose(model: Any, form: str | None) -> tuple[str, str, Any, Any]:
    """The form, the reason, and the class and config to write it with."""
    cut = [kept for kept in _all_kept(model) if not kept.zeroed]
    added = _added_biases(model) if cut or _all_kept(model) else []
    if not cut and not added:
        if form == "compact":
            return "compact", "as asked", type(model), model.config
        word = "its heads were zeroed, every shape is as before" if _all_kept(model) else "nothing was removed"
        return "plain", word, type(model), model.config
    plain, reason = (None, "as asked") if form in ("zeroed", "compact") else plain_config(model)
    if plain is not None:
        cls, config = plain
        word = "its config says the new number of heads" + (
            f", as {config.model_type}" if config.model_type != model.config.model_type else ""
        )
        return "plain", word, cls, config
    if form == "plain":
        raise HeadwiseError(f"this model has no plain form: {reason}; use form='compact' or 'zeroed'")
    if form == "zeroed":
        if added:
            raise HeadwiseError(f"this model has no zeroed form: {added[0]} was added to hold what removed heads gave")
        return "zeroed", "as asked: zeros where heads were, so it is not smaller", type(model), model.config
    return "compact", reason, type(model), model.config


def _all_kept(model: nn.Module) -> list[Kept]:
    kept = [getattr(site.module, "headwise_kept", None) for site in anatomy.sites(model)]
    return [k for k in kept if k is not None]


def _added_biases(model: Any) -> list[str]:
    """Output biases that the architecture has not, which compensation added."""
    try:
        plain = set(_skeleton(type(model), model.config).state_dict())
    except Exception:  # a class that does not build from its config alone is compared when it is read again
        return []
    return sorted(name for name in set(model.state_dict()) - plain if name.endswith(".bias"))


def _skeleton(cls: Any, config: Any) -> Any:
    """The model of a config without memory."""
    with torch.device("meta"):
        return cls._from_config(copy.deepcopy(config))


def plain_config(model: Any) -> tuple[tuple[Any, Any] | None, str]:
    """A class and config of transformers whose shapes are this model's, or None and the reason."""
    counts = {(p.query, p.kv) for p in (projections(model, site) for site in anatomy.sites(model))}
    if len(counts) > 1:
        return None, "its layers have different numbers of heads, which no transformers config can say"
    query, kv = counts.pop()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    reason = f"{model.config.model_type} derives the width of a head from their number"
    for cls, config in _candidates(model, query, kv):
        try:
            config = type(config).from_dict(config.to_dict())
            fresh = _skeleton(cls, config)
        except Exception as error:  # configs refuse what they cannot say in many ways
            reason = f"its config refuses: {' '.join(str(error).split())[:120]}"
            continue
        if {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes and _alike(model, fresh):
            return (cls, config), ""
    return None, reason


def _candidates(model: Any, query: int, kv: int) -> Iterator[tuple[Any, Any]]:
    config = copy.deepcopy(model.config)
    site = anatomy.sites(model)[0].module
    for name in anatomy.QUERY_HEADS:
        if hasattr(config, name):
            setattr(config, name, query)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = kv
    dim = getattr(site, "head_dim", None)
    if isinstance(dim, int) and not hasattr(config, "d_kv"):
        with suppress(AttributeError):  # Falcon's is computed
            config.head_dim = dim
    yield type(model), config
    if config.model_type == "llama" and not config.attention_bias and not config.mlp_bias:
        # LlamaConfig insists that heads divide the width; Mistral is the same model without that rule
        import transformers

        given = {key: x for key, x in config.to_dict().items() if key not in ("model_type", "architectures")}
        other = getattr(transformers, type(model).__name__.replace("Llama", "Mistral"), None)
        if other is not None:
            yield other, transformers.MistralConfig(**{**given, "sliding_window": None})


def _alike(model: Any, fresh: Any) -> bool:
    """Whether each attention layer keeps the same numbers about itself."""
    pairs = zip(anatomy.sites(model), anatomy.sites(fresh), strict=True)
    names = ("scaling", "head_dim", "num_key_value_groups", "attention_head_size", "key_value_proj_dim")
    return all(
        getattr(ours.module, name, None) == getattr(theirs.module, name, None)
        for ours, theirs in pairs
        for name in names
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' bars and warnings kept back."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _write(model: Any, folder: Path, form: str, cls: Any, config: Any) -> None:
    if form == "compact":
        from safetensors.torch import save_file

        config.save_pretrained(folder)
        _name_class(folder, cls)
        save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)
        return
    source = expanded(model) if form == "zeroed" else model
    from transformers.initialization import no_init_weights

    with no_init_weights():
        fresh = cls._from_config(copy.deepcopy(config), **_arguments(model))
    fresh.load_state_dict(_untied(source.state_dict()), assign=True)
    fresh.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder)


def _arguments(model: Any) -> dict[str, Any]:
    return {"add_pooling_layer": False} if hasattr(model, "pooler") and model.pooler is None else {}


def _name_class(folder: Path, cls: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["architectures"] = [cls.__name__]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _weights(model: Any) -> dict[str, Tensor]:
    """Every tensor once: those that the model's class ties under their first name."""
    try:
        pairs = ties(_skeleton(type(model), model.config))
    except Exception:  # a class that does not build from its config alone
        pairs = ties(model)
    tied = {name for name, first in pairs.items() if name != first}
    weights = model.state_dict()
    return {name: x.detach().cpu().contiguous().clone() for name, x in weights.items() if name not in tied}


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values, with a copy for every name after the first where several have one memory."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in weights.items():
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return separate


def expanded(model: Any) -> Any:
    """A copy with every head back in its place, the removed ones as zeros."""
    made = copy.deepcopy(model)
    sites = anatomy.sites(made)
    done: set[int] = set()
    for site in sites:
        kept = getattr(site.module, "headwise_kept", None)
        if kept is None or kept.zeroed or id(site.module) in done:
            continue
        done.add(id(site.module))
        query = [kept.query.index(i) if i in kept.query else None for i in range(kept.query_of)]
        kv = [kept.kv.index(i) if i in kept.kv else None for i in range(kept.kv_of)]
        reshape(projections(made, site), query, kv)
    pick_shared(sites, whole=True)
    return made


def _copy_others(model: Any, folder: Path) -> None:
    """The tokenizer and whatever else is in the model's own directory, but for weights and what describes them.

    A pruned model gets only files that are as true of it as of the first one, and says itself what it is.
    """
    pruned = bool(_all_kept(model))
    source = Path(getattr(model, "name_or_path", "") or "?")
    if pruned:
        (folder / "README.md").write_text(_readme(model, source.name), encoding="utf-8")
    if not source.is_dir():
        return
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        hidden = any(part.startswith(".") or part in SKIPPED or part == "__pycache__" for part in inside.parts)
        weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        other = pruned and not any(fnmatch.fnmatch(file.name.lower(), pattern) for pattern in SAME_WHEN_PRUNED)
        if hidden or weights or other or not file.is_file() or (folder / inside).exists() or str(inside) in OWN:
            continue
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / inside)


def _readme(model: Any, name: str) -> str:
    """What a pruned directory is, for a person who finds it."""
    name = "".join(letter if letter.isalnum() or letter in " .-" else "_" for letter in name) or "a model"
    rows = [
        f"| {site} | {', '.join(map(str, kept.removed))} |"
        for site in anatomy.sites(model)
        if (kept := getattr(site.module, "headwise_kept", None)) is not None
    ]
    head = f"# {name}, without some of its attention heads\n\nMade by headwise, which also reads it: "
    load = "`headwise.load` with the path of this directory.\n\n| layer | heads removed |\n|---|---|\n"
    return head + load + "\n".join(rows) + "\n"


def _compare(model: Any, folder: Path, form: str, cls: Any) -> float | None:
    """Read what was written and run it beside the model; far off is an error, and nothing is moved into place."""
    from ..loading.loader import load

    again = load(folder, attn_implementation=model.config._attn_implementation)
    if form != "zeroed":
        theirs = again.state_dict()
        for name, tensor in model.state_dict().items():
            if name not in theirs or not torch.equal(theirs[name], tensor.detach().to(theirs[name].device)):
                raise CheckpointError(f"what was written differs from the model in {name!r}; nothing was kept")
    given = probe(model)
    if given is None:
        return None
    far = difference(model, again, given)
    if not far <= close(model):
        raise CheckpointError(f"the model read again gives other outputs, off by {far:.2g}; nothing was kept")
    return far


def _let_others_read(folder: Path) -> None:
    """safetensors makes files that only their owner can read."""
    for file in folder.rglob("*.safetensors"):
        os.chmod(file, 0o666 & ~umask())
