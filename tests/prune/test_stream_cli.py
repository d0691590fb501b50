"""`headwise stream`: the plan and its report in every form, resuming after a stop, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.cli import main
from headwise.lab.tasks import Text
from headwise.models.streaming.filled_cache import filled_cache
from headwise.plans import StreamPlan
from headwise.prune import stream_session
from headwise.prune.other_levers import Int8, card_levers, int8_problem, int8_words, measure_int8, stored_bytes
from headwise.prune.stream_quality import random_plan, whole_plan
from headwise.prune.stream_report import (
    ALL,
    FULL,
    PLAN,
    RANDOM,
    NeedleResult,
    StreamOptions,
    StreamReport,
    stream_document,
)
from helpers.prune_command import save_model, write_random_texts
from helpers.streaming_models import build, layers_of

WINDOW, LENGTH = 40, 1100
SMALL = ["--window", WINDOW, "--context", LENGTH, "--limit", 2 * LENGTH, "--draws", 2, "--contexts", "64,300"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads characters, so that it knows the words of the needles."""
    folder = tmp_path_factory.mktemp("models") / "source"
    tokenizer = Text().tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, max_position_embeddings=2048, initializer_range=0.4,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def stream(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["stream", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_stream_writes_a_plan_and_a_report_that_agree_with_the_model(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, printed, _ = stream(capsys, "--model", source, "--out", out, "--needles", 1, "--json", *SMALL)
    assert code == 0
    report = json.loads(printed)
    assert report == json.loads((out / "streaming.json").read_text())
    plan = StreamPlan.load(out / "stream_plan.json")
    assert plan.to_json() == report["plan"] and (plan.streaming, plan.total, plan.window) == (3, 6, WINDOW)
    assert report["texts"]["chosen_on"] != "" and np.shape(report["losses"][RANDOM]) == (2, 2)
    model, tokenizer = headwise.load(source), headwise.tokenizer(source)
    texts = headwise.prune.stream_texts(tokenizer, LENGTH, part="report", needles=0, limit=2 * LENGTH)
    for column, ids in enumerate(texts.pieces):
        row = torch.tensor([ids])
        for variant, own in ((FULL, None), (PLAN, plan), (ALL, whole_plan(plan))):
            with torch.no_grad():
                if own is None:
                    loss = model(row, labels=row).loss
                else:
                    with headwise.streaming(model, own):
                        loss = model(row, labels=row).loss
            # both are means of float32 numbers, which differ by the order of the sum at most
            rounding = LENGTH * torch.finfo(torch.float32).eps
            assert report["losses"][variant][column] == pytest.approx(float(loss), rel=rounding)
    full_cache = 2 * 3 * 2 * 8 * 4  # layers x KV heads x (key and value) x width x bytes
    assert report["cache_bytes"]["300"][FULL] == 300 * full_cache
    assert report["cache_bytes"]["300"][PLAN] == 300 * full_cache // 2 + (WINDOW + 4) * full_cache // 2
    assert report["cache_share"] == pytest.approx(0.5 + 0.5 * (WINDOW + 4) / LENGTH)
    assert set(report["decoding_seconds"]) == {"64", "300"}
    assert set(report["prefill_seconds"]) == {FULL, PLAN, ALL, RANDOM}
    assert all(seconds > 0 for times in report["decoding_seconds"].values() for seconds in times.values())
    assert {len(results) for results in report["needles"].values()} == {3}
    assert not list(tmp_path.glob(".out*")), "the pieces are removed once the report is saved"
    page, markdown = (out / "streaming.html").read_text(), (out / "streaming.md").read_text()
    assert "3 of 6 KV heads streaming" in page and "3 of 6 KV heads streaming" in markdown and "//" not in page


def test_a_stopped_stream_run_resumes_with_its_finished_pieces(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = stream_session.text_loss, []

    def stop_at_seventh(*args: Any) -> float:
        calls.append(args)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(stream_session, "text_loss", stop_at_seventh)
    args = ["--model", source, "--out", tmp_path / "out", "--needles", 0, "--json", *SMALL]
    code, out, err = stream(capsys, *args)
    assert code == 130 and out == "" and not (tmp_path / "out").exists()
    assert err == "headwise: interrupted; what was measured so far is stored, and the same command resumes\n"
    assert len(list((tmp_path / ".out.pieces").glob("loss-*.json"))) == 6
    code, out, _ = stream(capsys, *args)
    expected = 7 + 4 + (0 if int8_problem() else 4)  # ten losses in all, six of them finished; int8 has its own
    assert code == 0 and len(calls) == expected
    assert np.isfinite(json.loads(out)["losses"][RANDOM]).all()


def test_a_bound_on_the_cache_or_on_the_loss_decides_how_many_heads_stream(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--model", source, "--needles", 0, "--json", *SMALL]
    budget = 2 * 3 * 2 * 8 * 4 * LENGTH * 2 // 3
    code, out, _ = stream(capsys, *args, "--out", tmp_path / "a", "--cache-bytes", budget)
    report = json.loads(out)
    assert code == 0 and report["cache_bytes"]["300"][PLAN] < report["cache_bytes"]["300"][FULL]
    plan = StreamPlan.from_json(report["plan"])
    assert plan.cache_bytes(LENGTH) <= budget < plan.cache_bytes(LENGTH) + plan.layers[0].token_bytes * LENGTH
    code, out, _ = stream(capsys, *args, "--out", tmp_path / "a", "--max-loss", 1000, "--overwrite")
    assert code == 0 and StreamPlan.from_json(json.loads(out)["plan"]).streaming == 6
    assert StreamPlan.load(tmp_path / "a" / "stream_plan.json").streaming == 6


def test_a_tokenizer_that_does_not_know_the_needles_is_measured_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", transformers.AutoModelForCausalLM, "llama", max_position_embeddings=512)
    texts = write_random_texts(tmp_path / "texts.txt", 240)
    code, out, _ = stream(
        capsys, "--model", source, "--texts", texts, "--out", tmp_path / "out", "--window", 9, "--context", 300,
        "--draws", 1, "--contexts", 32,
    )  # fmt: skip
    assert code == 0 and "No needle prompts were measured." in out and "240 texts" in out


def test_bad_options_of_stream_are_one_line_and_exit_code_2(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = save_model(tmp_path / "encoder")
    short = write_random_texts(tmp_path / "short.txt", 8)
    capsys.readouterr()
    valid = ["--model", source, "--out", tmp_path / "out"]
    for args, message in [
        (["--model", source], "Missing option '--out'"),
        ([*valid, "--share", 2], "'--share': 2.0 is not in the range 0<=x<=1"),
        ([*valid, "--share", "half"], "'half' is not a valid float"),
        ([*valid, "--share", 0.5, "--max-loss", 0.01], "give one of them"),
        ([*valid, "--window", 0], "0 is not in the range"),
        ([*valid, "--contexts", "1k"], "--contexts are numbers of tokens such as 1024,4096, got '1k'"),
        ([*valid, "--contexts", "0"], "--contexts are from 1 to"),
        ([*valid, "--draws", 0], "0 is not in the range"),
        ([*valid, "--texts", tmp_path / "none"], "cannot be read: No such file"),
        ([*valid, "--texts", short], "give more texts"),
        (["--model", encoder, "--out", tmp_path / "out"], "predicts no next token"),
        (["--model", source, "--out", source, "--overwrite"], "which would be replaced; give another --out"),
        ([*valid, "--cache-bytes", 1, *SMALL], "out of reach"),
    ]:
        code, out, err = stream(capsys, *args)
        assert code == 2 and out == "" and err.count("\n") == 1 and message in err, (args, err)
    assert not (tmp_path / "out").exists()


def make_report(**changes: Any) -> StreamReport:
    """A report with round numbers: the plan costs 0.5 %, random choice 2 %, all heads 10 %."""
    plan = StreamPlan({0: [1], 1: [0], 2: [1]}, layers_of(build("llama")), 64)
    full = np.array([2.0, 4.0, 3.0])
    losses = {FULL: full, PLAN: 1.005 * full, ALL: 1.1 * full, RANDOM: np.stack([1.01 * full, 1.03 * full])}
    needles = {name: [NeedleResult(0.1, True), NeedleResult(0.9, name != ALL)] for name in losses}
    values: dict[str, Any] = {
        "model": "a <b>", "options": StreamOptions(contexts=(1024, 4096)), "plan": plan, "chosen_on": "a",
        "reported_on": "b", "trained_length": 2048, "losses": losses, "needles": needles, "needle_length": 1024,
        "decoding": {1024: {FULL: 2e-3, PLAN: 1e-3, ALL: 5e-4, RANDOM: 1e-3}, 4096: "not measured: too large"},
        "prefill": {FULL: 2.0, PLAN: 1.0, ALL: 0.5, RANDOM: 1.0}, "levers": ["less"], "int8": "not measured",
        "machine": headwise.timing.describe_machine(),
    }  # fmt: skip
    return StreamReport(**{**values, **changes})


def test_the_increase_of_the_loss_is_compared_with_random_choice() -> None:
    report = make_report()
    assert report.change(PLAN).value == pytest.approx(0.005) and report.change(PLAN).low == pytest.approx(0.005)
    assert report.change(RANDOM).value == pytest.approx(0.02)
    assert report.random_range() == (pytest.approx(0.01), pytest.approx(0.03))
    ratio = report.against_random()
    assert ratio is not None and ratio.value == pytest.approx(0.25)
    assert ratio.low == pytest.approx(0.5 / 3) and ratio.high == pytest.approx(0.5), "the draws are resampled"


def test_one_piece_of_text_has_no_interval_over_pieces() -> None:
    full = np.array([2.0])
    losses = {FULL: full, PLAN: 1.005 * full, ALL: 1.1 * full, RANDOM: np.stack([1.01 * full, 1.03 * full])}
    report = make_report(losses=losses)
    assert report.verdict().endswith("and the loss changes by +0.50%.") and "nan" not in stream_document(report).text()
    assert report.to_json()["loss_change"][PLAN] == {"value": pytest.approx(0.005), "low": None, "high": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Worth it by the rule below: at 4,096 tokens the cache is 0.51 of the full one"),
        ({"options": StreamOptions(length=66)}, "Not worth it: the cache is still 1.00 of the full one"),
        (
            {"losses": {FULL: np.ones(2), PLAN: np.full(2, 1.02), ALL: np.ones(2) * 2, RANDOM: np.full((3, 2), 1.5)}},
            "Not worth it: the loss rises by 2.00%, and 1% is the limit.",
        ),
        (
            {
                "losses": {
                    FULL: np.ones(2),
                    PLAN: np.full(2, 1.005),
                    ALL: np.ones(2) * 2,
                    RANDOM: np.full((3, 2), 1.004),
                }
            },
            "Not worth it: its loss is not clearly below that of random choice.",
        ),
        (
            {"needles": {FULL: [NeedleResult(0.5, True)] * 4, PLAN: [NeedleResult(0.5, i > 0) for i in range(4)]}},
            "Not worth it: it answers 25 points fewer of the needle prompts.",
        ),
        (
            {"needles": {FULL: [NeedleResult(0.5, i > 18) for i in range(20)], PLAN: [NeedleResult(0.5, False)] * 20}},
            "Worth it by the rule below",
        ),
    ],
)
def test_the_verdict_follows_its_stated_rules(changes: dict[str, Any], words: str) -> None:
    assert make_report(**changes).verdict().startswith(words)


def test_every_form_of_the_report_says_what_proves_nothing_and_what_was_not_measured() -> None:
    few = {name: [NeedleResult(0.5, False)] * 20 for name in (FULL, PLAN, ALL, RANDOM)}
    document = stream_document(make_report(needles=few))
    for text in (document.markdown().replace("\\", ""), document.html(), document.text()):
        assert "Full attention itself answers 0%: the other rows prove nothing." in text
        assert "4,096 tokens: not measured: too large." in text
        assert "trained on 2,048 tokens: beyond that" in text and "int8 weights: not measured" in text
        assert "Called not worth it" in text
    assert "a &lt;b&gt;, 3 of 6" in document.html() and "a \\<b\\>, 3 of 6" in document.markdown()


def test_the_report_says_at_which_context_decoding_is_faster() -> None:
    times = {1024: {FULL: 2e-3, PLAN: 1.99e-3}, 4096: {FULL: 2e-3, PLAN: 1e-3}, 8192: "not measured"}
    first, second = make_report(decoding=times).speed()
    assert first.startswith("not faster at 1,024 tokens: 2.0 ms per token with full attention, 2.0 with the plan")
    assert second.startswith("faster at 4,096 tokens") and second.endswith("(0.50 of the time)")


def test_the_card_says_what_feed_forward_width_and_layers_would_save() -> None:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6
    )
    ffn, layer = 2 * 3 * 24 * 20, 3 * 24 * 20 + 4 * 24 * 24
    words = card_levers(transformers.LlamaForCausalLM(config))
    assert f"{ffn:,} of" in words[0] and f"would save {ffn // 4:,} parameters" in words[0]
    assert f"each of 2 has about {layer:,} parameters" in words[1] and "192 of 384 bytes per token" in words[1]
    assert card_levers(torch.nn.Linear(2, 2)) == [
        "Feed-forward width and layers: the card cannot say (Linear has no config)."
    ]


@pytest.mark.parametrize("heads", [{0: [1], 2: [0]}, {0: [0, 1], 1: [0, 1], 2: [0, 1]}])
def test_a_step_after_a_filled_cache_is_that_of_masks_per_head_over_the_same_keys(heads: dict[int, list[int]]) -> None:
    """In float64, so that the order of sums does not matter."""
    model = build("llama")
    plan = StreamPlan(heads, layers_of(model), 7, 2)
    token = torch.tensor([[5]])
    with torch.no_grad(), headwise.streaming(model, plan):
        outputs = [
            model(token, past_key_values=filled_cache(model, own, plan.layers, 40)).logits for own in (plan, None)
        ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        full = model(token, past_key_values=filled_cache(model, None, plan.layers, 40)).logits
    assert (outputs[0] - full).abs().max() > 1e-3, "so the window matters here"


def test_random_plans_stream_as_many_heads_and_differ_by_draw() -> None:
    plan = StreamPlan({0: [1], 1: [0], 2: [1]}, layers_of(build("llama")), 64)
    draws = [random_plan(plan, 0, draw) for draw in range(9)]
    assert {draw.streaming for draw in draws} == {3} and len({str(sorted(draw.heads.items())) for draw in draws}) > 3
    assert random_plan(plan, 0, 4) == draws[4] and random_plan(plan, 1, 4).heads != draws[4].heads
    sliding = StreamPlan({}, layers_of(build("gemma2")), 64)
    assert whole_plan(sliding).streaming == sum(layer.kv_heads for layer in sliding.layers if layer.window is None) < 6


def test_int8_leaves_a_tied_output_head_alone_and_counts_stored_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torchao that stores half as many bytes, since torchao is optional."""

    def quantize(model: Any, config: Any, filter_fn: Any) -> None:
        for path, module in model.named_modules():
            if filter_fn(module, path):
                module.weight = torch.nn.Parameter(module.weight.detach().half(), requires_grad=False)

    package, quantization = ModuleType("torchao"), ModuleType("torchao.quantization")
    vars(package).update(__version__="0.0")
    vars(quantization).update(Int8WeightOnlyConfig=object, quantize_=quantize)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", quantization)
    for tied in (False, True):
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6,
            tie_word_embeddings=tied,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        result = measure_int8(model, lambda m: float(stored_bytes(m)), 3)
        linear = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
        head = 0 if tied else 31 * 24
        assert result.bytes_before == 4 * sum(p.numel() for p in model.parameters())
        assert result.bytes_before - result.bytes_after == 2 * (linear + head) and result.pieces == 3
        assert result.loss_after == result.bytes_after, "the loss is that of the quantized copy"


def test_a_report_without_torchao_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.prune.other_levers.find_spec", lambda name: None)
    assert int8_words(str(int8_problem())) == (
        "int8 weights: not measured: torchao is not installed (pip install torchao)."
    )


def test_the_words_for_int8_give_size_and_change_of_the_loss() -> None:
    words = int8_words(Int8(4 * 2**20, 2**20, 2.0, 2.02, 2, "0.1"))
    assert "4.0 MiB become 1.0 MiB (0.25)" in words and "2 reporting pieces changes by +1.00%" in words
