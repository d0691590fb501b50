"""The changes to queries and keys between the projections and their product: rotary positions and norms.

A rotation depends on the position, a norm on the input. Models implement both in many ways, so the transformers layer
itself is run with basis vectors in place of its projections' outputs. The queries and keys that it passes to its
attention function are the columns of its maps.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.nn.module import MultiHeadAttention
from ..attention.nn.positions import Alibi, Rotary
from ..errors import HeadwiseError, UnsupportedError
from ..models.structure.bias_tables import takes_bias
from ..models.structure.discovery import ModuleClass, class_source, forward_source
from ..models.structure.projections import find_projections
from ..models.structure.sites import Site
from ..models.surgery.dummy_inputs import first_line
from ..models.watching import registry
from ..models.watching.call_reader import ModelCall
from .head_weights import LayerWeights
from .norms import Norm, read_norm
from .stream_norms import StreamNorms, check_unhooked

ROTARY = re.compile(r"rotary|\brope|_rope|cos, sin|sinusoidal_pos|freqs_ci|apply_rot", re.IGNORECASE)
DECORATOR = re.compile(r"^@.*$", re.MULTILINE)  # some name a rotation that the class does not use
POSITION_BIAS = re.compile(r"alibi|position_bias|relative_attention|rel_pos|disentangled", re.IGNORECASE)
FUNCTIONAL_NORM = ("logit_scale",)  # cosine attention divides queries and keys by their lengths
LENGTH = 1000.0  # of the basis vectors: the epsilon of a norm is negligible compared with it
LINEAR = 1e-4  # how far a map may be from linear, relative to its largest entry
ROTARY_NAME = "rotary_emb"
FIRST_POSITIONS = (0, 1)  # PaliGemma's positions count from 1
ROTATION = "the rotation of queries and keys"  # the subject of a refusal


@dataclass(frozen=True)
class HeadMaps:
    """The linear maps of a layer's queries and keys, (H or Hkv, d_k, d_k) each or None, and a description of them."""

    query: Tensor | None
    key: Tensor | None
    rotation: str
    notes: tuple[str, ...]


def head_maps(model: nn.Module, weights: LayerWeights, norms: StreamNorms, distance: int | None) -> HeadMaps:
    """The maps for a query `distance` tokens after its key; without rotation for None.

    Raises:
        HeadwiseError: for a distance that is not a whole number.
        UnsupportedError: if the rotation of a layer is not known.
    """
    if distance is not None and (not isinstance(distance, int) or isinstance(distance, bool)):
        raise HeadwiseError(f"distance must be a whole number of tokens or None, got {distance!r}")
    site = weights.site
    notes = _notes(weights)
    rotary = _has_rotary(site, norms)
    if distance is None or not rotary:
        query, key = (_norm_map(weights, role) for role in ("query", "key"))
        words = "the layer's rotary positions are left out" if rotary else "the layer has no rotary positions"
        return HeadMaps(query, key, f"none: {words}", notes)
    if isinstance(site.module, MultiHeadAttention):
        query, key = _own_maps(site.module, weights, distance)
    elif site.source == "registry":
        query, key = _registry_maps(model, weights, norms, distance)
    else:
        raise _unknown(site, "its attention function is not in transformers' registry")
    count = f"{abs(distance)} token{'' if abs(distance) == 1 else 's'}"
    side = "after" if distance >= 0 else "before"
    return HeadMaps(query, key, f"for a query {count} {side} its key", notes)


def _has_rotary(site: Site, norms: StreamNorms) -> bool:
    module = site.module
    if isinstance(module, MultiHeadAttention):
        return isinstance(module.position, Rotary)
    if isinstance(module, nn.MultiheadAttention):
        return False
    if site.name in norms.positions:  # None in a layer without positions of a model that has them
        return norms.positions[site.name] is not None
    cls: ModuleClass = type(module)
    source = DECORATOR.sub("", f"{forward_source(cls)}\n{class_source(cls)}")
    return _alibi(module) is not True and bool(ROTARY.search(source))


def _alibi(module: nn.Module) -> bool | None:
    """Whether a model's config chooses ALiBi; None where it does not say."""
    choice = getattr(getattr(module, "config", None), "alibi", None)
    return choice if isinstance(choice, bool) else None


def _adds_position_bias(module: nn.Module) -> bool:
    if isinstance(module, MultiHeadAttention):
        return isinstance(module.position, Alibi)
    cls: ModuleClass = type(module)
    if isinstance(module, nn.MultiheadAttention) or _alibi(module) is False:
        return False
    return takes_bias(cls) or bool(POSITION_BIAS.search(class_source(cls)))


def _notes(weights: LayerWeights) -> tuple[str, ...]:
    module = weights.site.module
    notes = []
    if weights.head_norms or any(hasattr(module, name) for name in FUNCTIONAL_NORM):
        notes.append(
            "queries and keys are normalised: scores are those of QK divided by the scale of each query and key, which "
            "depend on the input"
        )
    if _adds_position_bias(module):
        notes.append("position biases are added to the scores and are no part of QK")
    return tuple(notes)


def _norm_map(weights: LayerWeights, role: str) -> Tensor | None:
    """Gamma (and centring) of the norm of queries or keys, (heads, d_k, d_k); None if there is none."""
    rows = getattr(weights, role)  # (heads, d_k, d)
    norm = _head_norm(weights, role)
    if norm is None:
        return None
    heads, width = rows.shape[:2]
    eye = torch.eye(width, dtype=rows.dtype, device=rows.device)
    if norm.gamma is None or norm.gamma.shape == (width,):
        return norm.after(eye).expand(heads, width, width)
    return norm.gamma.unflatten(0, (heads, width))[:, :, None] * eye


def _head_norm(weights: LayerWeights, role: str) -> Norm | None:
    """The norm of a layer's queries or keys, over one head or, without centring, over all of them."""
    names = [name for name in weights.head_norms if _is_of(name, role)]
    if not names:
        return None
    rows, module, site = getattr(weights, role), weights.site.module, weights.site
    if len(names) > 1:
        raise _unknown(site, f"its {len(names)} norms of {role} vectors are one per head", "QK")
    heads, width = rows.shape[:2]
    path = f"{site.name}.{names[0]}".lstrip(".")
    child = module.get_submodule(names[0])
    sizes = {parameter.numel() for parameter in child.parameters()}
    spans_heads = heads * width in sizes and heads > 1
    if any(parameter.dim() > 1 for parameter in child.parameters()):
        raise _unknown(site, f"its {names[0]} has weights of its own for each head", "QK")
    norm = read_norm(child, path, heads * width if spans_heads else width, rows.dtype)
    if norm.beta is not None and bool(norm.beta.any()):
        raise _unknown(site, f"its {names[0]} adds a constant after its scale, so that QK is no matrix", "QK")
    if spans_heads and norm.centred:
        raise _unknown(site, f"its {names[0]} takes the mean over all heads off", "QK")
    return norm


def _is_of(name: str, role: str) -> bool:
    """Whether a norm is of queries or of keys, by its name; one for both is called qk."""
    return bool({role, role[0], "qk"} & set(re.split(r"[._]", name)))


def _own_maps(module: MultiHeadAttention, weights: LayerWeights, distance: int) -> tuple[Tensor, Tensor]:
    """The maps of headwise's own module: its norms, then its rotation."""
    position = module.position
    assert isinstance(position, Rotary)
    maps = []
    for role, at in (("query", max(distance, 0)), ("key", max(-distance, 0))):
        rows = getattr(weights, role)
        heads, width = rows.shape[:2]
        basis = torch.eye(width, dtype=rows.dtype, device=rows.device)
        norm = _norm_map(weights, role)
        columns = basis.expand(heads, width, width) if norm is None else norm.mT  # row i: the image of e_i
        positions = torch.full((width,), at, device=rows.device)
        maps.append(position(columns[None], positions)[0].mT)
    return maps[0], maps[1]


class _Captured(Exception):
    """Ends a layer's forward at its attention function."""


class _Capture:
    """Takes the queries and keys that a layer gives to its attention function."""

    def __init__(self) -> None:
        self.query: Tensor | None = None  # (B, H, T, d_k)
        self.key: Tensor | None = None

    def see(self, call: ModelCall, function: Any, eager: Any, innermost: bool) -> tuple[Tensor, Any]:
        self.query, self.key = call.query, call.key
        raise _Captured

    def see_known(self, call: Any, answer: Any, innermost: bool) -> Any:
        raise _Captured


def _registry_maps(model: nn.Module, weights: LayerWeights, norms: StreamNorms, distance: int) -> tuple[Tensor, Tensor]:
    """The maps of a layer of transformers, by its own code on basis vectors at the two positions."""
    check_unhooked(model)
    site = weights.site
    rotary, layer_type = _rotary_module(model, site, norms)
    positions = torch.tensor([[max(distance, 0), max(-distance, 0)]], device=weights.query.device)
    dtype = weights.query.dtype
    like = torch.zeros(1, 2, weights.query.shape[2], dtype=dtype, device=weights.query.device)
    embeddings = _rotate(copy.deepcopy(rotary), like, positions, layer_type)  # some rotary modules remember lengths
    images, doubled_images = (_run_layer(model, weights, embeddings, length) for length in (LENGTH, 2 * LENGTH))
    maps = []
    for token, role in enumerate(("query", "key")):
        # (heads, d_k, d_k): column i is the image of e_i
        columns, doubled = (x[token][:, :, token].permute(1, 2, 0) for x in (images, doubled_images))
        maps.append(_linear_map(weights, role, columns, doubled))
    return maps[0], maps[1]


def _linear_map(weights: LayerWeights, role: str, columns: Tensor, doubled: Tensor) -> Tensor:
    """The map from its images of basis vectors of two lengths: linear, or a norm, whose scale is left out."""
    size = columns.abs().max().clamp(min=1e-30)
    if float((doubled - 2 * columns).abs().max() / size) <= LINEAR:
        return columns / LENGTH
    norm = _head_norm(weights, role)
    if norm is None or float((doubled - columns).abs().max() / size) > LINEAR:
        raise _unknown(weights.site, f"its {role} vectors are no linear function of its projections, nor normalised")
    width = columns.shape[1]
    scale = (1 - 1 / width if norm.centred else 1.0) / width  # mean square of a basis vector
    return columns * scale**0.5


def _run_layer(model: nn.Module, weights: LayerWeights, embeddings: Any, length: float) -> tuple[Tensor, Tensor]:
    """Queries and keys (d_k, H, 2, d_k) for basis vectors, one per sequence of the batch, at two positions."""
    site, width = weights.site, weights.query.shape[1]
    module, layer = site.module, find_projections(model, site)
    basis = length * torch.eye(width, dtype=weights.query.dtype, device=weights.query.device)
    handles, capture = [], _Capture()
    for part in layer.parts:
        blocks = part.layout(layer.query, layer.kv)

        def replace(linear: nn.Module, args: Any, output: Tensor, blocks: Any = blocks) -> Tensor:
            out = output.new_zeros(output.shape, dtype=basis.dtype).unflatten(-1, (len(blocks), -1))
            for place, (role, _) in enumerate(blocks):
                if role != "v":
                    out[..., place, :] = basis[:, None]
            return out.flatten(-2)

        handles.append(part.linear.register_forward_hook(replace))
    own = layer.parts[0].linear.get_parameter("weight")
    hidden = torch.zeros(width, 2, weights.query.shape[2], dtype=own.dtype, device=own.device)
    try:
        registry.install([module], capture)
        with torch.no_grad():
            module(**_arguments(module, hidden, embeddings))
    except _Captured:
        pass
    except Exception as error:  # a model's code fails in any way
        raise _unknown(site, f"its code does not run by itself ({first_line(error)[:100]})") from error
    finally:
        registry.remove([module], capture)
        for handle in handles:
            handle.remove()
    if capture.query is None or capture.key is None or capture.query.shape[-1] != width:
        raise _unknown(site, "its code does not reach its attention function by itself")
    return capture.query.to(basis.dtype), capture.key.to(basis.dtype)


def _arguments(module: nn.Module, hidden: Tensor, embeddings: Any) -> dict[str, Any]:
    """Arguments for a layer's forward: None where it needs another one, and for its mask."""
    values = {"hidden_states": hidden, "position_embeddings": embeddings}
    parameters = inspect.signature(module.forward).parameters.values()
    named = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    needed = [x.name for x in named if x.default is x.empty or x.name in (*values, "attention_mask")]
    return {name: values.get(name) for name in needed}


def _rotary_module(model: Any, site: Site, norms: StreamNorms) -> tuple[nn.Module, str | None]:
    """The module that makes a layer's cos and sin, and for which type of layer, by what the layer is given."""
    embeddings = norms.positions.get(site.name)
    if embeddings is None:
        unseen = norms.reason if site.name not in norms.known_modules else "its forward is given no position_embeddings"
        raise _unknown(site, unseen)
    expected = list(_tensors(embeddings))  # cos and sin (..., T, width), or one complex table
    length = expected[0].shape[-2]
    like = torch.zeros(1, length, 1, dtype=expected[0].real.dtype if expected[0].is_complex() else expected[0].dtype)
    like = like.to(expected[0].device)
    positions = torch.arange(length, device=like.device)[None]
    parts = site.name.split(".")
    owners: list[Any] = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    for rotary in (getattr(owner, ROTARY_NAME, None) for owner in owners):
        if not isinstance(rotary, nn.Module):
            continue
        for layer_type, first in itertools.product((None, *getattr(rotary, "layer_types", ())), FIRST_POSITIONS):
            try:
                tables = list(_tensors(_rotate(copy.deepcopy(rotary), like, positions + first, layer_type)))
            except (TypeError, AttributeError, RuntimeError, ValueError, KeyError):
                continue
            if len(tables) == len(expected) and all(map(_same_rows, tables, expected)):
                return rotary, layer_type
    raise _unknown(site, f"no module {ROTARY_NAME} of the model gives the cos and sin that the layer is given")


def _rotate(rotary: nn.Module, like: Tensor, positions: Tensor, layer_type: str | None) -> Any:
    with torch.no_grad():
        return rotary(like, positions) if layer_type is None else rotary(like, positions, layer_type)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)


def _same_rows(table: Tensor, expected: Tensor) -> bool:
    """Whether two tables (..., T, width) are the same for each sequence of the batch."""
    if table.shape[-2:] != expected.shape[-2:]:
        return False
    table, expected = table.reshape(-1, *table.shape[-2:])[:1], expected.reshape(-1, *expected.shape[-2:])
    return bool(torch.equal(table.expand_as(expected), expected))


def _unknown(site: Site, reason: str, subject: str = ROTATION) -> UnsupportedError:
    advice = "; give distance=None for QK without rotation" if subject == ROTATION else ""
    owner = f"{type(site.module).__name__} (at {site.place})"
    return UnsupportedError(f"{subject} of {owner} is not known: {reason}{advice}")
