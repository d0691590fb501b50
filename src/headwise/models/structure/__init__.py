"""Where a model keeps its attention: layers (`sites`), W_O and head counts (`heads`), W_Q, W_K, W_V (`projections`).

`adapters` has the classes whose structure is known or declared.
Functions with the names of their modules: `projections.projections`, `text_model.text_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .config_sizes import head_count as head_count
    from .config_sizes import max_positions as max_positions
    from .heads import input_width as input_width
    from .heads import query_heads as query_heads
    from .heads import w_o as w_o
    from .linear_layers import output_width as output_width
    from .linear_layers import row_dim as row_dim
    from .sites import Site as Site
    from .sites import attention_sites as attention_sites
    from .sites import check_watchable as check_watchable
    from .sites import require_sites as require_sites
    from .text_model import check_takes_text as check_takes_text

_MODULES = {
    "Site": "sites",
    "attention_sites": "sites",
    "check_takes_text": "text_model",
    "check_watchable": "sites",
    "head_count": "config_sizes",
    "input_width": "heads",
    "max_positions": "config_sizes",
    "output_width": "linear_layers",
    "query_heads": "heads",
    "require_sites": "sites",
    "row_dim": "linear_layers",
    "w_o": "heads",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
