"""The rows of W_Q, W_K and W_V and the columns of W_O that belong to each head of a layer, as plain matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.structure.adapters import find_adapter
from ..models.structure.discovery import ModuleClass
from ..models.structure.heads import w_o
from ..models.structure.layouts import LAYOUTS, SAME_FOR_ALL_HEADS, Layout
from ..models.structure.linear_layers import row_dim, weight_problem
from ..models.structure.partition import head_partition
from ..models.structure.projections import Projections, ProjectionsError, find_projections
from ..models.structure.sites import Site
from .norms import is_norm

ROLES = {"q": "W_Q", "k": "W_K", "v": "W_V"}
# Linear layers with rows per query head that make no queries: of positions, of other kinds of tokens.
NOT_QUERIES = re.compile(r"^(pos_|linear_pos|w2e_|e2w_|e2e_)|_global$")
OF_HEADS = {"q", "k", "qk", "query", "key"}  # words in the name of a norm of queries or keys
AFTER_W_O = "LayerNorm"  # ALBERT's attention module has the norm of the residual stream in it


@dataclass(frozen=True)
class LayerWeights:
    """The weights of all heads of one layer; query head i reads KV head i // (H / Hkv)."""

    site: Site
    query: Tensor  # (H, d_k, d)
    key: Tensor  # (Hkv, d_k, d of keys)
    value: Tensor  # (Hkv, d_v, d of values)
    output: Tensor  # (H, d, d_v)
    biases: dict[str, Tensor]  # "query", "key", "value" -> (heads, rows); those that exist
    head_norms: tuple[str, ...]  # names of the norms of queries and keys in the attention module
    parts: tuple[nn.Module, ...]  # the linear layers

    @property
    def group(self) -> int:
        """How many query heads share a KV head."""
        return len(self.query) // len(self.key)


def layer_weights(model: nn.Module, site: Site) -> LayerWeights:
    """The matrices of a layer's heads, in float64 where the weights are, else in float32.

    Raises:
        UnsupportedError: if a head's output is not its part of W_O times a weighted sum of its values, or where the
            matrices are not known.
    """
    layer = _find(model, site)
    matrices = {role: _rows(layer, role) for role in reversed(ROLES)}
    _check(layer)
    weight = layer.out.get_parameter("weight").detach()
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    columns = weight if row_dim(layer.out) == 0 else weight.T  # (d, H * d_v)
    output = columns.to(dtype).unflatten(1, (layer.query, layer.value_dim)).transpose(0, 1)
    query, key, value = (matrices[role][0].to(dtype) for role in ROLES)
    if query.shape[1] != key.shape[1]:
        raise _unknown(site, f"its W_Q has {query.shape[1]} rows per head and its W_K {key.shape[1]}")
    if value.shape[1] != output.shape[2]:
        raise _unknown(site, f"its W_V has {value.shape[1]} rows per head and its W_O {output.shape[2]} columns")
    biases = {
        name: bias.to(dtype)
        for name, role in (("query", "q"), ("key", "k"), ("value", "v"))
        if (bias := matrices[role][1]) is not None
    }
    parts = tuple(part.linear for part in layer.parts)
    return LayerWeights(site, query, key, value, output.contiguous(), biases, _head_norms(site), parts)


def _find(model: nn.Module, site: Site) -> Projections:
    out = w_o(model, site)[1]
    if head_partition(model, site) is not None:
        raise _unknown(site, "each rank has some of its heads; give the model before it is split")
    if problem := weight_problem(out):
        raise _unknown(site, f"its W_O, {type(out).__name__}, is not a plain linear layer ({problem[0]})")
    try:
        layer = find_projections(model, site)
    except ProjectionsError as error:
        raise _unknown(site, error.reason) from None
    if any(weight_problem(part.linear) for part in layer.parts):
        raise _unknown(site, "its weights are sharded over ranks; give the model before it is sharded")
    if layer.out.get_parameter("weight").is_meta:
        raise _unknown(site, "its weights are on the meta device and have no values")
    return layer


def _check(layer: Projections) -> None:
    """Refuse a layer with more than W_V and W_O between the stream and a head's output."""
    module, site = layer.site.module, layer.site
    if getattr(module, "is_kv_shared_layer", False):
        raise _unknown(site, "its keys and values are those of another layer")
    gate = next((part.path for part in layer.parts if "gate" in part.path.rpartition(".")[2]), None)
    if gate is not None:
        raise _unknown(site, f"{gate} multiplies the heads' outputs by a gate that depends on the input")
    for name, child in module.named_modules():
        if is_norm(child) and not _is_head_norm(name) and name != AFTER_W_O:
            raise _unknown(site, f"its {name} changes more than queries and keys")
    norms = tuple(f"{name}." for name in _head_norms(site))
    accounted = {parameter for part in layer.parts for parameter in part.linear.parameters()}
    accounted |= set(layer.out.parameters())
    for name, parameter in module.named_parameters():
        is_known = name in layer.per_head or name.startswith((*SAME_FOR_ALL_HEADS, *norms))
        if parameter not in accounted and not is_known:
            raise _unknown(site, f"what its {name} does to the heads is not known")


def _rows(layer: Projections, role: str) -> tuple[Tensor, Tensor | None]:
    """(heads, rows, d) of one role, and the bias (heads, rows) where there is one."""
    heads = layer.query if role == "q" else layer.kv
    weight, bias, layout = _matrix(layer, role)
    if weight.is_meta:
        raise _unknown(layer.site, "its weights are on the meta device and have no values")
    blocks = layout(layer.query, layer.kv)
    own = [blocks.index((role, head)) for head in range(heads)]
    rows = weight.detach().unflatten(0, (len(blocks), -1))[own]
    bias = None if bias is None else bias.detach().unflatten(0, (len(blocks), -1))[own]
    extra = layer.site.module._parameters.get(f"{role}_bias")  # of BEiT and its relatives
    if extra is not None and bias is None:
        bias = extra.detach().unflatten(0, (heads, -1))
    return rows, bias


def _matrix(layer: Projections, role: str) -> tuple[Tensor, Tensor | None, Layout]:
    """The weight that makes queries, keys or values, its rows first; its bias; and the layout of its rows."""
    module = layer.site.module
    if isinstance(module, nn.MultiheadAttention):
        packed = module._parameters.get("in_proj_weight")
        bias, width = module._parameters.get("in_proj_bias"), layer.query * layer.value_dim
        if packed is not None:
            return packed, bias, LAYOUTS["qkv"]
        first = "qkv".index(role) * width
        return (
            module.get_parameter(f"{role}_proj_weight"),
            None if bias is None else bias[first : first + width],
            LAYOUTS[role],
        )
    candidates = []
    for part in layer.parts:
        name = part.path.rpartition(".")[2]
        if any(block[0] == role for block in part.layout(layer.query, layer.kv)) and not NOT_QUERIES.search(name):
            candidates.append(part)
    cls: ModuleClass = type(module)
    if len(candidates) > 1 and find_adapter(cls) is None:
        names = ", ".join(part.path for part in candidates)
        raise _unknown(layer.site, f"which of {names} is its {ROLES[role]} is not known")
    if not candidates:
        raise _unknown(layer.site, f"no layer of its own makes its {ROLES[role]}, as in multi-head latent attention")
    part = candidates[0]
    weight: Tensor = part.linear.get_parameter("weight")
    return weight if row_dim(part.linear) == 0 else weight.T, part.linear._parameters.get("bias"), part.layout


def _is_head_norm(path: str) -> bool:
    return bool(OF_HEADS & set(re.split(r"[._]", path)))


def _head_norms(site: Site) -> tuple[str, ...]:
    """Norms of queries and keys in the attention module, without modules that do nothing."""
    return tuple(name for name, child in site.module.named_modules() if is_norm(child) and _is_head_norm(name))


def _unknown(site: Site, reason: str) -> UnsupportedError:
    owner = f"{type(site.module).__name__}'s heads (at {site.place})"
    return UnsupportedError(f"the matrices of {owner} are not known: {reason}")
