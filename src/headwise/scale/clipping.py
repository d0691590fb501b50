"""Clipping the gradients of a split module by the norm of the whole module's gradients."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..errors import HeadwiseError, UnsupportedError
from .ranks import Ranks, ranks_of


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a module that `split_heads` split. All ranks must call it.

    The norm is that of the unsplit module's gradients. PyTorch's own function suffices if all parameters are DTensors
    on one mesh; this function also supports plain tensors, which must be the same on all ranks, and raises an error on
    ranks that disagree.

    Args:
        module: a split module, or a module with split submodules.
        max_norm: gradients are scaled down, in place, if their norm is larger.
        norm_type: the exponent of the norm; math.inf for the largest absolute value.
        error_if_nonfinite: raise an error on all ranks if the norm is NaN or infinite.
        timeout: seconds that a rank waits for the others; the time-out of their group by default.

    Returns:
        The norm before clipping, the same on every rank.

    Example:
        >>> loss.backward()
        >>> headwise.scale.clip_grad_norm_(block, 1.0)
        >>> optimizer.step()
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedError(f"scale.clip_grad_norm_ takes the split module, got a {type(module).__name__}")
    if not (norm_type > 0 and max_norm >= 0):
        raise HeadwiseError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm!r} and {norm_type!r}")
    groups = (getattr(part, name, None) for name in ("ranks", "token_ranks") for part in module.modules())
    mesh = next((group.mesh for group in groups if isinstance(group, Ranks)), None)
    ranks = ranks_of(mesh, timeout)
    gradients = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    digest = hashlib.sha256("\n".join(gradients).encode()).hexdigest()[:8]
    ranks.agree(
        "the gradients to clip",
        f"{len(gradients)} gradients, digest {digest}, max_norm {max_norm:g}, norm_type {norm_type:g}",
    )
    by_mesh: dict[Any, list[nn.Parameter]] = {}  # PyTorch combines the norms of DTensors on one mesh
    for parameter in module.parameters():
        if parameter.grad is not None:
            place = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(place, []).append(parameter)
    norms = [get_total_norm([x.grad for x in parameters], norm_type) for parameters in by_mesh.values()]  # type: ignore[misc]
    whole_norms = [torch.zeros(()), *(x.full_tensor() if isinstance(x, DTensor) else x for x in norms)]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in whole_norms])
    total = torch.linalg.vector_norm(torch.stack([x.to(ranks.device, dtype) for x in whole_norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise HeadwiseError(
            f"the gradients' norm is {float(total)}, so they cannot be clipped by it; look for what is not finite"
        )
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total)
    return total
