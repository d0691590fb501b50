"""The embedding and unembedding matrices of a model, read in blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.nn.stack import Decoder, Transformer
from ..errors import UnsupportedError
from ..models.structure.linear_layers import weight_problem
from ..models.structure.sites import Site, attention_sites
from ..models.text_inputs import has_config, is_encoder_decoder
from .norms import Norm, read_norm
from .stream_norms import StreamNorms, unembedding_module

BLOCK = 4096  # tokens


@dataclass(frozen=True)
class Vocabulary:
    """W_E and W_U of a model, (tokens, d) each, and the norm between the stream and W_U."""

    embedding: Tensor
    unembedding: Tensor
    norm: Norm | None  # the final norm, folded into W_U
    dtype: torch.dtype  # to compute in
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of tokens that have both an embedding and an unembedding."""
        return min(len(self.embedding), len(self.unembedding))

    def blocks(self) -> Iterator[slice]:
        for start in range(0, self.size, BLOCK):
            yield slice(start, min(start + BLOCK, self.size))

    def inputs(self, tokens: slice | list[int]) -> Tensor:
        """(n, d): embeddings of tokens."""
        return self.embedding[tokens].detach().to(self.dtype)

    def outputs(self, tokens: slice | list[int]) -> Tensor:
        """(n, d): unembeddings of tokens, with the final norm's gamma and centring folded in."""
        rows = self.unembedding[tokens].detach().to(self.dtype)
        return rows if self.norm is None else self.norm.before(rows)

    @cached_property
    def product(self) -> Tensor:
        """W_E^T W_U, (d, d): all that the eigenvalues of a head's full OV circuit need of the vocabulary."""
        width = self.embedding.shape[1]
        total = torch.zeros(width, width, dtype=self.dtype, device=self.embedding.device)
        for tokens in self.blocks():
            total.addmm_(self.inputs(tokens).T, self.outputs(tokens))
        return total


def vocabulary(model: Any, site: Site, width: int, dtype: torch.dtype, norms: StreamNorms) -> Vocabulary:
    """W_E and W_U for the heads of a layer.

    Raises:
        UnsupportedError: if the model has no such matrix, or the layer is not on the way from one to the other.
    """
    name = type(model).__name__
    _check_tower(model, site)
    embedding, unembedding = _matrices(model)
    if embedding is None:
        raise UnsupportedError(f"{name} has no token embeddings that are known; OV alone says nothing about tokens")
    if unembedding is None:
        raise UnsupportedError(
            f"{name} has no unembedding, so that what a head writes is no token; load the model with its output layer, "
            "such as AutoModelForCausalLM"
        )
    for label, matrix in (("embeddings", embedding), ("unembedding", unembedding)):
        if matrix.shape[1] != width:
            raise UnsupportedError(
                f"the {label} of {name} are {matrix.shape[1]} wide and its residual stream {width}; what lies between "
                "is not known"
            )
    norm, notes = _final_norm(model, norms, width, dtype)
    if hasattr(model, "get_output_embeddings") and "MaskedLM" in name:
        notes = (*notes, "the prediction head's own layer between the stream and W_U is left out")
    return Vocabulary(embedding, unembedding, norm, dtype, notes)


def _matrices(model: Any) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(model, Decoder | Transformer):
        decoder = model if isinstance(model, Decoder) else model.decoder
        tokens = decoder.embed.tokens.weight
        own = None if decoder.head is None else decoder.head.weight
        return tokens, tokens if decoder.shape.head == "tied" else own
    if not has_config(model):
        return None, None
    return _plain_weight(_input_embeddings(model)), _plain_weight(unembedding_module(model))


def _plain_weight(module: Any) -> Tensor | None:
    if not isinstance(module, nn.Module):
        return None
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight_problem(module) is not None or weight.is_meta:
        return None
    return weight


def _check_tower(model: Any, site: Site) -> None:
    """Refuse layers that read something other than token embeddings, or whose stream is not unembedded."""
    if site.kind.endswith("cross"):
        raise UnsupportedError(f"{site} reads the states of another stack, not token embeddings; take self-attention")
    if is_encoder_decoder(model) and site.kind == "encoder":
        raise UnsupportedError(f"{site} writes into the encoder's stream, which is not unembedded; take the decoder's")
    embeddings = _input_embeddings(model)
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if module is embeddings]
    if paths and not any(site.name.startswith(_owner(model, path)) for path in paths):
        raise UnsupportedError(f"{site} ({site.name}) does not read token embeddings")


def _owner(model: nn.Module, path: str) -> str:
    """The path, with a dot, of the innermost module that holds both the embeddings and attention layers."""
    names = [site.name for site in attention_sites(model)]
    while path:
        path = path.rpartition(".")[0]
        if any(name.startswith(f"{path}.") for name in names):
            return f"{path}." if path else ""
    return ""


def _input_embeddings(model: Any) -> nn.Module | None:
    if not has_config(model):
        return None
    try:
        module = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a model of images or sound
        return None
    return module if isinstance(module, nn.Module) else None


def _final_norm(model: Any, norms: StreamNorms, width: int, dtype: torch.dtype) -> tuple[Norm | None, tuple[str, ...]]:
    if not norms.final_known:
        return None, (f"a final norm, if there is one, is not folded into W_U: {norms.reason}",)
    if norms.final is None:
        return None, ()
    try:
        return read_norm(model.get_submodule(norms.final), norms.final, width, dtype), ()
    except UnsupportedError as error:
        return None, (f"the final norm is not folded into W_U: {error}",)
