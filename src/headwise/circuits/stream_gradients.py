"""Operations between the residual stream and a metric, with gradients of our own: norms and output layers.

A norm is made linear: its scale is held at its actual value. An output layer skips the positions and vocabulary entries
that the metric does not read, which are nearly all; otherwise its gradient would cost as much as its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .norms import is_norm, possible_forms

TOLERANCE = 256  # units in the last place by which a norm's output may differ from its formula


class NormForm(NamedTuple):
    """A norm's formula: y = gamma * scale * (x - mean of x, where centred) + beta, one scale per token."""

    gamma: Tensor | None  # (d,); None for ones
    beta: Tensor | None
    centred: bool

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        """The actual scale of each token, (..., 1)."""
        direction = self.centre(x) if self.gamma is None else self.centre(x) * self.gamma
        target = y if self.beta is None else y - self.beta
        size = (direction * direction).sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        return (target * direction).sum(-1, keepdim=True) / size

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        """dy/dx at the actual scale, elementwise: gamma * scale, (..., d)."""
        scale = self.scale(x, y)
        return scale.expand_as(x) if self.gamma is None else scale * self.gamma

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def pull_back(self, x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
        """The gradient by x from one by y, with the scale's own dependence on x: gradient (..., *x.shape)."""
        scale, centre = self.scale(x, y), self.centre(x)
        weighted = gradient if self.gamma is None else gradient * self.gamma
        along = (weighted * centre).mean(-1, keepdim=True)
        return self.centre(scale * weighted - scale**3 * along * centre)

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether this formula gives y for x."""
        wide_x, wide_y = x.double(), y.double()
        gamma, beta = (None if parameter is None else parameter.double() for parameter in (self.gamma, self.beta))
        form = NormForm(gamma, beta, self.centred)
        result = form.slope(wide_x, wide_y) * form.centre(wide_x)
        if form.beta is not None:
            result = result + form.beta
        precision = max(torch.finfo(y.dtype).eps, torch.finfo(torch.float32).eps)  # many norms compute in float32
        bound = TOLERANCE * precision * (wide_y.norm() + 1e-12)
        return bool((result - wide_y).norm() <= bound)


def norm_form(module: nn.Module, x: Any, y: Any) -> NormForm | None:
    """The formula of a LayerNorm or RMSNorm module, recognised from its output for x; None for other modules."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.shape != y.shape or not y.is_floating_point():
        return None
    if not is_norm(module):
        return None
    x, y = x.detach(), y.detach()
    forms = (NormForm(*form) for form in possible_forms(module, x.shape[-1]))
    return next((form for form in forms if form.fits(x, y)), None)


class FrozenNorm(torch.autograd.Function):
    """A norm's output, whose gradient passes by at the norm's actual scale, as through a linear map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, slope: Tensor, centred: bool) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.centred = centred
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        gradient = gradients[0] * slope
        if ctx.centred:
            gradient = gradient - gradient.mean(-1, keepdim=True)
        return gradient, None, None, None


class SparseLinear(torch.autograd.Function):
    """A linear layer's output y = x W^T + b, whose gradient is computed only for tokens and rows that have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        gradient = gradients[0]
        tokens = gradient.abs().amax(-1).nonzero(as_tuple=True)
        result = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1])
        chosen = gradient[tokens]
        (rows,) = chosen.any(0).nonzero(as_tuple=True)
        result[tokens] = chosen[:, rows] @ weight[rows] if 8 * len(rows) < len(weight) else chosen @ weight
        return result, None, None
