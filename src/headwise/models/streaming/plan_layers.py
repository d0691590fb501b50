"""Which KV heads of each layer stream by a plan."""

from __future__ import annotations

from ...attention.nn.streamed_keys import StreamingHeads
from ...plans import StreamPlan


def streaming_heads(plan: StreamPlan) -> dict[tuple[str, int], StreamingHeads]:
    """The streaming heads of every layer that has any, by (kind, layer)."""
    by_key = {layer[:2]: layer for layer in plan.layers}
    streams = {}
    for key, heads in plan.heads.items():
        full_key = key if isinstance(key, tuple) else (plan.layers[0].kind, key)
        if heads:
            kv_heads = by_key[full_key].kv_heads
            streams[full_key] = StreamingHeads(kv_heads, frozenset(heads), plan.window, plan.keep_first)
    return streams
