"""W_O of an attention layer, how many query heads it mixes, and checks of head numbers against that count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ...attention import validation
from ...errors import HeadwiseError, UnsupportedError
from .adapters import find_adapter, member
from .discovery import class_source, written_class
from .observed import ObservedLayer, observed_layers
from .sites import Site

# Names of the module that is W_O, in the attention module or, for BERT's relatives, in its sibling "output".
W_O_NAMES = (
    "o_proj", "out_proj", "c_proj", "o", "dense", "out_lin", "Wo", "wo", "proj", "projection", "projection_layer",
    "W_O", "W_o", "w_o", "linear_out", "output_projection", "to_out", "to_out.0", "attn_out", "out", "proj_out",
    "output.dense", "output",
)  # fmt: skip
# Names of the number of query heads, in the attention module or in its config.
QUERY_HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "num_head", "attn_heads",
    "encoder_attention_heads",
)  # fmt: skip
HEAD_DIM = ("v_head_dim", "value_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")


def w_o(model: nn.Module, site: Site) -> tuple[str, nn.Module]:
    """The path and the module of the projection that mixes a site's heads."""
    cls = written_class(site.module)
    adapter = find_adapter(cls)
    if adapter is not None:
        out = member(site.module, adapter.output)
        if not isinstance(out, nn.Module) or not input_width(out):
            raise UnsupportedError(
                f"W_O of {cls.__name__} (at {site.place}) was declared as {adapter.output!r}, which is no linear layer"
            )
        return f"{site.name}.{adapter.output}" if site.name else adapter.output, out
    layers = observed_layers(site.module)
    if layers:
        return _observed_output(model, site, layers)
    if "multi_head_attention_forward(" in class_source(cls):
        raise UnsupportedError(
            f"{cls.__name__} (at {site.place}) gives its W_O to PyTorch's multi_head_attention_forward "
            "instead of calling it; nothing can be put before it"
        )
    parent = site.name.rpartition(".")[0]
    for base in (site.name, parent):
        for name in W_O_NAMES:
            path = f"{base}.{name}" if base else name
            module = _submodule(model, path)
            if module is not None and input_width(module):
                return path, module
    raise UnsupportedError(
        f"W_O of {cls.__name__} (at {site.place}) was not found; no linear layer has one of the names "
        f"{', '.join(W_O_NAMES[:6])}, ...; say what it is called with headwise.adapt"
    )


def _observed_output(model: nn.Module, site: Site, layers: list[ObservedLayer]) -> tuple[str, nn.Module]:
    """W_O as it was seen while the model ran: the linear layer that read the heads' outputs."""
    w_o = layers[min(site.turn, len(layers) - 1)].w_o
    problem = None
    if any(layer.part for layer in layers):
        problem = "it attends more than once per call, and W_O does not tell which"
    elif w_o is None:
        problem = "no linear layer of the model was called with its heads' outputs"
    elif any(layer.readers > 1 for layer in layers):
        problem = "several linear layers read its heads' outputs"
    elif not all(layer.in_order for layer in layers):
        problem = "its heads' outputs do not lie head by head there"
    elif any(layer.w_o is not w_o for layer in layers):
        problem = "it serves several layers, each with its own"
    if w_o is None or problem:
        raise UnsupportedError(f"W_O of {type(site.module).__name__} (at {site.place}) is not known: {problem}")
    for path, module in model.named_modules():
        if module is w_o:
            return path, w_o
    raise UnsupportedError(f"W_O of {type(site.module).__name__} (at {site.place}) is outside of this model")


def input_width(linear: nn.Module) -> int | None:
    """The input width of a linear layer (or GPT-2's Conv1D); None for any other module."""
    width = getattr(linear, "in_features", getattr(linear, "nx", None))
    if width is None and type(linear).__name__ == "Conv1D":
        width = linear.get_parameter("weight").shape[0]
    return width if isinstance(width, int) else None


def query_heads(model: nn.Module, site: Site) -> int:
    """How many query heads a site has, by its own attributes, then by its config's."""
    width = input_width(w_o(model, site)[1]) or 0
    cls = written_class(site.module)
    adapter = find_adapter(cls)
    if adapter is not None:
        return adapter.query_heads(site.module)
    layers = observed_layers(site.module)
    if layers:
        return layers[min(site.turn, len(layers) - 1)].heads
    config = getattr(site.module, "config", None) or getattr(model, "config", None)
    for holder in (site.module, config, getattr(config, "text_config", None)):
        for name in QUERY_HEADS:
            heads = getattr(holder, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0 and width % heads == 0:
                _check_layout(site, heads, width)
                return heads
    raise UnsupportedError(f"the number of heads of {type(site.module).__name__} (at {site.place}) was not found")


def head_numbers(site: Site, requested: Any, count: int | None) -> list[int]:
    """The heads that a user named for a site, one number or several, as a list.

    Args:
        site: the layer, for the error messages.
        requested: a head number, or an iterable of head numbers.
        count: how many query heads the layer has; None where only the first call will tell.

    Raises:
        HeadwiseError: for anything but head numbers, and for a number that the layer does not have.
    """
    if isinstance(requested, int) and not isinstance(requested, bool):
        requested = [requested]
    if isinstance(requested, (str, bytes)) or not isinstance(requested, Iterable):
        raise HeadwiseError(f"the heads of {site} must be a list of numbers, got {requested!r}")
    try:
        return validation.pick("head", requested, 1 << 30 if count is None else count)
    except HeadwiseError as error:
        raise HeadwiseError(f"{site}: {error}") from None


def _check_layout(site: Site, heads: int, width: int) -> None:
    """Refuse a W_O that reads anything besides the heads: ConvBERT, for example, has convolutions there."""
    for name in HEAD_DIM:
        dim = getattr(site.module, name, None)
        if isinstance(dim, int) and dim > 0:
            if heads * dim != width:
                raise UnsupportedError(
                    f"{type(site.module).__name__} (at {site.place}) has {heads} heads of {dim}, but its W_O reads "
                    f"{width}; what belongs to which head is not known"
                )
            return


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    module: Any = model
    for part in path.split("."):
        module = getattr(module, part, None)
        if not isinstance(module, nn.Module):
            return None
    return module
