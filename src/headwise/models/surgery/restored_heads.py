"""A pruned model with every head back in its place, the removed ones as zeros."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ...errors import HeadwiseError
from ..structure.projections import projections
from ..structure.sites import attention_sites, first_per_module
from .kept_heads import kept_heads
from .reshape import reshape_heads, zero_padding
from .shared_biases import share_biases


def restore_heads(model: Any) -> Any:
    """A copy with all heads at their original positions, the removed ones zeroed."""
    for site in first_per_module(attention_sites(model)):
        record = kept_heads(site.module)
        if record is not None and record.padding and len(zero_padding(projections(model, site))) < len(record.padding):
            raise HeadwiseError(
                f"this model has no zeroed form: training changed a zeroed head of {site}, which pads a group and has "
                "no place in the original"
            )
    return _restore(copy.deepcopy(model))


def empty_restored(model: Any) -> Any:
    """The same on the meta device, without memory for the weights."""
    memo: dict[int, Any] = {id(x): torch.empty_like(x, device="meta") for x in model.buffers()}
    for x in model.parameters():
        memo[id(x)] = nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=x.requires_grad)
    return _restore(copy.deepcopy(model, memo))


def _restore(model: Any) -> Any:
    sites = attention_sites(model)
    for site in first_per_module(sites):
        record = kept_heads(site.module)
        if record is None or record.zeroed:
            continue
        query = [record.query.index(i) if i in record.query else None for i in range(record.query_of)]
        kv = [record.kv.index(i) if i in record.kv else None for i in range(record.kv_of)]
        reshape_heads(projections(model, site), query, kv)
    share_biases(sites, restored=True)
    return model
