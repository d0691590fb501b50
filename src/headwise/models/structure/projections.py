"""Where each architecture keeps W_Q, W_K and W_V: which rows of which linear layer belong to which head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ..surgery.shared_biases import TABLE, shared_table
from . import sites
from .sites import Site

Block = tuple[str, int]  # the rows of one head: its role ("q", "k", "v") and its number


def _grouped(query: int, kv: int) -> list[Block]:
    """Each group's queries, then its key and its value; a group a head is NeoX's and BLOOM's order, one is Falcon's."""
    size = query // kv
    return [
        block
        for group in range(kv)
        for block in [*(("q", group * size + i) for i in range(size)), ("k", group), ("v", group)]
    ]


SLICES = 4  # CodeGen's, one for each of four devices of old


def _sliced(query: int, kv: int) -> list[Block]:
    """Each slice's queries, then its values, then its keys: CodeGen's order."""
    size = query // SLICES
    return [(role, first + i) for first in range(0, query, size) for role in "qvk" for i in range(size)]


# In which order the rows of a linear layer hold its heads: a function of the numbers of query and KV heads.
LAYOUTS: dict[str, Callable[[int, int], list[Block]]] = {
    "q": lambda query, kv: [("q", i) for i in range(query)],
    "k": lambda query, kv: [("k", i) for i in range(kv)],
    "v": lambda query, kv: [("v", i) for i in range(kv)],
    "kv": lambda query, kv: [(role, i) for role in "kv" for i in range(kv)],
    "qkv": lambda query, kv: [("q", i) for i in range(query)] + [(role, i) for role in "kv" for i in range(kv)],
    "grouped": _grouped,
    "sliced": _sliced,
}
# Names of linear layers, inside the attention module, and the layout of their rows.
NAMED = {
    "q": ("q_proj", "query", "q", "q_lin", "query_proj", "q_b_proj", "q_attn", "to_q", "linear_q", "Wq", "wq",
          "q_linear", "project_q", "query_global", "pos_query_proj", "pos_q_proj", "pos_key_proj", "pos_proj",
          "linear_pos", "w2e_query", "e2w_query", "e2e_query", "q_gate_proj"),
    "k": ("k_proj", "key", "k", "k_lin", "key_proj", "to_k", "linear_k", "Wk", "wk", "k_linear", "project_k",
          "key_global"),
    "v": ("v_proj", "value", "v", "v_lin", "value_proj", "to_v", "linear_v", "Wv", "wv", "v_linear", "project_v",
          "value_global"),
    "mla": ("kv_b_proj",),
    "kv": ("to_kv",),
    "qkv": ("qkv_proj", "qkv", "Wqkv", "c_attn", "W_pack"),
    "grouped": ("query_key_value", "in_proj"),
}  # fmt: skip
# Where a name means something else in one architecture: (part of the class's full name, name of the layer, layout).
EXCEPTIONS = (
    ("GPTBigCode", "c_attn", "grouped"),
    ("codegen.", "qkv_proj", "sliced"),
    ("HYV4", "gate_proj", "q"),
    ("DiffLlama", "q_proj", None),  # a head's output is a difference of two heads'
    ("MiniMaxLightning", "qkv_proj", None),
    # their code takes the width of a head, or of all, from the width of the model
    ("blip", "qkv", None),
    ("fsmt.", "q_proj", None),
    ("Longformer", "query", None),
    ("LEDEncoderSelf", "query", None),
    ("LongT5Local", "q", None),
    ("LongT5TransientGlobal", "q", None),
    ("PegasusXGlobalLocal", "q_proj", None),
)
# Parameters with an entry a head: the dimension that counts heads, and whose heads.
HEADED = {
    "sinks": (0, "q"),
    "relative_attention_bias.weight": (1, "q"),
    "relative_position_bias_table": (1, "q"),
    "relative_position_bias.relative_position_bias_table": (1, "q"),
    "logit_scale": (0, "q"),
    "continuous_position_bias_mlp.2.weight": (0, "q"),
    "gru_rel_pos_const": (1, "q"),
    "pos_bias_u": (0, "q"),
    "pos_bias_v": (0, "q"),
    "q_norm.weight": (0, "q"),
    "k_norm.weight": (0, "k"),
    "q_bias": (0, "q"),
    "v_bias": (0, "v"),
    "softmax_scaling.scale": (0, "q"),
    "softmax_scaling.bias": (0, "q"),
}
# What an attention module may hold besides: whatever is the same for all heads.
SAME_FOR_ALL = (
    "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "distance_embedding", "gru_rel_pos_linear",
    "continuous_position_bias_mlp.0", "rotary_emb", "inner_attn", "emb_rel_k", "emb_rel_v", "rel_pos_h", "rel_pos_w",
    "LayerNorm",  # ALBERT's, after W_O
    "indexer",  # DeepSeek's sparse attention: heads of its own choose the keys for all
)  # fmt: skip
OVER_ALL_HEADS = "its {} runs over all heads at once, so that removing one is not the same as masking it"


@dataclass(frozen=True)
class Part:
    """One linear layer, and whose rows it holds in which order."""

    path: str
    linear: nn.Module
    layout: Callable[[int, int], list[Block]]


@dataclass(frozen=True)
class Projections:
    """All that belongs to the heads of one site."""

    site: Site
    query: int  # heads
    kv: int
    value_dim: int
    out: nn.Module  # W_O
    out_path: str
    parts: list[Part]
    headed: dict[str, tuple[int, str]] = field(default_factory=dict)  # parameters with an entry a head
    multiple: int = 1  # of which the number of heads must be


def projections(model: nn.Module, site: Site) -> Projections:
    """Where a site's W_Q, W_K, W_V and W_O are; refused by name where removing a head would not be exact."""
    out_path, out = sites.w_o(model, site)
    check_zeroable(site, out)
    width = sites.input_width(out) or 0
    query = sites.query_heads(model, site, width)
    value_dim = width // query
    named = list(_named(site, query))
    if not named:
        raise refused(site, "no layer of a known name makes its queries, keys and values")
    kv = _kv_heads(site, named, query, value_dim)
    parts = [Part(f"{site.name}.{name}", linear, _layout(layout)) for name, linear, layout in named]
    for part in parts:
        _check_linear(site, part.linear)
        blocks, rows = len(part.layout(query, kv)), output_width(part.linear)
        if rows % blocks:
            raise refused(site, f"{part.path} has {rows} rows for {blocks} blocks of heads")
    _check_linear(site, out)
    multiple = SLICES if any(layout == "sliced" for _, _, layout in named) else 1
    found = Projections(site, query, kv, value_dim, out, out_path, parts, dict(_headed(site, query, kv)), multiple)
    _check_rest(found)
    return found


def refused(site: Site, why: str, instead: str = "") -> UnsupportedError:
    """Only for sites whose W_O is zeroable, since that is the advice."""
    return UnsupportedError(
        f"heads of {type(site.module).__name__} (at {site.name}) cannot be cut out: {why}; "
        f"{instead}zero=True zeroes them instead"
    )


def output_width(linear: nn.Module) -> int:
    width = getattr(linear, "out_features", getattr(linear, "nf", None))
    return width if isinstance(width, int) else 0


def row_dim(linear: nn.Module) -> int:
    """The dimension of the weight that counts outputs: 0, or 1 for GPT-2's Conv1D."""
    return 1 if type(linear).__name__ == "Conv1D" else 0


def _named(site: Site, query: int) -> Iterator[tuple[str, nn.Module, str]]:
    kind = f"{type(site.module).__module__}.{type(site.module).__qualname__}"
    layouts = {name: layout for layout, names in NAMED.items() for name in names}
    for name, child in site.module.named_children():
        layout: str | None = layouts.get(name)
        for owner, its, special in EXCEPTIONS:
            if owner in kind and its == name:
                if special is None:
                    raise refused(site, "its own code lays the heads out in a way that is bound to their number")
                layout = special
        if layout == "qkv" and hasattr(site.module, "q_attn"):
            layout = "kv"  # GPT-2's cross-attention
        if layout is not None:
            yield name, child, layout


def _layout(name: str) -> Callable[[int, int], list[Block]]:
    return LAYOUTS["q" if name == "mla" else name]


def _kv_heads(site: Site, named: list[tuple[str, nn.Module, str]], query: int, value_dim: int) -> int:
    """By structure: how many blocks as wide as one head's values there are."""
    for _, linear, layout in named:
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
                raise refused(site, f"{rows} rows do not divide into heads of {value_dim}")
            return int(count)
    raise refused(site, "no layer of a known name makes its values")


def _headed(site: Site, query: int, kv: int) -> Iterator[tuple[str, tuple[int, str]]]:
    for name, parameter in site.module.named_parameters():
        dim, whose = HEADED.get(name, (0, ""))
        if not whose or (name.endswith("norm.weight") and parameter.dim() < 2):  # a norm of one head serves all
            continue
        shared = name.startswith(TABLE) and shared_table(site.module)  # then it may have heads of other layers too
        if not shared and parameter.shape[dim] % (query if whose == "q" else kv):
            raise refused(site, f"{name} has {parameter.shape[dim]} entries for {query} heads")
        yield name, (dim, whose)


def _check_linear(site: Site, linear: nn.Module) -> None:
    if problem := unusual(linear):
        why, remedy = problem
        raise refused(site, f"{type(linear).__name__} is not a plain linear layer ({why}); {remedy}", "or ")
    known = type(linear).forward is nn.Linear.forward or type(linear).__module__.startswith("transformers.models.")
    if type(linear).__name__ != "Conv1D" and not (isinstance(linear, nn.Linear) and known):
        raise refused(site, f"{type(linear).__name__} is not a plain linear layer (its code is its own)")


def check_zeroable(site: Site, out: nn.Module) -> None:
    """W_O has a matrix of its own, whose columns can be set to zero."""
    if problem := unusual(out):
        why, remedy = problem
        raise UnsupportedError(
            f"heads of {type(site.module).__name__} (at {site.name}) can neither be cut out nor zeroed: its W_O, "
            f"{type(out).__name__}, is not a plain linear layer ({why}); {remedy}"
        )


def unusual(linear: nn.Module) -> tuple[str, str] | None:
    """Why the weight of a linear layer is no ordinary matrix, and what to do; None where it is one."""
    if problem := wrapped(linear):
        return problem
    weight = linear._parameters.get("weight")
    if weight is None or weight.dtype not in FLOATS or weight.dim() != 2:
        return QUANTIZED
    return None


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTIZED = (
    "quantized or wrapped weights",
    "prune and save the model before it is quantized, or load it unquantized",
)


def wrapped(module: nn.Module) -> tuple[str, str] | None:
    """Why the parameters of a module are not simply its own tensors, and what to do; None where they are."""
    if hasattr(module, "base_layer") or hasattr(module, "lora_A"):
        return "it carries an adapter", "merge that first, with merge_and_unload() of peft's PeftModel"
    if nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrized", "call torch.nn.utils.parametrize.remove_parametrizations first"
    if "weight" not in module._parameters and type(vars(module).get("weight")) in (Tensor, nn.Parameter):
        return "its weight is computed by a hook", "call remove_weight_norm or the like of torch.nn.utils first"
    tensors = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    if any(hasattr(x, "device_mesh") for x in tensors):
        return "its weight is sharded over ranks", "prune and save the model before it is sharded"
    if any(type(x) not in (nn.Parameter, Tensor) and type(x).__name__ != "Buffer" for x in tensors):
        # torchao's, bitsandbytes' and others'
        return QUANTIZED
    if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
        return QUANTIZED
    return None


def _check_rest(found: Projections) -> None:
    """Nothing else in the module has anything to do with the number of heads."""
    site = found.site
    blocks = [(part, len(part.layout(found.query, found.kv))) for part in found.parts]
    per_head = {found.value_dim, *(output_width(part.linear) // count for part, count in blocks)}
    known = {id(parameter) for part in found.parts for parameter in part.linear.parameters()}
    known |= {id(parameter) for parameter in found.out.parameters()}
    for name, parameter in site.module.named_parameters():
        if id(parameter) in known or name in found.headed or name.startswith(SAME_FOR_ALL):
            continue
        if "norm" in name.lower() and parameter.dim() == 1:
            if parameter.numel() in per_head:
                continue
            raise refused(site, OVER_ALL_HEADS.format(name.rpartition(".")[0] or name))
        raise refused(site, f"what its {name} has to do with the heads is not known")
    if getattr(site.module, "is_kv_shared_layer", False) or getattr(site.module, "store_full_length_kv", False):
        raise refused(site, "its keys and values are shared between layers")


def attributes(module: Any) -> dict[str, int]:
    """The whole numbers that a module keeps about itself."""
    return {name: x for name, x in vars(module).items() if isinstance(x, int) and not isinstance(x, bool)}


def value_bias(found: Projections) -> Tensor | None:
    """(kv, value_dim): what every value is shifted by, where it is known to be a constant of the head."""
    if "sinks" in found.headed:  # weights that do not sum to one: no constant
        return None
    for part in found.parts:
        blocks = part.layout(found.query, found.kv)
        bias = part.linear._parameters.get("bias")
        if ("v", 0) in blocks and bias is not None:
            size = len(bias) // len(blocks)
            return bias.detach().view(len(blocks), size)[[blocks.index(("v", i)) for i in range(found.kv)]]
    return None
