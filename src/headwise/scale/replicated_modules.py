"""Layers that every rank holds whole: their parameters are DTensors too, so that optimizers, clipping and checkpoints
have parameters of one kind, and they compute with plain tensors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.nn.blocks import Embedding
from .class_replacement import replace_class
from .parallel_linear import distribute_parameter, local_tensor
from .ranks import Ranks


class ReplicatedLinear(nn.Linear):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_tensor(self.weight), local_tensor(self.bias))


class ReplicatedEmbedding(nn.Embedding):
    """A table of embeddings."""

    def forward(self, x: Tensor) -> Tensor:
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return F.embedding(x, local_tensor(self.weight), *options)


class ReplicatedLayerNorm(nn.LayerNorm):
    """A layer norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, local_tensor(self.weight), local_tensor(self.bias), self.eps)


class ReplicatedRMSNorm(nn.RMSNorm):
    """An RMS norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, local_tensor(self.weight), self.eps)


class SplitEmbedding(Embedding):
    """The embeddings of a stack, whose output layer may use the table of tokens too."""

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, local_tensor(self.tokens.weight))


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    cls.__bases__[-1]: cls for cls in (ReplicatedLinear, ReplicatedEmbedding, ReplicatedLayerNorm, ReplicatedRMSNorm)
}


def replicate_parameters(module: nn.Module, ranks: Ranks) -> None:
    """Make the plain parameters of PyTorch's layers in a module replicated DTensors, in place.

    A parameter that several layers share stays shared. Parameters of other classes stay plain tensors, and so do those
    that they share with such a layer.
    """
    foreign = {p for part in module.modules() if type(part) not in CLASSES for p in part.parameters(recurse=False)}
    new: dict[nn.Parameter, nn.Parameter] = {}
    for part in list(module.modules()):
        if type(part) is Embedding:
            replace_class(part, SplitEmbedding)
        parameters = dict(part.named_parameters(recurse=False))
        if type(part) not in CLASSES or not parameters or foreign.intersection(parameters.values()):
            continue
        replace_class(part, CLASSES[type(part)])
        for name, parameter in parameters.items():
            if parameter not in new:
                distribute_parameter(part, name, ranks)
                new[parameter] = part._parameters[name]  # type: ignore[assignment]
            part._parameters[name] = new[parameter]
