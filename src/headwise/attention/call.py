"""One validated attention call as plain data: what every backend receives, whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from . import validation
from .options import AttendOptions, CallOptions, VisibilityOptions, WeightOptions
from .torch_modes import in_vmap, needs_gradient
from .validation import Sizes
from .visibility import Visibility
from .visibility_options import check_tensor, resolve_visibility

__all__ = ["AttendOptions", "AttentionCall", "CallOptions", "StatsRequest", "VisibilityOptions", "WeightOptions"]


@dataclass(frozen=True)
class AttentionCall:
    """Everything about one call but its q, k and v."""

    visibility: Visibility  # who may attend to whom: mask, band, lengths, offset, and ALiBi's slopes
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # (Hq,) extra logits in the softmax's denominator
    gates: Tensor | None = None  # (Hq,) or (B, Hq), multiply each head's output
    dropout: float = 0.0
    seed: Any = None  # of our own generator of dropout: an int, in a compiled graph a tensor; None: PyTorch draws
    origin: tuple[int, int] = (0, 0)  # the sequence and the query head that a part of a call begins with

    @property
    def size(self) -> Sizes:
        """The sizes of q, k and v."""
        return self.visibility.size

    @property
    def adjusts_scores(self) -> bool:
        """Whether scores are more than scale * q.k and hidden keys: softcap, a float mask or slopes change them."""
        mask = self.visibility.mask
        biased = self.visibility.slopes is not None or (mask is not None and mask.dtype != torch.bool)
        return biased or self.softcap is not None

    @property
    def gates_stride(self) -> int:
        """The stride of contiguous gates from one sequence to the next."""
        return 0 if self.gates is None or self.gates.dim() == 1 else self.size.heads

    def detach(self) -> AttentionCall:
        """The same call with tensors that carry neither gradients nor tangents."""
        mask, slopes, sinks, gates = (
            None if x is None else x.detach()
            for x in (self.visibility.mask, self.visibility.slopes, self.sinks, self.gates)
        )
        return self.with_tensors(mask, slopes, sinks, gates)

    def with_tensors(
        self, mask: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, gates: Tensor | None
    ) -> AttentionCall:
        """The same call with other tensors of the same shapes."""
        visibility = self.visibility
        if mask is not visibility.mask or slopes is not visibility.slopes:
            visibility = replace(visibility, mask=mask, slopes=slopes)
        elif sinks is self.sinks and gates is self.gates:  # most calls have none of them
            return self
        return replace(self, visibility=visibility, sinks=sinks, gates=gates)

    def with_copied_positions(self) -> AttentionCall:
        """The same call, for a backward pass before which the caller may change offset, starts or lengths in place."""
        return self if self.visibility.uniform else replace(self, visibility=self.visibility.with_copied_positions())

    def part(self, batch: slice, kv_heads: slice) -> AttentionCall:
        """The call on some sequences and some KV heads with the query heads that read them; gates are left out."""
        heads = slice(kv_heads.start * self.size.group, kv_heads.stop * self.size.group)
        sinks = None if self.sinks is None else self.sinks[heads]
        origin = self.origin[0] + batch.start, self.origin[1] + heads.start
        return replace(self, visibility=self.visibility.part(batch, kv_heads), sinks=sinks, gates=None, origin=origin)


@dataclass(frozen=True)
class StatsRequest:
    """Which statistics of a call are requested."""

    queries: Tensor | None = None  # (B, Tq) bool: those that count; None for all
    classes: Mapping[str, Tensor] = field(default_factory=dict)  # name -> (B, Tk) bool
    cross: bool = False  # positions of queries and keys do not compare: no distance, previous, next, self
    received: bool = False  # whether the weight each key receives is requested too

    def stacked_classes(self) -> Tensor | None:
        """(B, classes, Tk) float32 of zeros and ones, or None."""
        return torch.stack(list(self.classes.values()), 1).float() if self.classes else None


def build_call(q: Tensor, k: Tensor, v: Tensor | None = None, **options: Unpack[CallOptions[Tensor]]) -> AttentionCall:
    """Validate all options of a call."""
    scale = _without_gradient("scale", options.pop("scale", None), "multiply q by it")
    softcap = _without_gradient("softcap", options.pop("softcap", None), "give softcap.item()")
    sinks, gates = options.pop("sinks", None), options.pop("gates", None)
    dropout = _without_gradient("dropout", options.pop("dropout", 0.0), "give dropout.item()")
    visibility = resolve_visibility(q, k, v, **options)  # type: ignore[misc]  # what is left says who sees whom
    size = visibility.size
    validation.check_numbers(scale, softcap, dropout)
    if sinks is not None:
        _check_real(sinks, "sinks", q)
        validation.check_per_head("sinks", sinks.shape, size)
    if gates is not None:
        _check_real(gates, "gates", q)
        validation.check_per_head("gates", gates.shape, size, batched=True)
    dropout = float(dropout) if isinstance(dropout, Tensor) else dropout
    return AttentionCall(visibility, size.dim**-0.5 if scale is None else float(scale), softcap, sinks, gates, dropout)


def build_request(
    q: Tensor,
    size: Sizes,
    queries: Tensor | None = None,
    classes: Mapping[str, Tensor] | None = None,
    cross: bool = False,
    received: bool = False,
) -> StatsRequest:
    """Validate what head_stats takes besides attend's options."""
    if in_vmap():
        raise UnsupportedError("statistics cannot be taken inside torch.func.vmap; give head_stats the whole batch")
    if queries is not None:
        check_tensor("queries", queries, q)
        validation.check_queries(queries, size, queries.dtype == torch.bool)
    if classes:
        validation.check_classes({} if isinstance(classes, dict) else classes, size, None)
        for name, x in classes.items():
            check_tensor(name, x, q)
        validation.check_classes(classes, size, lambda keys: keys.dtype == torch.bool)
    return StatsRequest(queries, classes or {}, cross, received)


def _without_gradient(name: str, number: Any, remedy: str) -> Any:
    """A number; of a tensor the value alone, and an error where its gradient would be lost."""
    if not isinstance(number, Tensor):
        return number
    if needs_gradient(number):
        raise ShapeError(f"{name} has no gradient, got a tensor that requires one; {remedy}")
    return number.detach()


def _check_real(x: Any, name: str, like: Tensor) -> None:
    """Require a tensor of real numbers on the device of `like`."""
    check_tensor(name, x, like)
    if x.is_complex() or x.dtype == torch.bool:
        raise ShapeError(f"{name} must be real numbers, got {x.dtype}; use a tensor of {like.dtype}")
