"""A matrix as the product of two thin factors; the square matrix is not formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """left @ right, of rank at most r.

    Example:
        >>> head.ov.norm, head.ov.singular_values[:3]
    """

    left: Tensor  # (m, r)
    right: Tensor  # (r, n)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """The width of the factors: the largest rank that the product can have."""
        return self.left.shape[1]

    @property
    def T(self) -> LowRank:
        return LowRank(self.right.T, self.left.T)

    @property
    def norm(self) -> float:
        """The Frobenius norm, from the Gram matrices of the factors."""
        grams = (self.left.T @ self.left) * (self.right @ self.right.T)
        return float(grams.sum().clamp(min=0).sqrt())

    @property
    def singular_values(self) -> Tensor:
        """(r,), the largest first; from the triangular factors of both sides."""
        upper = torch.linalg.qr(self.left, mode="r").R
        lower = torch.linalg.qr(self.right.T, mode="r").R
        return torch.linalg.svdvals(upper @ lower.T)

    @property
    def eigenvalues(self) -> Tensor:
        """(r,) complex: those of right @ left, which are the nonzero ones of left @ right."""
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"a matrix of {self.shape[0]} x {self.shape[1]} has no eigenvalues")
        return torch.linalg.eigvals(self.right @ self.left)

    def dense(self) -> Tensor:
        """(m, n): the product itself."""
        return self.left @ self.right
