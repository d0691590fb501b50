"""One text through a model: what every head does with it, as values and in the terminal.

A function with the name of its module: `words.words`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .comparison import Comparison as Comparison
    from .encoding import clean_text as clean_text
    from .encoding import encode as encode
    from .examples import EXAMPLES as EXAMPLES
    from .examples import SENTENCE as SENTENCE
    from .examples import Example as Example
    from .image_result import ImageInspection as ImageInspection
    from .images import ImageTokens as ImageTokens
    from .images import encode_image as encode_image
    from .result import PRONOUNS as PRONOUNS
    from .result import STATISTICS as STATISTICS
    from .result import Inspection as Inspection
    from .result import Link as Link
    from .run import inspect as inspect
    from .words import Words as Words

_MODULES = {
    "Comparison": "comparison",
    "EXAMPLES": "examples",
    "Example": "examples",
    "ImageInspection": "image_result",
    "ImageTokens": "images",
    "Inspection": "result",
    "Link": "result",
    "PRONOUNS": "result",
    "SENTENCE": "examples",
    "STATISTICS": "result",
    "Words": "words",
    "clean_text": "encoding",
    "encode": "encoding",
    "encode_image": "images",
    "inspect": "run",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
