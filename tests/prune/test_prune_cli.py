"""`headwise prune` from texts to a directory, and the parts it is made of: texts, quality, recovery, curves, report."""

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
from headwise.prune import recover as recovery
from headwise.prune.batches import batched, read_labels, read_texts
from headwise.prune.curve import curve
from headwise.prune.importance import SCORES
from headwise.prune.latency import attention_time, times
from headwise.prune.quality import quality, size
from headwise.prune.recover import recover
from headwise.prune.report import markdown
from headwise.prune.report_html import page
from headwise.roles.atlas.corpus import read
from headwise.terminal import one_line
from helpers.prunable_models import CLOSE, build, error, inputs

WORDS = "the animal did not cross street because it was too tired she sat by river bank after money from".split()


def saved(folder: Path, auto: Any = transformers.AutoModel, name: str = "bert", **more: Any) -> Path:
    """A tiny model with a tokenizer that knows a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    build(name, auto, **more).save_pretrained(folder)
    known = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, random.integers(4, 12))) for _ in range(24)]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n")
    return tmp_path / "texts.txt"


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["prune", "--batch", "6", "--context", "16", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_from_texts_to_a_directory(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source")
    code, out, _ = run(capsys, "--model", source, "--texts", texts, "--out", tmp_path / "out", "--keep", 0.6, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["before"]["parameters"] - report["after"]["parameters"] == 6 * (4 * 12 * 60 + 3 * 12)
    assert report["most_that_heads_can_save"]["parameters"] == 15 * (4 * 12 * 60 + 3 * 12)
    assert abs(report["quality"]["full"]["value"]) < 1e-6 < report["quality"]["pruned"]["value"]
    assert report["texts"] == {"scored": 12, "measured": 12}
    assert [found["batch"] for found in report["latency_ms"]] == [6, 1] and len(report["verdict"]) == 2
    again, made = headwise.load(tmp_path / "out"), headwise.Plan.load(tmp_path / "out" / "plan.json")
    assert sum(map(len, made.heads.values())) == 6
    given = inputs("bert")
    with torch.no_grad(), headwise.mask_heads(model := headwise.load(source), made.heads):
        assert error(again(**given), model(**given)) < CLOSE[torch.float32]
    assert headwise.tokenizer(tmp_path / "out")("the animal").input_ids == [2, 3]
    page_text = (tmp_path / "out" / "pruning.html").read_text()
    assert "6 of 15 heads removed" in page_text and "http:" not in page_text and "https:" not in page_text
    assert "| parameters |" in (tmp_path / "out" / "pruning.md").read_text()


def test_words_plan_by_hand_zero_and_curve(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source")
    code, out, _ = run(capsys, "--model", source, "--texts", texts, "--out", tmp_path / "a", "--score", "output")
    assert code == 0 and "The most that removing heads can save: all heads together are" in out and "compact" in out
    made = json.loads((tmp_path / "a" / "plan.json").read_text())
    for layer in made["layers"]:
        layer["remove"] = [1] if layer["layer"] == 2 else []
    (tmp_path / "mine.json").write_text(json.dumps(made))
    args = ["--model", source, "--texts", texts, "--out", tmp_path / "b", "--plan", tmp_path / "mine.json"]
    code, out, _ = run(capsys, *args, "--zero", "--curve")
    assert code == 0 and "remove 1 of 15 heads" in out and ": plain (its heads were zeroed" in out
    transformers.AutoModel.from_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "curve.png").read_bytes().startswith(b"\x89PNG")
    drawn = json.loads((tmp_path / "b" / "curve.json").read_text())
    assert (
        np.shape(drawn["scores"]["random"]) == (3, 6) and "curve.png" in (tmp_path / "b" / "pruning.html").read_text()
    )


def test_a_causal_model_has_perplexity_and_a_cache(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "source", transformers.AutoModelForCausalLM, "mistral")
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
    code, out, _ = run(capsys, *args)
    report = json.loads(out)
    assert code == 0 and report["quality"]["full"]["name"] == "perplexity"
    assert report["before"]["cache"] == 3 * 2 * 2 * 14 * 4  # layers x KV heads x (key and value) x width x bytes
    assert report["after"]["cache"] == report["before"]["cache"] * 4 // 6


def test_labels_and_recovery(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source", transformers.AutoModelForSequenceClassification, num_labels=3)
    (tmp_path / "labels.txt").write_text("\n".join(["0", "LABEL_1", "2"] * 8) + "\n")
    args = ["--model", source, "--texts", texts, "--labels", tmp_path / "labels.txt", "--out", tmp_path / "out"]
    code, out, _ = run(capsys, *args, "--recover", 8, "--json")
    report = json.loads(out)
    assert code == 0 and report["quality"]["full"]["name"] == "accuracy"
    assert set(report["quality"]) == {"full", "pruned", "recovered"} and len(report["recovery_losses"]) == 8
    assert not list(tmp_path.glob(".*recovery*"))
    assert "8 steps of distillation" in (tmp_path / "out" / "pruning.html").read_text()


@pytest.mark.parametrize("targets", [False, True])
def test_an_encoder_decoder_from_texts(
    targets: bool, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its decoder is given the texts to be written, else the texts themselves; kinds have budgets of their own."""
    source = saved(tmp_path / "source", transformers.AutoModelForSeq2SeqLM, "t5")
    args = ["--model", source, "--texts", texts, "--out", tmp_path / "out", "--keep", "encoder=0.6,cross=0.8"]
    if targets:
        (tmp_path / "written.txt").write_text("\n".join(reversed(texts.read_text().splitlines())) + "\n")
        args += ["--labels", tmp_path / "written.txt"]
    code, out, _ = run(capsys, *args, "--recover", 2, "--json")
    report = json.loads(out)
    assert code == 0
    name = "cross-entropy of the labels" if targets else "KL divergence from the full model"
    assert report["quality"]["full"]["name"] == name and report["quality"]["pruned"]["value"] > 0
    removed = {kind: sum(len(row["remove"]) for row in report["plan"]["layers"] if row["kind"] == kind)
               for kind in ("encoder", "decoder", "cross")}  # fmt: skip
    assert removed == {"encoder": 6, "decoder": 0, "cross": 3}
    (tmp_path / "written.txt").write_text("one\n")
    code, _, err = run(capsys, *args[:4], "--out", tmp_path / "b", "--labels", tmp_path / "written.txt")
    assert code == 2 and "1 labels for 24 texts" in err


def test_scores_against_ablation(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source", transformers.AutoModelForCausalLM, "llama")
    args = ["--model", source, "--texts", texts, "--out", tmp_path / "out", "--keep", 0.67, "--compare-scores"]
    code, out, _ = run(capsys, *args)
    assert code == 0 and "rank correlation with ablation:" in out and "of 18 heads matter alone" in out
    report = json.loads((tmp_path / "out" / "pruning.json").read_text())
    rows = {row["score"]: row["correlation"] for row in report["against_ablation"]["rows"]}
    assert set(rows) == set(SCORES) - {"ablation", "l0"} and max(rows.values()) < 1
    lines = texts.read_text().splitlines()
    given = batched(lines, headwise.tokenizer(source), batch=6, length=16).scoring
    model = headwise.load(source)
    truth, output = (headwise.importance(model, given, score) for score in ("ablation", "output"))
    assert rows["output"] == pytest.approx(truth.correlation(output))
    assert report["against_ablation"]["alone"] == truth.significant()
    assert len(report["scores"]["heads"]) == 18 and report["scores"]["score"] == "michel"
    written = (tmp_path / "out" / "pruning.html").read_text()
    assert written.count("×</td>") == 6 and "Scores against ablation" in written
    assert "## Scores against ablation" in (tmp_path / "out" / "pruning.md").read_text()


def test_recovery_comes_nearer_and_keeps_zeros_zero() -> None:
    model = build("llama")
    given = [inputs("llama", seed) for seed in range(3)]
    pruned = headwise.prune_heads(model, {0: [0, 1], 1: [3]})
    before = quality(pruned, model, given).value
    losses = recover(pruned, model, given, 40, rate=1e-3)
    assert quality(pruned, model, given).value < 0.8 * before and np.mean(losses[-3:]) < 0.8 * losses[0]
    numbers = pruned.headwise_heads[0]
    weight = pruned.layers[0].self_attn.o_proj.weight.unflatten(1, (len(numbers), -1))
    assert None in numbers
    assert all(bool((weight[:, i] == 0).all()) == (number is None) for i, number in enumerate(numbers))


def test_an_interrupted_recovery_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "EVERY", 5)
    model, given = build("bert"), [inputs("bert", seed) for seed in range(2)]
    whole = headwise.prune_heads(model, {0: [1, 2]})
    losses = recover(whole, model, given, 12)
    file = tmp_path / "kept.safetensors"

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"interrupted at step 7 of 12; the same command goes on from step 5"):
        recover(headwise.prune_heads(model, {0: [1, 2]}), model, given, 12, checkpoint=file, progress=stop)
    again = headwise.prune_heads(model, {0: [1, 2]})
    assert recover(again, model, given, 12, checkpoint=file) == pytest.approx(losses, rel=1e-5)
    for one, other in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert not file.exists()
    file.write_bytes(b"broken")
    with pytest.raises(HeadwiseError, match="is broken"):
        recover(again, model, given, 12, checkpoint=file)


def test_a_disk_that_fills_up_in_recovery_is_one_line_and_what_was_kept_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "EVERY", 2)
    model, given, file = build("bert"), [inputs("bert")], tmp_path / "kept.safetensors"
    write, done = safetensors.torch.save_file, []

    def fills_up(*args: Any) -> None:
        if done:
            raise safetensors.SafetensorError("I/O error: No space left on device")
        done.append(write(*args))

    monkeypatch.setattr("safetensors.torch.save_file", fills_up)
    with pytest.raises(HeadwiseError, match=r"recovery stopped at step 4: .* cannot be written \(.*No space left"):
        recover(headwise.prune_heads(model, {0: [1]}), model, given, 6, checkpoint=file)
    assert [found.name for found in tmp_path.iterdir()] == ["kept.safetensors"]
    monkeypatch.undo()
    losses = recover(again := headwise.prune_heads(model, {0: [1]}), model, given, 6, checkpoint=file)
    whole = recover(other := headwise.prune_heads(model, {0: [1]}), model, given, 6)
    assert losses == pytest.approx(whole, rel=1e-5)
    for one, two in zip(again.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_curve_falls_and_starts_at_the_full_model() -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    given = [inputs("llama", seed) for seed in range(4)]
    found = curve(model, given[:2], given[2:], scores=("output", "random"), shares=(1.0, 0.5), seeds=2)
    assert found.values["output"].shape == (2, 2)
    np.testing.assert_allclose(found.values["output"][:, 0], found.full.value, rtol=1e-5)
    assert (found.values["random"][:, 1] != found.full.value).all()
    one = curve(model, given[:1], given[2:], scores=("michel-token",), shares=(0.9, 0.8, 0.7, 0.6, 0.5), seeds=3)
    assert len(np.unique(one.values["michel-token"].round(6), axis=0)) > 1, "seeds draw other texts, also of one batch"


def test_sizes_and_times() -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    pruned = headwise.prune_heads(model, {0: [0, 1, 2]})
    assert size(model).cache * 5 == size(pruned).cache * 6
    given = inputs("llama")
    taken = times({"full": model, "pruned": pruned}, given, 2)
    assert set(taken) == {"full", "pruned"} and 0 < attention_time(model, given, 2) < 10 * taken["full"]


class QueuedWork:
    """An accelerator's clock: work is queued when a module runs, and takes its time when something waits for it."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def queue(self, seconds: float) -> Any:
        def run(*_: Any) -> None:
            self.queued += seconds

        return run

    def synchronize(self, *_: Any) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


def test_times_wait_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model, given = QueuedWork(), build("bert"), inputs("bert")
    other = build("bert")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", clock.synchronize)
    monkeypatch.setattr("headwise.prune.latency.time.perf_counter", lambda: clock.now)
    for layer in model.encoder.layer:
        layer.attention.self.query.register_forward_hook(clock.queue(5))
        layer.attention.self.value.register_forward_hook(clock.queue(2))
        layer.output.register_forward_hook(clock.queue(7))
    other.embeddings.register_forward_hook(clock.queue(11))
    assert times({"bert": model, "other": other}, given, 3) == {"bert": 3 * 14, "other": 11}
    assert attention_time(model, given, 3) == 3 * 7


def test_texts_of_jsonl_are_read_as_the_atlas_reads_them(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = texts.read_text().splitlines()
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"said": line, "id": i}) + "\n\n" for i, line in enumerate(lines)))
    assert read_texts(file, "said") == lines == list(read(file, "said")[0])
    source = saved(tmp_path / "source")
    plain = ["--model", source, "--score", "output", "--json"]
    found = []
    for name, more in (("a", ["--texts", texts]), ("b", ["--texts", file, "--field", "said"])):
        code, out, _ = run(capsys, *plain, *more, "--out", tmp_path / name)
        assert code == 0
        found.append(json.loads(out)["scores"])
    assert found[0] == found[1]
    code, _, err = run(capsys, *plain, "--texts", file, "--out", tmp_path / "c")
    assert code == 2 and "line 1 of" in err and "is no JSON object with a 'text'" in err


def test_a_perplexity_counts_tokens_wherever_the_padding_is() -> None:
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
        where = slice(7, 11) if side == "left" else slice(0, 4)
        rows[1, where], masks[side][1, where] = ids[0, :4], 1
        found = quality(model, model, [{"input_ids": rows, "attention_mask": masks[side]}])
        assert found.value == pytest.approx(np.exp(np.mean(nats)), rel=1e-3), side


def test_a_plan_for_a_time_that_can_be_had_and_one_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is one that counts heads, so that the test does not measure the machine."""
    from headwise.prune import latency

    model, given = build("bert"), inputs("bert")

    def counted(models: dict[str, Any], batch: Any, rounds: int = 0) -> dict[str, float]:
        return {name: 100.0 + sum(p.numel() for p in m.encoder.parameters()) / 1000 for name, m in models.items()}

    monkeypatch.setattr(latency, "times", counted)
    scores = headwise.importance(model, [given], "output")
    made = headwise.plan(scores, 0.9, budget="latency", model=model, inputs=given)
    assert made.budget == "latency" and made.keep == 0.9 and "of the full model's time" in str(made)
    full = counted({"x": model}, None)["x"]
    assert 0.8 * full < counted({"x": headwise.prune_heads(model, made)}, None)["x"] <= 0.9 * full
    with pytest.raises(
        HeadwiseError, match=r"latency: keep=0.3 cannot be met by removing heads; the nearest is keep=0.78"
    ):
        headwise.plan(scores, 0.3, budget="latency", model=model, inputs=given)


HOSTILE = (
    "<b>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://x.test/)", "<http://x.test>",
    "`a`", "``` \n# b", "a | b", "*a* _b_ ~~c~~", "&lt;b&gt;", "\\[a](b)", "-->", "a\n\n# b", "\x1b]52;c;eA==\x07",
    "$a$ @b", "{title}", "</style><script>alert(1)</script>",
)  # fmt: skip


def report_of(name: str, note: str = "") -> Any:
    """A report whose every text of others is a given one."""
    from headwise.models.surgery.saving import Saved
    from headwise.prune.plan import Plan
    from headwise.prune.quality import Quality, Size
    from headwise.prune.session import Asked, Latency, Report

    found = Quality(name, 1, 1, 1, True, 2)
    made = Plan({0: [1]}, (("self", 0, 2, 2),), score=name, notes=(note or name,))
    slow = [Latency(1, 8, 1.0, 1.01), Latency(4, 8, 1.0, 0.5)]
    quality = {"full": found, "pruned": found, "recovered": found}
    saved = Saved(name, "plain", name, f"headwise.load({name!r})", None)
    return Report(
        name, Asked(), made, Size(9, 4, 0), Size(7, 2, 0), quality, slow, 0.3, 1, 1, saved=saved, losses=[2.0, 1.0]
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_of_others_is_shown_and_not_obeyed(name: str) -> None:
    from markdown_it import MarkdownIt

    report = report_of(name)
    shown = one_line(name)
    written = markdown(report)
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(written)
    inner = [child for token in tokens for child in token.children or []]
    kinds = {token.type for token in [*tokens, *inner]}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "em_open", "strong_open", "s_open"}, kinds
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", "h2", "h2", "h2"]
    title = next(token for token in tokens if token.type == "inline")
    text = "".join(child.content for child in title.children or [])
    assert text == f"{shown}, 1 of 2 heads removed"
    assert [token.content for token in inner if token.type == "code_inline"] == [one_line(f"headwise.load({name!r})")]
    assert len([token for token in tokens if token.type == "fence"]) == 1 and "\x1b" not in written
    drawn = page(report)
    assert html.escape(f"{shown}, 1 of 2 heads removed") in drawn and "\x1b" not in drawn
    assert drawn.count("<script") == 0 and drawn.count("<img") == 0 and drawn.count("</style>") == 1
    assert "Content-Security-Policy" in drawn


def test_a_verdict_says_where_it_is_faster() -> None:
    lines = report_of("a").verdict()
    assert lines[0].startswith("not faster at batch 1 x 8 tokens") and "0.50" in lines[1]


def test_bad_input_is_one_line(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source")
    capsys.readouterr()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    (tmp_path / "plan.json").write_text("{}")
    headwise.plan({"self": np.ones((3, 7))}, 0.5).save(tmp_path / "other.json")
    whole = headwise.plan({"self": np.arange(15.0).reshape(3, 5)}, 0.5, allow_empty=True)
    whole.save(tmp_path / "empty.json")
    assert whole.heads[0] == [0, 1, 2, 3, 4]
    usual = ["--model", source, "--texts", texts, "--out", tmp_path / "out"]
    for args, words in [
        ([], "Missing option '--texts'"),
        (["--texts", texts], "Missing option '--out'"),
        (["--texts", texts, "--out", tmp_path / "full"], "exists and is not empty"),
        ([*usual, "--keep", "many"], "--keep is a share such as 0.6"),
        ([*usual, "--keep", "0.01"], "the nearest is --keep 0.2000"),
        ([*usual, "--keep", "6"], "keep is a share from 0 to 1"),
        ([*usual, "--keep", "middle=0.5"], "no 'middle' attention here"),
        ([*usual, "--score", "best"], "'best' is not one of 'michel'"),
        ([*usual, "--plan", tmp_path / "plan.json"], "not a plan that headwise wrote"),
        ([*usual, "--plan", tmp_path / "other.json"], "this plan is for another model: 3 layers of 7 heads, but"),
        ([*usual, "--plan", tmp_path / "empty.json"], "all 5 heads of self layer 0 would go; keep one, or say"),
        ([*usual, "--recover", "-3"], "Invalid value for '--recover': -3 is not in the range 0 to 10,000,000"),
        ([*usual, "--recover", "9" * 30], "Invalid value for '--recover'"),
        ([*usual, "--batch", "9" * 30], "is not in the range 1 to 65,536"),
        ([*usual, "--context", "0"], "Invalid value for '--context': 0 is not in the range 1 to"),
        ([*usual, "--seed", "-1"], "Invalid value for '--seed': -1 is not in the range"),
        ([*usual, "--seed", "4294967296"], "4294967296 is not in the range 0 to 4,294,967,295"),
        ([*usual, "--seed", "9" * 5000], "Invalid value for '--seed'"),
        ([*usual, "--keep", "nan"], "keep is a share from 0 to 1, such as 0.6, got nan"),
        ([*usual, "--keep", "encoder=inf"], "keep is a share from 0 to 1, such as 0.6, got inf"),
        ([*usual, "--keep", "encoder=0.5,encoder=0.6"], "--keep is one share per kind"),
        ([*usual, "--keep", "=0.5"], "--keep is one share per kind"),
        ([*usual, "--keep", "9" * 5000], "keep is a share from 0 to 1, such as 0.6, got inf"),
        ([*usual, "--budget", "euro"], "'euro' is not one of 'heads', 'parameters', 'cache', 'latency'"),
        ([*usual, "--per", "word"], "'word' is not one of 'model', 'layer'"),
        ([*usual, "--compensate", "much"], "'much' is not one of 'bias', 'mean'"),
        ([*usual, "--over", "mail"], "'mail' is not one of 'ddp', 'fsdp'"),
        ([*usual, "--steps", "16"], "steps must be at most the number of heads, 15, got 16"),
        ([*usual, "--steps", "2", "--budget", "latency"], "steps are for one share of heads, parameters or cache"),
        ([*usual, "--plan", tmp_path / "empty.json", "--keep", "0.5"], "--plan says which heads go: leave out --keep"),
        ([*usual[:-1], tmp_path / "full", "--overwrite"], "holds something else than a model, and is not replaced"),
        ([*usual[:-1], source, "--overwrite"], "which would be replaced; give another --out"),
        ([*usual[:-1], "."], "give a new directory, by its name"),
        ([*usual[:-1], "a\0b"], "Invalid value for '--out'"),
        ([*usual[:-1], texts / "out"], "is no directory that can be written to"),
        ([*usual[:-1], texts], "exists and is not empty"),
        ([*usual, "--steps", "0"], "Invalid value for '--steps': 0 is not in the range"),
        (["--model", source, "--texts", tmp_path / "none", "--out", tmp_path / "out"], "cannot be read: No such file"),
        (["--model", source, "--texts", tmp_path / "few.txt", "--out", tmp_path / "out"], "2 texts are too few"),
        ([*usual, "--labels", tmp_path / "few.txt"], "label 'one' is neither a number"),
    ]:
        code, out, err = run(capsys, *args)
        assert code == 2 and out == "" and err.count("\n") == 1 and words in err, (args, err)
    assert not (tmp_path / "out").exists() and (tmp_path / "full" / "mine.txt").exists()


def test_labels_are_checked(tmp_path: Path) -> None:
    config = transformers.BertConfig(num_labels=2)
    for lines, words in [
        ("0\n5\n", "label 5 is not one of the model's 2 classes"),
        ("0\n", "1 labels for 2 texts"),
        ("0\n²\n", "label '²' is neither a number nor one of"),
        ("0\n" + "9" * 5000 + "\n", "label '9+' is neither a number nor one of"),
    ]:
        (tmp_path / "labels.txt").write_text(lines)
        with pytest.raises(HeadwiseError, match=words):
            read_labels(tmp_path / "labels.txt", 2, config)


def test_halves_do_not_overlap() -> None:
    class Words:
        pad_token = "x"

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": torch.tensor([[int(text)] for text in texts])}

    made = batched([str(i) for i in range(11)], Words(), batch=4)
    scored = {int(i) for batch in made.scoring for i in batch["input_ids"]}
    measured = {int(i) for batch in made.measuring for i in batch["input_ids"]}
    assert not scored & measured and scored | measured == set(range(11))
