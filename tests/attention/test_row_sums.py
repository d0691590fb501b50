"""The sums of every row over some keys, merged with those over others, against the statistics of all keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from headwise import head_stats
from headwise.attention import dispatch
from headwise.attention.backends import blockwise_stats
from headwise.attention.backends.native import library
from headwise.attention.backends.protocol import ExtraOutputs
from headwise.attention.backends.row_sums import RowSums
from headwise.attention.call import StatsRequest, build_call

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 6, 2, 29, 53, 7
CUTS = (0, 11, 12, 37, KEYS)
OPTIONS = {
    "without options": {},
    "a window": {"window": (9, 3)},
    "softcap": {"softcap": 2.0},
    "lengths": {"lengths": torch.tensor([13, 0])},
    "slopes": {"slopes": torch.arange(1, 1 + HEADS) / 8},
    "very negative scores": {"scale": -0.5, "softcap": 400.0},
}


def random_inputs(dtype: torch.dtype, name: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    sizes = (HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS)
    q, k, v = (torch.randn(BATCH, heads, tokens, DIM, generator=random, dtype=torch.float64) for heads, tokens in sizes)
    if name == "very negative scores":  # of -100 and less, where exp of the negative of one overflows float32
        q, k = q.abs() + 5, k.abs() + 5
    return [x.to(dtype) for x in (q, k, v)]


def merged_rows(q, k, v, classes, options):
    """The sums over parts of the keys, merged."""
    rows = RowSums.empty(q[:0], q.shape[:3], len(classes))
    lengths, offset = options.get("lengths"), KEYS - QUERIES
    for start, stop in pairwise(CUTS):
        part = {**options, "offset": offset - start}
        if lengths is not None:
            part["lengths"] = (lengths - start).clamp(0, stop - start)
        keys, values = k[:, :, start:stop], v[:, :, start:stop]
        call = build_call(q, keys, values, **part)
        members = {name: x[:, start:stop] for name, x in classes.items()}
        _, lse, sums = dispatch.attend_with_rows(q, keys, values, call, members, has_first=start == 0)
        torch.testing.assert_close(lse, sums.largest + sums.class_sums[..., 0].log(), equal_nan=True)
        rows.merge((slice(None), slice(None), slice(None)), sums)
    return rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_sums_over_parts_of_the_keys_merge_to_the_statistics_of_all(name, dtype):
    q, k, v = random_inputs(dtype, name)
    classes = {"even": (torch.arange(KEYS) % 2 == 0).expand(BATCH, -1)}
    queries = torch.arange(QUERIES).expand(BATCH, -1) % 5 != 0
    options, exact = (
        {n: x.to(d) if n == "slopes" else x for n, x in OPTIONS[name].items()} for d in (dtype, torch.float64)
    )
    rows = merged_rows(q, k, v, classes, options)
    got = blockwise_stats.stats_from_rows(rows, None, StatsRequest(queries, classes))
    tensors = q.double(), k.double(), v.double()
    want = blockwise_stats.run(
        *tensors, build_call(*tensors, **exact), ExtraOutputs(stats=StatsRequest(queries, classes))
    ).stats
    assert torch.equal(got.count, want.count)
    # a score is a sum of DIM products; a statistic is a sum over KEYS of terms of at most the largest score or distance
    largest = max(KEYS, float((q.double().abs() @ k.double().abs().repeat_interleave(3, 1).mT).max()))
    bound = 8 * torch.finfo(dtype).eps * (DIM + KEYS) * largest * QUERIES
    for table, others in ((got.sums, want.sums), (got.maxima, want.maxima)):
        assert set(table) == set(others)
        for statistic, x in table.items():
            torch.testing.assert_close(x, others[statistic], rtol=0, atol=bound, msg=lambda m, s=statistic: f"{s} {m}")


def test_nan_in_a_part_reaches_the_rows_that_see_it_and_no_others():
    q, k, v = random_inputs(torch.float32, "")
    k[0, 1, 20, 3] = torch.nan
    options = {"window": (4, 2)}
    rows = merged_rows(q, k, v, {}, options)
    got = blockwise_stats.stats_from_rows(rows, None, StatsRequest())
    _, want = head_stats(q, k, v, **options)
    assert torch.equal(got.maxima["max_logit"].isnan(), want.maxima["max_logit"].isnan())
    for statistic, x in got.sums.items():
        assert torch.equal(x.isnan(), want.sums[statistic].isnan()), statistic


@pytest.mark.skipif(library.choice().why_not is not None, reason="the native kernel is off or was not built")
def test_float32_rows_come_from_the_native_kernel(monkeypatch):
    monkeypatch.setattr(blockwise_stats, "row_sums", None)
    q, k, v = random_inputs(torch.float32, "")
    assert merged_rows(q, k, v, {}, {}).has_keys.all()
