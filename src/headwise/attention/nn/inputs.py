"""What a stack is given besides its ids, checked and brought into the form that its blocks take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import MaskError, ShapeError
from ..torch_modes import is_readable
from ..validation import shown
from .kv_cache import KVCache, SlidingCache

if TYPE_CHECKING:
    from .stack import Caches


def check_integers(name: str, given: Tensor, form: str, fits: bool) -> None:
    if not fits or given.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"{name} must be whole numbers {form}, got {given.dtype} {shown(given.shape)}")


def range_of(given: Tensor, unseen: int = -1) -> tuple[int, int]:
    """The smallest and the largest of these numbers; where that cannot be seen, 0 and `unseen`."""
    if not is_readable(given) or not given.numel():
        return 0, unseen
    low, high = given.aminmax()
    return int(low), int(high)


def key_mask(mask: Tensor | None, name: str, shape: Sequence[int], flat: bool = False) -> Tensor | None:
    """A mask of real tokens (B, Tk) as attend wants it, (B, 1, 1, Tk) bool; one of four dimensions as it is."""
    if mask is None or (mask.dim() == 4 and not flat):
        return mask
    if tuple(mask.shape) != tuple(shape):
        also = "" if flat else ", or four dimensions as in attend"
        raise MaskError(f"{name} must be (B, tokens) = {shown(shape)}{also}, got {shown(mask.shape)}")
    if mask.is_floating_point() or (is_readable(mask) and mask.numel() and not bool(((mask == 0) | (mask == 1)).all())):
        raise MaskError(f"{name} must be True or 1 for a real token, False or 0 for padding, got other {mask.dtype}s")
    return mask.bool()[:, None, None, :]


def positions_of(ids: Tensor, mask: Tensor | None, cache: Caches | None) -> Tensor:
    """Where the tokens of a causal stack stand: from the first real one in a padding mask, else one after another."""
    if mask is None or mask.dim() != 2:
        return (KVCache() if cache is None else cache.layers[0]).positions(ids.shape[1], ids.device)
    real = mask.long()
    return ((real.cumsum(1) - 1) * real)[:, mask.shape[1] - ids.shape[1] :]


def of_held_keys(mask: Tensor | None, cache: KVCache | None, count: int) -> Tensor | None:
    """The columns of a mask over all tokens that a sliding cache will show, with `count` new ones."""
    if mask is None or not isinstance(cache, SlidingCache) or mask.shape[-1] == 1:
        return mask
    return mask[..., mask.shape[-1] - min(cache.length, cache.window - 1) - count :]
