"""The windows of a plan, layer by layer."""

from __future__ import annotations

from ...plans import StreamPlan
from ..watching.head_windows import HeadWindows


def layer_windows(plan: StreamPlan) -> dict[tuple[str, int], HeadWindows]:
    """The windows of every layer in which heads stream, by (kind, layer)."""
    by_key = {layer[:2]: layer for layer in plan.layers}
    windows = {}
    for key, heads in plan.heads.items():
        full_key = key if isinstance(key, tuple) else (plan.layers[0].kind, key)
        if heads:
            kv_heads = by_key[full_key].kv_heads
            windows[full_key] = HeadWindows(kv_heads, frozenset(heads), plan.window, plan.keep_first)
    return windows
