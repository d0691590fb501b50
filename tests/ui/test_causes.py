"""Causes: the direct effects that the page shows add up to the difference of two logits, also with heads off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise
from headwise.ui import capture, causes
from headwise.ui.causes import measure_causes
from headwise.ui.payload import SIGNIFICANT
from headwise.ui.service import Service
from helpers import small_checkpoints

TEXT = "The animal was too"
ROUNDING = 0.5 * 10 ** (1 - SIGNIFICANT)  # of each effect, relative to itself


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """In double precision, so that the effects add up but for their rounding in the answer."""
    return small_checkpoints.sharp(small_checkpoints.MODELS["gpt2"]()).double(), small_checkpoints.byte_level()


@pytest.fixture(scope="module")
def service(minilm: tuple[Any, Any], tiny: tuple[Any, Any], bart: tuple[Any, Any]) -> Service:
    return Service({"tiny": tiny, "minilm": minilm, "bart": bart})


def ask(service: Service, **fields: str) -> dict[str, Any]:
    return service.answer({"ask": "causes", "text": TEXT, **fields})["causes"]


def last_logits(tiny: tuple[Any, Any]) -> torch.Tensor:
    with torch.no_grad():
        return tiny[0](torch.tensor([tiny[1](TEXT)["input_ids"]])).logits[0, -1]


def check_sum(answer: dict[str, Any], difference: float) -> None:
    parts = [*(x for row in answer["effects"] for x in row), *(x for _, x in answer["rest"])]
    assert answer["value"] == pytest.approx(difference, rel=1e-9)
    assert abs(sum(parts) - difference) <= (ROUNDING + 1e-9) * sum(map(abs, parts))


def test_effects_add_up_to_the_two_most_probable_tokens_by_default(service: Service, tiny: tuple[Any, Any]) -> None:
    logits = last_logits(tiny)
    first, second = logits.topk(2).indices.tolist()
    answer = ask(service)
    assert [answer[name]["text"] for name in ("answer", "other")] == [tiny[1].decode([first]), tiny[1].decode([second])]
    assert answer["answer"]["probability"] == pytest.approx(float(logits.float().softmax(-1)[first]), rel=1e-5)
    assert len(answer["predictions"]) == 8
    assert [len(row) for row in answer["effects"]] == [3, 3]
    check_sum(answer, float(logits[first] - logits[second]))


def test_a_token_beyond_the_tokenizer_has_its_number_as_name() -> None:
    model = small_checkpoints.sharp(small_checkpoints.MODELS["llama"]())  # 60 tokens more than this tokenizer has
    tokenizer = small_checkpoints.byte_level()
    pass_ = capture.run(TEXT, model, tokenizer=tokenizer)
    predicted = measure_causes(pass_, model, tokenizer, "", "")
    name = predicted["answer"]["text"]
    assert name == f"token {int(pass_.output.logits[0, -1].argmax())}"
    assert measure_causes(pass_, model, tokenizer, name, "") == predicted


def test_effects_are_on_the_chosen_tokens(service: Service, tiny: tuple[Any, Any]) -> None:
    logits = last_logits(tiny)
    ids = {text: tiny[1](text)["input_ids"] for text in ("a", "b")}
    assert all(len(tokens) == 1 for tokens in ids.values())
    answer = ask(service, answer="a", other="b")
    assert (answer["answer"]["text"], answer["other"]["text"]) == ("a", "b")
    check_sum(answer, float(logits[ids["a"][0]] - logits[ids["b"][0]]))
    alone = ask(service, answer=tiny[1].decode([int(logits.topk(2).indices[1])]))
    assert alone["other"]["text"] == tiny[1].decode([int(logits.argmax())])


def test_heads_that_are_off_have_no_effect(service: Service, tiny: tuple[Any, Any]) -> None:
    with headwise.mask_heads(tiny[0], {1: [2]}):
        logits = last_logits(tiny)
    a, b = (tiny[1](text)["input_ids"][0] for text in ("a", "b"))
    answer = ask(service, answer="a", other="b", off="1.2")
    assert answer["effects"][1][2] == 0 and answer["effects"][1][1] != 0
    check_sum(answer, float(logits[a] - logits[b]))
    assert ask(service, answer="a", other="b")["effects"][1][2] != 0


def test_other_models_say_why_not(service: Service, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(service, model="minilm") == {
        "refusal": "minilm predicts no next token; causes are shown for decoders, such as smollm2"
    }
    for fields in ({"model": "bart"}, {"model": "bart", "target": "It"}):
        assert "has an encoder and a decoder" in ask(service, **fields)["refusal"]
    monkeypatch.setattr(causes, "MOST_TOKENS", 3)
    assert "causes are shown for up to 3" in ask(service)["refusal"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"answer": "xyz"}, "the answer 'xyz' is 3 tokens"),
        ({"other": "xyz"}, "the answer 'xyz' is 3 tokens"),
        ({"answer": "a", "other": "a"}, "answer and other token are both 'a'"),
        ({"answer": 7}, "answer and other are texts"),
    ],
)
def test_wrong_tokens_are_refused(fields: dict[str, Any], words: str, service: Service) -> None:
    with pytest.raises(headwise.HeadwiseError, match=words):
        ask(service, **fields)


def test_a_model_whose_stream_is_no_sum_says_so(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise headwise.UnsupportedError("its residual stream is no sum")

    monkeypatch.setattr(causes, "attribute", refuse)
    pass_ = capture.run(TEXT, tiny[0], tokenizer=tiny[1])
    assert measure_causes(pass_, *tiny, "", "") == {"refusal": "its residual stream is no sum"}


def test_causes_that_take_too_long_are_stopped(tiny: tuple[Any, Any]) -> None:
    service = Service({"tiny": tiny})
    service.answer({"ask": "run", "text": TEXT})  # the pass itself is cached
    service.seconds = -1.0
    with pytest.raises(headwise.HeadwiseError, match="took more than"):
        ask(service)
    service.seconds = 60.0
    with pytest.raises(capture.StoppedError):
        service.answer({"ask": "causes", "text": TEXT}, lambda: True)
    assert not any(module._forward_pre_hooks for module in tiny[0].modules())
    assert ask(service)["value"] > 0
