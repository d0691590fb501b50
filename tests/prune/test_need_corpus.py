"""context_need over a corpus: read batch by batch, resumed after a stop, and on the bundled texts by default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise
from headwise import CheckpointError, HeadwiseError
from headwise.prune import stream_texts

SIZES: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 30, "num_hidden_layers": 2, "intermediate_size": 17, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = (3, 7)


class Counter:
    """How often a model ran, and what it ran on; it may stop as if it were killed."""

    def __init__(self, model: Any, stop_at: int | None = None) -> None:
        self.lengths: list[int] = []
        self.logits: list[int] = []
        self.stop_at = stop_at
        model.model.register_forward_pre_hook(self.count, with_kwargs=True)
        model.lm_head.register_forward_hook(lambda module, args, out: self.logits.append(out.shape[1]))

    def count(self, module: Any, args: Any, options: dict[str, Any]) -> None:
        if len(self.lengths) == self.stop_at:
            raise KeyboardInterrupt
        self.lengths.append(options["input_ids"].shape[1])


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model


def corpus() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(3, 89, (1 + length % 2, length))} for length in (19, 14, 11, 23)]


def test_an_iterator_is_read_batch_by_batch() -> None:
    done: list[tuple[int, int | None]] = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(corpus()):
            assert len(done) == number  # the one before is measured
            yield batch

    need = headwise.context_need(build(), batches(), WINDOWS, progress=lambda *step: done.append(step))
    assert done == [(1, None), (2, None), (3, None), (4, None)]
    assert need.to_json() == headwise.context_need(build(), corpus(), WINDOWS).to_json()


def test_an_empty_iterator_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="no inputs"):
        headwise.context_need(build(), iter([]), WINDOWS)


def test_logits_are_computed_for_the_last_token_alone() -> None:
    model = build()
    counter = Counter(model)
    headwise.context_need(model, corpus(), WINDOWS)
    assert counter.lengths == [19, 14, 11, 23] and counter.logits == [1, 1, 1, 1]


def test_a_run_that_was_stopped_goes_on_with_the_missing_batches(tmp_path: Path) -> None:
    whole = headwise.context_need(build(), corpus(), WINDOWS)
    stopped = build()
    Counter(stopped, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        headwise.context_need(stopped, corpus(), WINDOWS, resume=tmp_path / "work")
    resumed = build()
    counter = Counter(resumed)
    need = headwise.context_need(resumed, iter(corpus()), WINDOWS, resume=tmp_path / "work")
    assert counter.lengths == [11, 23]
    assert need.to_json() == whole.to_json()  # float64 numbers survive JSON exactly


@pytest.mark.parametrize("difference", ["weights", "windows", "first keys", "labels"])
def test_results_of_another_run_are_not_mixed_in(tmp_path: Path, difference: str) -> None:
    headwise.context_need(build(), corpus(), WINDOWS, resume=tmp_path)
    model, batches = build(seed=int(difference == "weights")), corpus()
    if difference == "labels":
        batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    arguments: dict[str, Any] = {
        "windows": (7, 3) if difference == "windows" else WINDOWS,
        "keep_first": 2 if difference == "first keys" else 4,
    }
    alone = headwise.context_need(model, batches, **arguments)
    counter = Counter(model)
    need = headwise.context_need(model, batches, **arguments, resume=tmp_path)
    assert len(counter.lengths) == 4 and need.to_json() == alone.to_json()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    headwise.context_need(build(), corpus()[:1], WINDOWS, resume=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{file.name}.*remove the file to measure it again"):
        headwise.context_need(build(), corpus()[:1], WINDOWS, resume=tmp_path)


class LetterTokenizer:
    """One token per character."""

    unk_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        ids = [3 + ord(letter) % 86 for letter in text]
        return {"input_ids": ids, "special_tokens_mask": [0] * len(ids)}


def test_the_default_is_the_part_of_the_bundled_texts_to_choose_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, measured = LetterTokenizer(), []

    def record(model: Any, inputs: Any, *_: Any) -> list[Any]:
        measured.extend(inputs)
        raise KeyboardInterrupt  # measuring the whole novel would take long

    monkeypatch.setattr("headwise.prune.context_need.measure_batches", record)
    with pytest.raises(KeyboardInterrupt):
        headwise.context_need(build(), tokenizer=tokenizer)
    expected = stream_texts(tokenizer, 512, part="choose").batches  # the model has 512 positions
    assert len(measured) == len(expected)
    assert all(a["labels"].equal(b["labels"]) for a, b in zip(measured, expected, strict=True))


def test_the_bundled_texts_need_a_tokenizer_and_batches_no_length() -> None:
    with pytest.raises(HeadwiseError, match="tokenizer=headwise.tokenizer"):
        headwise.context_need(build())
    with pytest.raises(HeadwiseError, match="length is that of the bundled texts"):
        headwise.context_need(build(), corpus(), length=100)
