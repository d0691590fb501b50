"""The layers of a plan: whether they are those of a model, and which of their KV heads stream."""

from __future__ import annotations

from typing import Any

from ...attention.nn.streamed_keys import StreamingHeads
from ...errors import HeadwiseError
from ...plans import StreamPlan
from ..structure.projections import layer_shape
from ..structure.sites import attention_sites


def check_plan(model: Any, plan: Any) -> None:
    """Refuse what is not a plan for this model."""
    if not isinstance(plan, StreamPlan):
        raise HeadwiseError(f"a StreamPlan is expected, as headwise.stream_plan gives it, got {type(plan).__name__}")
    kinds = {layer.kind for layer in plan.layers}
    sites = attention_sites(model)
    of_kinds = [site for site in sites if site.kind in kinds] or sites
    plan.check_layers([layer_shape(model, site) for site in of_kinds], type(model).__name__)


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
