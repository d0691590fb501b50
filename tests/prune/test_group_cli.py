"""`headwise group` from texts to a directory: the report in every form, resuming after a stop, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.card import read as read_card
from headwise.cli import main
from headwise.prune import group_session
from headwise.prune.quality import QualityPerText, loss_change
from helpers.prunable_models import CLOSE, error, inputs
from helpers.prune_command import save_model, write_random_texts

CAUSAL = transformers.AutoModelForCausalLM


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_random_texts(tmp_path / "texts.txt")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "source", CAUSAL, "llama", num_key_value_heads=6)


def group(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["group", "--batch", "6", "--context", "16", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_group_saves_a_model_whose_card_report_and_outputs_agree(
    tmp_path: Path, texts: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, printed, _ = group(
        capsys, "--model", source, "--kv-heads", 2, "--texts", texts, "--out", out, "--grouping", "contiguous", "--json"
    )
    assert code == 0
    report = json.loads(printed)
    assert report == json.loads((out / "grouping.json").read_text())
    assert [(p["kv_heads"], p["grouping"]) for p in report["points"]] == [
        (count, grouping) for count in (3, 2, 1) for grouping in ("contiguous", "similar")
    ]
    cache = 3 * 2 * 2 * 14 * 4  # layers x KV heads x (key and value) x width x bytes
    assert report["before"]["cache"] == 3 * cache
    assert report["card_cache_bytes_per_token"] == cache == read_card(out).cache(1, "fp32").per_token
    reloaded = CAUSAL.from_pretrained(out)
    grouped, mapping = headwise.group_kv_heads(headwise.load(source), 2)
    assert reloaded.config.num_key_value_heads == 2 and report["heads"][0]["kv"] == [list(g) for g in mapping[0].kv]
    with torch.no_grad():
        batch = inputs("llama")
        assert error(reloaded(**batch).logits, grouped(**batch).logits) < CLOSE[torch.float32]
    assert report["texts"] == {"trained": 12, "measured": 12} and report["recovery_losses"] == []


def test_the_forms_of_the_report_have_the_same_curve_and_verdict(
    tmp_path: Path, texts: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, printed, _ = group(capsys, "--model", source, "--kv-heads", 3, "--texts", texts, "--out", out, "--recover", 3)
    assert code == 0
    report = json.loads((out / "grouping.json").read_text())
    markdown, page = (out / "grouping.md").read_text(), (out / "grouping.html").read_text()
    assert len(report["recovery_losses"]) == 3
    for point in report["points"]:
        assert point["recovered"]["quality"]["value"] != point["merged"]["quality"]["value"]
        value = f"{point['recovered']['quality']['value']:.4g}"
        assert value in markdown and value in page and value in printed
    assert report["verdict"] in page and report["verdict"] in printed
    assert (out / "grouping.png").read_bytes().startswith(b"\x89PNG") and "grouping.png" in page
    assert not list(tmp_path.glob(".out*")), "what a run resumes from is removed once its model is saved"


def test_a_stopped_group_run_resumes_and_measures_no_point_twice(
    tmp_path: Path, texts: Path, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--model", source, "--texts", texts, "--kv-heads", 1, "--recover", 3, "--json"]
    code, expected, _ = group(capsys, *args, "--out", tmp_path / "whole")
    assert code == 0
    real, calls = group_session.recover, []

    def stop_at_fourth(*positional: Any, **named: Any) -> list[float]:
        calls.append(named["checkpoint"])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*positional, **named)

    monkeypatch.setattr(group_session, "recover", stop_at_fourth)
    code, out, err = group(capsys, *args, "--out", tmp_path / "out")
    assert code == 130 and out == "" and err.endswith("is stored, and the same command resumes\n")
    assert not (tmp_path / "out").exists() and len(list((tmp_path / ".out.pieces").glob("point-*.json"))) == 3
    code, out, _ = group(capsys, *args, "--out", tmp_path / "out")
    assert code == 0 and len(calls) == 4 + 2, "of five recoveries three were there"
    resumed, whole = json.loads(out), json.loads(expected)
    assert resumed["points"] == whole["points"] and resumed["recovery_losses"] == whole["recovery_losses"]
    assert not list(tmp_path.glob(".out*"))


def test_pieces_of_another_model_are_not_reused(
    tmp_path: Path, texts: Path, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    args = ["--texts", texts, "--kv-heads", 1, "--out", tmp_path / "out", "--json"]
    monkeypatch.setattr(group_session, "save_grouped", fail)
    assert group(capsys, "--model", source, *args)[0] == 130
    monkeypatch.undo()
    other = save_model(tmp_path / "other", CAUSAL, "llama", num_key_value_heads=6, rms_norm_eps=0.1)
    code, out, _ = group(capsys, "--model", other, *args)
    code_alone, alone, _ = group(capsys, "--model", other, *args[:-2], tmp_path / "alone", "--json")
    assert code == code_alone == 0 and json.loads(out)["points"] == json.loads(alone)["points"]


def test_bad_options_of_group_are_one_line_and_exit_code_2(
    tmp_path: Path, texts: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = save_model(tmp_path / "gpt2", CAUSAL, "gpt2")
    capsys.readouterr()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    valid = ["--model", source, "--texts", texts, "--out", tmp_path / "out"]
    for args, message in [
        (["--kv-heads", 2], "Missing option '--model'"),
        (valid, "Missing option '--kv-heads'"),
        ([*valid, "--kv-heads", 4], "the model has 6 KV heads per layer, which cannot become 4; give 1 or 2 or 3"),
        ([*valid, "--kv-heads", 6], "the model has 6 KV heads per layer, which cannot become 6; give 1 or 2 or 3"),
        ([*valid, "--kv-heads", 0], "0 is not in the range"),
        ([*valid, "--kv-heads", 2, "--grouping", "best"], "'best' is not one of 'contiguous', 'similar'"),
        ([*valid, "--kv-heads", 2, "--recover", -1], "-1 is not in the range"),
        ([*valid, "--kv-heads", 2, "--rate", 0], "0.0 is not in the range 0<x<=1"),
        ([*valid[:-1], tmp_path / "full", "--kv-heads", 2], "exists and is not empty"),
        ([*valid[:-1], source, "--kv-heads", 2, "--overwrite"], "which would be replaced; give another --out"),
        (["--model", source, "--texts", tmp_path / "few.txt", "--out", tmp_path / "out", "--kv-heads", 2], "too few"),
        (["--model", gpt2, "--texts", texts, "--out", tmp_path / "out", "--kv-heads", 1], "cannot be merged"),
    ]:
        code, out, err = group(capsys, *args)
        assert code == 2 and out == "" and err.count("\n") == 1 and message in err, (args, err)
    assert not (tmp_path / "out").exists()


def test_an_encoder_is_told_that_it_has_no_cache_to_save(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", transformers.AutoModel, "llama", num_key_value_heads=6)
    code, out, _ = group(capsys, "--model", source, "--texts", texts, "--kv-heads", 2, "--out", tmp_path / "out")
    assert code == 0 and "Not worth it: the model generates nothing, so that it has no KV cache" in out


def test_the_change_of_the_loss_is_paired_and_weighted_by_tokens() -> None:
    losses, weights = np.array([2.0, 4.0]), np.array([3.0, 1.0])
    full = QualityPerText("perplexity", losses, weights, exponentiate=True)
    other = QualityPerText("perplexity", 1.1 * losses, weights, exponentiate=True)
    change = loss_change(full, other)
    assert change.value == pytest.approx(0.1) and change.low == pytest.approx(0.1) and change.high == pytest.approx(0.1)
    uneven = QualityPerText("perplexity", losses + np.array([0.0, 1.0]), weights, exponentiate=True)
    assert loss_change(full, uneven).value == pytest.approx(1 / 10)
