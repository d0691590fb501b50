"""`headwise.watch`: exact statistics, weights, links and outputs of every head while a model runs.

`watcher` answers each attention call that one of the `sources` intercepts. A call of transformers' `registry` is
translated by `call_reader`, and `trust` compares the translation with the model's own output; the meaning of a call of
`known_modules` is known. `recording` keeps what `request` asks for in `layers`. `returned_weights` is for models that
cannot be watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .call_reader import Reading as Reading
    from .eager import EagerReading as EagerReading
    from .layers import HeadRows as HeadRows
    from .layers import Layer as Layer
    from .layers import Links as Links
    from .request import CallObserver as CallObserver
    from .request import Request as Request
    from .request import WatchOptions as WatchOptions
    from .returned_weights import output_attentions as output_attentions
    from .watcher import Watch as Watch
    from .watcher import watch as watch
    from .watcher import watch_calls as watch_calls

_MODULES = {
    "CallObserver": "request",
    "EagerReading": "eager",
    "HeadRows": "layers",
    "Layer": "layers",
    "Links": "layers",
    "Reading": "call_reader",
    "Request": "request",
    "Watch": "watcher",
    "WatchOptions": "request",
    "output_attentions": "returned_weights",
    "watch": "watcher",
    "watch_calls": "watcher",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
