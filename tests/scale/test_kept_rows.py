"""Whether weights have changed is seen from their contents; checks of ranks are in helpers/rank_checks/kept_rows.py."""

from __future__ import annotations

import pytest
import torch

from headwise.scale.kept_rows import WIDTH, content_sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 7, 2 * WIDTH + 5, 8 * WIDTH + 3])
def test_any_change_of_one_number_changes_the_sums(dtype: torch.dtype, count: int) -> None:
    x = torch.linspace(-1, 1, count, dtype=torch.float64).to(dtype)
    before = content_sums([x])
    assert torch.equal(before, content_sums([x.clone()]))
    for place in {0, count // 2, count - 1}:
        y = x.clone()
        y[place] = torch.nextafter(y[place].float(), torch.tensor(9.0)) if dtype == torch.float32 else y[place] + 0.5
        assert not torch.equal(content_sums([y]), before)


def test_swapped_rows_and_columns_change_the_sums() -> None:
    x = torch.randn(37, 53, generator=torch.Generator().manual_seed(0))
    for y in (x.flip(0), x.flip(1), x[[1, 0, *range(2, 37)]]):
        assert not torch.equal(content_sums([y]), content_sums([x]))


def test_a_part_that_begins_inside_a_word_is_summed() -> None:
    x = torch.arange(11, dtype=torch.float32)
    assert torch.equal(content_sums([x[1:]]), content_sums([x[1:].clone()]))
