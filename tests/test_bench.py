"""The benchmark on tiny sizes: its cases, its results and its output. No test looks at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import headwise
from headwise.bench import cases, engines, limits, memory, models, peers, result_rows, suite, sweep
from headwise.cli import main
from headwise.errors import HeadwiseError
from headwise.timing import verify

# --- cases ---


STATISTICS = {
    "backward-stats": 1.5,
    "stats": 1.05,
    "stats-causal": 1.2,
    "stats-512": 1.1,
    "stats-512-causal": 1.7,
    "stats-4096": 1.03,
    "stats-4096-causal": 1.1,
    "stats-fp16": 2.2,
}


def test_the_goals_of_the_attention_cases() -> None:
    assert {(case.name, peer): goal for case in cases.CASES.values() for peer, goal in case.goals.items()} == {
        ("dense", "sdpa"): 0.97,
        ("causal", "sdpa is_causal"): 1.1,
        ("decode", "sdpa enable_gqa"): 3.8,
        ("decode-bf16", cases.IN_FLOATS): 1.8,
        ("decode-fp16", cases.IN_FLOATS): 1.8,
        ("window", "sdpa with mask"): 14.0,
        ("stats-decode", "sdpa enable_gqa"): 3.8,
        ("stats-window", "sdpa with mask"): 14.0,
        ("backward", "sdpa"): 1.15,
        ("backward-causal", "sdpa"): 1.6,
        ("backward-groups", "sdpa"): 1.5,
        ("backward-window", "sdpa"): 10.0,
        ("backward-dropout-256", "sdpa"): 2.2,
        ("backward-dropout-512", "sdpa"): 3.0,
        ("windows-per-head", "sdpa with mask"): 3.0,
        ("module", "nn.MultiheadAttention"): 1.3,
        ("module", "textbook"): 1.7,
        ("training", "nn.MultiheadAttention"): 1.2,
        ("training-compiled", "nn.MultiheadAttention"): 1.8,
        ("training-compiled", "the same uncompiled"): 0.95,
        ("training-dropout", "nn.MultiheadAttention"): 1.8,
        **{(name, cases.SDPA): goal for name, goal in STATISTICS.items()},
        **dict.fromkeys(((name, cases.ATTEND) for name in STATISTICS), 0.95),
    }


def test_every_goal_names_a_peer_and_every_title_has_its_sizes() -> None:
    for case in cases.CASES.values():
        assert set(case.goals) <= set(case.build(True, **case.tiny).peers)
        assert case.sizes.keys() == case.tiny.keys()
        for name in ("heads", "tokens", "batch"):
            assert (
                name not in case.sizes or str(case.sizes[name]) in case.title.replace(",", "").replace("/", " ").split()
            )


def test_the_matmul_limit_scales_with_the_floating_point_operations() -> None:
    assert limits.matmul_limit(2 * limits.SIDE**3).scale == 1.0
    assert limits.matmul_limit(limits.SIDE**3).scale == 0.5


def test_the_read_limit_reads_all_of_k_and_v() -> None:
    k, v = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 7)
    for x in (k, v):
        assert torch.allclose(limits.row_sums(x), x.sum(-1).flatten(), atol=1e-6)
        assert torch.allclose(limits.norm(x), x.square().sum().sqrt(), atol=1e-6)
        assert limits.total(x).equal(x.sum())
    for way, read in zip(limits.read_limit(k, v).ways, (limits.row_sums, limits.norm, limits.total), strict=True):
        got_k, got_v = way()
        assert got_k.equal(read(k)) and got_v.equal(read(v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_read_limit_of_16_bits_reads_half_as_many_floats(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(limits, "_read_both", lambda read, *tensors: sizes.extend(x.numel() for x in tensors))
    for way in limits.read_limit(torch.randn(1, 2, 5, 8).to(dtype), torch.randn(1, 2, 5, 6).to(dtype)).ways:
        way()
    assert set(sizes) == {1 * 2 * 5 * 4, 1 * 2 * 5 * 3}


def test_the_slowest_limit_counts_the_fastest_of_its_ways_and_its_scale() -> None:
    def run() -> torch.Tensor:
        return torch.zeros(())

    both = limits.Limit("read", (run, run)), limits.Limit("product", (run,), scale=2.0)
    first, second, product = limits.contestants(both)
    assert limits.slowest(both, {first: 5.0, second: 3.0, product: 1.0}) == ("read", 3.0)
    assert limits.slowest(both, {first: 5.0, second: 3.0, product: 2.0}) == ("product", 4.0)


def test_the_textbook_peer_equals_the_reference_with_a_mask() -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 7).unbind()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    out, weights = peers.textbook(q, k, v, mask)
    assert torch.allclose(
        out,
        torch.as_tensor(headwise.reference.attend(*map(torch.Tensor.numpy, (q, k, v)), causal=True)).float(),
        atol=1e-5,
    )
    assert weights.shape == (2, 3, 5, 5)


# --- inference engines ---


ENGINES = {"ONNX Runtime": ("onnx", "onnxruntime"), "OpenVINO": ("onnx", "openvino")}
PROBLEMS = {  # query heads, KV heads, queries, keys, causal
    "dense": (3, 3, 19, 19, False),
    "causal": (3, 3, 19, 19, True),
    "decode": (6, 2, 1, 37, False),
}


def problem(name: str) -> tuple[list[torch.Tensor], bool]:
    heads, kv_heads, queries, keys, causal = PROBLEMS[name]
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(1, h, t, 8, generator=generator) for h, t in sizes], causal


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_graph_of_an_engine_gives_the_output_of_attend(engine: str, name: str) -> None:
    for package in ENGINES[engine]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    (q, k, v), causal = problem(name)
    graphs = {"ONNX Runtime": engines._onnx_runtime, "OpenVINO": engines._openvino}[engine]
    candidates = graphs(engines.Problem(q, k, v, causal))
    assert len(candidates) == 2
    for candidate in candidates:
        run = candidate()
        verify(lambda: headwise.attend(q, k, v, causal=causal), {engine: run})
        q.mul_(2)  # the engine reads our memory, so the next call sees it
        verify(lambda: headwise.attend(q, k, v, causal=causal), {engine: run})
    verify(lambda: headwise.attend(q, k, v, causal=causal), {engine: engines.engines(q, k, v, causal=causal)[engine]()})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_not_installed_is_listed_with_the_command(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ENGINES[engine][1]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    report = suite.run(suite.Options(("decode",), rounds=1, tiny=True))
    assert report.errors == []
    message = f"{engine}: {package} is not installed: pip install 'headwise[bench-peers]'"
    assert message in [row.peer for row in result_rows.rows(report.to_json())]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_without_a_graph_for_a_call_says_so(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("no such operator\nat line 3")

    monkeypatch.setattr(engines, "_onnx_runtime", lambda problem: [refuse])
    monkeypatch.setattr(engines, "_openvino", lambda problem: [refuse])
    with pytest.raises(peers.Unavailable, match=r"^has no graph for this: no such operator$"):
        engines.engines(*problem("dense")[0])[engine]()


def test_engines_are_not_measured_where_they_cannot_be_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "restricted_to", lambda: "avx2")
    with pytest.raises(peers.Unavailable, match=r"^cannot be restricted to avx2$"):
        engines.engines(*problem("dense")[0])["OpenVINO"]()


# --- sweep ---


def test_the_sweep_is_deterministic_and_covers_its_ranges() -> None:
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
def test_every_sdpa_call_of_a_shape_computes_the_output_of_attend(kind: str, kv_heads: int) -> None:
    queries = 5 if kind == "chunk" else 13
    shape = sweep.Shape(kind, 3, 6, kv_heads, queries, 13, 8, window=4 if kind == "window" else 0)
    ours, calls, path = sweep.contestants(shape)
    assert list(ours) == ["attend", "head_stats"]
    assert len(calls) == (1 if kind in ("dense", "causal") else 2) * (1 if kv_heads == 6 else 2)
    assert path
    for run in ours.values():
        verify(run, calls)


def test_the_masks_of_window_chunk_and_padding_hide_the_right_keys() -> None:
    """With masks that hide nothing, all calls would still agree."""
    draw = torch.Generator().manual_seed(0)
    window = sweep._mask(sweep.Shape("window", 1, 1, 1, 9, 9, 4, window=3), draw)
    chunk = sweep._mask(sweep.Shape("chunk", 1, 1, 1, 2, 9, 4), draw)
    padding = sweep._mask(sweep.Shape("padding", 50, 1, 1, 9, 9, 4), draw)
    assert window.sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert chunk.sum(-1).tolist() == [8, 9]
    assert set(padding.sum(-1).flatten().tolist()) == set(range(1, 10))


# --- memory ---


def test_peak_above_sees_the_peak_of_a_call() -> None:
    """In a fresh process, where nothing else allocates memory meanwhile."""
    size = 256 * 2**20
    script = (
        f"import torch; from headwise.bench import memory; print(memory.peak_above(lambda: torch.ones({size // 4})))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.9 * size < int(run.stdout) < 1.5 * size


def test_the_memory_of_head_stats_is_measured_in_its_own_process() -> None:
    assert 0 <= memory.peak("head_stats", memory.Sizes(tokens=257, heads=2, dim=16)) < memory.GOAL


def test_a_failed_memory_measurement_is_one_line() -> None:
    with pytest.raises(HeadwiseError, match=r"^measuring the memory of nothing failed: KeyError: 'nothing'$"):
        memory.peak("nothing", memory.Sizes(17, 1, 4))


# --- reports ---


@pytest.fixture(scope="module")
def report() -> suite.BenchReport:
    return suite.run(suite.Options(tiny=True, rounds=2))


def test_a_report_has_every_case_the_sweep_and_the_memory(report: suite.BenchReport) -> None:
    assert report.errors == []
    assert [case.name for case in report.cases] == list(suite.CASES)
    assert len(report.sweep) == len(sweep.KINDS)
    assert [item.name for item in report.memory] == [*memory.MEASUREMENTS, *models.MEMORY_CASES]
    for case in report.cases:
        assert case.seconds is not None
        assert case.path
        assert {peer.name for peer in case.peers if peer.goal} == set(suite.CASES[case.name].goals)
        for peer in case.peers:
            if peer.missing:
                assert peer.name in engines.engines(*[torch.ones(1, 1, 1, 1)] * 3)  # an optional package
                continue
            assert peer.seconds is not None
            assert peer.ratio == peer.seconds / case.seconds
            assert peer.met == (None if peer.goal is None else peer.ratio >= peer.goal)


def test_the_summary_names_the_worst_shape(report: suite.BenchReport) -> None:
    ratios = {result.title: dict(result.ratios)["head_stats"] for result in report.sweep}
    summary = report.summary("head_stats")
    assert summary is not None
    assert summary["worst"] == min(ratios.values()) == ratios[summary["worst_shape"]]
    assert summary["median"] == sorted(ratios.values())[2]
    assert summary["shapes"] == 5


def test_a_report_is_plain_json(report: suite.BenchReport) -> None:
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["settings"]["rounds"] == 2
    assert data["machine"]["torch"] == torch.__version__
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert list(data["sweep"]["summary"]) == ["attend", "head_stats"]
    assert all(isinstance(peer["met"], bool) for case in data["cases"] for peer in case["peers"] if peer["goal"])


def test_named_cases_run_without_the_sweep_unless_it_is_requested() -> None:
    def job_count(**options: object) -> int:
        return len(suite.jobs(suite.Options(**options)))  # type: ignore[arg-type]

    assert job_count(cases=("dense",)) == 1
    assert job_count(cases=("dense",), sweep=True) == 1 + 40
    assert job_count(cases=("memory",)) == 6
    assert job_count(sweep=False) == len(suite.CASES) + 6
    assert job_count() == len(suite.CASES) + 40 + 6
    assert job_count(quick=True) == len(suite.CASES) + 10 + 6


@pytest.mark.parametrize("name", list(cases.CASES))
def test_the_tensors_of_a_case_are_all_on_the_default_device(name: str) -> None:
    case = cases.CASES[name]
    with torch.device("meta"):
        prepared = case.build(True, **case.tiny)
    for run in (prepared.ours, *prepared.peers.values(), *limits.contestants(prepared.limits).values()):
        with torch.no_grad():
            out = run()
        assert all(x.device.type == "meta" for x in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("shape", sweep.shapes(5))
def test_the_tensors_of_a_shape_are_all_on_the_default_device(shape: sweep.Shape) -> None:
    with torch.device("meta"):
        ours, peers, _ = sweep.contestants(shape)
    assert all(run().device.type == "meta" for run in (*ours.values(), *peers.values()))


def test_another_device_than_the_cpu_has_only_attention_cases_and_no_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "devices", lambda: ["cpu", "cuda", "meta"])
    monkeypatch.setattr(suite, "verify", lambda *all: None)  # meta tensors hold no numbers
    report = suite.run(suite.Options(("decode",), rounds=1, device="meta", tiny=True))
    assert [(peer.goal, peer.met) for peer in report.cases[0].peers] == [(None, None)] * 4
    assert [peer.missing for peer in report.cases[0].peers][2:] == ["measured on the CPU alone"] * 2
    assert report.settings["device"] == "meta" and cases.CASES["decode"].goals
    assert len(suite.jobs(suite.Options(device="cuda"))) == len(cases.CASES) + 40
    with pytest.raises(HeadwiseError, match="case 'watch' is measured on the CPU alone; leave out device="):
        suite.Options(("watch",), device="cuda")


def test_an_unavailable_device_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="there is no device 'abacus' here; there is cpu"):
        suite.Options(device="abacus")


def test_a_case_with_wrong_output_is_an_error_without_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = headwise.attend
    monkeypatch.setattr(headwise, "attend", lambda *qkv, **options: attend(*qkv, **options) + 0.5)
    report = suite.run(suite.Options(("decode",), tiny=True))
    assert report.cases[0].seconds is None
    assert report.errors == [f"{cases.CASES['decode'].title}: sdpa enable_gqa and headwise differ by 0.5"]
    [row] = result_rows.rows(report.to_json())
    assert row.cells[2:] == ("sdpa enable_gqa and headwise differ by 0.5", "", "error", "")


def test_an_unavailable_peer_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(attn: object) -> None:
        raise peers.Unavailable("not here")

    monkeypatch.setattr(peers, "bert", unavailable)
    report = suite.run(suite.Options(("module",), rounds=1, tiny=True))
    assert report.errors == []
    assert "transformers' BERT, sdpa: not here" in [row.peer for row in result_rows.rows(report.to_json())]


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
def test_bench_prints_a_table_that_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main("bench --cases module --cases decode --rounds 1 --explain".split()) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= columns
    for text in ("nn.MultiheadAttention", "≥ 1.3", "≥ 1.7", "≥ 3.8", "limit: sgemm", f"torch {torch.__version__}"):
        assert text in out
    assert out.count("\n" + cases.CASES["module"].title + ": ") == 1  # its backend, by --explain


@pytest.mark.usefixtures("tiny")
def test_bench_json_is_the_only_output_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("bench --cases dense --rounds 1 --sweep --threads 1 --json".split()) == 0
    results = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in results["cases"]] == ["dense"]
    assert len(results["sweep"]["shapes"]) == 5
    assert results["machine"]["threads"] == 1


@pytest.mark.usefixtures("tiny")
def test_bench_exits_with_1_when_an_output_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(headwise, "attend", lambda q, k, v, **options: q * 0)
    assert main("bench --cases dense --rounds 1 --json".split()) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["cases"][0]["error"].startswith("sdpa and headwise differ by")
    assert "headwise: dense, 12 heads, T 2048, D 64: sdpa and headwise differ by" in err
