"""Products of tensors, in the forms that models write them: matmul, @, bmm, baddbmm and einsum."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

PRODUCTS = frozenset(("matmul", "rmatmul", "bmm", "baddbmm", "einsum"))


class Operands(NamedTuple):
    """The two operands of a product, and the letters of their axes and of the result's."""

    left: Tensor
    right: Tensor
    left_axes: str
    right_axes: str
    result_axes: str


class Factor(NamedTuple):
    """One operand of a product, and its axes in another order."""

    tensor: Tensor
    axes: str
    order: str

    def arranged(self, x: Tensor | None = None) -> Tensor:
        """The tensor, or another of its shape, in that order; an axis that it does not have gets size 1."""
        x = self.tensor if x is None else x
        if self.axes == self.order:
            return x
        x = x.permute(*(self.axes.index(axis) for axis in self.order if axis in self.axes))
        for position, axis in enumerate(self.order):
            if axis not in self.axes:
                x = x.unsqueeze(position)
        return x


class Scores(NamedTuple):
    """A product as queries (*lead, Tq, D) times keys (*lead, Tk, D)."""

    query: Factor
    key: Factor


class Mix(NamedTuple):
    """A product as weights (*lead, Tq, Tk) times values (*lead, Tk, Dv)."""

    value: Factor
    result_order: tuple[int, ...]  # the result's axes in the order (*lead, Tq, Dv)


def read_operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operands | None:
    """The operands of a product of two tensors; None for any other call."""
    if name == "einsum":
        return _read_einsum(args)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if name == "baddbmm":
        tensors = tensors[1:]
    if len(tensors) != 2 or min(x.dim() for x in tensors) < 2:
        return None
    left, right = reversed(tensors) if name == "rmatmul" else tensors
    lead = "".join(chr(ord("a") + i) for i in range(max(left.dim(), right.dim()) - 2))
    left_lead, right_lead = (lead[len(lead) + 2 - x.dim() :] for x in (left, right))
    return Operands(left, right, left_lead + "xy", right_lead + "yz", lead + "xz")


def _read_einsum(args: tuple[Any, ...]) -> Operands | None:
    if not args or not isinstance(args[0], str):
        return None
    tensors = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2 or len(tensors) != 2:
        return None
    if "..." in args[0]:
        terms, result = _name_ellipsis(terms, result, tensors)
    if any(len(set(term)) != len(term) for term in (*terms, result)):
        return None
    return Operands(tensors[0], tensors[1], terms[0], terms[1], result)


def _name_ellipsis(terms: list[str], result: str, tensors: Any) -> tuple[list[str], str]:
    counts = [x.dim() - len(term) + 3 if "..." in term else 0 for x, term in zip(tensors, terms, strict=True)]
    letters = "".join(chr(ord("\u03b1") + i) for i in range(max(counts)))
    named = [term.replace("...", letters[len(letters) - n :]) for term, n in zip(terms, counts, strict=True)]
    return named, result.replace("...", letters)


def read_scores(operands: Operands) -> Scores | None:
    """A product as queries times keys, the keys on the result's last axis; None where it is not one."""
    result = operands.result_axes
    if len(result) < 2:
        return None
    lead, rows, columns = result[:-2], result[-2], result[-1]
    left, right = (operands.left, operands.left_axes), (operands.right, operands.right_axes)
    if rows in right[1]:
        left, right = right, left
    shared = [axis for axis in left[1] if axis in right[1] and axis not in result]
    if len(shared) != 1 or rows not in left[1] or columns not in right[1] or columns in left[1] or rows in right[1]:
        return None
    if not set(left[1] + right[1]) <= set(result) | set(shared):
        return None
    return Scores(Factor(*left, lead + rows + shared[0]), Factor(*right, lead + columns + shared[0]))


def read_mix(operands: Operands, weights: Tensor) -> Mix | None:
    """A product as weights (one of the operands, its last axis the keys) times values; None where it is not one."""
    weight_axes, value, value_axes = operands.left_axes, operands.right, operands.right_axes
    if operands.left is not weights:
        weight_axes, value, value_axes = operands.right_axes, operands.left, operands.left_axes
    lead, rows, keys, result = weight_axes[:-2], weight_axes[-2], weight_axes[-1], operands.result_axes
    columns = [axis for axis in value_axes if axis not in weight_axes]
    if keys in result or keys not in value_axes or rows in value_axes or len(columns) != 1:
        return None
    order = lead + rows + columns[0]
    if sorted(order) != sorted(result):
        return None
    factor = Factor(value, value_axes, lead + keys + columns[0])
    return Mix(factor, tuple(result.index(axis) for axis in order))


def projected_axes(operands: Operands, weight: Tensor) -> tuple[int, ...]:
    """The axes of a product with a layer's own weight that the weight brings in."""
    weight_axes, other = operands.left_axes, operands.right_axes
    if operands.left is not weight:
        weight_axes, other = other, weight_axes
    return tuple(i for i, axis in enumerate(operands.result_axes) if axis in weight_axes and axis not in other)
