"""The benchmark on tiny sizes: what it times, what it refuses to time, what it writes. No test looks at a time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.bench import cases, limits, memory, models, peers, suite, sweep, table
from headwise.cli import main
from headwise.errors import HeadwiseError
from headwise.timing import machine, race


class Clock:
    """Time that passes only when a contestant says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, *durations: float) -> race.Contestant:
        """Takes these durations in turn, the last one ever after."""
        left = list(durations)

        def run() -> torch.Tensor:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return torch.zeros(1)

        return run


# --- harness ---


def test_every_round_times_everyone_once_and_nobody_always_follows_the_same() -> None:
    clock = Clock()
    contestants = {name: clock.contestant(name, 1.0) for name in "abc"}
    race.race(contestants, rounds=20, clock=clock)
    timed = "".join(clock.calls[len("aabbcc") :])  # after warming up
    assert all(set(timed[i : i + 3]) == set("abc") for i in range(0, 60, 3))
    assert {timed[i : i + 2] for i in range(59)} >= {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_the_best_round_counts_and_warming_up_does_not() -> None:
    clock = Clock()
    contestants = {
        "steady": clock.contestant("steady", 3.0),
        "uneven": clock.contestant("uneven", 0.1, 9.0, 9.0, 2.0, 7.0),  # two calls to warm up, then the rounds
    }
    assert race.race(contestants, rounds=3, clock=clock) == {"steady": 3.0, "uneven": 2.0}


def test_short_contestants_have_as_many_rounds_as_a_spell_allows() -> None:
    clock = Clock()
    contestants = {name: clock.contestant(name, 0.25) for name in "ab"}
    race.race(contestants, rounds=3, shortest=0.25, spell=5.0, clock=clock)
    assert len(clock.calls) == 2 * 2 + 2 * 10  # warming up, and ten rounds of half a second


def test_a_fast_call_is_repeated_within_its_turn() -> None:
    clock = Clock()
    times = race.race({"fast": clock.contestant("fast", 0.25)}, rounds=1, shortest=1.0, clock=clock)
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
def test_different_outputs_are_not_timed(ours: torch.Tensor, theirs: race.Output, words: str) -> None:
    with pytest.raises(race.Mismatch, match=words):
        race.verify(lambda: ours, {"peer": lambda: theirs})


def test_rounding_is_no_difference() -> None:
    race.verify(lambda: torch.ones(3), {"peer": lambda: torch.ones(3) + 1e-6})


# --- cases ---


STATISTICS = {
    "stats": 1.05,
    "stats-causal": 1.2,
    "stats-512": 1.1,
    "stats-512-causal": 1.7,
    "stats-4096": 1.03,
    "stats-4096-causal": 1.1,
    "stats-fp16": 2.2,
}


def test_the_goals_are_those_that_were_set() -> None:
    assert {(case.name, peer): goal for case in cases.CASES.values() for peer, goal in case.goals.items()} == {
        ("dense", "sdpa"): 0.97,
        ("causal", "sdpa is_causal"): 1.1,
        ("decode", "sdpa enable_gqa"): 3.8,
        ("window", "sdpa with mask"): 14.0,
        ("stats-decode", "sdpa enable_gqa"): 3.8,
        ("stats-window", "sdpa with mask"): 14.0,
        ("backward", "sdpa"): 1.0,
        ("module", "nn.MultiheadAttention"): 1.3,
        ("module", "textbook"): 1.7,
        ("training", "nn.MultiheadAttention"): 1.0,
        **{(name, cases.SDPA): goal for name, goal in STATISTICS.items()},
        **dict.fromkeys(((name, cases.ATTEND) for name in STATISTICS), 0.95),
    }


def test_every_goal_has_its_peer_and_every_title_its_sizes() -> None:
    for case in cases.CASES.values():
        assert set(case.goals) <= set(case.build(True, **case.tiny).peers)
        assert case.sizes.keys() == case.tiny.keys()
        for name in ("heads", "tokens", "batch"):
            assert (
                name not in case.sizes or str(case.sizes[name]) in case.title.replace(",", "").replace("/", " ").split()
            )


def test_a_limit_scales_with_the_work() -> None:
    assert limits.multiplying(2 * limits.SIDE**3).scale == 1.0
    assert limits.multiplying(limits.SIDE**3).scale == 0.5


def test_reading_touches_all_of_k_and_v() -> None:
    k, v = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 7)
    read = limits.reading(k, v).run()
    assert torch.allclose(read[0], k.sum(-1).flatten(), atol=1e-6)
    assert torch.allclose(read[1], v.sum(-1).flatten(), atol=1e-6)


def test_textbook_with_a_mask_equals_the_specification() -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 7).unbind()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    out, weights = peers.textbook(q, k, v, mask)
    assert torch.allclose(
        out,
        torch.as_tensor(headwise.reference.attend(*map(torch.Tensor.numpy, (q, k, v)), causal=True)).float(),
        atol=1e-5,
    )
    assert weights.shape == (2, 3, 5, 5)


# --- sweep ---


def test_the_sweep_is_the_same_everywhere_and_covers_what_it_says() -> None:
    shapes = sweep.shapes()
    assert shapes == sweep.shapes()
    assert shapes != sweep.shapes(seed=1)
    assert len(shapes) == 40
    assert {shape.kind for shape in shapes} == set(sweep.KINDS)
    for name, low, high in (("batch", 1, 32), ("heads", 1, 32), ("keys", 17, 4096), ("dim", 32, 256)):
        values = [getattr(shape, name) for shape in shapes]
        assert low <= min(values) <= 2 * low
        assert high / 2 <= max(values) <= high
    assert all(shape.work <= sweep.MOST_WORK for shape in shapes)
    assert sum(shape.keys % 2 for shape in shapes) > 5
    assert sum(shape.kv_heads < shape.heads for shape in shapes) > 5
    assert sum(shape.queries < shape.keys for shape in shapes) > 5


@pytest.mark.parametrize("kind", sweep.KINDS)
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_every_sdpa_call_of_a_kind_computes_what_ours_does(kind: str, kv_heads: int) -> None:
    queries = 5 if kind == "chunk" else 13
    shape = sweep.Shape(kind, 3, 6, kv_heads, queries, 13, 8, window=4 if kind == "window" else 0)
    ours, calls, path = sweep.contestants(shape)
    assert list(ours) == ["attend", "head_stats"]
    assert len(calls) == (1 if kind in ("dense", "causal") else 2) * (1 if kv_heads == 6 else 2)
    assert path
    for run in ours.values():
        race.verify(run, calls)


def test_kinds_hide_what_they_say() -> None:
    """A mask that hides nothing would still let all calls agree."""
    draw = torch.Generator().manual_seed(0)
    window = sweep._mask(sweep.Shape("window", 1, 1, 1, 9, 9, 4, window=3), draw)
    chunk = sweep._mask(sweep.Shape("chunk", 1, 1, 1, 2, 9, 4), draw)
    padding = sweep._mask(sweep.Shape("padding", 50, 1, 1, 9, 9, 4), draw)
    assert window.sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert chunk.sum(-1).tolist() == [8, 9]
    assert set(padding.sum(-1).flatten().tolist()) == set(range(1, 10))


# --- memory ---


def test_memory_above_sees_the_peak_of_a_call() -> None:
    """In a process of its own, where nothing else takes or gives back memory meanwhile."""
    size = 256 * 2**20
    script = f"import torch; from headwise.bench import memory; print(memory.above(lambda: torch.ones({size // 4})))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.9 * size < int(run.stdout) < 1.5 * size


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    assert 0 <= memory.peak("head_stats", memory.Sizes(tokens=257, heads=2, dim=16)) < memory.GOAL


def test_a_measurement_that_fails_says_so_in_one_line() -> None:
    with pytest.raises(HeadwiseError, match=r"^measuring the memory of nothing failed: KeyError: 'nothing'$"):
        memory.peak("nothing", memory.Sizes(17, 1, 4))


# --- the whole ---


@pytest.fixture(scope="module")
def report() -> suite.Report:
    return suite.run(suite.Options(tiny=True, rounds=2))


def test_a_report_has_every_case_the_sweep_and_the_memory(report: suite.Report) -> None:
    assert report.errors == []
    assert [case.name for case in report.cases] == list(suite.CASES)
    assert len(report.sweep) == len(sweep.KINDS)
    assert [item.name for item in report.memory] == [*memory.MEASURED, *models.MEASURED]
    for case in report.cases:
        assert case.seconds is not None
        assert case.path
        assert {peer.name for peer in case.peers if peer.goal} == set(suite.CASES[case.name].goals)
        for peer in case.peers:
            assert peer.seconds is not None
            assert peer.ratio == peer.seconds / case.seconds
            assert peer.met == (None if peer.goal is None else peer.ratio >= peer.goal)


def test_the_summary_names_the_worst_shape(report: suite.Report) -> None:
    ratios = {result.title: dict(result.ratios)["head_stats"] for result in report.sweep}
    found = report.summary("head_stats")
    assert found is not None
    assert found["worst"] == min(ratios.values()) == ratios[found["worst_shape"]]
    assert found["median"] == sorted(ratios.values())[2]
    assert found["shapes"] == 5


def test_the_json_is_plain(report: suite.Report) -> None:
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["settings"]["rounds"] == 2
    assert data["machine"]["torch"] == torch.__version__
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert list(data["sweep"]["summary"]) == ["attend", "head_stats"]
    assert all(isinstance(peer["met"], bool) for case in data["cases"] for peer in case["peers"] if peer["goal"])


def test_named_cases_run_alone_unless_the_sweep_is_asked_for() -> None:
    def titles(**options: object) -> int:
        return len(suite.jobs(suite.Options(**options)))  # type: ignore[arg-type]

    assert titles(cases=("dense",)) == 1
    assert titles(cases=("dense",), sweep=True) == 1 + 40
    assert titles(cases=("memory",)) == 6
    assert titles(sweep=False) == len(suite.CASES) + 6
    assert titles() == len(suite.CASES) + 40 + 6
    assert titles(quick=True) == len(suite.CASES) + 10 + 6


@pytest.mark.parametrize("name", list(cases.CASES))
def test_contestants_are_made_wholly_on_the_device(name: str) -> None:
    case = cases.CASES[name]
    with torch.device("meta"):
        entry = case.build(True, **case.tiny)
    for run in (entry.ours, *entry.peers.values(), entry.limit.run):
        with torch.no_grad():
            out = run()
        assert all(x.device.type == "meta" for x in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("shape", sweep.shapes(5))
def test_shapes_are_made_wholly_on_the_device(shape: sweep.Shape) -> None:
    with torch.device("meta"):
        ours, others, _ = sweep.contestants(shape)
    assert all(run().device.type == "meta" for run in (*ours.values(), *others.values()))


def test_another_device_has_attention_alone_and_no_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "devices", lambda: ["cpu", "cuda", "meta"])
    monkeypatch.setattr(suite, "verify", lambda *all: None)  # meta tensors hold no numbers
    found = suite.run(suite.Options(("decode",), rounds=1, device="meta", tiny=True))
    assert [(peer.goal, peer.met) for peer in found.cases[0].peers] == [(None, None)] * 2
    assert found.settings["device"] == "meta" and cases.CASES["decode"].goals
    assert len(suite.jobs(suite.Options(device="cuda"))) == len(cases.CASES) + 40
    with pytest.raises(HeadwiseError, match="case 'watch' is measured on the CPU alone; leave out device="):
        suite.Options(("watch",), device="cuda")


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="there is no device 'abacus' here; there is cpu"):
        suite.Options(device="abacus")


def test_a_wrong_result_is_an_error_not_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = headwise.attend
    monkeypatch.setattr(headwise, "attend", lambda *args, **how: attend(*args, **how) + 0.5)
    found = suite.run(suite.Options(("decode",), tiny=True))
    assert found.cases[0].seconds is None
    assert found.errors == [f"{cases.CASES['decode'].title}: sdpa enable_gqa and headwise differ by 0.5"]
    [row] = table.rows(found.to_json())
    assert row.cells[2:] == ("sdpa enable_gqa and headwise differ by 0.5", "", "error", "")


def test_a_peer_that_does_not_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(attn: object) -> None:
        raise peers.Unavailable("not here")

    monkeypatch.setattr(peers, "bert", unavailable)
    found = suite.run(suite.Options(("module",), rounds=1, tiny=True))
    assert found.errors == []
    assert "transformers' BERT, sdpa: not here" in [row.peer for row in table.rows(found.to_json())]


# --- the table ---


def sample(ratio: float = 0.9699) -> dict:
    peer = {"name": "sdpa", "seconds": 0.05, "ratio": ratio, "goal": 0.97, "missing": "", "met": ratio >= 0.97}
    case = {"title": "dense", "seconds": 0.0516, "error": "", "peers": [peer], "limit": "sgemm"}
    return {
        "machine": machine.describe(),
        "settings": {"rounds": 3, "device": "cpu"},
        "cases": [{**case, "limit_seconds": 0.0387, "of_limit": 0.75}],
        "sweep": {
            "summary": {"attend": {"worst": 0.5, "worst_shape": "odd one", "median": 12.34, "shapes": 40}},
            "shapes": [{"title": "bad one", "error": "differs"}],
        },
        "memory": [{"title": "head_stats", "peak": 110_000_000, "goal": 10**9, "error": "", "met": True}],
    }


def test_markdown() -> None:
    text = table.markdown(sample())
    assert "| dense | 51.6 ms | sdpa | 50.0 ms | 0.969 | ≥ 0.97 ✗ |" in text
    assert "|  |  | limit: sgemm | 38.7 ms | 75% of it |  |" in text
    assert "Best of 3 interleaved rounds" in text
    assert table.rounds_in_words({"rounds": 9, "spell": 1.5}).endswith("(of more where they last less than 1.5 s)")
    assert machine.in_words(machine.describe()) in text
    assert "median ratio 12.340, worst 0.500 (odd one)" in text
    assert "- bad one: differs" in text
    assert "- memory of head_stats: 110 MB above the inputs (goal: under 1,000 MB)" in text


def test_the_readme_gets_its_table_and_keeps_the_rest(tmp_path: Path) -> None:
    page, results = tmp_path / "README.md", tmp_path / "x.json"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter √\n", encoding="utf-8")
    page.chmod(0o640)
    results.write_text(json.dumps(sample(0.98)), encoding="utf-8")
    for _ in range(2):  # the second time changes nothing
        table.main(str(results), str(page))
        text = page.read_text(encoding="utf-8")
        assert text == f"before\n{table.BEGIN}\n{table.markdown(sample(0.98))}\n{table.END}\nafter √\n"
    assert page.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [page, results]


@pytest.mark.parametrize("text", ["", table.BEGIN, f"{table.END}\n{table.BEGIN}", f"{table.BEGIN * 2}{table.END}"])
def test_a_readme_without_markers_is_left_alone(text: str, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(HeadwiseError, match="needs one line <!-- benchmark:begin -->"):
        table.write(sample(), page)
    assert page.read_text() == text
    assert list(tmp_path.iterdir()) == [page]


def test_a_failing_write_leaves_the_page_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{table.BEGIN}\n{table.END}\n")

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HeadwiseError, match="README.md.* cannot be written: disk full$"):
        table.write(sample(), page)
    assert page.read_text() == f"{table.BEGIN}\n{table.END}\n"
    assert list(tmp_path.iterdir()) == [page]


# --- the command ---


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command on tiny sizes; the number of threads is put back."""
    options, threads = suite.Options, torch.get_num_threads()
    monkeypatch.setattr(suite, "Options", lambda *args: options(*args, tiny=True))
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("columns", [80, 120])
def test_the_command_draws_a_table(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main("bench --cases module --cases decode --rounds 1 --explain".split()) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= columns
    for words in ("nn.MultiheadAttention", "≥ 1.3", "≥ 1.7", "≥ 3.8", "limit: sgemm", f"torch {torch.__version__}"):
        assert words in out
    assert out.count("\n" + cases.CASES["module"].title + ": ") == 1  # the path


@pytest.mark.usefixtures("tiny")
def test_the_command_writes_json_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("bench --cases dense --rounds 1 --sweep --threads 1 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in found["cases"]] == ["dense"]
    assert len(found["sweep"]["shapes"]) == 5
    assert found["machine"]["threads"] == 1


@pytest.mark.usefixtures("tiny")
def test_the_command_fails_when_a_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(headwise, "attend", lambda q, k, v, **how: q * 0)
    assert main("bench --cases dense --rounds 1 --json".split()) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["cases"][0]["error"].startswith("sdpa and headwise differ by")
    assert "headwise: dense, 12 heads, T 2048, D 64: sdpa and headwise differ by" in err


def test_a_lesser_instruction_set_begins_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(machine.os, "execve", lambda *how: begun.append(how))
    machine.restrict("avx2", ["bench", "--isa", "avx2"])
    ((_, command, told),) = begun
    assert command[1:] == ["-m", "headwise", "bench", "--isa", "avx2"]
    assert told["HEADWISE_KERNEL"] == "avx2" and told["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "restricted" not in machine.in_words(machine.describe())
    for name, value in machine.LESSER["avx2"].items():
        monkeypatch.setenv(name, value)
    machine.restrict("avx2", ["bench"])
    assert len(begun) == 1  # it is what was asked for already
    assert "all restricted to avx2" in machine.in_words(machine.describe())
    assert main("bench --isa mmx".split()) == 2
    assert "'mmx' is not" in capsys.readouterr().err
