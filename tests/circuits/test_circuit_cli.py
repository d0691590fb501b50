"""`headwise circuit`: its tables, JSON and page, and mistakes in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from headwise.circuits.effects import EffectLayer, Effects, EffectsAbout
from headwise.cli import main
from headwise.models.loading import resolve
from headwise.models.loading.resolve import NamedModel
from helpers import small_checkpoints

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Anna gave a drink to"
EXAMPLE = [CLEAN, "--answer", " Mary", "--other", " John", "--corrupted", CORRUPTED]
NODES = [
    {"id": "embedding", "type": "embedding", "layer": -1, "order": 0},
    {"id": "self.3.1", "type": "head", "kind": "self", "layer": 3, "heads": [1], "head": 1, "order": 6},
    {"id": "feed-forward.3", "type": "feed-forward", "layer": 3, "order": 7},
    {"id": "self.24.kv0", "type": "kv", "kind": "self", "layer": 24, "heads": [0, 1, 2], "order": 48},
    {"id": "self.24.2", "type": "head", "kind": "self", "layer": 24, "heads": [2], "head": 2, "order": 48},
    {"id": "output", "type": "output", "layer": 30, "order": 60},
]
EDGES = [
    {"from": "self.24.2", "to": "output", "input": "input", "score": 0.75, "low": 0.5, "high": 1.0},
    {"from": "self.3.1", "to": "self.24.kv0", "input": "key", "score": -0.25, "low": None, "high": None},
    {"from": "feed-forward.3", "to": "output", "input": "input", "score": 0.125, "low": None, "high": None},
]
CURVE = [
    {"edges": 1, "faithfulness": [0.25, 0.125, 0.375], "completeness": [0.5, None, None], "random": [None] * 3},
    {
        "edges": 3,
        "faithfulness": [0.875, 0.75, 1.25],
        "completeness": [0.75, None, None],
        "random": [0.02, -0.001, 0.1],
    },
]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[NamedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield NamedModel("smollm2", headwise.load("smollm2"), headwise.tokenizer("smollm2"))
    torch.set_num_threads(threads)


@pytest.fixture
def loaded(smollm2: NamedModel, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """The command gets a model that is loaded already."""
    monkeypatch.setattr(resolve, "resolve", lambda *place: smollm2)
    return smollm2


def smollm2_effects(name: str, prompts: int, sign: float) -> Effects:
    """Effects of SmolLM2's shape: sign * (9 layer + head) / 100."""
    layers = [EffectLayer("self", layer, 9) for layer in range(30)]
    rows = [np.tile(sign * (9 * layer + np.arange(9.0)) / 100, (prompts, 1)) for layer in range(30)]
    about = EffectsAbout(name, f"how {name} is measured", "a metric", 2.5, notes=(f"a note on {name}",))
    return Effects(layers, rows, about, rest={"embeddings": np.ones(prompts)})


@pytest.fixture
def measured(loaded: NamedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Known numbers in place of attribution, patching and the circuit; the arguments of the three."""
    calls: dict[str, Any] = {}

    def attribute(model: Any, inputs: Any, metric: Any, *, tokenizer: Any, progress: Any) -> Effects:
        calls["attribute"] = (model, inputs, metric)
        progress(1, 1)
        return smollm2_effects("direct effect", len(inputs), 1.0)

    def patch(
        model: Any, clean: Any, corrupted: Any, metric: Any, *, method: str, tokenizer: Any, progress: Any
    ) -> Effects:
        calls["patch"] = (clean, corrupted, method)
        return smollm2_effects("output patching", len(clean), -1.0)

    def circuit(
        model: Any, clean: Any, corrupted: Any, metric: Any, *, tokenizer: Any, progress: Any, size: int = 3
    ) -> Any:
        calls["circuit"] = size
        document = {
            "headwise": "circuit", "format": 1, "model": "", "metric": "a metric", "clean": 3.5, "corrupted": 0.5,
            "prompts": len(clean), "method": "by hand", "size": size, "total": 7000,
            "nodes": NODES, "edges": EDGES, "curve": CURVE,
            "notes": ["a note on the circuit"],
        }  # fmt: skip
        return headwise.Circuit.from_json(document)

    for function in (attribute, patch, circuit):
        monkeypatch.setattr(headwise, function.__name__, function, raising=False)
    return calls


def test_the_strongest_heads_and_the_circuit_are_printed(
    measured: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["circuit", *EXAMPLE]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"smollm2, 1 pair of prompts\n  clean      {CLEAN!r}\n  corrupted  {CORRUPTED!r}\n")
    assert "  answer     ' Mary', not ' John'\n" in out
    assert re.search(r"^  metric     a metric = \d\.\d+ clean, -?\d\.\d+ corrupted$", out, re.MULTILINE)
    assert re.search(r"^29\.8 +\+2\.690 +29\.8 +-2\.690", out, re.MULTILINE)
    assert re.search(r"^head 24\.2 +→ output +\+0\.750", out, re.MULTILINE)
    assert re.search(r"^head 3\.1 +→ key of KV head 24\.0 +-0\.250", out, re.MULTILINE)
    assert re.search(r"^ +1 +0\.25 \(0\.12 to 0\.38\) +0\.50 +–", out, re.MULTILINE)
    assert re.search(r"^ +3 +0\.88 \(0\.75 to 1\.25\) +0\.75 +0\.02 \(0\.00 to 0\.10\)", out, re.MULTILINE)
    assert "95 % interval" not in out  # of one pair
    assert "Circuit: 3 edges of the model's 7,000, of which the 3 strongest (by hand)" in out
    for note in ("a note on direct effect", "a note on output patching", "a note on the circuit", "by hand"):
        assert note in out
    assert measured["patch"] == ([CLEAN], [CORRUPTED], "gradient")


@pytest.mark.parametrize("method", ["gradient", "exact"])
def test_a_small_model_is_measured_from_end_to_end(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_checkpoints.save_small_model("gpt2", tmp_path / "model")
    model, tokenizer = headwise.load(folder), headwise.tokenizer(folder)
    clean, corrupted = "x7y7z", "x7y8z"  # one token per character

    def logits(text: str) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1].double()

    ids = [tokenizer(text)["input_ids"][0] for text in ("a", "b")]
    before, after = ((x[ids[0]] - x[ids[1]]).item() for x in (logits(clean), logits(corrupted)))
    answer, other = ("a", "b") if before > after else ("b", "a")
    page = tmp_path / "circuit.html"
    options = ["--answer", answer, "--other", other, "--corrupted", corrupted, "--model", str(folder)]
    measurement = ["--method", method, "--size", "7", "--html", str(page), "--json"]
    assert main(["circuit", clean, *options, *measurement]) == 0
    report = json.loads(capsys.readouterr().out)
    rounding = 1000 * torch.finfo(torch.float32).eps * float(logits(clean).abs().max())
    assert report["metric"]["clean"] == pytest.approx(before if answer == "a" else -before, abs=rounding)
    direct, patching = (Effects.from_json(report[name]) for name in ("direct", "patching"))
    parts = [*(float(x) for table in direct.values() for x in table.ravel()), *direct.rest.values()]
    difference = direct.about.details["difference"] + 1e-12  # relative to the sum of absolute parts
    assert abs(sum(parts) - direct.about.value) <= difference * sum(map(abs, parts))
    assert direct["self"].shape == patching["self"].shape == (2, 3)
    assert report["circuit"]["model"] == str(folder) and len(report["circuit"]["edges"]) == 7
    assert headwise.Circuit.from_json(report["circuit"]).size == 7
    assert page.stat().st_size > 100_000


def test_a_task_gives_its_pairs_with_the_models_accuracy(
    measured: dict[str, Any], loaded: NamedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["circuit", "--task", "ioi", "--pairs", "5", "--method", "exact", "--size", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    pairs = headwise.circuits.task("ioi", loaded.tokenizer, count=5)
    assert (report["model"], report["task"]) == ("smollm2", "ioi")
    assert report["prompts"] == {
        "clean": pairs.clean, "corrupted": pairs.corrupted, "answers": pairs.answers, "others": pairs.others,
    }  # fmt: skip
    assert report["accuracy"]["preferred"] == pairs.accuracy(loaded.model).preferred
    assert report["metric"]["clean"] > report["metric"]["corrupted"]
    assert measured["patch"] == (pairs.clean, pairs.corrupted, "exact") and measured["circuit"] == 2
    loaded_effects = Effects.from_json(report["patching"])
    assert loaded_effects.count == 5 and loaded_effects["self"][29, 8] == pytest.approx(-2.69)
    assert report["circuit"]["model"] == "smollm2" and len(report["circuit"]["edges"]) == 3


def test_the_page_is_written_beside_the_tables(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "circuit.html"
    assert main(["circuit", *EXAMPLE, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "Strongest heads" in out and err.startswith(f"wrote {page} (")
    data = re.search(r'id="headwise-data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    [run] = json.loads(data[1])["runs"]
    assert run["circuit"]["edges"] == EDGES and run["text"] == CLEAN and run["corrupted"] == CORRUPTED
    assert [table["name"] for table in run["effects"]] == ["direct effect", "output patching"]
    assert run["chosen"] == [[29, 8]]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a prompt with --answer and --corrupted, or --task ioi"),
        ([CLEAN, "--corrupted", CORRUPTED], "--answer is missing"),
        ([CLEAN, "--answer", " Mary"], "--corrupted is missing"),
        ([CLEAN, "--answer", " Mary", "--other", " Mary", "--corrupted", CORRUPTED], "are both ' Mary'"),
        ([CLEAN, "--task", "ioi"], "--task brings its own prompts and answers; leave TEXT out"),
        (["--task", "ioi", "--other", " a"], "leave --other out"),
        ([*EXAMPLE, "--pairs", "3"], "--pairs is for --task"),
        (["--task", "winograd"], "'winograd' is not one of 'agreement', 'colour'"),
        (["--task", "ioi", "--pairs", "0"], "0 is not in the range 1 to 100"),
        ([*EXAMPLE, "--method", "magic"], "'magic' is not one of 'gradient', 'exact'"),
        ([*EXAMPLE, "--html", "/nowhere/at/all.html"], "'/nowhere/at' is no directory"),
        ([*EXAMPLE, "--html", "/"], "'/' is a directory; give a file"),
        ([*EXAMPLE, "--model", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["circuit", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headwise: ") and err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--answer": " Mississippian"}, r"the answer ' Mississippian' is \d tokens for this tokenizer \("),
        ({"--other": " Mississippian"}, r"the answer ' Mississippian' is \d tokens"),
        (
            {"--corrupted": "When Mary and John went to the store, Annabelle Lee gave a drink to"},
            r"the prompt has 14 tokens clean and \d+ corrupted.*: token 9 \(' John'\) became tokens 9 to \d+ \(' Ann",
        ),
        ({"--corrupted": CLEAN}, "the prompt is the same clean and corrupted"),
        ({"--answer": " John", "--other": " Mary"}, "the corrupted run answers better than the clean one"),
    ],
)
def test_prompts_that_cannot_be_compared_are_one_line(
    changes: dict[str, str], words: str, loaded: NamedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--answer": " Mary", "--other": " John", "--corrupted": CORRUPTED, **changes}
    assert main(["circuit", CLEAN, *(word for option in options.items() for word in option)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(words, err), err


def test_a_corrupted_run_that_answers_the_same_is_refused(
    loaded: NamedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(input_ids: Any, **options: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, len(loaded.tokenizer))
        logits[..., loaded.tokenizer(" Mary")["input_ids"]] = 1.5
        return SimpleNamespace(logits=logits)

    monkeypatch.setattr(loaded.model, "forward", constant)
    assert main(["circuit", *EXAMPLE]) == 2
    expected = "answers the same as the clean one: logit of ' Mary' minus ' John' = 1.5 on both"
    assert expected in capsys.readouterr().err


def test_a_model_without_logits_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    minilm = NamedModel("minilm", headwise.load("minilm"), headwise.tokenizer("minilm"))
    monkeypatch.setattr(resolve, "resolve", lambda *place: minilm)
    assert main(["circuit", *EXAMPLE]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "has no logits" in err


def test_progress_goes_to_the_terminal_only(
    measured: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.cli import circuit as module

    works: list[str] = []

    class Bars:
        def __enter__(self) -> Callable[[str, int, int | None], None]:
            return lambda work, step, total: works.append(f"{work} {step}/{total}")

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(module, "progress_bars", Bars)
    assert main(["circuit", *EXAMPLE]) == 0
    assert works == ["direct effects 1/1"] and capsys.readouterr().err == ""
