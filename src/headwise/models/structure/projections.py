"""W_Q, W_K, W_V and W_O of one attention layer: which rows of which linear layer belong to which head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ...errors import UnsupportedError
from ...plans import LayerShape
from .adapters import find_adapter, member
from .bias_tables import TABLE, has_shared_table
from .discovery import written_class
from .heads import input_width, query_heads, w_o
from .layouts import EXCEPTIONS, LAYER_NAMES, LAYOUTS, PER_HEAD, SAME_FOR_ALL_HEADS, SLICES, Layout
from .linear_layers import output_width, weight_problem
from .sites import Site, attention_sites

# the parameters of nn.MultiheadAttention
MULTIHEAD = {
    "in_proj_weight": (0, "qkv"),
    "in_proj_bias": (0, "qkv"),
    "q_proj_weight": (0, "q"),
    "k_proj_weight": (0, "k"),
    "v_proj_weight": (0, "v"),
    "bias_k": (2, "k"),
    "bias_v": (2, "v"),
}
OVER_ALL_HEADS = "its {} runs over all heads at once, so that removing one is not the same as masking it"


class ProjectionsError(UnsupportedError):
    """Heads that cannot be cut out, or whose projections are not known; `reason` alone says why."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[ProjectionsError], tuple[str, str]]:
        return ProjectionsError, (self.args[0], self.reason)


@dataclass(frozen=True)
class Projection:
    """One linear layer, and the order in which its rows hold the heads."""

    path: str
    linear: nn.Module
    layout: Layout


@dataclass(frozen=True)
class Projections:
    """All parameters that belong to the heads of one site."""

    site: Site
    query: int  # heads
    kv: int  # heads
    value_dim: int
    out: nn.Module  # W_O
    out_path: str
    parts: list[Projection]
    # other parameters: the dimension that counts heads, and "q", "k" or "v" for whose, or the layout of several
    per_head: dict[str, tuple[int, str]] = field(default_factory=dict)
    multiple: int = 1  # the number of heads must be a multiple of this


def projections(model: nn.Module, site: Site) -> Projections:
    """Locate a site's W_Q, W_K, W_V and W_O; refuse layers in which removing a head would not be exact.

    Ranks may have parts of the weights: who reads their values checks that, or takes the `whole_weight`.
    """
    layer = find_projections(model, site)
    _check_other_parameters(layer)
    return layer


def find_projections(model: nn.Module, site: Site, *, plain: bool = True) -> Projections:
    """Like projections, but also for modules with other parameters that forbid removing a head.

    plain: refuse layers with an adapter or quantized weights; their widths, and so the heads, are known all the same.
    """
    out_path, out = w_o(model, site)
    if plain:
        check_zeroable(site, out)
    query = query_heads(model, site)
    value_dim = (input_width(out) or 0) // query
    named_layers = list(_named_layers(site))
    if not named_layers and not isinstance(site.module, nn.MultiheadAttention):
        raise refusal(
            site, "no layer of a known name makes its queries, keys and values (headwise.adapt declares them)"
        )
    kv = _kv_heads(site, named_layers, query, value_dim)
    parts = [
        Projection(f"{site.name}.{name}".lstrip("."), linear, LAYOUTS["q" if layout == "mla" else layout])
        for name, linear, layout in named_layers
    ]
    for part in parts:
        if plain:
            _check_linear(site, part.linear)
        blocks, rows = len(part.layout(query, kv)), output_width(part.linear)
        if rows % blocks:
            raise refusal(site, f"{part.path} has {rows} rows for {blocks} blocks of heads")
    if plain:
        _check_linear(site, out)
    multiple = SLICES if any(layout == "sliced" for _, _, layout in named_layers) else 1
    return Projections(site, query, kv, value_dim, out, out_path, parts, dict(_per_head(site, query, kv)), multiple)


def layer_shapes(model: nn.Module) -> tuple[LayerShape, ...]:
    """Kind, layer number, query heads and KV heads of every attention layer of a model.

    If projections are not known, every query head is assumed to have its own keys and values.
    """
    return tuple(layer_shape(model, site) for site in attention_sites(model))


def layer_shape(model: nn.Module, site: Site) -> LayerShape:
    """The same of one layer, also where its weights or norms forbid that a head is removed."""
    try:
        layer = find_projections(model, site, plain=False)
    except UnsupportedError:
        heads = query_heads(model, site)
        return site.kind, site.index, heads, heads
    return site.kind, site.index, layer.query, layer.kv


def refusal(site: Site, reason: str, alternative: str = "") -> ProjectionsError:
    """The error for heads that cannot be cut out; for sites whose W_O can be zeroed, since it advises that."""
    message = (
        f"heads of {type(site.module).__name__} (at {site.place}) cannot be cut out: {reason}; "
        f"{alternative}zero=True zeroes them instead"
    )
    return ProjectionsError(message, reason)


def check_zeroable(site: Site, out: nn.Module) -> None:
    """Refuse a W_O without a matrix of its own, whose columns could be set to zero."""
    if problem := weight_problem(out, values=False):
        reason, remedy = problem
        raise UnsupportedError(
            f"heads of {type(site.module).__name__} (at {site.place}) can neither be cut out nor zeroed: its W_O, "
            f"{type(out).__name__}, is not a plain linear layer ({reason}); {remedy}"
        )


def value_bias(layer: Projections) -> Tensor | None:
    """(kv, value_dim): the bias of W_V, where it shifts each head's output by a constant; else None."""
    module = layer.site.module
    appends_keys = isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn)
    if "sinks" in layer.per_head or appends_keys:  # weights on values with a bias do not sum to one: no constant
        return None
    biases = [(part.layout, part.linear._parameters.get("bias")) for part in layer.parts]
    if isinstance(module, nn.MultiheadAttention):
        biases = [(LAYOUTS["qkv"], module.in_proj_bias)]
    for layout, bias in biases:
        blocks = layout(layer.query, layer.kv)
        if ("v", 0) in blocks and bias is not None:
            size = len(bias) // len(blocks)
            return bias.detach().view(len(blocks), size)[[blocks.index(("v", i)) for i in range(layer.kv)]]
    return None


def _named_layers(site: Site) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, linear layer and name of the layout of each projection of a site."""
    cls = written_class(site.module)
    adapter = find_adapter(cls)
    if adapter is not None:
        for name, rows_of in adapter.layers().items():
            linear = member(site.module, name)
            if not isinstance(linear, nn.Module) or not output_width(linear):
                raise refusal(site, f"its class was declared with a linear layer {name!r}, which it has not")
            yield name, linear, rows_of
        return
    class_name = f"{cls.__module__}.{cls.__qualname__}"
    layouts = {name: layout for layout, names in LAYER_NAMES.items() for name in names}
    for name, child in site.module.named_children():
        layout: str | None = layouts.get(name)
        for owner, layer_name, exception in EXCEPTIONS:
            if owner in class_name and layer_name == name:
                if exception is None:
                    raise refusal(site, "its own code lays the heads out in a way that is bound to their number")
                layout = exception
        if layout == "qkv" and hasattr(site.module, "q_attn"):
            layout = "kv"  # GPT-2's cross-attention
        if layout is not None:
            yield name, child, layout


def _kv_heads(site: Site, named_layers: list[tuple[str, nn.Module, str]], query: int, value_dim: int) -> int:
    """The number of KV heads, declared, or by how many blocks of a head's value width the rows divide into."""
    cls = written_class(site.module)
    adapter = find_adapter(cls)
    if adapter is not None:
        kv = adapter.key_value_heads(site.module)
        if query % kv:
            raise refusal(site, f"{query} query heads cannot share {kv} KV heads evenly")
        for name, linear, layout in named_layers:
            rows = output_width(linear)
            values = {"v": kv, "qkv": query + 2 * kv, "grouped": query + 2 * kv}.get(layout)
            if values is not None and rows != values * value_dim:
                raise refusal(
                    site,
                    f"{name} has {rows} rows, and {query} query heads and {kv} KV heads of {value_dim} need "
                    f"{values * value_dim}: is kv_heads declared?",
                )
        return kv
    for _, linear, layout in named_layers:
        rows = output_width(linear)
        count = {
            "v": rows / value_dim,
            "mla": query,
            "kv": rows / value_dim / 2,
            "qkv": (rows / value_dim - query) / 2,
            "grouped": (rows / value_dim - query) / 2,
            "sliced": (rows / value_dim - query) / 2,
        }.get(layout)
        if count is not None:
            if count != int(count) or count < 1 or query % int(count):
                raise refusal(site, f"{rows} rows do not divide into heads of {value_dim}")
            return int(count)
    raise refusal(site, "no layer of a known name makes its values")


def _per_head(site: Site, query: int, kv: int) -> Iterator[tuple[str, tuple[int, str]]]:
    """Parameters of a site with entries per head: name, the dimension that counts heads, and whose heads."""
    if isinstance(site.module, nn.MultiheadAttention):
        yield from ((name, at) for name, at in MULTIHEAD.items() if site.module._parameters.get(name) is not None)
        return
    for name, parameter in site.module.named_parameters():
        dim, role = PER_HEAD.get(name, (0, ""))
        if not role or (name.endswith("norm.weight") and parameter.dim() < 2):  # a norm over one head serves all heads
            continue
        is_shared = name.startswith(TABLE) and has_shared_table(site.module)  # it may have heads of other layers too
        if not is_shared and parameter.shape[dim] % (query if role == "q" else kv):
            raise refusal(site, f"{name} has {parameter.shape[dim]} entries for {query} heads")
        yield name, (dim, role)


def _check_linear(site: Site, linear: nn.Module) -> None:
    if problem := weight_problem(linear, values=False):
        reason, remedy = problem
        raise refusal(site, f"{type(linear).__name__} is not a plain linear layer ({reason}); {remedy}", "or ")
    plain_forward = type(linear).forward is nn.Linear.forward or type(linear).__module__.startswith(
        ("transformers.models.", "headwise.scale.")
    )
    if type(linear).__name__ != "Conv1D" and not (isinstance(linear, nn.Linear) and plain_forward):
        raise refusal(site, f"{type(linear).__name__} is not a plain linear layer (its code is its own)")


def _check_other_parameters(layer: Projections) -> None:
    """Refuse a module with other parameters that may depend on the number of heads."""
    site = layer.site
    blocks = [(part, len(part.layout(layer.query, layer.kv))) for part in layer.parts]
    head_widths = {layer.value_dim, *(output_width(part.linear) // count for part, count in blocks)}
    accounted = {parameter for part in layer.parts for parameter in part.linear.parameters()}
    accounted |= set(layer.out.parameters())
    for name, parameter in site.module.named_parameters():
        if parameter in accounted or name in layer.per_head or name.startswith(SAME_FOR_ALL_HEADS):
            continue
        if "norm" in name.lower() and parameter.dim() == 1:
            if parameter.numel() in head_widths:
                continue
            raise refusal(site, OVER_ALL_HEADS.format(name.rpartition(".")[0] or name))
        raise refusal(site, f"what its {name} has to do with the heads is not known")
    if getattr(site.module, "is_kv_shared_layer", False) or getattr(site.module, "store_full_length_kv", False):
        raise refusal(site, "its keys and values are shared between layers")
