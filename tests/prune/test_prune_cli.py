"""`headwise prune` from texts to a directory, and its parts: batches, quality, recovery, curves, report."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import headwise
from headwise import HeadwiseError
from headwise.cli import main
from headwise.prune import recovery
from headwise.prune.batches import make_batches, read_labels, read_texts
from headwise.prune.curve import curve
from headwise.prune.latency import attention_time, pass_times
from headwise.prune.quality import quality, size
from headwise.prune.recovery import recover
from headwise.prune.registry import scores
from headwise.prune.report_html import page
from headwise.prune.report_markdown import markdown
from headwise.roles.atlas.corpus import read
from headwise.terminal import one_line
from helpers.prunable_models import CLOSE, build, error, inputs
from helpers.prune_command import save_model, write_random_texts
from helpers.small_gguf import build_model, write_gguf


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_random_texts(tmp_path / "texts.txt")


def prune(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["prune", "--batch", "6", "--context", "16", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_prune_writes_a_model_a_plan_and_a_report_that_agree(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source")
    code, out, _ = prune(
        capsys, "--model", source, "--texts", texts, "--out", tmp_path / "out", "--keep", 0.6, "--json"
    )
    assert code == 0
    report = json.loads(out)
    assert report["before"]["parameters"] - report["after"]["parameters"] == 6 * (4 * 12 * 60 + 3 * 12)
    assert report["most_that_heads_can_save"]["parameters"] == 15 * (4 * 12 * 60 + 3 * 12)
    assert abs(report["quality"]["full"]["value"]) < 1e-6 < report["quality"]["pruned"]["value"]
    assert report["texts"] == {"scored": 12, "measured": 12}
    assert [entry["batch"] for entry in report["latency_ms"]] == [6, 1] and len(report["verdict"]) == 2
    reloaded, plan = headwise.load(tmp_path / "out"), headwise.Plan.load(tmp_path / "out" / "plan.json")
    assert sum(map(len, plan.heads.values())) == 6
    batch = inputs("bert")
    with torch.no_grad(), headwise.mask_heads(model := headwise.load(source), plan.heads):
        assert error(reloaded(**batch), model(**batch)) < CLOSE[torch.float32]
    assert headwise.tokenizer(tmp_path / "out")("the animal").input_ids == [2, 3]
    page_text = (tmp_path / "out" / "pruning.html").read_text()
    assert "6 of 15 heads removed" in page_text and "http:" not in page_text and "https:" not in page_text
    assert "| parameters |" in (tmp_path / "out" / "pruning.md").read_text()


def test_prune_writes_further_forms_and_its_figures_in_the_model_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "source.gguf", build_model())
    (tmp_path / "texts.txt").write_text("".join(f"a big cat and {i} dogs did it\n" for i in range(12)))
    arguments = ("--texts", tmp_path / "texts.txt", "--keep", 0.6, "--score", "output", "--format", "gguf", "--json")
    code, out, err = prune(capsys, "--model", source, "--out", tmp_path / "out", *arguments)
    assert code == 0, err
    report = json.loads(out)
    assert report["exports"]["gguf"]["load"] == f"headwise.load({str(tmp_path / 'out' / 'model.gguf')!r})"
    ids = torch.tensor([[1, 17, 31, 8]])
    with torch.no_grad():
        first, second = (headwise.load(tmp_path / "out" / name)(ids).logits for name in ("", "model.gguf"))
    assert error(first, second) < CLOSE[torch.float32]
    full, pruned = (report["quality"][name]["value"] for name in ("full", "pruned"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| perplexity (95 % interval over 6 texts) | {full:.4g} (" in card and f"| {pruned:.4g} (" in card
    encoder = save_model(tmp_path / "encoder")
    code, out, err = prune(capsys, "--model", encoder, "--out", tmp_path / "other", *arguments)
    assert code == 0, err
    reason = json.loads(out)["exports"]["gguf"]
    assert reason.startswith("BertModel cannot be written as GGUF") and not (tmp_path / "other/model.gguf").exists()
    assert "- no model.gguf" in (tmp_path / "other" / "pruning.md").read_text()


def test_prune_follows_an_edited_plan_zeroes_heads_and_draws_the_curve(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source")
    code, out, _ = prune(capsys, "--model", source, "--texts", texts, "--out", tmp_path / "a", "--score", "output")
    assert code == 0 and "The most that removing heads can save: all heads together are" in out and "compact" in out
    plan = json.loads((tmp_path / "a" / "plan.json").read_text())
    for layer in plan["layers"]:
        layer["remove"] = [1] if layer["layer"] == 2 else []
    (tmp_path / "mine.json").write_text(json.dumps(plan))
    args = ["--model", source, "--texts", texts, "--out", tmp_path / "b", "--plan", tmp_path / "mine.json"]
    code, out, _ = prune(capsys, *args, "--zero", "--curve")
    assert code == 0 and "remove 1 of 15 heads" in out and ": plain (its heads were zeroed" in out
    transformers.AutoModel.from_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "curve.png").read_bytes().startswith(b"\x89PNG")
    curve_json = json.loads((tmp_path / "b" / "curve.json").read_text())
    assert (
        np.shape(curve_json["scores"]["random"]) == (3, 6)
        and "curve.png" in (tmp_path / "b" / "pruning.html").read_text()
    )


def test_a_causal_model_is_measured_by_perplexity_and_its_kv_cache_shrinks(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", transformers.AutoModelForCausalLM, "mistral")
    args = [
        "--model",
        source,
        "--texts",
        texts,
        "--out",
        tmp_path / "out",
        "--budget",
        "cache",
        "--keep",
        0.67,
        "--json",
    ]
    code, out, _ = prune(capsys, *args)
    report = json.loads(out)
    assert code == 0 and report["quality"]["full"]["name"] == "perplexity"
    assert report["before"]["cache"] == 3 * 2 * 2 * 14 * 4  # layers x KV heads x (key and value) x width x bytes
    assert report["after"]["cache"] == report["before"]["cache"] * 4 // 6


def test_labels_give_accuracy_and_recovery_removes_its_checkpoint(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", transformers.AutoModelForSequenceClassification, num_labels=3)
    (tmp_path / "labels.txt").write_text("\n".join(["0", "LABEL_1", "2"] * 8) + "\n")
    args = ["--model", source, "--texts", texts, "--labels", tmp_path / "labels.txt", "--out", tmp_path / "out"]
    code, out, _ = prune(capsys, *args, "--recover", 8, "--json")
    report = json.loads(out)
    assert code == 0 and report["quality"]["full"]["name"] == "accuracy"
    assert set(report["quality"]) == {"full", "pruned", "recovered"} and len(report["recovery_losses"]) == 8
    assert not list(tmp_path.glob(".*recovery*"))
    assert "8 steps of distillation" in (tmp_path / "out" / "pruning.html").read_text()


@pytest.mark.parametrize("targets", [False, True])
def test_an_encoder_decoder_reads_target_texts_or_the_texts_themselves(
    targets: bool, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of attention has its own share here."""
    source = save_model(tmp_path / "source", transformers.AutoModelForSeq2SeqLM, "t5")
    args = ["--model", source, "--texts", texts, "--out", tmp_path / "out", "--keep", "encoder=0.6,cross=0.8"]
    if targets:
        (tmp_path / "written.txt").write_text("\n".join(reversed(texts.read_text().splitlines())) + "\n")
        args += ["--labels", tmp_path / "written.txt"]
    code, out, _ = prune(capsys, *args, "--recover", 2, "--json")
    report = json.loads(out)
    assert code == 0
    name = "cross-entropy of the labels" if targets else "KL divergence from the full model"
    assert report["quality"]["full"]["name"] == name and report["quality"]["pruned"]["value"] > 0
    removed = {
        kind: sum(len(row["remove"]) for row in report["plan"]["layers"] if row["kind"] == kind)
        for kind in ("encoder", "decoder", "cross")
    }
    assert removed == {"encoder": 6, "decoder": 0, "cross": 3}
    (tmp_path / "written.txt").write_text("one\n")
    code, _, err = prune(capsys, *args[:4], "--out", tmp_path / "b", "--labels", tmp_path / "written.txt")
    assert code == 2 and "1 labels for 24 texts" in err


def test_compare_reports_the_rank_correlation_of_every_score_with_ablation(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", transformers.AutoModelForCausalLM, "llama")
    args = ["--model", source, "--texts", texts, "--out", tmp_path / "out", "--keep", 0.67, "--compare-scores"]
    code, out, _ = prune(capsys, *args)
    assert code == 0 and "rank correlation with ablation:" in out and "of 18 heads matter alone" in out
    report = json.loads((tmp_path / "out" / "pruning.json").read_text())
    correlations = {row["score"]: row["correlation"] for row in report["against_ablation"]["rows"]}
    assert set(correlations) == set(scores()) - {"ablation", "l0"} and max(correlations.values()) < 1
    lines = texts.read_text().splitlines()
    batches = make_batches(lines, headwise.tokenizer(source), batch=6, length=16).scoring
    model = headwise.load(source)
    truth, output = (headwise.importance(model, batches, score) for score in ("ablation", "output"))
    assert correlations["output"] == pytest.approx(truth.correlation(output))
    assert report["against_ablation"]["alone"] == truth.significant()
    assert len(report["scores"]["heads"]) == 18 and report["scores"]["score"] == "michel"
    page_text = (tmp_path / "out" / "pruning.html").read_text()
    assert page_text.count("×</td>") == 6 and "Scores against ablation" in page_text
    assert "## Scores against ablation" in (tmp_path / "out" / "pruning.md").read_text()


def test_recovery_improves_quality_and_keeps_padded_heads_zero() -> None:
    model = build("llama")
    batches = [inputs("llama", seed) for seed in range(3)]
    pruned = headwise.prune_heads(model, {0: [0, 1], 1: [3]})
    before = quality(pruned, model, batches).value
    losses = recover(pruned, model, batches, 40, rate=1e-3)
    assert quality(pruned, model, batches).value < 0.8 * before and np.mean(losses[-3:]) < 0.8 * losses[0]
    numbers = pruned.headwise_heads[0]
    weight = pruned.layers[0].self_attn.o_proj.weight.unflatten(1, (len(numbers), -1))
    assert None in numbers
    assert all(bool((weight[:, i] == 0).all()) == (number is None) for i, number in enumerate(numbers))


def test_an_interrupted_recovery_resumes_to_the_same_weights_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "CHECKPOINT_STEPS", 5)
    model, batches = build("bert"), [inputs("bert", seed) for seed in range(2)]
    uninterrupted = headwise.prune_heads(model, {0: [1, 2]})
    losses = recover(uninterrupted, model, batches, 12)
    file = tmp_path / "kept.safetensors"

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"interrupted at step 7 of 12; the same command resumes from step 5"):
        recover(headwise.prune_heads(model, {0: [1, 2]}), model, batches, 12, checkpoint=file, progress=stop)
    resumed = headwise.prune_heads(model, {0: [1, 2]})
    assert recover(resumed, model, batches, 12, checkpoint=file) == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not file.exists()
    file.write_bytes(b"broken")
    with pytest.raises(HeadwiseError, match="is broken"):
        recover(resumed, model, batches, 12, checkpoint=file)


def test_a_full_disk_during_recovery_is_one_line_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "CHECKPOINT_STEPS", 2)
    model, batches, file = build("bert"), [inputs("bert")], tmp_path / "kept.safetensors"
    save_file, saves = safetensors.torch.save_file, []

    def save_once_then_fail(*args: Any) -> None:
        if saves:
            raise safetensors.SafetensorError("I/O error: No space left on device")
        saves.append(save_file(*args))

    monkeypatch.setattr("safetensors.torch.save_file", save_once_then_fail)
    with pytest.raises(HeadwiseError, match=r"recovery stopped at step 4: .* cannot be written \(.*No space left"):
        recover(headwise.prune_heads(model, {0: [1]}), model, batches, 6, checkpoint=file)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.safetensors"]
    monkeypatch.undo()
    losses = recover(resumed := headwise.prune_heads(model, {0: [1]}), model, batches, 6, checkpoint=file)
    expected = recover(uninterrupted := headwise.prune_heads(model, {0: [1]}), model, batches, 6)
    assert losses == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_curve_starts_at_the_full_models_quality_and_varies_with_the_seed() -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    batches = [inputs("llama", seed) for seed in range(4)]
    result = curve(model, batches[:2], batches[2:], scores=("output", "random"), shares=(1.0, 0.5), seeds=2)
    assert result.values["output"].shape == (2, 2)
    np.testing.assert_allclose(result.values["output"][:, 0], result.full.value, rtol=1e-5)
    assert (result.values["random"][:, 1] != result.full.value).all()
    resampled = curve(
        model, batches[:1], batches[2:], scores=("michel-token",), shares=(0.9, 0.8, 0.7, 0.6, 0.5), seeds=3
    )
    assert len(np.unique(resampled.values["michel-token"].round(6), axis=0)) > 1, "seeds resample the texts"


def test_the_cache_of_a_pruned_model_is_smaller_and_times_are_positive() -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    pruned = headwise.prune_heads(model, {0: [0, 1, 2]})
    assert size(model).cache * 5 == size(pruned).cache * 6
    batch = inputs("llama")
    seconds = pass_times({"full": model, "pruned": pruned}, batch, 2)
    assert set(seconds) == {"full", "pruned"} and 0 < attention_time(model, batch, 2) < 10 * seconds["full"]


class QueuedWork:
    """The clock of an accelerator: work is queued when a module runs, and time passes when something waits for it."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def queue(self, seconds: float) -> Any:
        def prune(*_: Any) -> None:
            self.queued += seconds

        return prune

    def synchronize(self, *_: Any) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


def test_pass_times_wait_for_the_queue_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model, batch = QueuedWork(), build("bert"), inputs("bert")
    other = build("bert")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", clock.synchronize)
    monkeypatch.setattr("headwise.prune.latency.time.perf_counter", lambda: clock.now)
    for layer in model.encoder.layer:
        layer.attention.self.query.register_forward_hook(clock.queue(5))
        layer.attention.self.value.register_forward_hook(clock.queue(2))
        layer.output.register_forward_hook(clock.queue(7))
    other.embeddings.register_forward_hook(clock.queue(11))
    assert pass_times({"bert": model, "other": other}, batch, 3) == {"bert": 3 * 14, "other": 11}
    assert attention_time(model, batch, 3) == 3 * 7


def test_jsonl_texts_give_the_same_scores_as_plain_lines(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = texts.read_text().splitlines()
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"said": line, "id": i}) + "\n\n" for i, line in enumerate(lines)))
    assert read_texts(file, "said") == lines == list(read(file, "said")[0])
    source = save_model(tmp_path / "source")
    options = ["--model", source, "--score", "output", "--json"]
    scores = []
    for name, source_options in (("a", ["--texts", texts]), ("b", ["--texts", file, "--field", "said"])):
        code, out, _ = prune(capsys, *options, *source_options, "--out", tmp_path / name)
        assert code == 0
        scores.append(json.loads(out)["scores"])
    assert scores[0] == scores[1]
    code, _, err = prune(capsys, *options, "--texts", file, "--out", tmp_path / "c")
    assert code == 2 and "line 1 of" in err and "is no JSON object with a 'text'" in err


def test_perplexity_ignores_left_and_right_padding() -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    ids = torch.randint(4, 80, (1, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        nats = []
        for text in (ids, ids[:, :4]):
            logits = model(text).logits[0, :-1].log_softmax(-1)
            nats += [-float(row[token]) for row, token in zip(logits, text[0, 1:], strict=True)]
    padded = {side: torch.zeros(2, 11, dtype=torch.long) for side in ("left", "right")}
    masks = {side: torch.zeros(2, 11, dtype=torch.long) for side in padded}
    for side, rows in padded.items():
        rows[0], masks[side][0] = ids, 1
        place = slice(7, 11) if side == "left" else slice(0, 4)
        rows[1, place], masks[side][1, place] = ids[0, :4], 1
        result = quality(model, model, [{"input_ids": rows, "attention_mask": masks[side]}])
        assert result.value == pytest.approx(np.exp(np.mean(nats)), rel=1e-3), side


def test_a_latency_budget_is_met_or_the_nearest_share_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts parameters, so that the test does not measure the machine."""
    from headwise.prune import latency

    model, batch = build("bert"), inputs("bert")

    def count_parameters(models: dict[str, Any], batch: Any, rounds: int = 0) -> dict[str, float]:
        return {name: 100.0 + sum(p.numel() for p in m.encoder.parameters()) / 1000 for name, m in models.items()}

    monkeypatch.setattr(latency, "pass_times", count_parameters)
    scores = headwise.importance(model, [batch], "output")
    plan = headwise.plan(scores, 0.9, budget="latency", model=model, inputs=batch)
    assert plan.budget == "latency" and plan.keep == 0.9 and "of the full model's time" in str(plan)
    full = count_parameters({"x": model}, None)["x"]
    assert 0.8 * full < count_parameters({"x": headwise.prune_heads(model, plan)}, None)["x"] <= 0.9 * full
    with pytest.raises(
        HeadwiseError, match=r"latency: keep=0.3 cannot be met by removing heads; the nearest is keep=0.78"
    ):
        headwise.plan(scores, 0.3, budget="latency", model=model, inputs=batch)


HOSTILE = (
    "<b>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://x.test/)", "<http://x.test>",
    "`a`", "``` \n# b", "a | b", "*a* _b_ ~~c~~", "&lt;b&gt;", "\\[a](b)", "-->", "a\n\n# b", "\x1b]52;c;eA==\x07",
    "$a$ @b", "{title}", "</style><script>alert(1)</script>",
)  # fmt: skip


def make_report(name: str, note: str = "") -> Any:
    """A report in which every name that comes from outside is `name`."""
    from headwise.models.surgery.saving import SaveResult
    from headwise.plans import Plan
    from headwise.prune.quality import Quality, Size
    from headwise.prune.report import Latency, PruneOptions, PruneReport

    full_quality = Quality(name, 1, 1, 1, True, 2)
    plan = Plan({0: [1]}, (("self", 0, 2, 2),), score=name, notes=(note or name,))
    latency = [Latency(1, 8, 1.0, 1.01), Latency(4, 8, 1.0, 0.5)]
    quality = {"full": full_quality, "pruned": full_quality, "recovered": full_quality}
    saved = SaveResult(name, "plain", name, f"headwise.load({name!r})", None)
    return PruneReport(
        name,
        PruneOptions(),
        plan,
        Size(9, 4, 0),
        Size(7, 2, 0),
        quality,
        latency,
        0.3,
        1,
        1,
        saved=saved,
        exports={"gguf": saved, "onnx": name},
        losses=[2.0, 1.0],
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_outside_are_escaped_in_markdown_and_html(name: str) -> None:
    from markdown_it import MarkdownIt

    report = make_report(name)
    shown = one_line(name)
    markdown_text = markdown(report)
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(markdown_text)
    inline_tokens = [child for token in tokens for child in token.children or []]
    token_types = {token.type for token in [*tokens, *inline_tokens]}
    assert not token_types & {"html_block", "html_inline", "link_open", "image", "em_open", "strong_open", "s_open"}, (
        token_types
    )
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", "h2", "h2", "h2"]
    title = next(token for token in tokens if token.type == "inline")
    text = "".join(child.content for child in title.children or [])
    assert text == f"{shown}, 1 of 2 heads removed"
    assert [token.content for token in inline_tokens if token.type == "code_inline"] == [
        one_line(f"headwise.load({name!r})")
    ]
    assert len([token for token in tokens if token.type == "fence"]) == 1 and "\x1b" not in markdown_text
    html_text = page(report)
    assert html.escape(f"{shown}, 1 of 2 heads removed") in html_text and "\x1b" not in html_text
    assert html_text.count("<script") == 0 and html_text.count("<img") == 0 and html_text.count("</style>") == 1
    assert "Content-Security-Policy" in html_text


def test_the_verdict_says_at_which_batch_the_pruned_model_is_faster() -> None:
    lines = make_report("a").verdict()
    assert lines[0].startswith("not faster at batch 1 x 8 tokens") and "0.50" in lines[1]


def test_bad_options_of_prune_are_one_line_and_exit_code_2(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source")
    capsys.readouterr()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    (tmp_path / "plan.json").write_text("{}")
    headwise.plan({"self": np.ones((3, 7))}, 0.5).save(tmp_path / "other.json")
    empty_layer_plan = headwise.plan({"self": np.arange(15.0).reshape(3, 5)}, 0.5, allow_empty=True)
    empty_layer_plan.save(tmp_path / "empty.json")
    assert empty_layer_plan.heads[0] == [0, 1, 2, 3, 4]
    valid = ["--model", source, "--texts", texts, "--out", tmp_path / "out"]
    for args, message in [
        ([], "Missing option '--texts'"),
        (["--texts", texts], "Missing option '--out'"),
        (["--texts", texts, "--out", tmp_path / "full"], "exists and is not empty"),
        ([*valid, "--keep", "many"], "--keep is a share such as 0.6"),
        ([*valid, "--keep", "0.01"], "the nearest is --keep 0.2000"),
        ([*valid, "--keep", "6"], "keep is a share from 0 to 1"),
        ([*valid, "--keep", "middle=0.5"], "has no 'middle' attention"),
        ([*valid, "--score", "best"], "'best' is not one of 'ablation'"),
        ([*valid, "--plan", tmp_path / "plan.json"], "not a plan that headwise wrote"),
        ([*valid, "--plan", tmp_path / "other.json"], "this plan is for another model: 3 layers of 7 heads, but"),
        ([*valid, "--plan", tmp_path / "empty.json"], "all 5 heads of self layer 0 would go; keep one, or say"),
        ([*valid, "--recover", "-3"], "Invalid value for '--recover': -3 is not in the range 0 to 10,000,000"),
        ([*valid, "--recover", "9" * 30], "Invalid value for '--recover'"),
        ([*valid, "--batch", "9" * 30], "is not in the range 1 to 65,536"),
        ([*valid, "--context", "0"], "Invalid value for '--context': 0 is not in the range 1 to"),
        ([*valid, "--seed", "-1"], "Invalid value for '--seed': -1 is not in the range"),
        ([*valid, "--seed", "4294967296"], "4294967296 is not in the range 0 to 4,294,967,295"),
        ([*valid, "--seed", "9" * 5000], "Invalid value for '--seed'"),
        ([*valid, "--keep", "nan"], "keep is a share from 0 to 1, such as 0.6, got nan"),
        ([*valid, "--keep", "encoder=inf"], "keep is a share from 0 to 1, such as 0.6, got inf"),
        ([*valid, "--keep", "encoder=0.5,encoder=0.6"], "--keep is one share per kind"),
        ([*valid, "--keep", "=0.5"], "--keep is one share per kind"),
        ([*valid, "--keep", "9" * 5000], "keep is a share from 0 to 1, such as 0.6, got inf"),
        ([*valid, "--budget", "euro"], "'euro' is not one of 'heads', 'parameters', 'cache', 'latency'"),
        ([*valid, "--per", "word"], "'word' is not one of 'model', 'layer'"),
        ([*valid, "--compensate", "much"], "'much' is not one of 'bias', 'mean'"),
        ([*valid, "--over", "mail"], "'mail' is not one of 'ddp', 'fsdp'"),
        ([*valid, "--steps", "16"], "steps must be at most the number of heads, 15, got 16"),
        ([*valid, "--steps", "2", "--budget", "latency"], "steps are for one share of heads, parameters or cache"),
        ([*valid, "--plan", tmp_path / "empty.json", "--keep", "0.5"], "--plan says which heads go: leave out --keep"),
        ([*valid[:-1], tmp_path / "full", "--overwrite"], "holds something else than a model, and is not replaced"),
        ([*valid[:-1], source, "--overwrite"], "which would be replaced; give another --out"),
        ([*valid[:-1], "."], "give a new directory, by its name"),
        ([*valid[:-1], "a\0b"], "Invalid value for '--out'"),
        ([*valid[:-1], texts / "out"], "is no directory that can be written to"),
        ([*valid[:-1], texts], "exists and is not empty"),
        ([*valid, "--steps", "0"], "Invalid value for '--steps': 0 is not in the range"),
        (["--model", source, "--texts", tmp_path / "none", "--out", tmp_path / "out"], "cannot be read: No such file"),
        (["--model", source, "--texts", tmp_path / "few.txt", "--out", tmp_path / "out"], "2 texts are too few"),
        ([*valid, "--labels", tmp_path / "few.txt"], "label 'one' is neither a number"),
    ]:
        code, out, err = prune(capsys, *args)
        assert code == 2 and out == "" and err.count("\n") == 1 and message in err, (args, err)
    assert not (tmp_path / "out").exists() and (tmp_path / "full" / "mine.txt").exists()


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(num_labels=2)
    for lines, message in [
        ("0\n5\n", "label 5 is not one of the model's 2 classes"),
        ("0\n", "1 labels for 2 texts"),
        ("0\n²\n", "label '²' is neither a number nor one of"),
        ("0\n" + "9" * 5000 + "\n", "label '9+' is neither a number nor one of"),
    ]:
        (tmp_path / "labels.txt").write_text(lines)
        with pytest.raises(HeadwiseError, match=message):
            read_labels(tmp_path / "labels.txt", 2, config)


def test_no_text_is_used_for_both_scoring_and_measuring() -> None:
    class Words:
        pad_token = "x"

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": torch.tensor([[int(text)] for text in texts])}

    batches = make_batches([str(i) for i in range(11)], Words(), batch=4)
    scored = {int(i) for batch in batches.scoring for i in batch["input_ids"]}
    measuring = {int(i) for batch in batches.measuring for i in batch["input_ids"]}
    assert not scored & measuring and scored | measuring == set(range(11))
