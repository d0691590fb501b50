"""A module whose class is changed in place stays what it was in everything else."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.scale.class_replacement import check_replaceable, replace_class


class ScalingMixin(nn.Module):
    """Multiplies the output of a layer, before its hooks see it."""

    factor: int

    def forward(self, x: Tensor) -> Any:
        return self.factor * super().forward(x)


class ScalingLinear(ScalingMixin, nn.Linear):
    """The class that a Linear gets in these tests."""


class OtherLinear(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_replace_class_keeps_the_object_with_all_it_holds() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).eval()
    linear, parameters, keys = model[0], list(model.parameters()), list(model.state_dict())
    outputs: list[Tensor] = []
    linear.register_forward_hook(lambda module, args, out: outputs.append(out))
    x = torch.randn(7, 5)
    want = linear(x)
    assert replace_class(linear, ScalingLinear, factor=2) is linear is model[0]
    assert isinstance(linear, ScalingLinear) and not linear.training
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert torch.equal(linear(x), 2 * want)
    assert torch.equal(outputs[0], want) and torch.equal(outputs[1], 2 * want)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_replaced_class_survives_copies_and_pickles(duplicate: Any) -> None:
    linear = replace_class(nn.Linear(5, 3), ScalingLinear, factor=2)
    other = duplicate(linear)
    x = torch.randn(7, 5)
    assert type(other) is ScalingLinear and other is not linear
    assert torch.equal(other(x), linear(x))


def test_replace_class_refuses_a_class_with_methods_of_its_own() -> None:
    linear = OtherLinear(5, 3)
    message = re.escape("OtherLinear is not a plain Linear, and what it does otherwise would be lost")
    for refuse in (check_replaceable, replace_class):
        with pytest.raises(UnsupportedError, match=message):
            refuse(linear, ScalingLinear)
    with pytest.raises(UnsupportedError, match=message):
        replace_class(linear, ScalingLinear, factor=2)
    assert type(linear) is OtherLinear and not hasattr(linear, "factor")


def test_replace_class_refuses_to_replace_twice() -> None:
    linear = replace_class(nn.Linear(5, 3), ScalingLinear, factor=2)
    with pytest.raises(UnsupportedError, match="ScalingLinear is not a plain Linear"):
        replace_class(linear, ScalingLinear, factor=3)
    assert linear.factor == 2
