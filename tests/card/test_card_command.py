"""`headwise card` and `headwise diff`: what they print and how quickly they start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.card.types import Layer
from headwise.cli import card_tables, main

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


def test_card_prints_heads_sources_and_words(capsys: pytest.CaptureFixture[str], config: str) -> None:
    out = printed(capsys, "card", config)
    assert out.startswith("config.json: LlamaForCausalLM (model type llama)\n")
    assert "queries  ●●● ●●●\n         └┬┘ └┬┘\nkeys      ■   ■\n" in out
    assert "read: num_attention_heads" in out
    assert "6 query heads share 2 key/value heads in groups of 3 (GQA)" in out


@pytest.mark.parametrize(("model", "total"), [("minilm", 22_713_216), ("smollm2", 134_515_008)])
def test_card_and_diff_take_bundled_names(capsys: pytest.CaptureFixture[str], model: str, total: int) -> None:
    document = json.loads(printed(capsys, "card", model, "--json"))
    assert (document["name"], document["parameters"]["total"]) == (model, total)
    assert printed(capsys, "diff", model, model).strip() == f"{model} and {model} have the same shape."


def test_card_lists_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "gpt-oss-20b", "--layers")
    rows = [line.split() for line in out.splitlines() if line.startswith("model ")]
    assert rows[0] == ["model", "0", "64", "8", "64", "64", "128", "sliding", "GQA"]
    assert rows[1] == ["model", "1", "64", "8", "64", "64", "full", "GQA"]
    assert len(rows) == 24


def test_card_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "llama3-8b", "--json", "--context", "32768", "--dtype", "fp8", "--batch", "3")
    plain = json.loads(out)
    assert plain["parameters"]["total"] == 8_030_261_248
    assert plain["kv_cache"]["ideal"] == 3 * 2 * 2**30
    assert "layers" not in plain["parts"][0]
    assert plain["flops"]["convention"].startswith("a multiply-add is 2 FLOPs")
    assert "layers" in json.loads(printed(capsys, "card", "llama3-8b", "--json", "--layers"))["parts"][0]


def test_card_prints_the_longest_context_for_a_memory(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "llama3-8b", "--memory", "1GiB")
    assert "A cache of 1 GiB holds a context of 8,192 tokens." in out.replace("\n", " ")
    assert json.loads(printed(capsys, "card", "llama3-8b", "--memory", "1G", "--json"))["longest_context"] == 8192
    assert "A cache of 1 GiB holds any context" in printed(capsys, "card", "bert-base", "--memory", "1G")


def test_diff_prints_words_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "diff", "llama2-7b", "llama3-8b")
    assert "4 times fewer KV heads, so the cache at 32k falls from 16 to 4 GiB (bf16)." in out
    assert json.loads(printed(capsys, "diff", "gpt2", "gpt2-xl", "--json"))["names"] == ["gpt2", "gpt2-xl"]


def test_design_lists_head_counts(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "card", "--design", "1024", "--params", "300M")
    assert out.startswith("width 1,024, 24 layers; embeddings not counted, cache in bf16\n")
    assert "GQA, groups of 4: usual" in out
    assert json.loads(printed(capsys, "card", "--design", "64", "--json"))[0]["layers"] == 12


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("card", "Missing argument 'MODEL': a config.json, a directory"),
        ("card --design", "Option '--design' requires an argument"),
        ("card gpt2 --design 64", "--design takes no MODEL"),
        ("card gpt2 --params 7B", "--params belongs to --design"),
        ("card --design 999999", "999999 is not in the range 8 to 262,144"),
        ("card --design 1024 --params many", "'many' is no amount; write 300M or 7B"),
        ("card gpt2 --memory 3X", "'3X' is no amount"),
        ("card gpt2 --dtype float", "'float' is not one of 'fp32', 'bf16'"),
        ("card gpt2 --context 0", "'--context'"),
        ("card gpt2 --context many", "'--context'"),
        ("card gpt2 --batch -1", "'--batch'"),
        ("card gpt2 --nonsense", "--nonsense"),
        ("card gpt2 --source 7", "--source is for cross-attention, of which gpt2 has none; leave it out"),
        ("card gpt2 gpt3", "see headwise card --help"),
        ("diff gpt2", "see headwise diff --help"),
        ("diff gpt2 nowhere", "'nowhere' is neither a file"),
    ],
)
def test_user_errors_of_card_and_diff_are_one_line(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    assert words in err


def test_card_loads_no_heavy_package(config: str) -> None:
    heavy = ("torch", "transformers", "numpy", "typer", "pydantic", "huggingface_hub", "gguf")
    code = (
        f"import sys; from headwise.cli import main; main(['card', {config!r}]); "
        f"sys.exit(', '.join(sorted(set({heavy}) & sys.modules.keys())) or 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    loaded = "', '.join(sorted({'torch', 'numpy', 'rich'} & sys.modules.keys()))"
    code = f"import sys, headwise; headwise.card.read; sys.exit({loaded} or 0)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def test_markup_in_a_file_name_has_no_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
        (3, 3, 9, "queries  ●●●\nlatent   └─┘ 9 numbers per token"),
    ],
)
def test_drawing_of_query_heads_over_kv_heads(query: int, kv: int, latent: int, want: str) -> None:
    drawing = card_tables.heads_drawing(Layer(0, 64, query, kv, 8, 8, latent=latent)).plain
    assert [line.rstrip() for line in drawing.splitlines()] == want.splitlines()


def test_drawings_fit_into_80_columns() -> None:
    for query in (1, 2, 71, 128, 1000):
        for kv in {1, 2, query, max(query // 8, 1)}:
            drawing = card_tables.heads_drawing(Layer(0, 64, query, kv, 8, 8)).plain
            assert max(map(len, drawing.splitlines())) <= 79, (query, kv)
