"""What a `FunctionMode` reports of a running model: attention calls, where their heads go, and what it rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .head_axes import HeadAxes
from .score_changes import NO_ROWS, RowScores


class Rejection(NamedTuple):
    """Something that looks like attention and was not recorded."""

    name: str  # the path of the module that computes it
    module: str  # its class
    reason: str

    def __str__(self) -> str:
        return f"{self.module} (at {self.name or 'the top'}): {self.reason}"


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One attention call that was seen in the functions of a module."""

    modules: tuple[nn.Module, ...]  # that were running during all of it, outermost first
    query: Tensor  # (B, H, Tq, D)
    key: Tensor  # (B, Hkv, Tk, D)
    value: Tensor  # (B, Hkv, Tk, Dv)
    axes: HeadAxes  # of the model's own tensors
    weights: Tensor | None = None  # (B, H, Tq, Tk): the softmax, before dropout; None in PyTorch's fused function
    scores: RowScores = NO_ROWS  # (B, H, Tq): what is known of the scores that the weights are the softmax of
    mask: Tensor | None = None  # of the fused function, with four axes
    causal: bool = False  # query i sees keys 0 ... i
    scale: float | None = None
    dropout: float = 0.0
    options: dict[str, Any] | None = None  # of headwise.attend, where the model calls that


class Receiver(Protocol):
    """The callbacks for attention calls that a mode observes."""

    def answer(self, call: FunctionCall, run: Callable[[], Tensor]) -> tuple[Tensor, Any]:
        """The output of a call, in the shape that run gives it, and a token for the call."""

    def keep_outputs(self, token: Any, outputs: Callable[[], Tensor]) -> None:
        """The heads' outputs (B, H, Tq, Dv) of a call, as the call gave them."""

    def project(self, token: Any, linear: nn.Module, in_order: bool, outputs: Callable[[], Tensor | None]) -> None:
        """The heads' outputs of a call reach a linear layer.

        Args:
            token: of the call.
            linear: the layer.
            in_order: whether they lie head by head, each head's width together.
            outputs: gives them as they are there, (B, H, Tq, Dv); None where something was added or left out.
        """

    def reject(self, rejection: Rejection) -> None:
        """Something looked like attention and was not understood."""
