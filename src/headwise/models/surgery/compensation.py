"""The mean or constant contribution of removed heads, moved into the bias of W_O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..intervene.head_outputs import mean_head_outputs
from ..structure.linear_layers import row_dim
from ..structure.projections import projections, value_bias
from ..structure.sites import attention_sites

Compensation = Literal["bias", "mean"]
COMPENSATE: tuple[Compensation, ...] = ("bias", "mean")


def removed_outputs(
    model: nn.Module, removed: dict[str, list[int]], compensate: Compensation | None, batches: Iterable[Any] | None
) -> dict[str, Tensor]:
    """The constant output of each removed head, {module path: (removed heads, value_dim)}.

    Args:
        model: the model before the removal.
        removed: {module path: heads}.
        compensate: "bias" for the head's value bias, "mean" for its mean output over batches, None for nothing.
        batches: model inputs, for "mean".
    """
    if compensate is None:
        return {}
    if compensate == "mean":
        means = mean_head_outputs(model, batches or [])
        return {name: means[name][heads] for name, heads in removed.items()}
    sites = {site.name: site for site in attention_sites(model)}
    constants = {}
    for name, heads in removed.items():
        layer = projections(model, sites[name])
        bias = value_bias(layer)
        if bias is not None:
            constants[name] = bias[torch.tensor(heads) // (layer.query // layer.kv)]
    return constants


def add_to_output_bias(out: nn.Module, constant: Tensor, heads: list[int]) -> None:
    """Add W_O^h c_h of the removed heads to W_O's bias, which is made if there is none."""
    weight = out.get_parameter("weight").detach()
    weight = weight.T if row_dim(out) else weight  # (width, heads * value_dim)
    size = constant.shape[1]
    columns = torch.cat([torch.arange(head * size, (head + 1) * size) for head in heads]).to(weight.device)
    addition = weight[:, columns].double() @ constant.flatten().double().to(weight.device)
    bias = out._parameters.get("bias")
    total = addition if bias is None else addition + bias.detach().double()
    requires_grad = weight.requires_grad if bias is None else bias.requires_grad
    out.bias = nn.Parameter(total.to(weight.dtype), requires_grad=requires_grad)
