"""Interleaved races, races on one thread, and the machine's description, with a clock that tests control."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from headwise import timing
from headwise.cli import main
from headwise.timing import (
    Contestant,
    Mismatch,
    Output,
    describe_machine,
    machine,
    machine_summary,
    race,
    race_on_one_thread,
    verify,
)


class Clock:
    """Time that passes only when a contestant says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, *durations: float) -> Contestant:
        """Takes these durations in turn, the last one ever after."""
        remaining = list(durations)

        def run() -> torch.Tensor:
            self.calls.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]
            return torch.zeros(1)

        return run


def test_every_round_times_every_contestant_once_in_varying_order() -> None:
    clock = Clock()
    contestants = {name: clock.contestant(name, 1.0) for name in "abc"}
    race(contestants, rounds=20, clock=clock)
    timed = "".join(clock.calls[len("aabbcc") :])  # after warming up
    assert all(set(timed[i : i + 3]) == set("abc") for i in range(0, 60, 3))
    assert {timed[i : i + 2] for i in range(59)} >= {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_the_best_round_counts_and_warm_up_calls_do_not() -> None:
    clock = Clock()
    contestants = {
        "steady": clock.contestant("steady", 3.0),
        "uneven": clock.contestant("uneven", 0.1, 9.0, 9.0, 2.0, 7.0),  # two calls to warm up, then the rounds
    }
    assert race(contestants, rounds=3, clock=clock) == {"steady": 3.0, "uneven": 2.0}


def test_a_race_goes_on_until_its_minimum_time() -> None:
    clock = Clock()
    contestants = {name: clock.contestant(name, 0.25) for name in "ab"}
    race(contestants, rounds=3, min_turn=0.25, min_seconds=5.0, clock=clock)
    assert len(clock.calls) == 2 * 2 + 2 * 10  # warming up, and ten rounds of half a second


def test_a_fast_call_is_repeated_within_its_turn() -> None:
    clock = Clock()
    times = race({"fast": clock.contestant("fast", 0.25)}, rounds=1, min_turn=1.0, clock=clock)
    assert times == {"fast": 0.25}
    assert len(clock.calls) == 2 + 4


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"peer gives shapes \(3, 2\), headwise \(2, 3\)"),
        (torch.zeros(2, 3), torch.full((2, 3), 0.5), "peer and headwise differ by 0.5"),
        (torch.zeros(2), torch.full((2,), math.nan), "peer and headwise differ by nan"),
        (torch.zeros(2), (torch.zeros(2), torch.zeros(2)), r"peer gives shapes \(2,\), \(2,\), headwise \(2,\)"),
    ],
)
def test_verify_refuses_peers_with_other_outputs(ours: torch.Tensor, theirs: Output, words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        verify(lambda: ours, {"peer": lambda: theirs})


def test_verify_accepts_differences_of_rounding() -> None:
    verify(lambda: torch.ones(3), {"peer": lambda: torch.ones(3) + 1e-6})


def test_a_race_on_one_thread_restores_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        results = race_on_one_thread(
            {"a": lambda: seen.append(torch.get_num_threads())}, races=3, rounds=1, min_turn=0.0
        )
        assert [list(times) for times in results] == [["a"]] * 3 and set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_race_on_one_thread_counts_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "process_time", clock)
    contestants = {"a": clock.contestant("a", 2.0), "b": clock.contestant("b", 3.0)}
    assert race_on_one_thread(contestants, races=2, rounds=1) == [{"a": 2.0, "b": 3.0}] * 2


def test_the_package_lists_its_public_names_and_refuses_others() -> None:
    assert dir(timing) == sorted(timing.__all__) and all(hasattr(timing, name) for name in timing.__all__)
    with pytest.raises(AttributeError, match="module 'headwise.timing' has no attribute 'stopwatch'"):
        timing.stopwatch  # noqa: B018


def test_an_older_instruction_set_restarts_the_process_with_its_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts: list[Any] = []
    monkeypatch.setattr(machine.os, "execve", lambda *arguments: restarts.append(arguments))
    machine.restrict_instructions("avx2", ["bench", "--isa", "avx2"])
    ((_, command, environment),) = restarts
    assert command[1:] == ["-m", "headwise", "bench", "--isa", "avx2"]
    assert environment["HEADWISE_KERNEL"] == "avx2" and environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "restricted" not in machine_summary(describe_machine())
    for name, value in machine.RESTRICTIONS["avx2"].items():
        monkeypatch.setenv(name, value)
    machine.restrict_instructions("avx2", ["bench"])
    assert len(restarts) == 1  # this process is restricted already
    assert "all restricted to avx2" in machine_summary(describe_machine())
    assert main("bench --isa mmx".split()) == 2
    assert "Invalid value for '--isa': 'mmx' is not 'avx2'" in capsys.readouterr().err
