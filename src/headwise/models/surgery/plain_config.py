"""A transformers class and config that describe a pruned model, where there are any."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ..structure.heads import QUERY_HEADS
from ..structure.projections import projections
from ..structure.sites import attention_sites

COMPARED_ATTRIBUTES = ("scaling", "head_dim", "num_key_value_groups", "attention_head_size", "key_value_proj_dim")


def empty_model(cls: Any, config: Any) -> Any:
    """The model of a config on the meta device."""
    with torch.device("meta"):
        return cls._from_config(copy.deepcopy(config))


def plain_config(model: Any) -> tuple[tuple[Any, Any] | None, str]:
    """A class and config of transformers whose shapes are this model's, or None and the reason."""
    counts = {(p.query, p.kv) for p in (projections(model, site) for site in attention_sites(model))}
    if len(counts) > 1:
        return None, "its layers have different numbers of heads, which no transformers config can say"
    query, kv = counts.pop()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    reason = f"{model.config.model_type} derives the width of a head from their number"
    for cls, config in _candidates(model, query, kv):
        try:
            config = type(config).from_dict(config.to_dict())
            fresh = empty_model(cls, config)
        except Exception as error:  # configs raise many kinds of errors
            reason = f"its config refuses: {' '.join(str(error).split())[:120]}"
            continue
        same_shapes = {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes
        if same_shapes and _same_attributes(model, fresh):
            return (cls, config), ""
    return None, reason


def _candidates(model: Any, query: int, kv: int) -> Iterator[tuple[Any, Any]]:
    """Classes and configs that may describe a model with these numbers of heads."""
    config = copy.deepcopy(model.config)
    module = attention_sites(model)[0].module
    for name in QUERY_HEADS:
        if hasattr(config, name):
            setattr(config, name, query)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = kv
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


def _same_attributes(model: Any, fresh: Any) -> bool:
    """Whether the attention layers of two models have the same numbers as attributes."""
    pairs = zip(attention_sites(model), attention_sites(fresh), strict=True)
    return all(
        getattr(ours.module, name, None) == getattr(theirs.module, name, None)
        for ours, theirs in pairs
        for name in COMPARED_ATTRIBUTES
    )
