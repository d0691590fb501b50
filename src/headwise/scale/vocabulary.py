"""The vocabulary of a stack over ranks: each holds some rows of the embedding table and of the output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from ..attention.nn.blocks import Embedding
from ..attention.nn.stack import Decoder
from ..errors import UnsupportedError
from .class_replacement import check_replaceable, replace_class
from .parallel_linear import distribute_parameter, local_tensor
from .ranks import Ranks
from .row_plan import chunk_ranges


class VocabularyLinear(nn.Linear):
    """An output layer of which this rank holds some tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return token_logits(x, self.weight)


class SplitEmbedding(Embedding):
    """The embeddings of a stack, whose output layer may use the table of tokens too."""

    def logits(self, hidden: Tensor) -> Tensor:
        return token_logits(hidden, self.tokens.weight)


def token_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(B, T, d) -> (B, T, vocab): with gradients a DTensor of each rank's tokens where the weight is split."""
    if not (isinstance(weight, DTensor) and isinstance(weight.placements[0], Shard)):
        return F.linear(hidden, local_tensor(weight))
    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits = F.linear(whole, weight)
    return logits if torch.is_grad_enabled() else logits.full_tensor()  # type: ignore[attr-defined]


def vocabulary_layers(module: nn.Module) -> list[nn.Module]:
    """The tables of tokens and the output layers of a module's stacks."""
    tables: list[nn.Module] = [part.tokens for part in module.modules() if isinstance(part, Embedding)]
    return tables + [part.head for part in module.modules() if isinstance(part, Decoder) and part.head is not None]


def check_vocabulary(module: nn.Module, ranks: Ranks) -> None:
    """Refuse a module whose vocabulary cannot be split."""
    layers = vocabulary_layers(module)
    if not layers:
        raise UnsupportedError(f"vocabulary=True is for stacks; {type(module).__name__} has no embeddings of tokens")
    for layer in layers:
        if isinstance(layer, nn.Linear):
            check_replaceable(layer, VocabularyLinear)
        elif type(layer) is not nn.Embedding:
            raise UnsupportedError(f"{type(layer).__name__} is not a plain Embedding, whose rows can be split")
        count = next(layer.parameters()).shape[0]
        if not all(chunk_ranges(count, ranks.count)):
            raise UnsupportedError(
                f"chunks of a vocabulary of {count} tokens leave one of {ranks.count} ranks without any"
            )


def split_vocabulary(module: nn.Module, ranks: Ranks) -> None:
    """Split the embedding tables of tokens and the output layers of a module's stacks, in place."""
    for layer in vocabulary_layers(module):
        if isinstance(layer, nn.Linear):
            distribute_parameter(replace_class(layer, VocabularyLinear), "weight", ranks, 0)
        else:
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            parallelize_module(layer, ranks.mesh, style)
