"""headwise.json, the record of a pruned model's heads in its directory, and the model rebuilt from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from ...attention.checkpoints.pretrained import open_safetensors, read_json
from ...attention.validation import shown
from ...errors import CheckpointError
from ...json_documents import other_format
from ..multihead import plain_class
from ..structure.projections import projections
from ..structure.sites import attention_sites
from .kept_heads import KeptHeads, kept_heads, set_head_numbers, set_kept_heads
from .reshape import reshape_heads
from .save_pretrained import attach
from .shared_biases import share_biases

FILE = "headwise.json"
VERSION = 1


def build_record(model: nn.Module, form: str) -> dict[str, Any]:
    """A pruned model as JSON: for each layer, which of the original heads it has."""
    layers = {}
    for site in attention_sites(model):
        record = kept_heads(site.module)
        if record is not None:
            record = _as_zeroed(record) if form == "zeroed" else record
            layers[site.name] = {"kind": site.kind, "layer": site.index, **asdict(record)}
    without_pooler = hasattr(model, "pooler") and model.pooler is None
    return {
        "headwise": VERSION,
        "form": form,
        "class": plain_class(model).__name__,
        "arguments": {"add_pooling_layer": False} if without_pooler else {},
        "buffers": sorted(
            set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        ),
        "layers": layers,
    }


def _as_zeroed(record: KeptHeads) -> KeptHeads:
    """The same heads in a model of the original shapes."""
    if record.zeroed:
        return record
    query = tuple(i if i in record.query else None for i in range(record.query_of))
    return KeptHeads(query, (), record.query_of, 0, zeroed=True)


def write_record(folder: Path, model: nn.Module, form: str) -> None:
    """Write headwise.json."""
    text = json.dumps(build_record(model, form), indent=2)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What headwise.save wrote about the heads of a directory's model, or None."""
    if not (folder / FILE).exists():
        return None
    content = read_json(folder / FILE)
    layers = content.get("layers")
    if content.get("headwise") != VERSION:
        raise CheckpointError(f"{FILE} cannot be read: its {other_format(content.get('headwise'), VERSION)}")
    if not isinstance(layers, dict):
        raise CheckpointError(f"{FILE} has no layers; headwise.save did not write it")
    try:
        for name, entry in layers.items():
            layers[name] = _parse_kept_heads(entry)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{FILE} does not say what the heads of {name!r} are: {error}") from None
    return content


def _parse_kept_heads(entry: dict[str, Any]) -> KeptHeads:
    query, kv = (tuple(entry[key]) for key in ("query", "kv"))
    return KeptHeads(query, kv, int(entry["query_of"]), int(entry["kv_of"]), bool(entry["zeroed"]))


def restore_records(model: Any, content: dict[str, Any]) -> Any:
    """Set the records of a model whose shapes are right already."""
    modules = {site.name: site.module for site in attention_sites(model)}
    for name, record in content["layers"].items():
        if name in modules:
            set_kept_heads(modules[name], record)
    set_head_numbers(model)
    attach(model)
    return model


def rebuild(cls: Any, folder: Path, content: dict[str, Any], options: dict[str, Any]) -> Any:
    """The model of a compact directory: the architecture of config.json, cut to the record, with the file's weights."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    options = dict(options)
    dtype = options.pop("dtype", None)
    with no_init_weights():
        model = cls._from_config(AutoConfig.from_pretrained(folder), **content["arguments"], **options)
    model.name_or_path = str(folder)
    model.config._name_or_path = str(folder)
    prune_to_record(model, content["layers"])
    _load_weights(model, folder)
    _load_generation_config(model, folder)
    return model if dtype is None else model.to(dtype)


def prune_to_record(model: Any, layers: dict[str, KeptHeads]) -> None:
    """Cut a whole model to the recorded heads."""
    sites = {site.name: site for site in attention_sites(model)}
    for name, record in layers.items():
        if name not in sites:
            raise CheckpointError(f"{FILE} speaks of {name!r}, which {type(model).__name__} has not")
        if record.zeroed:
            set_kept_heads(sites[name].module, record)
            continue
        layer = projections(model, sites[name])
        if (layer.query, layer.kv) != (record.query_of, record.kv_of):
            raise CheckpointError(
                f"{FILE} is for {record.query_of} heads at {name}, the model has {layer.query}: not the same model"
            )
        reshape_heads(layer, list(record.query), list(record.kv))
    share_biases(attention_sites(model))
    set_head_numbers(model)
    attach(model)


def _load_weights(model: Any, folder: Path) -> None:
    file = open_safetensors(folder / "model.safetensors", "cpu")
    weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # this is no dict
    for name in set(weights) - set(model.state_dict()):
        owner, _, leaf = name.rpartition(".")
        linear = model.get_submodule(owner) if leaf == "bias" else None
        if linear is None or "bias" not in linear._parameters:
            raise CheckpointError(f"the checkpoint has a tensor {name!r} that {FILE} does not account for")
        linear.bias = nn.Parameter(weights[name])  # what removed heads contributed, where there was no output bias
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise CheckpointError(f"tensor {name!r} is {shown(tensor.shape)}, {FILE} says {shown(shapes[name])}")
    missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    model.tie_weights()
    missing = sorted(set(missing) - set(tied_names(model)))
    if missing:
        note = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise CheckpointError(f"the checkpoint lacks {missing[0]!r}{note}")


def tied_names(model: Any) -> dict[str, str]:
    """For each name in a model's state dict whose tensor has several names, the first of these names."""
    first_names: dict[int, str] = {}
    names = {name: first_names.setdefault(id(x), name) for name, x in model.state_dict(keep_vars=True).items()}
    repeated_names = {first for name, first in names.items() if first != name}
    return {name: first for name, first in names.items() if first in repeated_names}


def _load_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
