"""`headwise card` and `headwise diff`: what they print, both ways in, and how light they start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.card.types import Layer
from headwise.cli import cards, main, quick

LLAMA = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_card_is_printed(capsys: pytest.CaptureFixture[str], config: str) -> None:
    out = printed(capsys, "card", config)
    assert out.startswith("config.json: LlamaForCausalLM (model type llama)\n")
    assert "queries  ●●● ●●●\n         └┬┘ └┬┘\nkeys      ■   ■\n" in out
    assert "read: num_attention_heads" in out
    assert "6 query heads share 2 key/value heads in groups of 3 (GQA)" in out


def test_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "gpt-oss-20b", "--layers")
    rows = [line.split() for line in out.splitlines() if line.startswith("model ")]
    assert rows[0] == ["model", "0", "64", "8", "64", "64", "128", "sliding", "GQA"]
    assert rows[1] == ["model", "1", "64", "8", "64", "64", "full", "GQA"]
    assert len(rows) == 24


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "llama3-8b", "--json", "--context", "32768", "--dtype", "fp8", "--batch", "3")
    plain = json.loads(out)
    assert plain["parameters"]["total"] == 8_030_261_248
    assert plain["kv_cache"]["ideal"] == 3 * 2 * 2**30
    assert "layers" not in plain["parts"][0]
    assert plain["flops"]["convention"].startswith("a multiply-add is 2 FLOPs")
    assert "layers" in json.loads(printed(capsys, "card", "llama3-8b", "--json", "--layers"))["parts"][0]


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "llama3-8b", "--memory", "1G")
    assert "Into 1G of memory for the cache alone fits a context of 8,192 tokens." in out.replace("\n", " ")
    assert json.loads(printed(capsys, "card", "llama3-8b", "--memory", "1G", "--json"))["longest_context"] == 8192
    assert "fits any context" in printed(capsys, "card", "bert-base", "--memory", "1G")


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "diff", "llama2-7b", "llama3-8b")
    assert "4 times fewer KV heads, so the cache at 32k falls from 16 to 4 GiB (bf16)." in out
    assert json.loads(printed(capsys, "diff", "gpt2", "gpt2-xl", "--json"))["names"] == ["gpt2", "gpt2-xl"]


def test_design(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "--design", "--width", "1024", "--params", "300M")
    assert out.startswith("width 1,024, 24 layers; embeddings not counted, cache in bf16\n")
    assert "GQA, groups of 4: usual" in out
    assert json.loads(printed(capsys, "card", "--design", "--width", "64", "--json"))[0]["layers"] == 12


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("card", "name a model: a config.json, a folder"),
        ("card --design", "--design needs a --width"),
        ("card gpt2 --width 64", "--width and --params belong to --design"),
        ("card --design --width 1024 --params many", "'many' is no amount; write 300M, 7B or 16G"),
        ("card gpt2 --memory 3X", "'3X' is no amount"),
        ("card gpt2 --dtype float", "dtype 'float' is not known"),
        ("card gpt2 --context 0", "'--context'"),
        ("card gpt2 --context many", "'--context'"),
        ("card gpt2 --batch -1", "'--batch'"),
        ("card gpt2 --nonsense", "No such option: --nonsense"),
        ("card gpt2 gpt3", "see headwise card --help"),
        ("diff gpt2", "see headwise diff --help"),
        ("diff gpt2 nowhere", "'nowhere' is neither a file"),
    ],
)
def test_mistakes_are_one_line(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    assert words in err


def test_both_ways_in_print_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forms = (
        ["card", "llama3-8b", "--layers", "--context", "99"],
        ["card", "gpt2", "--json", "--dtype", "fp8", "--batch", "2"],
        ["diff", "gpt2", "gpt3", "--context", "7"],
    )
    short = [printed(capsys, *form) for form in forms]
    assert all(quick.parse(form) is not None for form in forms)
    monkeypatch.setattr(quick, "parse", lambda args: None)
    assert [printed(capsys, *form) for form in forms] == short


@pytest.mark.parametrize(
    "args",
    ["card", "card --help", "card a b", "card a --context", "card a --context x", "card a --context=5",
    "diff a b --layers",
     "card a --context 99999999", "trace", "", "card a --batch 0", "card --design --width 64"],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_typer(args: str) -> None:
    assert quick.parse(args.split()) is None


def test_a_card_starts_light(config: str) -> None:
    heavy = ("torch", "transformers", "numpy", "typer", "pydantic", "huggingface_hub", "gguf")
    code = (
        f"import sys; from headwise.cli import main; main(['card', {config!r}]); "
        f"sys.exit(', '.join(sorted(set({heavy}) & sys.modules.keys())) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = "', '.join(sorted({'torch', 'numpy', 'rich'} & sys.modules.keys()))"
    code = f"import sys, headwise; headwise.card.read; sys.exit({loaded} or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "[bold]red :smile:.json"
    path.write_text(json.dumps(LLAMA))
    assert "[bold]red :smile:.json" in printed(capsys, "card", str(path))


@pytest.mark.parametrize(
    ("query", "kv", "latent", "want"),
    [
        (4, 4, 0, "queries  ● ● ● ●\n         │ │ │ │\nkeys     ■ ■ ■ ■"),
        (4, 2, 0, "queries  ●● ●●\n         └┘ └┘\nkeys     ■  ■"),
        (6, 2, 0, "queries  ●●● ●●●\n         └┬┘ └┬┘\nkeys      ■   ■"),
        (4, 1, 0, "queries  ●●●●\n         └┬─┘\nkeys      ■"),
        (3, 3, 9, "queries  ●●●\nlatent   └─┘ 9 numbers a token"),
    ],
)
def test_the_drawing(query: int, kv: int, latent: int, want: str) -> None:
    drawn = cards.heads_drawing(Layer(0, 64, query, kv, 8, 8, latent=latent)).plain
    assert [line.rstrip() for line in drawn.splitlines()] == want.splitlines()


def test_a_drawing_stays_on_the_screen() -> None:
    for query in (1, 2, 71, 128, 1000):
        for kv in {1, 2, query, max(query // 8, 1)}:
            drawn = cards.heads_drawing(Layer(0, 64, query, kv, 8, 8)).plain
            assert max(map(len, drawn.splitlines())) <= 79, (query, kv)
