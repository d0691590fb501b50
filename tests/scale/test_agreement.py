"""Records that ranks exchange before they act together, compared in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headwise.scale import run_folder
from headwise.scale.agreement import (
    FAILED,
    FINE,
    SIZE,
    Record,
    describe_arguments,
    describe_difference,
    describe_tensor,
    floating_tensors,
    is_alike,
    sketch,
)


def records(*values: torch.Tensor) -> list[Record]:
    return [Record.unpack(Record.of(FINE, "a call", 3, {"x": x}).pack()) for x in values]


def test_a_record_survives_packing_into_a_fixed_number_of_bytes() -> None:
    record = Record.of(FINE, "é" * 1000, -7, {"x": torch.ones(3)})
    unpacked = Record.unpack(record.pack())
    assert len(record.pack()) == SIZE and record.text.startswith(unpacked.text) and len(unpacked.text) > 100
    assert (unpacked.status, unpacked.digest, unpacked.number, unpacked.sketches) == (
        FINE,
        record.digest,
        -7,
        record.sketches,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_records_differ_by_values_but_not_by_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = (x * (1 + torch.finfo(dtype).eps * torch.rand(x.shape, dtype=torch.float64))).to(dtype)
    named = {"x": x.to(dtype)}
    assert describe_difference(records(x.to(dtype), rounded), named) == ""
    for other in (-x, x + 0.3, x.roll(1, 0), x.roll(1, 1), x.roll(1, 2), x.flip(2), 1.1 * x, 0 * x):
        message = f"the values of x {describe_tensor(named['x'])} on rank 1 are not those on rank 0"
        assert describe_difference(records(x.to(dtype), other.to(dtype)), named) == message
    one = x.clone()
    one[2, 5, 3] += 2
    assert describe_difference(records(x.to(dtype), x.to(dtype), one.to(dtype)), named).endswith(
        "on rank 2 are not those on rank 0"
    )


def test_records_differ_by_masks_of_huge_and_infinite_values() -> None:
    for least in (-math.inf, torch.finfo(torch.float32).min, math.nan):
        mask = torch.zeros(5, 7)
        mask[1:3, 2:] = least
        moved, other = mask.roll(1, 0), mask.clone()
        other[4, 6] = 0.5
        assert describe_difference(records(mask, mask.clone()), {"x": mask}) == ""
        assert describe_difference(records(mask, moved), {"x": mask}) and describe_difference(
            records(mask, other), {"x": mask}
        )


def test_records_differ_by_the_last_of_more_tensors_than_slots() -> None:
    values = {f"x{n}": torch.full((3,), 1.0 + n) for n in range(11)}
    other = {**values, "x10": torch.full((3,), 5.0)}
    pair = [Record.of(FINE, "", 0, x) for x in (values, other)]
    assert describe_difference(pair, values) and not describe_difference([pair[0], pair[0]], values)


def test_sketches_of_empty_and_meta_tensors_are_zero() -> None:
    assert sketch(torch.empty(0, 3)) == sketch(torch.empty(2, 3, device="meta")) == [0.0] * 4
    assert sketch(torch.tensor(2.0))[0] == 2.0


def test_arguments_of_a_call_are_described() -> None:
    ids = torch.tensor([[1, 2]])
    assert describe_arguments([ids]) == describe_tensor(ids) != describe_tensor(torch.tensor([[1, 3]]))
    x = torch.ones(3, requires_grad=True)
    assert describe_arguments({"b": x, "a": (True, None, 2.5)}) == "a True, None, 2.5, b float32 (3,) with gradient"
    with torch.no_grad():
        assert describe_arguments(x) == "float32 (3,)"
    assert list(floating_tensors([ids, x, [x]]) | floating_tensors({"mask": x})) == ["input 1", "input 2.0", "mask"]


def test_a_folder_that_another_run_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a killed agent may finish, and remove the folder, while the next run opens its lock."""
    lock, opened = run_folder.Lock(tmp_path / "unfinished" / "lock"), run_folder.Lock._open
    calls: list[int] = []

    def open_after_removal(self: run_folder.Lock, flags: int) -> None:
        calls.append(flags)
        if len(calls) == 1:
            self.path.parent.rmdir()
        opened(self, flags)

    monkeypatch.setattr(run_folder.Lock, "_open", open_after_removal)
    lock.acquire(5.0)
    assert len(calls) == 2 and (tmp_path / "unfinished" / "lock").exists()
    lock.release()


def maxima(records: list[Record]) -> list[float]:
    """What an all-reduce of the records' extremes gives every rank."""
    return [max(column) for column in zip(*(record.extremes() for record in records), strict=True)]


def test_records_are_alike_where_no_difference_can_be_described() -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    named = {"x": x}
    same = [Record.of(FINE, "a call", number, {"x": x * (1 + 1e-7 * number)}) for number in range(3)]
    assert is_alike(maxima(same), named) and describe_difference(same, named) == ""
    for other in (
        Record.of(FINE, "another call", 0, named),
        Record.of(FINE, "a call", 0, {"x": x + 0.3}),
        Record.of(FINE, "a call", 0, {"x": x.flip(1)}),
    ):
        for place in range(3):
            records = [*same[:place], other, *same[place:]]
            assert not is_alike(maxima(records), named) and describe_difference(records, named) != ""


def test_a_rank_that_failed_is_like_no_other() -> None:
    assert not is_alike(maxima([Record.of(FAILED, "it broke")] * 2), {})
    assert is_alike(maxima([Record.of(FINE, "here")] * 2), {})


def test_every_piece_of_a_digest_is_exact_in_float64() -> None:
    record = Record.of(FINE, "a call")
    ones = Record(FINE, b"\xff" * 32, 0, record.sketches, "")
    below = Record(FINE, b"\xff" * 23 + b"\xfe" + b"\xff" * 8, 0, record.sketches, "")  # another last compared byte
    assert not is_alike(maxima([ones, below]), {})
