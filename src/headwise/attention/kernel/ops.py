"""The native kernel as an operator of PyTorch's: torch.compile and torch.export see one node and its shapes.

Outside of graphs native.py is called directly, which is several times faster to begin. Operators take no
`int | Tensor`, so offset and end come twice: a number, and a tensor that counts where it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Sizes
from ..sight import Sight
from ..stats import HeadStats
from . import native

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? offsets, Tensor? ends, Tensor? slopes, Tensor? sinks, "
    "Tensor? gates, Tensor? asked, Tensor? classes, SymInt left, SymInt right, SymInt offset, SymInt end, float scale, "
    "float softcap, bool measured) -> (Tensor, Tensor)"
)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    ends: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    asked: Tensor | None,
    classes: Tensor | None,
    left: int,
    right: int,
    offset: int,
    end: int,
    scale: float,
    softcap: float,
    measured: bool,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and, if measured, the sums (SUMS and classes, B, H). left, right: -1 is open."""
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    sight = Sight(
        size=Sizes(batch, heads, kv_heads, queries, keys, dim, value_dim),
        device=q.device,
        mask=mask,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        offset=offset if offsets is None else offsets,
        end=end if ends is None else ends,
        slopes=slopes,
        readable=True,
    )
    sums = q.new_empty(_columns(classes, measured), batch, heads, dtype=torch.float64)
    extra = native.Extra(sums, asked, classes) if measured else native.PLAIN
    return native.run(q, k, v, sight, scale, softcap or None, sinks, gates, extra), sums


def _columns(classes: Tensor | None, measured: bool) -> int:
    return (len(native.SUMS) + (0 if classes is None else classes.shape[1])) if measured else 0


_operator = torch.library.custom_op("headwise::attend", _attend, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, **more: bool) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    measured = more["measured"] if more else bool(others[-1])
    classes = others[7]
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(_columns(classes, measured), batch, heads, dtype=torch.float64)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    queries: Tensor | None = None,
    classes: Tensor | None = None,
    measured: bool = False,
) -> tuple[Tensor, Tensor]:
    """native.run as one node of a graph."""
    offset, end = sight.offset, sight.end
    return _operator(  # type: ignore[no-any-return, unused-ignore]
        q, k, v, sight.mask,
        offset if isinstance(offset, Tensor) else None, end if isinstance(end, Tensor) else None,
        sight.slopes, sinks, gates, queries, classes,
        -1 if sight.left is None else sight.left, -1 if sight.right is None else sight.right,
        0 if isinstance(offset, Tensor) else offset, 0 if isinstance(end, Tensor) else end,
        scale, softcap or 0.0, measured,
    )  # fmt: skip


def head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    queries: Tensor | None,
    classes: dict[str, Tensor],
    cross: bool,
) -> tuple[Tensor, HeadStats]:
    """native.head_stats as one node of a graph."""
    marks = torch.stack(list(classes.values()), 1).float() if classes else None
    out, sums = run(q, k, v, sight, scale, softcap, sinks, gates, queries, marks, True)
    return out, HeadStats(*native.apart(sums, list(classes), cross, sinks is not None))
