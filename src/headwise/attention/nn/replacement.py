"""Replace every nn.MultiheadAttention of a model by headwise's attention, and put PyTorch's back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from ...errors import UnsupportedError
from .torch_encoder import HeadwiseTransformerEncoderLayer
from .torch_module import HeadwiseMultiheadAttention, allow_fast_path, forbid_fast_path

Model = TypeVar("Model", bound=nn.Module)


def replace_attention(model: Model) -> Model:
    """Compute every nn.MultiheadAttention of a model with headwise's attention, in place.

    The module objects stay, with their parameters, hooks and mode. Only their class changes, and that of
    nn.TransformerEncoderLayer around them. Optimizers, state dicts, shared modules and code that reads attributes such
    as `batch_first` and `in_proj_weight` are not affected. `restore_attention` restores PyTorch's classes.

    Outputs equal PyTorch's, except for queries with no visible keys (fully masked rows), where PyTorch returns NaN and
    headwise returns zeros. In inference PyTorch's nn.TransformerEncoderLayer would bypass the module. The replaced
    layer calls it, except for sequences of at most 256 tokens without masks, which PyTorch's fused layer computes
    faster.

    Subclasses of nn.MultiheadAttention, including quantised ones, have their own code. They are not changed, and a
    warning names them.

    Args:
        model: changed in place.

    Returns:
        The same model.

    Raises:
        UnsupportedError: if no nn.MultiheadAttention can be replaced; the model is then unchanged.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
        >>> headwise.replace_attention(encoder)
    """
    _check_module("replace_attention", model)
    plain, count, reasons = [], 0, []
    for name, module in _attention_modules(model):
        if isinstance(module, HeadwiseMultiheadAttention):
            count += 1
        elif reason := _why_not(module):
            reasons.append(f"{name or 'the module'} {reason}")
        else:
            plain.append(module)
    report = "; ".join(reasons)
    if not plain and not count:
        end = f": {report}" if reasons else ""
        raise UnsupportedError(f"{type(model).__name__} has no nn.MultiheadAttention that headwise can replace{end}")
    if reasons:
        warnings.warn(f"replace_attention leaves some attention as it is: {report}", stacklevel=2)
    for module in plain:
        module.__class__ = HeadwiseMultiheadAttention
    layers = _encoder_layers(model)
    for layer in layers:
        layer.__class__ = HeadwiseTransformerEncoderLayer
    for module in {*plain} - {layer.self_attn for layer in layers}:
        forbid_fast_path(module)
    return model


def restore_attention(model: Model) -> Model:
    """Undo `replace_attention` in place: every replaced module gets PyTorch's class back.

    Args:
        model: changed in place; a model without replaced modules is not changed.

    Returns:
        The same model.

    Example:
        >>> headwise.restore_attention(headwise.replace_attention(model))
    """
    _check_module("restore_attention", model)
    ours = [x for x in _attention_modules(model) if isinstance(x[1], HeadwiseMultiheadAttention)]
    for name, module in ours:
        if type(module) is not HeadwiseMultiheadAttention:
            kind = type(module).__name__
            raise UnsupportedError(
                f"{name or 'the module'} has become a {kind} since it was replaced; undo that first (such as "
                "torch.nn.utils.parametrize.remove_parametrizations)"
            )
    for _, module in ours:
        module.__class__ = nn.MultiheadAttention
        allow_fast_path(module)
    for layer in model.modules():
        if type(layer) is HeadwiseTransformerEncoderLayer:
            layer.__class__ = nn.TransformerEncoderLayer  # type: ignore[assignment]  # mypy takes it for narrowed
    return model


def _encoder_layers(model: nn.Module) -> list[nn.TransformerEncoderLayer]:
    """PyTorch's own layers that are the only users of a replaced attention module."""
    parents: dict[nn.Module, set[nn.Module]] = {}
    for parent in model.modules():
        for child in parent.children():
            parents.setdefault(child, set()).add(parent)
    layers = [layer for layer in model.modules() if type(layer) is nn.TransformerEncoderLayer]
    replaced = [layer for layer in layers if type(layer.self_attn) is HeadwiseMultiheadAttention]
    return [layer for layer in replaced if parents[layer.self_attn] <= {*layers}]


def _check_module(name: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"{name} takes a module, got {type(model).__name__}")


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield name, module


def _why_not(module: nn.MultiheadAttention) -> str | None:
    """Why a module cannot be replaced, as the end of a sentence, or None."""
    kind = type(module)
    if kind is not nn.MultiheadAttention:
        return f"is a {kind.__module__}.{kind.__qualname__}, whose own code would be lost"
    if "forward" in vars(module):
        return "has a forward of its own, set on the module, which would hide headwise's"
    return None
