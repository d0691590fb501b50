"""What every head of a vision model does on one image: an Inspection whose words are special tokens and patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .images import ImageTokens
from .result import Inspection

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

STRONGEST_PATCHES = 5  # per head in JSON
EVERY_PATCH = "the mean over all patches"  # the source of models without special tokens


@dataclass(frozen=True, eq=False, repr=False)
class ImageInspection(Inspection):
    """What every head does on one image: the result of `headwise.inspect(image=...)`. It prints as a page.

    Everything of Inspection, where a word is a special token such as "[CLS]" or a patch "row,column".

    Attributes:
        image: the grid of patches, the special tokens, and the picture as the model was given it.

    Example:
        >>> seen = headwise.inspect(image="cat.png", model="vit-directory")  # doctest: +SKIP
        >>> seen.patch_weights("3.1", "[CLS]").shape  # doctest: +SKIP
        (14, 14)
    """

    image: ImageTokens = field(kw_only=True)

    @property
    def sources(self) -> list[str | None]:
        """The tokens whose weights are shown: those of `follow`, else [CLS]; None for the mean over all patches."""
        if self.follow:
            return [self.words.names[self.find(token)] for token in self.follow]
        return [self.image.special[0] if self.image.special else None]

    def followed_words(self) -> list[tuple[int, str]]:
        return [(self.find(source), "") for source in self.sources if source is not None]

    def patch_weights(self, head: str | tuple[int, int], source: str | None = None) -> np.ndarray:
        """(rows, columns): one head's weights to the patches, from a token, or the mean over all patches."""
        matrix = self.matrix(head)
        row = matrix[self.image.offset :].mean(0) if source is None else matrix[self.find(source)]
        return self.image.patches(row)

    def strongest_heads(self, source: str | None) -> list[tuple[tuple[int, int], np.ndarray]]:
        """Every head with its weights to the patches, the head with the largest single weight first."""
        grids = [(head, self.patch_weights(head, source)) for head in self.heads]
        return sorted(grids, key=lambda entry: -float(entry[1].max()))

    def to_json(self, head: str | tuple[int, int] | None = None) -> dict[str, Any]:
        """The grid, and for every head its strongest patches; head: with the matrix of this one."""
        data = super().to_json(head)
        for name in ("text", "words", "unknown", "causal"):
            del data[name]
        return {
            "image": self.image.title,
            "grid": {"rows": self.image.rows, "columns": self.image.columns, "offset": self.image.offset},
            "special": list(self.image.special),
            **data,
            "followed": [{"from": source or EVERY_PATCH, "heads": self._heads_json(source)} for source in self.sources],
        }

    def _heads_json(self, source: str | None) -> list[dict[str, Any]]:
        return [
            {
                "head": f"{layer}.{number}",
                "share": round(float(grid.sum()), 6),  # of the weight, on patches
                "patches": strongest_patches(grid),
            }
            for (layer, number), grid in self.strongest_heads(source)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .image_terminal import draw_image

        yield draw_image(self, options.max_width, colour=console.color_system is not None)


def strongest_patches(grid: np.ndarray) -> list[dict[str, Any]]:
    """The patches of the largest weights, (rows, columns), strongest first."""
    order = np.argsort(-grid, axis=None, kind="stable")[:STRONGEST_PATCHES]
    places = [divmod(int(place), grid.shape[1]) for place in order]
    return [{"row": row, "column": column, "weight": round(float(grid[row, column]), 6)} for row, column in places]
