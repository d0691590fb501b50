"""The masks of nn.MultiheadAttention as `attend` takes them: True hides there, and means "may attend" here."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MaskError
from ..options import VisibilityOptions
from ..torch_modes import is_readable
from ..validation import shown


class MaskSizes(NamedTuple):
    """The sizes that masks must have."""

    batch: int
    heads: int
    queries: int
    keys: int
    extra_keys: int  # appended by add_bias_kv and add_zero_attn: every query sees them, and masks do not count them


def visible_keys(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
    size: MaskSizes,
    dtype: torch.dtype,
) -> VisibilityOptions[Tensor]:
    """The options of `attend` that hide what these arguments of nn.MultiheadAttention.forward hide.

    is_causal is a hint that attn_mask is the causal mask. PyTorch trusts it where nothing else hides keys and no
    weights are wanted; so does this, except beside appended keys, which PyTorch's kernel would hide against the mask.
    A mask that is seen to be the causal one is not read at all by the kernel, which halves its work.
    """
    if is_causal and attn_mask is None:
        raise MaskError(
            "is_causal=True is a hint about attn_mask, got none; "
            "give nn.Transformer.generate_square_subsequent_mask(tokens)"
        )
    hidden = None if key_padding_mask is None else _padding(key_padding_mask, size)
    causal: VisibilityOptions[Tensor] = {
        "mask": None if hidden is None else _visible(hidden),
        "causal": True,
        "offset": 0,
    }
    if is_causal and hidden is None and not (need_weights or size.extra_keys):
        return causal
    if attn_mask is not None:
        attention = _attention(attn_mask, size)
        if not size.extra_keys and _is_triangle(attn_mask):
            return causal
        hidden = attention if hidden is None else _merge(attention, hidden, dtype)
    if hidden is None:
        return {}
    mask = _visible(hidden)
    if size.extra_keys:
        mask = F.pad(mask, (0, size.extra_keys), value=mask.dtype == torch.bool)
    return {"mask": mask}


def _attention(mask: Tensor, size: MaskSizes) -> Tensor:
    """attn_mask (T, S) or (B * H, T, S) in four dimensions."""
    _check_type("attn_mask", mask)
    flat, per_head = (size.queries, size.keys), (size.batch * size.heads, size.queries, size.keys)
    if tuple(mask.shape) == flat:
        return mask[None, None]
    if tuple(mask.shape) == per_head:
        return mask.unflatten(0, (size.batch, size.heads))
    raise MaskError(
        f"attn_mask must be {shown(flat)} or (B * heads, T, S) = {shown(per_head)}, got {shown(mask.shape)}"
    )


def _padding(mask: Tensor, size: MaskSizes) -> Tensor:
    """key_padding_mask (B, S) in four dimensions; bool if it only hides keys.

    nn.TransformerEncoder makes its bool masks float, and keys that do not exist are cheaper to skip than to add to.
    """
    _check_type("key_padding_mask", mask)
    if tuple(mask.shape) != (size.batch, size.keys):
        raise MaskError(f"key_padding_mask must be {shown((size.batch, size.keys))}, got {shown(mask.shape)}")
    if mask.is_floating_point() and not mask.requires_grad and is_readable(mask):
        hidden = mask == -torch.inf
        if bool((hidden | (mask == 0)).all()):
            mask = hidden
    return mask[:, None, None]


def _check_type(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"{name} must be bool (True hides) or float (added to the scores), got {kind}; use .bool()")


def _is_triangle(mask: Tensor) -> bool:
    """Whether a mask is seen to be the causal one and nothing else."""
    if mask.dim() != 2 or min(mask.shape) < 2 or mask.requires_grad or not is_readable(mask):
        return False
    if mask[0, 1].item() != (True if mask.dtype == torch.bool else -torch.inf):  # most other masks differ there
        return False
    triangle = torch.ones_like(mask, dtype=torch.bool).triu(1)  # on the mask's device, whatever the default is
    return torch.equal(mask, triangle if mask.dtype == torch.bool else _as_bias(triangle, mask.dtype))


def _merge(attention: Tensor, padding: Tensor, dtype: torch.dtype) -> Tensor:
    """Both masks in one: bool if both are, float otherwise."""
    if attention.dtype == padding.dtype == torch.bool:
        return attention | padding
    return _as_bias(attention, dtype) + _as_bias(padding, dtype)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where a bool mask hides; a float mask is returned unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _visible(hidden: Tensor) -> Tensor:
    """A mask in which True means "may attend"; a float mask is returned unchanged."""
    return ~hidden if hidden.dtype == torch.bool else hidden
