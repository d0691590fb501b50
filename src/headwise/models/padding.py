"""Which queries of a self-attention call are tokens and not padding, by the arguments of modules that are known."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.nn.module import MultiHeadAttention
from .multihead import visible_keys


def real_queries(
    mask: Tensor | None, lengths: Tensor | None, offset: int | Tensor, q: Tensor, k: Tensor
) -> Tensor | None:
    """(B, Tq) bool: the queries whose own keys exist, by lengths (B,) and by a mask that is the same for all queries.

    mask: (B, H, Tq, Tk) in attend's polarity. q (B, ..., Tq, D), k (B, ..., Tk, D). None where neither tells.
    """
    by_key = mask is not None and mask.shape[2] == 1
    if lengths is None and not by_key:
        return None
    batch, queries, keys = q.shape[0], q.shape[-2], k.shape[-2]
    exists = torch.ones(batch, keys, dtype=torch.bool, device=q.device)
    if mask is not None and by_key:
        visible = mask if mask.dtype == torch.bool else mask != -torch.inf
        exists = exists & visible.any(1)[:, 0]
    if lengths is not None:
        exists = exists & (torch.arange(keys, device=q.device) < lengths.to(q.device)[:, None])
    first = torch.as_tensor(offset, device=q.device).expand(batch)
    own_keys = first[:, None] + torch.arange(queries, device=q.device)  # (B, Tq)
    return exists.gather(1, own_keys.clamp(0, keys - 1))


def real_queries_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The same for a call of a known module, by its arguments; None where they do not tell."""
    try:
        call = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError:  # the call fails by itself
        return None
    query, key = call.get("query"), call.get("key")
    if not isinstance(query, Tensor) or query.is_nested:
        return None
    if isinstance(module, nn.MultiheadAttention):
        padding = call.get("key_padding_mask")
        if not isinstance(padding, Tensor) or not isinstance(key, Tensor) or query.shape != key.shape:
            return None
        own = query is key or torch.equal(query, key)
        return torch.atleast_2d(visible_keys(padding)) if own else None
    if not isinstance(module, MultiHeadAttention) or not (key is None or key is query):
        return None
    mask, lengths, cache = call.get("mask"), call.get("lengths"), call.get("cache")
    if cache is not None:
        lengths = None  # they count cached keys too
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] >= query.shape[1]:
        mask = mask[..., mask.shape[-1] - query.shape[1] :]
    else:
        mask = None
    return real_queries(mask, lengths, 0, query, query)
