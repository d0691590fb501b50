"""Collectives and agreements as PyTorch operators, for compiled graphs.

A compiled graph calls at run time what eager code calls, with the same time-outs and errors. The operators have ordered
effects, so that no compiler drops or reorders them: ranks with different numbers of heads have different graphs, and
must still communicate in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.torch_internals import EffectType
from ..errors import UnsupportedError
from .agreement import describe_random_state, describe_tensor
from .ranks import ranks_with_key


def _all_reduce(x: Tensor, key: str, activity: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    ranks_with_key(key).all_reduce(total, activity)
    return total


def _all_to_all(x: Tensor, sent: list[int], received: list[int], key: str, activity: str) -> Tensor:
    return ranks_with_key(key).all_to_all(x, sent, received, activity)


def _agree(
    values: list[Tensor], numbers: list[float], key: str, activity: str, text: str, compare_values: bool, random: bool
) -> None:
    ranks = ranks_with_key(key)
    parts = [
        text,
        *map(str, numbers),
        *map(describe_tensor, values),
        *([describe_random_state(ranks.device)] if random else []),
    ]
    tensors = {f"tensor {n}": x for n, x in enumerate(values) if compare_values and x.is_floating_point()}
    ranks.agree(activity, ", ".join(parts), values=tensors)


all_reduce = torch.library.custom_op(
    "headwise::all_reduce", _all_reduce, mutates_args=(), schema="(Tensor x, str key, str activity) -> Tensor"
)
all_to_all = torch.library.custom_op(
    "headwise::all_to_all",
    _all_to_all,
    mutates_args=(),
    schema="(Tensor x, int[] sent, int[] received, str key, str activity) -> Tensor",
)

agree = torch.library.custom_op(
    "headwise::agree",
    _agree,
    mutates_args=(),
    schema="(Tensor[] values, float[] numbers, str key, str activity, str text, bool compare_values, bool random)"
    " -> ()",
)


@all_reduce.register_fake
def _(x: Tensor, key: str, activity: str) -> Tensor:
    check_order()
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_to_all.register_fake
def _(x: Tensor, sent: list[int], received: list[int], key: str, activity: str) -> Tensor:
    check_order()
    return x.new_empty(sum(received))


@agree.register_fake
def _(
    values: list[Tensor], numbers: list[float], key: str, activity: str, text: str, compare_values: bool, random: bool
) -> None:
    check_order()


if EffectType is not None:
    for operator in (all_reduce, all_to_all, agree):
        operator.register_effect(EffectType.ORDERED)


def check_order() -> None:
    """Refuse to trace where this version of PyTorch has no effects: a compiler could drop or reorder the operators."""
    if EffectType is None:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot keep the order of collectives in a compiled graph; run modules whose "
            "heads are split over ranks uncompiled"
        )
