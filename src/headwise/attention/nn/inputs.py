"""Validation of a stack's inputs besides its ids, and their conversion to what its blocks take."""

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


def check_integers(name: str, x: Tensor, form: str, fits: bool, shape: Sequence[int] | None = None) -> None:
    """Require whole numbers of the described shape, whose sizes are `shape`: only shown, since they may be symbols."""
    if not fits or x.dtype not in (torch.int64, torch.int32):
        form = form if shape is None else f"{form} = {shown(shape)}"
        raise ShapeError(f"{name} must be whole numbers {form}, got {x.dtype} {shown(x.shape)}")


def range_of(x: Tensor, unknown: int = -1) -> tuple[int, int]:
    """The smallest and the largest of these numbers; where they cannot be read, 0 and `unknown`."""
    if not is_readable(x) or not x.numel():
        return 0, unknown
    low, high = x.aminmax()
    return int(low), int(high)


def key_mask(mask: Tensor | None, name: str, shape: Sequence[int], flat: bool = False) -> Tensor | None:
    """A mask of real tokens (B, Tk) in attend's form, (B, 1, 1, Tk) bool; a 4-D mask is returned unchanged."""
    if mask is None or (mask.dim() == 4 and not flat):
        return mask
    if tuple(mask.shape) != tuple(shape):
        also = "" if flat else ", or four dimensions as in attend"
        raise MaskError(f"{name} must be (B, tokens) = {shown(shape)}{also}, got {shown(mask.shape)}")
    if mask.is_floating_point() or (is_readable(mask) and mask.numel() and not bool(((mask == 0) | (mask == 1)).all())):
        raise MaskError(f"{name} must be True or 1 for a real token, False or 0 for padding, got other {mask.dtype}s")
    return mask.bool()[:, None, None, :]


def positions_of(ids: Tensor, mask: Tensor | None, cache: Caches | None) -> Tensor:
    """The positions of a causal stack's tokens: counted from the first real one in a padding mask, else consecutive."""
    if mask is None or mask.dim() != 2:
        return (KVCache() if cache is None else cache.layers[0]).positions(ids.shape[1], ids.device)
    real = mask.long()
    return ((real.cumsum(1) - 1) * real)[:, mask.shape[1] - ids.shape[1] :]


def mask_of_cached_keys(mask: Tensor | None, cache: KVCache | None, count: int) -> Tensor | None:
    """The columns of a mask over all tokens for the keys that a sliding cache retains, with `count` new ones."""
    if mask is None or not isinstance(cache, SlidingCache) or mask.shape[-1] == 1:
        return mask
    return mask[..., mask.shape[-1] - min(cache.length, cache.window - 1) - count :]
