"""Head plans and sequence plans: which rank holds what, and what it sends."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise import Heads, ShapeError
from headwise.scale.exchange import exchanges
from headwise.scale.head_plan import HeadPlan, all_reduce_bytes, even_ranges, plan
from headwise.scale.sequence_plan import SequencePlan
from headwise.scale.sequence_shards import plan_of_counts

COUNTS = st.builds(
    lambda kv, group, ranks: HeadPlan(Heads(97, kv * group, kv, 5), ranks),
    st.integers(1, 13),
    st.integers(1, 8),
    st.integers(1, 17),
)


@given(COUNTS)
def test_every_head_is_on_a_rank_with_its_kv_head(made: HeadPlan) -> None:
    heads = made.heads
    assert [h for share in made.shares for h in share.query] == list(range(heads.query))
    most = -(-heads.query // made.ranks)
    assert max(len(share.query) for share in made.shares) == most
    for share in made.shares:
        reads = [h // heads.group for h in share.query]
        assert set(share.kv) == set(reads)
        if share.idle:
            continue
        local = share.local_heads(heads)
        assert [share.slots[i // local.group] for i in range(local.query)] == reads


@given(COUNTS)
def test_every_row_that_a_rank_needs_is_stored_there_or_sent_to_it(made: HeadPlan) -> None:
    for rows in (made.query_rows, made.kv_rows):
        if not rows.replicated:
            assert [row for chunk in rows.chunks for row in chunk] == list(range(rows.count))
            assert all(rows.chunks)
        for rank, needed in enumerate(rows.needed):
            received = rows.received(rank)
            assert all(received[peer] == rows.sent(peer)[rank] for peer in received)
            assert rank not in received
            parts = sorted([*received.values(), rows.own(rank)], key=lambda part: part.start)
            assert [row for part in parts for row in part] == list(needed)
            assert all(row in rows.chunks[peer] for peer, part in received.items() for row in part)
        if made.even:
            assert rows.local and rows.sent_count(0) == rows.received_count(0) == 0


def test_whole_groups_where_they_cost_nothing() -> None:
    assert [len(share.query) for share in plan(Heads(64, 12, 3, 4), 3).shares] == [4, 4, 4]
    assert [len(share.query) for share in plan(Heads(64, 12, 3, 4), 2).shares] == [6, 6]  # a group is cut
    assert [share.slots for share in plan(Heads(64, 12, 3, 4), 2).shares] == [(0, 0, 1), (1, 2, 2)]
    assert [list(share.kv) for share in plan(Heads(64, 8, 1, 8), 4).shares] == [[0]] * 4


def test_a_head_plan_prints_and_is_json() -> None:
    made = plan(Heads(15, 3, 3, 5), 4)
    assert str(made).splitlines() == [
        "3 query and 3 key/value heads of 5 over 4 ranks",
        *(f"  rank {rank}: query {rank}, KV {rank}" for rank in range(3)),
        "  rank 3: no head; it waits for the others",
    ]
    assert "KV 0 also elsewhere" in str(plan(Heads(64, 8, 1, 8), 2))
    assert json.loads(json.dumps(made.to_json()))["shares"][1]["query"] == [1]
    with pytest.raises(ShapeError, match="ranks must be a whole number of at least 1, got 0"):
        plan(Heads(15, 3, 3, 5), 0)


def test_bytes_of_an_all_reduce() -> None:
    assert all_reduce_bytes(1000, 1) == 0
    assert all_reduce_bytes(1000, 2) == 1000
    assert all_reduce_bytes(1000, 4) == 1500


@given(
    st.integers(0, 67), st.integers(1, 7), st.none() | st.integers(0, 20), st.none() | st.integers(0, 9), st.booleans()
)
def test_every_token_is_on_one_rank_and_needed_keys_are_sent(
    tokens: int, ranks: int, left: int | None, right: int | None, zigzag: bool
) -> None:
    made = SequencePlan(tokens, ranks, left, right, zigzag)
    by_rank = [made.positions(rank) for rank in range(ranks)]
    assert sorted(i for positions in by_rank for i in positions) == list(range(tokens))
    for rank in range(ranks):
        assert len(by_rank[rank]) == made.token_count(rank)
        for source in range(ranks):
            needed = {j for chunk in made.needed_chunks(rank, source) for j in made.chunks[chunk]}
            for i in by_rank[rank]:
                low = 0 if left is None else i - left
                high = tokens if right is None else i + right + 1
                assert needed >= {j for j in by_rank[source] if low <= j < high}


@given(
    st.integers(0, 67), st.integers(1, 7), st.none() | st.integers(0, 20), st.none() | st.integers(0, 9), st.booleans()
)
def test_counts_of_tokens_and_pairs_are_those_of_counting_one_by_one(
    tokens: int, ranks: int, left: int | None, right: int | None, zigzag: bool
) -> None:
    plan = SequencePlan(tokens, ranks, left, right, zigzag)

    def visible(i: int) -> list[int]:
        return [j for j in range(tokens) if (left is None or j >= i - left) and (right is None or j <= i + right)]

    def sent(source: int, target: int) -> int:
        reach = {j for i in plan.positions(target) for j in visible(i)}
        return sum(len(plan.chunks[chunk]) for chunk in plan.chunks_of(source) if reach & {*plan.chunks[chunk]})

    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        assert plan.tokens_sent(rank) == sum(sent(rank, other) for other in others)
        assert plan.tokens_received(rank) == sum(sent(other, rank) for other in others)
        assert plan.pairs(rank) == sum(len(visible(i)) for i in plan.positions(rank))


@given(
    st.integers(0, 67), st.integers(1, 7), st.none() | st.integers(0, 20), st.none() | st.integers(0, 9), st.booleans()
)
def test_what_a_rank_sends_another_receives_in_the_same_order(
    tokens: int, ranks: int, left: int | None, right: int | None, zigzag: bool
) -> None:
    plan = SequencePlan(tokens, ranks, left, right, zigzag)
    sent, received = {}, {}
    for rank in range(ranks):
        for source, target, chunks in exchanges(plan, rank):
            sent[rank, target] = [chunk for _, chunk in chunks if chunk is not None]
            received[source, rank] = [chunk for chunk, _ in chunks if chunk is not None]
    pairs = {(source, target) for source in range(ranks) for target in range(ranks) if source != target}
    for source, target in pairs:
        needed = plan.needed_chunks(target, source)
        assert sent.get((source, target), []) == received.get((source, target), []) == needed


def test_a_plan_of_1024_ranks_takes_less_than_50_ms() -> None:
    times = []
    for tokens in range(131_072, 131_077):  # plans are remembered, so each is another one
        counts = list(map(SequencePlan(tokens, 1024).token_count, range(1024)))
        start = time.process_time()
        plan = plan_of_counts(counts, None, 0, True)
        steps = exchanges(plan, 511)
        times.append(time.process_time() - start)
        assert len(steps) == 1023
    assert min(times) < 0.05  # of computation, not by the clock
    assert exchanges(plan, 511) is steps


def test_zigzag_balances_causal_work() -> None:
    made = SequencePlan(4096, 8, right=0)
    assert len({made.pairs(rank) for rank in range(8)}) == 1
    straight = SequencePlan(4096, 8, right=0, zigzag=False)
    assert max(straight.pairs(rank) for rank in range(8)) > 1.8 * made.pairs(0)


def test_a_window_sends_to_neighbouring_ranks_only() -> None:
    made = SequencePlan(8192, 8, left=511, right=0, zigzag=False)
    assert [made.tokens_sent(rank) for rank in range(8)] == [1024] * 7 + [0]
    assert exchanges(made, 3) == ((2, 4, ((2, 3),)),)
    assert "rank 7: tokens 7168 to 8191; sends the keys and values of 0" in str(made)
    assert json.loads(json.dumps(made.to_json()))["sent"][0] == 1024


@pytest.mark.parametrize(("ranks", "right"), [(1, 0), (7, 0), (16, 0), (5, None)])
def test_the_last_rank_sends_most_without_a_window(ranks: int, right: int | None) -> None:
    made = SequencePlan(641, ranks, right=right, zigzag=right == 0)
    most = max(made.tokens_sent(rank) for rank in range(ranks))
    assert made.tokens_sent(ranks - 1) >= most - 2 * ranks  # chunks differ by a token


def test_causal_zigzag_sends_only_needed_chunks() -> None:
    made, chunk = SequencePlan(8192, 2, right=0), 2048
    assert (made.tokens_sent(0), made.tokens_sent(1)) == (chunk, 2 * chunk)  # rank 0's last chunk is for itself alone
    assert even_ranges(5, 3) == [range(2), range(2, 4), range(4, 5)]
    assert math.isclose(made.pairs(0), 8192 * 8193 / 4)
