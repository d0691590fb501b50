"""An extension of griffe, which reads docstrings for the site: a section "Example:" is one of examples."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """griffe knows "Examples:"; the docstrings of this package have one example and say so."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
