"""What ranks say of themselves, compared without any ranks."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.scale.agreement import FINE, SIZE, Record, difference, floating, form, sketch, told


def records(*values: torch.Tensor) -> list[Record]:
    return [Record.unpacked(Record.of(FINE, "a call", 3, {"x": x}).packed()) for x in values]


def test_a_record_is_what_was_packed_into_a_fixed_number_of_bytes() -> None:
    record = Record.of(FINE, "é" * 1000, -7, {"x": torch.ones(3)})
    again = Record.unpacked(record.packed())
    assert len(record.packed()) == SIZE and record.words.startswith(again.words) and len(again.words) > 100
    assert (again.status, again.digest, again.number, again.sketches) == (FINE, record.digest, -7, record.sketches)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference_and_other_values_are_one(dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = (x * (1 + torch.finfo(dtype).eps * torch.rand(x.shape, dtype=torch.float64))).to(dtype)
    named = {"x": x.to(dtype)}
    assert difference(records(x.to(dtype), rounded), named) == ""
    for other in (-x, x + 0.3, x.roll(1, 0), x.roll(1, 1), x.roll(1, 2), x.flip(2), 1.1 * x, 0 * x):
        words = f"the values of x {form(named['x'])} on rank 1 are not those on rank 0"
        assert difference(records(x.to(dtype), other.to(dtype)), named) == words
    one = x.clone()
    one[2, 5, 3] += 2
    assert difference(records(x.to(dtype), x.to(dtype), one.to(dtype)), named).endswith(
        "on rank 2 are not those on rank 0"
    )


def test_masks_of_huge_and_infinite_values_are_compared() -> None:
    for least in (-math.inf, torch.finfo(torch.float32).min, math.nan):
        mask = torch.zeros(5, 7)
        mask[1:3, 2:] = least
        moved, other = mask.roll(1, 0), mask.clone()
        other[4, 6] = 0.5
        assert difference(records(mask, mask.clone()), {"x": mask}) == ""
        assert difference(records(mask, moved), {"x": mask}) and difference(records(mask, other), {"x": mask})


def test_more_tensors_than_a_record_has_places_for_are_compared() -> None:
    given = {f"x{n}": torch.full((3,), 1.0 + n) for n in range(11)}
    other = {**given, "x10": torch.full((3,), 5.0)}
    pair = [Record.of(FINE, "", 0, values) for values in (given, other)]
    assert difference(pair, given) and not difference([pair[0], pair[0]], given)


def test_sketches_of_nothing_are_zero() -> None:
    assert sketch(torch.empty(0, 3)) == sketch(torch.empty(2, 3, device="meta")) == [0.0] * 4
    assert sketch(torch.tensor(2.0))[0] == 2.0


def test_a_call_in_words() -> None:
    ids = torch.tensor([[1, 2]])
    assert told([ids]) == form(ids) != form(torch.tensor([[1, 3]]))
    x = torch.ones(3, requires_grad=True)
    assert told({"b": x, "a": (True, None, 2.5)}) == "a True, None, 2.5, b float32 (3,) with gradient"
    with torch.no_grad():
        assert told(x) == "float32 (3,)"
    assert list(floating([ids, x, [x]]) | floating({"mask": x})) == ["input 1", "input 2.0", "mask"]
