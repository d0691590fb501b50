"""A transformers class and config that describe a pruned model, where there are any."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch

from ...errors import UnsupportedError
from ..structure.heads import QUERY_HEADS
from ..structure.projections import layer_shape
from ..structure.sites import attention_sites
from .restored_heads import empty_restored

HEADS_PER_LAYER = "num_attention_heads_per_layer"  # Laguna's list of query heads
COMPARED_ATTRIBUTES = ("scaling", "head_dim", "num_key_value_groups", "attention_head_size", "key_value_proj_dim")


def empty_model(cls: Any, config: Any) -> Any:
    """The model of a config on the meta device."""
    with torch.device("meta"):
        return cls._from_config(copy.deepcopy(config))


def full_config(model: Any) -> tuple[Any, Any]:
    """The class and config of a pruned model with all of its heads.

    A model that was loaded from a plain directory has a config with fewer heads than it had at first.
    """
    restored = empty_restored(model)
    try:
        fresh = empty_model(type(model), model.config)
    except Exception:  # a class that cannot be built from its config alone
        return type(model), model.config
    shapes = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    if all(shapes.get(name, tensor.shape) == tensor.shape for name, tensor in restored.state_dict().items()):
        return type(model), model.config
    plain, _ = plain_config(restored)
    return plain or (type(model), model.config)


def plain_config(model: Any) -> tuple[tuple[Any, Any] | None, str]:
    """A class and config of transformers whose shapes are this model's, or None and the reason."""
    sites = attention_sites(model)
    try:
        counts = [layer_shape(model, site)[2:] for site in sites]  # also of layers whose heads cannot be cut out
    except UnsupportedError as error:
        return None, f"the heads of one of its layers are not known: {error}"
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    uneven = len(set(counts)) > 1
    reason = f"{model.config.model_type} derives the width of a head from their number"
    if uneven:
        reason = f"its layers have different numbers of heads, which no config of {model.config.model_type} can say"
    one_kind = len({site.kind for site in sites}) == 1
    candidates = chain(
        () if uneven else _candidates(model, *counts[0]), _candidates_per_layer(model, counts) if one_kind else ()
    )
    for cls, config in candidates:
        try:
            config = type(config).from_dict(config.to_dict())
            fresh = empty_model(cls, config)
        except Exception as error:  # configs raise many kinds of errors
            if uneven:
                continue
            reason = f"its config refuses: {' '.join(str(error).split())[:120]}"
            continue
        same_shapes = {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes
        if same_shapes and _same_attributes(model, fresh):
            return (cls, config), ""
    return None, reason


def _candidates(model: Any, query: int, kv: int) -> Iterator[tuple[Any, Any]]:
    """Classes and configs that may describe a model with these numbers of heads."""
    config = copy.deepcopy(model.config)
    if getattr(config, "is_heterogeneous", False):
        config.per_layer_config = None  # the counts of heads may be read only after this
    module = attention_sites(model)[0].module
    for names, heads in ((QUERY_HEADS, query), (("num_key_value_heads",), kv)):
        for name in names:
            # SegFormer and Swin have a list, with a number per stage
            if hasattr(config, name) and isinstance(getattr(config, name), int | None):
                setattr(config, name, heads)
    dim = getattr(module, "head_dim", None)
    if isinstance(dim, int) and not hasattr(config, "d_kv"):
        with suppress(AttributeError):  # Falcon's is computed
            config.head_dim = dim
    yield type(model), config
    if config.model_type == "llama" and not config.attention_bias and not config.mlp_bias:
        # LlamaConfig requires that heads divide the width; Mistral is the same model without that rule
        import transformers

        values = {key: x for key, x in config.to_dict().items() if key not in ("model_type", "architectures")}
        other = getattr(transformers, type(model).__name__.replace("Llama", "Mistral"), None)
        if other is not None:
            yield other, transformers.MistralConfig(**{**values, "sliding_window": None})


def _candidates_per_layer(model: Any, counts: list[tuple[int, int]]) -> Iterator[tuple[Any, Any]]:
    """Configs with numbers of heads per layer; few classes read them, which their shapes show."""
    if len(counts) != getattr(model.config, "num_hidden_layers", None):
        return
    queries, kvs = zip(*counts, strict=True)
    if hasattr(model.config, HEADS_PER_LAYER):
        config = copy.deepcopy(model.config)
        setattr(config, HEADS_PER_LAYER, list(queries))
        if len(set(kvs)) == 1:
            config.num_key_value_heads = kvs[0]
        yield type(model), config
    if hasattr(model.config, "per_layer_config"):  # of recent versions of transformers
        config = copy.deepcopy(model.config)
        overrides: dict[Any, dict[str, Any]] = config.to_dict().get("per_layer_config") or {}
        by_layer = {int(layer): values for layer, values in overrides.items()}
        names = ("num_attention_heads", "num_key_value_heads")
        config.per_layer_config = {
            layer: by_layer.get(layer, {}) | dict(zip(names, heads, strict=True)) for layer, heads in enumerate(counts)
        }
        yield type(model), config


def _same_attributes(model: Any, fresh: Any) -> bool:
    """Whether the attention layers of two models have the same numbers as attributes."""
    pairs = zip(attention_sites(model), attention_sites(fresh), strict=True)
    return all(
        getattr(ours.module, name, None) == getattr(theirs.module, name, None)
        for ours, theirs in pairs
        for name in COMPARED_ATTRIBUTES
    )
