"""Whole modules over a split sequence: attention, blocks and stacks whose tokens live on several ranks.

Every rank holds all weights and some tokens; only attention speaks with the others. What a rank's tokens give the
weights is a part of their gradient, which `sum_gradients` puts together.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..attention.nn.module import MultiHeadAttention
from ..attention.nn.positions import Alibi, Rotary
from ..attention.nn.stack import Decoder, Encoder, Transformer
from ..attention.options import Window
from ..attention.stats import HeadStats
from ..attention.validation import shown
from ..errors import ShapeError, UnsupportedError
from .context_parallel import positions_of, ring_attend, ring_head_stats
from .ranks import ranks_of
from .tensor_parallel import SplitAttention, looks


class RingAttention(MultiHeadAttention):
    """Self-attention of a sequence of which this rank holds some tokens, in the order of `placed`."""

    zigzag: bool
    mesh: DeviceMesh | None
    timeout: float | None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        causal: bool = False,
        window: Window | None = None,
        lengths: Tensor | None = None,
        gates: Tensor | None = None,
        positions: Tensor | None = None,
        **other: Any,
    ) -> Any:
        """query (B, tokens here, d_model) -> the same shape. lengths (B,) are of the whole sequences."""
        ranks = ranks_of(self.mesh, self.timeout)
        with ranks.in_step("the attention of a split sequence"):
            return self._forward(query, key, positions, other, causal, window, lengths, gates)

    def _forward(
        self, query: Tensor, key: Tensor | None, positions: Tensor | None, other: dict[str, Any], causal: bool,
        window: Window | None, lengths: Tensor | None, gates: Tensor | None,
    ) -> Tensor:  # fmt: skip
        q, k, v = self._here(query, key, positions, other)
        out = ring_attend(q, k, v, causal=causal, window=window, lengths=lengths, gates=gates, **self._how(query))
        found: Tensor = self.W_O(out.transpose(1, 2).flatten(2))
        return found

    def stats(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **how: Any) -> HeadStats:
        """Of the whole sequence, on every rank; queries and classes are of the tokens here."""
        asked = {name: how.pop(name, None) for name in ("queries", "classes", "window", "lengths", "gates")}
        with torch.no_grad():
            q, k, v = self._here(query, key, how.pop("positions", None), how)
            return ring_head_stats(q, k, v, causal=how.get("causal", False), **asked, **self._how(query))[1]

    def weights(self, query: Tensor, key: Tensor | None = None, **how: Any) -> Tensor:
        raise UnsupportedError("weights of a split sequence are on no rank whole; use stats, or the whole sequence")

    def _here(
        self, query: Tensor, key: Tensor | None, positions: Tensor | None, other: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        def words() -> str:
            for name in ("mask", "cache", "need_weights"):
                if other.get(name) is not None and other[name] is not False:
                    raise UnsupportedError(f"a split sequence takes no {name}; lengths and windows it takes")
            if key is not None and key is not query:
                raise UnsupportedError("a split sequence is for self-attention, got a key of another sequence")
            if self.training and self.dropout:
                raise UnsupportedError("a split sequence has no dropout inside attention; set dropout=0")
            if query.dim() != 3:
                raise ShapeError(f"query must be (B, tokens here, d_model), got {shown(query.shape)}")
            mode = "training" if self.training else "not training"
            learned = ", with gradient" if torch.is_grad_enabled() else ""
            return f"a call {'with' if positions is not None else 'without'} positions, {mode}{learned}"

        here = query.shape[1] if query.dim() > 1 else 0
        places = positions_of(here, self.zigzag, self.mesh, self.timeout, words)
        if positions is None and isinstance(self.position, Rotary):
            positions = places.to(query.device)
        projected = self.project(query, positions=positions)
        return projected.q, projected.k, projected.v

    def _how(self, query: Tensor) -> dict[str, Any]:
        slopes = None
        if isinstance(self.position, Alibi):
            slopes = torch.tensor(self.position.for_heads(self.heads.query), device=query.device)
        given = {"softcap": self.softcap, "sinks": self.sinks, "slopes": slopes}
        return {**given, "zigzag": self.zigzag, "mesh": self.mesh, "timeout": self.timeout}


def split_sequence(
    module: Any, mesh: DeviceMesh | None = None, *, zigzag: bool = True, timeout: float | None = None
) -> Any:
    """Let an attention, a block or a stack take this rank's tokens of a sequence (`placed`): in place, as split_heads.

    zigzag: how tokens are placed, for all layers alike. A stack's positions are those of the whole sequence.
    timeout: seconds that a rank waits for the others, in forward and in backward; that of their group by default.
    """
    ranks = ranks_of(mesh, timeout)
    found = [part for part in module.modules() if isinstance(part, MultiHeadAttention)]
    if not found or isinstance(module, Transformer) or any(isinstance(part, SplitAttention) for part in found):
        raise UnsupportedError(f"{type(module).__name__} has no self-attention whose sequence can be split")
    ranks.agree("the module whose sequence is split", lambda: looks(module))
    for part in found:
        part.__class__ = RingAttention
        assert isinstance(part, RingAttention)
        part.zigzag, part.mesh, part.timeout = zigzag, mesh, timeout
    if isinstance(module, Decoder | Encoder):

        def place(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            ids = args[0] if args else kwargs["ids"]
            if kwargs.get("positions") is None:
                kwargs = {**kwargs, "positions": positions_of(ids.shape[1], zigzag, mesh, timeout).to(ids.device)}
            return args, kwargs

        module.register_forward_pre_hook(place, with_kwargs=True)
    return module


def sum_gradients(module: nn.Module, mesh: DeviceMesh | None = None, *, timeout: float | None = None) -> None:
    """Each rank's part of every gradient -> the whole one, on all ranks.

    A rank whose tokens gave a parameter no gradient takes part with zeros. One that has no gradient on any rank stays
    without.
    """
    ranks = ranks_of(mesh, timeout)
    named = dict(module.named_parameters())

    def words() -> str:
        forms = [f"{name} {x.dtype} {tuple(x.shape)} {x.requires_grad}" for name, x in named.items()]
        digest = hashlib.sha256("\n".join(forms).encode()).hexdigest()[:12]
        return f"a {type(module).__name__} of {len(forms)} parameters, digest {digest}"

    ranks.agree("the gradients to sum", words)
    if ranks.count == 1 or not named:
        return
    there = torch.tensor([x.grad is not None for x in named.values()], dtype=torch.int32, device=ranks.device)
    ranks.sum(there, "who has gradients")
    for has, (name, x) in zip(there.tolist(), named.items(), strict=True):
        if has:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
            ranks.sum(x.grad, f"the gradient of {name}")
