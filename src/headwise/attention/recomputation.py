"""Backward passes that compute an output again: its inputs, and the check that they are what they were."""

from __future__ import annotations

from torch import Tensor


def separate_input(x: Tensor, create_graph: bool) -> Tensor:
    """x as an input of an output that is computed again: the gradient stops there.

    With create_graph it is a view of x, which stays in the graph. x itself may be several inputs at once, or others may
    be computed from it: its gradient would contain theirs, and PyTorch would add them once more.
    """
    return x.view_as(x) if create_graph else x.detach().requires_grad_(x.requires_grad)
