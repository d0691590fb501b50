"""resolve and text_model: which model a user means, and which part of it reads a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwise import HeadwiseError, UnsupportedError
from headwise.models.loading.resolve import resolve
from headwise.models.structure.text_model import ENCODER_ONLY, check_takes_text, text_model
from helpers import small_checkpoints
from helpers.model_families import BY_NAME, build


def test_a_directory_gives_its_model_and_tokenizer(tmp_path: Path) -> None:
    folder = small_checkpoints.save_small_model("gpt2", tmp_path / "model")
    name, model, tokenizer = resolve(folder)
    assert name == str(folder) and type(model).__name__ == "GPT2LMHeadModel"
    assert tokenizer("tired")["input_ids"] and resolve(folder, tokenizer, "mine").name == "mine"


def test_a_loaded_model_needs_its_tokenizer() -> None:
    model, tokenizer = build(BY_NAME["gpt2"]), small_checkpoints.byte_level()
    assert resolve(model, tokenizer) == ("GPT2Model", model, tokenizer)
    with pytest.raises(HeadwiseError, match=r"already loaded needs its tokenizer; give tokenizer=headwise.tokenizer"):
        resolve(model)


@pytest.mark.parametrize(("family", "notes"), [("bert", ()), ("llama", ()), ("bart", (ENCODER_ONLY,))])
def test_the_text_part_is_the_model_or_its_encoder(family: str, notes: tuple[str, ...]) -> None:
    model = build(BY_NAME[family])
    part, found_notes = text_model(model, purpose="inspect needs")
    assert found_notes == notes and part is (model.get_encoder() if notes else model)
    with torch.no_grad():
        assert part(input_ids=torch.tensor([[5, 7, 11]]))[0].shape[:2] == (1, 3)


def test_models_of_images_are_refused_by_name() -> None:
    model = build(BY_NAME["vit"])
    with pytest.raises(UnsupportedError, match=r"^ViTModel takes pixel_values, not text; an atlas needs a text model$"):
        check_takes_text(model, purpose="an atlas needs")
    with pytest.raises(UnsupportedError, match=r"^vit \(ViTModel\) takes pixel_values"):
        text_model(model, purpose="inspect needs", name="vit")
