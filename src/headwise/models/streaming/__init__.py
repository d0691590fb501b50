"""`headwise.streaming` and `headwise.HeadCache`: KV heads that see and keep only the first and the most recent keys.

`context` replaces a model's attention by ours while some of its heads stream. `head_cache` is the cache for it: it
passes `deferred_keys` to the model, which `cached_attention` reads; `padding` finds the padding from the mask.
`generation` passes the cache to `generate`. `own_decoder` is for headwise's own Decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .context import Streaming as Streaming
    from .context import streaming as streaming
    from .head_cache import HeadCache as HeadCache

_MODULES = {
    "HeadCache": "head_cache",
    "Streaming": "context",
    "streaming": "context",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
