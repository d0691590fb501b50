"""Which tokens of each prompt are patched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HeadwiseError, ShapeError
from ..json_documents import brief
from ..models.batches import batch_size


class Positions:
    """Token positions, of all prompts alike, of each prompt, or as a mask.

    Args:
        positions: None for all tokens; a position or several for all prompts; a tensor (prompts,) of one position per
            prompt; or a bool mask (prompts, T), also as a list of one per batch. Numbers count a prompt's own tokens,
            without padding; negative ones from its last.
        batches: the batches whose prompts they are.
    """

    def __init__(self, positions: Any, batches: Sequence[Any]) -> None:
        sizes = [batch_size(batch) for batch in batches]
        self._numbers: Tensor | None = None  # (prompts, positions)
        self._masks: list[Tensor] | None = None
        self.words = "all tokens"
        if positions is None:
            return
        masks = _masks(positions, sizes)
        if masks is not None:
            self._masks, self.words = masks, "the tokens of a mask"
            return
        if isinstance(positions, Tensor) and positions.dim() == 1 and not positions.is_floating_point():
            if len(positions) != sum(sizes):
                raise ShapeError(
                    f"positions are {len(positions)} numbers for {sum(sizes)} prompts; give one per prompt, or a list "
                    "of positions for all"
                )
            self._numbers, self.words = positions.cpu()[:, None], "one token per prompt"
        else:
            numbers = [positions] if isinstance(positions, int) else positions
            if not _are_numbers(numbers):
                raise HeadwiseError(
                    "positions must be token positions, a tensor with one per prompt, or a bool mask (prompts, T), got "
                    f"{brief(positions)}"
                )
            chosen = list(numbers)
            self._numbers = torch.tensor(chosen, dtype=torch.long).expand(sum(sizes), -1)
            self.words = f"position{'s' if len(chosen) > 1 else ''} {', '.join(map(str, chosen))}"
        self._numbers_of = self._numbers.split(sizes)

    def __bool__(self) -> bool:
        """Whether they are fewer than all tokens."""
        return self._numbers is not None or self._masks is not None

    def mask(self, number: int, shape: tuple[int, int], real: Tensor | None, place: Any) -> Tensor | None:
        """(B, T) bool: the tokens of batch `number` to patch, at a layer with T positions; None for all.

        Args:
            number: of the batch.
            shape: (B, T) of the activations.
            real: (B, T) bool, which positions are tokens; None for all.
            place: the layer, for messages.
        """
        if self._masks is not None:
            mask = self._masks[number]
            if tuple(mask.shape) != shape:
                raise ShapeError(f"positions are a mask {tuple(mask.shape)}, and {place} has (B, T) = {shape}")
            return mask if real is None else mask.to(real.device) & real
        if self._numbers is None:
            return real
        tokens = torch.ones(shape, dtype=torch.bool) if real is None else real
        counts = tokens.sum(1)  # (B,)
        chosen = self._numbers_of[number].to(tokens.device)  # (B, positions)
        outside = (chosen >= counts[:, None]) | (chosen < -counts[:, None])
        if bool(outside.any()):
            row, column = outside.nonzero()[0].tolist()
            raise HeadwiseError(
                f"position {int(chosen[row, column])} is not in a prompt of {int(counts[row])} tokens, at {place}"
            )
        chosen = torch.where(chosen < 0, chosen + counts[:, None], chosen)
        places = tokens.cumsum(1) - 1  # the number of each token in its prompt
        return (places[:, :, None] == chosen[:, None, :]).any(-1) & tokens


def _are_numbers(values: Any) -> bool:
    if isinstance(values, (str, bytes, Tensor)) or not isinstance(values, Iterable):
        return False
    numbers = list(values)
    return bool(numbers) and all(isinstance(i, int) and not isinstance(i, bool) for i in numbers)


def _masks(positions: Any, sizes: list[int]) -> list[Tensor] | None:
    """One bool mask per batch; None where positions are no masks."""
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        if positions.dim() != 2 or len(positions) != sum(sizes):
            raise ShapeError(
                f"positions are a bool tensor {tuple(positions.shape)}; (prompts, T) with {sum(sizes)} prompts is "
                "expected"
            )
        return list(positions.split(sizes))
    if isinstance(positions, Sequence) and positions and all(isinstance(x, Tensor) for x in positions):
        shapes = [tuple(x.shape) for x in positions]
        if [shape[:1] for shape in shapes] != [(size,) for size in sizes] or any(
            x.dtype != torch.bool or x.dim() != 2 for x in positions
        ):
            raise ShapeError(f"positions are tensors {shapes}; one bool mask (B, T) per batch is expected")
        return list(positions)
    return None
