"""The interface of every backend: it takes a call and the requested extra outputs, and returns `Outputs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from ..call import AttentionCall, StatsRequest
from ..stats import HeadStats

if TYPE_CHECKING:
    from .row_sums import RowSums


class ExtraOutputs(NamedTuple):
    """The outputs that a call requests besides the attention output."""

    stats: StatsRequest | None = None
    lse: bool = False  # each row's log-sum-exp
    strongest: int = 0  # the number of largest weights per row, and their keys
    rows: bool = False  # the sums of each row behind the statistics, which must be wanted, too


NO_EXTRA = ExtraOutputs()


class StrongestKeys(NamedTuple):
    """The largest weights of every row, in descending order, and their keys; 0 and -1 where a row sees fewer keys."""

    keys: Tensor  # (B, H, Tq, count) int32
    weights: Tensor  # (B, H, Tq, count) float32


class Outputs(NamedTuple):
    """What a backend computed."""

    out: Tensor  # (B, H, Tq, Dv)
    stats: HeadStats | None = None
    lse: Tensor | None = None  # (B, H, Tq) float32; -inf for a query with no visible keys
    strongest: StrongestKeys | None = None
    rows: RowSums | None = None


class Backend(Protocol):
    """A way to compute a call. Modules implement it: native.library, triton.launch, sdpa, blockwise."""

    @property
    def NAME(self) -> str:  # as explain names it
        ...

    def why_not(self, q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
        """Why this backend cannot compute the call and the extra outputs, or None."""

    def explain(self, call: AttentionCall) -> str:
        """Describe how this backend computes the call."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> Outputs:
        """Compute the call."""


def apply_gates(out: Tensor, call: AttentionCall) -> Tensor:
    """Each head's output (B, H, Tq, Dv) times its gate."""
    return out if call.gates is None else out * call.gates.to(out.dtype).view(-1, out.shape[1], 1, 1)
