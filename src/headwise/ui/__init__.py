"""Pictures of heads: the page, its server, the notebook widget, and figures as PNG or SVG.

`headwise.view` is a name of the root. `capture` records a pass of a model, `payload` makes the page's data of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .atlas import save_page as save_page
    from .atlas import save_picture as save_picture
    from .circuit_page import save_circuit_page as save_circuit_page
    from .curves import save_curve as save_curve
    from .figure import save_figure as save_figure
    from .overlays import Overlays as Overlays
    from .overlays import read_overlays as read_overlays
    from .recorder_page import save_training_page as save_training_page
    from .server import serve as serve
    from .service import Service as Service
    from .service import parse_heads_off as parse_heads_off
    from .widget import Page as Page
    from .widget import run_passes as run_passes
    from .widget import save_passes as save_passes
    from .widget import view as view

_MODULES = {
    "Overlays": "overlays",
    "Page": "widget",
    "Service": "service",
    "parse_heads_off": "service",
    "read_overlays": "overlays",
    "run_passes": "widget",
    "save_circuit_page": "circuit_page",
    "save_curve": "curves",
    "save_figure": "figure",
    "save_page": "atlas",
    "save_passes": "widget",
    "save_picture": "atlas",
    "save_training_page": "recorder_page",
    "serve": "server",
    "view": "widget",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
