"""The bundled importance scores, one module each; importing this package registers all of them.

Nothing here is public: scores are named in `headwise.importance`, and added by `headwise.prune.score`.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
