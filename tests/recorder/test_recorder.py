"""What the recorder counts: exact statistics, of the passes that lead to a recorded optimizer step and no others."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import headwise
from headwise import HeadwiseError, Recorder, UnsupportedError
from headwise.attention.stats import stats_from_weights
from headwise.recorder import LogEntry
from headwise.recorder.terminal import draw_log
from helpers.training import BATCH, CLOSE, HEADS, LAYERS, LENGTH, WIDTH, batches, small_gpt2, train
from helpers.undeclared_models import DIM, Einsum, Stack, merge, split
from helpers.undeclared_models import WIDTH as STACK_WIDTH


def record_step(model: Any, inputs: list[torch.Tensor], **options: Any) -> LogEntry:
    """The entry of the first step of a training."""
    with Recorder(model, every=1, path=None, **options) as recorder:
        train(model, inputs)
    assert recorder.entry is not None
    return recorder.entry


def assert_same(entry: LogEntry, other: LogEntry, **close: float) -> None:
    assert entry.values.keys() == other.values.keys() and entry.queries == other.queries
    for key, values in entry.values.items():
        for name, row in values.items():
            np.testing.assert_allclose(row, other.values[key][name], **(close or CLOSE), err_msg=f"{key} {name}")


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


# --- exactness ---


def eager_statistics(model: Any, ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Every layer's statistics from the weights and projections that the model itself computes."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    projections: list[torch.Tensor] = []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda _, args, out: projections.append(out))
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions
    layers = []
    for rows, projection in zip(weights, projections, strict=True):
        q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in projection.split(WIDTH, -1)[:2])
        logits = q @ k.mT / (WIDTH // HEADS) ** 0.5
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        stats = stats_from_weights(rows)
        layers.append(
            {name: stats[name] for name in ("entropy", "first", "confidence")}
            | {"max_logit": logits.masked_fill(~causal, -torch.inf).amax((0, 2, 3))}
        )
    return layers


def test_recorded_statistics_are_those_of_the_models_own_weights() -> None:
    model, [ids] = small_gpt2(), batches(1)
    expected = eager_statistics(model, ids)
    entry = record_step(model, [ids])
    assert entry.step == 1 and entry.passes == 1
    for index, statistics in enumerate(expected):
        assert entry.queries["self", index] == BATCH * LENGTH
        for name, row in statistics.items():
            np.testing.assert_allclose(entry.values["self", index][name], row, **CLOSE, err_msg=name)


def test_training_with_a_recorder_gives_the_same_parameters_to_the_bit() -> None:
    models = [small_gpt2(dropout=0.2, dtype=torch.float32) for _ in range(2)]
    for model, path in zip(models, (None, "on"), strict=True):
        torch.manual_seed(11)
        if path is None:
            train(model, batches(4))
        else:
            with Recorder(model, every=1, path=None):
                train(model, batches(4))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def train_stack(model: nn.Module, x: torch.Tensor, steps: int = 1) -> None:
    """Optimizer steps on a model of tokens."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_hand_written_attention_has_the_max_logit_of_its_own_scores() -> None:
    torch.manual_seed(2)
    model = Stack(Einsum, 1).double().train()
    x = torch.randn(BATCH, LENGTH, STACK_WIDTH, dtype=torch.float64)
    step = model.steps[0]
    scores = (split(step.asks(x)) @ split(step.offers(x)).mT).detach() / DIM**0.5
    with Recorder(model, every=1, path=None) as recorder:
        train_stack(model, x)
    assert recorder.entry is not None
    values = recorder.entry.values["self", 0]["max_logit"]
    np.testing.assert_allclose(values, scores.amax((0, 2, 3)), **CLOSE)


def test_a_max_logit_that_cannot_be_known_is_reported_once_and_shown_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class Squared(Einsum):
        def mix(self, x: Any, q: Any, k: Any, v: Any) -> Any:
            return merge((split(q) @ split(k).mT).square().softmax(-1) @ split(v))

    model, x = Stack(Squared).train(), torch.randn(BATCH, LENGTH, STACK_WIDTH)
    path = tmp_path / "heads.jsonl"
    with caplog.at_level(logging.WARNING), Recorder(model, every=1, path=path) as recorder:
        train_stack(model, x, 3)
    words = "max_logit of steps.0 is not recorded, nor of layers like it: its scores pass through square before"
    assert caplog.text.count(words) == caplog.text.count("max_logit") == 1
    assert recorder.log.steps == [1, 2, 3] and "max_logit" not in recorder.log.names
    Console(width=80).print(draw_log(recorder.log, 80, colour=False))
    assert "max_logit: not recorded, the scores before softcap and mask are not known" in capsys.readouterr().out


def test_encoder_decoder_models_have_entries_of_every_kind() -> None:
    import transformers

    config = transformers.BartConfig(
        vocab_size=53, d_model=15, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=5, encoder_ffn_dim=17, decoder_ffn_dim=17, max_position_embeddings=23,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).train()
    entry = record_step(model, batches(1))
    assert [(key, len(values["entropy"])) for key, values in entry.values.items()] == [
        (("encoder", 0), 3), (("encoder", 1), 3), (("decoder", 0), 5), (("cross", 0), 5),
    ]  # fmt: skip


def test_learned_sinks_are_recorded() -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).train()
    [ids] = batches(1)
    with headwise.watch(model) as seen, torch.no_grad():
        model(input_ids=ids)
    entry = record_step(model, [ids])
    np.testing.assert_allclose(entry.values["self", 1]["sink"], seen[1].stats.sink, rtol=1e-5)


def test_padding_does_not_count() -> None:
    model, [ids] = small_gpt2(), batches(1)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    mask[3, 7:] = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with headwise.watch(model) as seen, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    with Recorder(model, path=None) as recorder:
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        optimizer.step()
    entry = recorder.entry
    assert entry is not None and entry.queries["self", 0] == int(mask.sum())
    for layer in seen.layers:
        np.testing.assert_allclose(entry.values[layer.key]["entropy"], layer.stats.entropy, **CLOSE)


# --- which steps, which passes ---


def test_the_first_and_every_nth_step_are_recorded(tmp_path: Path) -> None:
    model = small_gpt2()
    with Recorder(model, every=4, path=tmp_path / "heads.jsonl") as recorder:
        train(model, batches(9))
    assert recorder.log.steps == [1, 4, 8]
    assert recorder.step_number == 9


def test_the_model_is_watched_in_recorded_steps_only(tmp_path: Path) -> None:
    model, watched = small_gpt2(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, every=3, path=tmp_path / "heads.jsonl"):
        for ids in batches(7):
            watched.append(hooks(model) > 0)
            train(model, [ids], optimizer)
    assert watched == [True, False, True, False, False, True, False]
    assert hooks(model) == 0


def test_passes_of_gradient_accumulation_are_added_up() -> None:
    ids, others = batches(2)
    whole = record_step(small_gpt2(), [torch.cat([ids, others])])
    model = small_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, path=None) as recorder:
        for part in (ids, others):
            (model(input_ids=part, labels=part).loss / 2).backward()
        optimizer.step()
    assert recorder.entry is not None and recorder.entry.passes == 2
    assert_same(recorder.entry, whole, rtol=1e-5)  # samples are added up in float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_that_checkpointing_repeats_counts_once(reentrant: bool) -> None:
    [ids] = batches(1)
    expected = record_step(small_gpt2(), [ids])
    model = small_gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    entry = record_step(model, [ids])
    assert entry.passes == 1
    assert_same(entry, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_grad_scaler_skips_is_none(fused: bool, tmp_path: Path) -> None:
    model = small_gpt2(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Recorder(model, every=2, path=tmp_path / "heads.jsonl") as recorder:
        for number, ids in enumerate(batches(5)):
            loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss * (torch.inf if number in (0, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert recorder.step_number == 3
    assert [(entry.step, entry.passes) for entry in recorder.log.entries] == [(1, 2), (2, 1)]


def test_evaluation_in_between_does_not_count() -> None:
    first, second, other = batches(3)
    expected = record_step(small_gpt2(), [first, second])
    model = small_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(input_ids=other)
            model.generate(other[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()

    with Recorder(model, every=1, path=None) as recorder:
        evaluate()
        train(model, [first], optimizer)
        evaluate()
        model(input_ids=second, labels=second).loss.backward()
        evaluate()
        optimizer.step()
    assert recorder.entry is not None and recorder.entry.passes == 1
    assert_same(recorder.entry, expected)


def test_memory_does_not_grow_with_the_passes_of_a_step() -> None:
    model, [ids] = small_gpt2(), batches(1)
    with Recorder(model, path=None) as recorder:
        for _ in range(5):
            model(input_ids=ids)
        assert recorder._watch is not None
        assert [len(layer.runs) for layer in recorder._watch.layers] == [0] * LAYERS
        assert all(total.stats.count.shape == (1, HEADS) for total in recorder._totals.layers.values())


# --- whose steps ---


def test_optimizers_of_other_models_are_not_counted() -> None:
    model, other = small_gpt2(), nn.Linear(3, 2)
    stranger = torch.optim.SGD(other.parameters(), 0.1)
    with Recorder(model, every=1, path=None) as recorder:
        for _ in range(3):
            other(torch.ones(3)).sum().backward()
            stranger.step()
        train(model, batches(2))
    assert recorder.step_number == 2


def test_two_optimizers_of_one_model_count_once() -> None:
    model = small_gpt2()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:3], 0.1), torch.optim.AdamW(parameters[3:], 0.1)]
    with Recorder(model, every=1, path=None) as recorder:
        for ids in batches(3):
            model(input_ids=ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert recorder.step_number == 3


def test_an_optimizer_that_replaces_another_counts_on() -> None:
    model = small_gpt2()
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with Recorder(model, every=1, path=None) as recorder:
        train(model, batches(3), first)
        train(model, batches(4), second)
    assert recorder.step_number == 7


def update_by_hand(model: nn.Module) -> None:
    """What an optimizer that is not PyTorch's does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def test_a_line_in_a_plain_loop_counts_the_steps_of_any_optimizer(tmp_path: Path) -> None:
    model = small_gpt2()
    recorder = Recorder(model, every=2, path=tmp_path / "heads.jsonl", manual=True)
    for ids in batches(5):
        model(input_ids=ids, labels=ids).loss.backward()
        update_by_hand(model)
        recorder.step()
    recorder.stop()
    assert recorder.log.steps == [2, 4]  # the first pass ran before the recorder was on
    with Recorder(model, every=2, path=tmp_path / "others.jsonl", manual=True) as recorder:
        for ids in batches(4):
            model(input_ids=ids, labels=ids).loss.backward()
            update_by_hand(model)
            recorder.step()
    assert recorder.log.steps == [1, 2, 4]


def test_steps_are_not_counted_twice() -> None:
    with Recorder(small_gpt2(), path=None) as recorder, pytest.raises(HeadwiseError, match="counted already"):
        recorder.step()


def test_start_and_stop_do_what_with_does(tmp_path: Path) -> None:
    model = small_gpt2()
    recorder = Recorder(model, every=1, path=tmp_path / "heads.jsonl").start()
    with pytest.raises(HeadwiseError, match="on already"):
        recorder.start()
    train(model, batches(2))
    recorder.stop()
    recorder.stop()
    train(model, batches(2))
    assert recorder.log.steps == [1, 2] and hooks(model) == 0


def test_a_loop_whose_steps_are_not_seen_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, [ids] = small_gpt2(), batches(1)
    with caplog.at_level(logging.WARNING), Recorder(model, path=None):
        model(input_ids=ids, labels=ids).loss.backward()
        update_by_hand(model)
    assert "no step of an optimizer of its parameters was seen" in caplog.text


def test_a_step_without_a_training_pass_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = small_gpt2().eval()
    with caplog.at_level(logging.WARNING), Recorder(model, every=1, path=None) as recorder:
        train(model, batches(3))
    assert recorder.entry is None
    assert caplog.text.count("no pass of GPT2LMHeadModel in training mode was seen") == 1


# --- errors ---


def test_everything_is_put_back_after_an_exception(tmp_path: Path) -> None:
    model, [ids] = small_gpt2(), batches(1)
    path = tmp_path / "heads.jsonl"
    with pytest.raises(ZeroDivisionError), Recorder(model, every=1, path=path) as recorder:  # noqa: PT012
        train(model, [ids])
        model(input_ids=ids)
        raise ZeroDivisionError
    assert hooks(model) == 0
    assert recorder.log.steps == [1]
    train(model, [ids])
    assert recorder.step_number == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be a number of steps from 1 on, got 0"),
        ({"every": True}, "every must be a number of steps"),
        ({"resume": -1}, "resume must be True, False or a number of steps, got -1"),
        ({"resume": "yes"}, "resume must be True, False or a number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        Recorder(small_gpt2(), path=None, **options)


def test_a_name_instead_of_a_model_is_refused_at_once() -> None:
    with pytest.raises(HeadwiseError, match=r"a model is expected, got str; load one with headwise.load\(name\)"):
        Recorder("minilm", path=None)


def test_a_model_without_attention_is_refused_before_the_training() -> None:
    with pytest.raises(UnsupportedError, match="no attention layer"), Recorder(nn.Linear(3, 2), path=None):
        pass


def failing_write(file: int, data: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.WARNING), Recorder(model, every=1, path=tmp_path / "heads.jsonl") as recorder:
        train(model, batches(1), optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("headwise.recorder.log_file.os.write", failing_write)
            train(model, batches(1), optimizer)
        train(model, batches(1), optimizer)
    assert "step 2 could not be written" in caplog.text and "No space left" in caplog.text
    assert recorder.log.steps == [1, 3]


def head_columns(model: Any, part: str, layer: int, head: int) -> torch.Tensor:
    """The columns of c_attn that make a head's queries (q), keys (k) or values (v)."""
    first = "qkv".index(part) * WIDTH + head * (WIDTH // HEADS)
    return model.transformer.h[layer].attn.c_attn.weight[:, first : first + WIDTH // HEADS]


def test_duplicate_and_silent_heads_are_told_from_others() -> None:
    model, [ids] = small_gpt2(), batches(1)
    with torch.no_grad():
        for part in "qk":  # head 2 of layer 1 attends as head 0 does
            head_columns(model, part, 1, 2).copy_(head_columns(model, part, 1, 0))
        head_columns(model, "v", 0, 1).zero_()
    alarms: list[Any] = []
    entry = record_step(model, [ids], on_alarm=alarms.extend)
    twins = entry.values["self", 1]["twin"]
    assert twins[0] == pytest.approx(1, abs=1e-6) and twins[2] == pytest.approx(1, abs=1e-6) and twins[1] < 0.9
    assert entry.twins["self", 1][0] == 2 and entry.twins["self", 1][2] == 0
    assert entry.values["self", 0]["output"][1] == 0 and min(entry.values["self", 1]["output"]) > 0.1
    assert [(alarm.kind, alarm.layer, alarm.head, alarm.other) for alarm in alarms] == [
        ("dead head", ("self", 0), 1, None),
        ("duplicate heads", ("self", 1), 0, 2),
    ]
