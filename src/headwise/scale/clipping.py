"""Clipping the gradients of a split module by the norm of the whole module's gradients."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import HeadwiseError, UnsupportedError
from .gradients import norm_over_ranks, owned_part, sum_of_powers
from .parallel_linear import local_tensor, parameter_parts
from .ranks import ranks_of


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a module that `split_heads` split, in one all-reduce. All ranks must call it.

    The norm is that of the unsplit module's gradients: every parameter of the whole module counts once.

    Args:
        module: wholly split, or with split submodules.
        max_norm: gradients are scaled down, in place, where their norm is larger.
        norm_type: of the norm; math.inf for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite, on all ranks.
        timeout: seconds that a rank waits for the others; that of their group by default.

    Returns:
        The norm before clipping, the same on every rank.

    Example:
        >>> loss.backward()
        >>> headwise.scale.clip_grad_norm_(block, 1.0)
        >>> optimizer.step()
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedError(
            f"scale.clip_grad_norm_ takes the split module, which knows its parts, got a {type(module).__name__}"
        )
    if not (norm_type > 0 and max_norm >= 0):
        raise HeadwiseError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm!r} and {norm_type!r}")
    parts = parameter_parts(module)
    mesh = next((part.mesh for part in parts.values()), None)
    ranks = ranks_of(mesh, timeout)
    gradients = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    digest = hashlib.sha256("\n".join(gradients).encode()).hexdigest()[:8]
    ranks.agree(
        "the gradients to clip",
        f"{len(gradients)} gradients, digest {digest}, max_norm {max_norm:g}, norm_type {norm_type:g}",
    )
    split_gradients, replicated_gradients = list[Tensor](), list[Tensor]()
    for name, x in gradients.items():
        if name in parts:
            split_gradients.append(owned_part(local_tensor(x), parts[name]))
        elif isinstance(x, DTensor):  # sharded by another library; DTensor computes its norm
            replicated_gradients.append(torch.linalg.vector_norm(x, norm_type).full_tensor().as_subclass(Tensor)[None])
        else:
            replicated_gradients.append(x)
    own_gradients = [*split_gradients, *(replicated_gradients if ranks.first else [])]
    total = norm_over_ranks(sum_of_powers(own_gradients, norm_type, ranks.device), norm_type, ranks)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise HeadwiseError(
            f"the gradients' norm is {float(total)}, so they cannot be clipped by it; look for what is not finite"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for x in gradients.values():
            local = local_tensor(x)
            local.mul_(factor.to(local))
    return total
