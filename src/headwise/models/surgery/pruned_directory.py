"""What a directory says about a pruned model, and the model rebuilt from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from ...attention.checkpoints.pretrained import open_safetensors, read_json
from ...attention.validation import shown
from ...errors import CheckpointError
from ..structure import sites as anatomy
from ..structure.projections import projections
from .removal import Kept, originals, reshape
from .save_pretrained import attach
from .shared_biases import pick_shared

FILE = "headwise.json"
VERSION = 1


def record(model: nn.Module, form: str) -> dict[str, Any]:
    """A pruned model's layers as JSON: for each, which of the first model's heads it has."""
    layers = {
        site.name: {"kind": site.kind, "layer": site.index, **asdict(_as_zeroed(kept) if form == "zeroed" else kept)}
        for site in anatomy.sites(model)
        if (kept := getattr(site.module, "headwise_kept", None)) is not None
    }
    without_pooler = hasattr(model, "pooler") and model.pooler is None
    return {
        "headwise": VERSION,
        "form": form,
        "class": type(model).__name__,
        "arguments": {"add_pooling_layer": False} if without_pooler else {},
        "buffers": sorted(
            set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        ),
        "layers": layers,
    }


def _as_zeroed(kept: Kept) -> Kept:
    """The same heads in a model of the first shapes."""
    if kept.zeroed:
        return kept
    here = tuple(i if i in kept.query else None for i in range(kept.query_of))
    return Kept(here, (), kept.query_of, 0, zeroed=True)


def write_record(folder: Path, model: nn.Module, form: str) -> None:
    text = json.dumps(record(model, form), indent=2)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What headwise.save wrote about the heads of a directory's model, or None."""
    if not (folder / FILE).exists():
        return None
    found = read_json(folder / FILE)
    layers = found.get("layers")
    if found.get("headwise") != VERSION or not isinstance(layers, dict):
        raise CheckpointError(
            f"{FILE} is not one that this version wrote (headwise {found.get('headwise')!r}, known: 1)"
        )
    try:
        for name, entry in layers.items():
            layers[name] = _kept(entry)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{FILE} does not say what the heads of {name!r} are: {error}") from None
    return found


def _kept(entry: dict[str, Any]) -> Kept:
    query, kv = (tuple(entry[key]) for key in ("query", "kv"))
    return Kept(query, kv, int(entry["query_of"]), int(entry["kv_of"]), bool(entry["zeroed"]))


def remember(model: Any, found: dict[str, Any]) -> Any:
    """The original numbers of the heads, on a model whose shapes are right already."""
    by_name = {site.name: site.module for site in anatomy.sites(model)}
    for name, kept in found["layers"].items():
        if name in by_name:
            by_name[name].headwise_kept = kept
    model.headwise_heads = originals(model)
    attach(model)
    return model


def rebuilt(cls: Any, folder: Path, found: dict[str, Any], how: dict[str, Any]) -> Any:
    """A compact directory's model: the architecture of config.json, cut to the record, with the file's weights."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    how = dict(how)
    dtype = how.pop("dtype", None)
    with no_init_weights():
        model = cls._from_config(AutoConfig.from_pretrained(folder), **found["arguments"], **how)
    model.name_or_path = str(folder)
    model.config._name_or_path = str(folder)
    _cut(model, found["layers"])
    _fill(model, folder)
    _generation(model, folder)
    return model if dtype is None else model.to(dtype)


def _cut(model: Any, layers: dict[str, Kept]) -> None:
    sites = {site.name: site for site in anatomy.sites(model)}
    for name, kept in layers.items():
        if name not in sites:
            raise CheckpointError(f"{FILE} speaks of {name!r}, which {type(model).__name__} has not")
        if kept.zeroed:
            sites[name].module.headwise_kept = kept  # type: ignore[assignment]
            continue
        place = projections(model, sites[name])
        if (place.query, place.kv) != (kept.query_of, kept.kv_of):
            raise CheckpointError(
                f"{FILE} is for {kept.query_of} heads at {name}, config.json says {place.query}: not the same model"
            )
        reshape(place, list(kept.query), list(kept.kv))
    pick_shared(list(anatomy.sites(model)))
    model.headwise_heads = originals(model)
    attach(model)


def _fill(model: Any, folder: Path) -> None:
    opened = open_safetensors(folder / "model.safetensors", "cpu")
    weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # this is no dict
    for name in set(weights) - set(model.state_dict()):
        owner, _, leaf = name.rpartition(".")
        linear = model.get_submodule(owner) if leaf == "bias" else None
        if linear is None or "bias" not in linear._parameters:
            raise CheckpointError(f"the checkpoint has a tensor {name!r} that {FILE} does not account for")
        linear.bias = nn.Parameter(weights[name])  # a removed head's constant, where there was no output bias
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise CheckpointError(f"tensor {name!r} is {shown(tensor.shape)}, {FILE} says {shown(shapes[name])}")
    missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    model.tie_weights()
    lost = sorted(set(missing) - set(ties(model)))
    if lost:
        raise CheckpointError(f"the checkpoint lacks {lost[0]!r}{f' and {len(lost) - 1} more' * (len(lost) > 1)}")


def ties(model: Any) -> dict[str, str]:
    """For each name in a model's state dict that is another by the same tensor, or is that other, the first of them."""
    seen: dict[int, str] = {}
    names = {name: seen.setdefault(id(x), name) for name, x in model.state_dict(keep_vars=True).items()}
    again = {first for name, first in names.items() if first != name}
    return {name: first for name, first in names.items() if first in again}


def _generation(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
