"""The norm of all gradients of a split model, every parameter of the whole model counted once, and clipping by it."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import HeadwiseError, UnsupportedError
from .gradients import over_ranks, owned, powers_of
from .parallel_linear import local, pieces
from .ranks import ranks_of


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    timeout: float | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ of a module that split_heads split, wholly or in parts: the norm of the unsplit
    module's gradients, the same on every rank, in one sum over the ranks. All ranks must call it.

    Args:
        module: all of whose parameters count. What a rank alone holds is summed over ranks; what several hold, once.
        max_norm: gradients are scaled down, in place, where their norm is larger.
        norm_type: of the norm; math.inf for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite, on all ranks.
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedError(
            f"scale.clip_grad_norm_ takes the split module, which knows its parts, got a {type(module).__name__}"
        )
    if not (norm_type > 0 and max_norm >= 0):
        raise HeadwiseError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm!r} and {norm_type!r}")
    known = pieces(module)
    mesh = next((piece.mesh for piece in known.values()), None)
    ranks = ranks_of(mesh, timeout)
    found = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    here = hashlib.sha256("\n".join(found).encode()).hexdigest()[:8]
    ranks.agree(
        "the gradients to clip",
        f"{len(found)} gradients, digest {here}, max_norm {max_norm:g}, norm_type {norm_type:g}",
    )
    alone, alike = list[Tensor](), list[Tensor]()
    for name, x in found.items():
        if name in known:
            alone.append(owned(local(x), known[name]))
        elif isinstance(x, DTensor):  # of another library's sharding, which knows its own norm
            alike.append(torch.linalg.vector_norm(x, norm_type).full_tensor().as_subclass(Tensor)[None])
        else:
            alike.append(x)
    counted = [*alone, *(alike if ranks.first else [])]
    total = over_ranks(powers_of(counted, norm_type, ranks.device), norm_type, ranks)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise HeadwiseError(
            f"the gradients' norm is {float(total)}, so they cannot be clipped by it; look for what is not finite"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for x in found.values():
            part = local(x)
            part.mul_(factor.to(part))
    return total
