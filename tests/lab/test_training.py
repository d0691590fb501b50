"""The lab's tasks, models and training loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.lab.model import Recipe, as_gpt2, build, task_of
from headwise.lab.store import DEFAULT, Lab
from headwise.lab.tasks import IGNORED, Relations, Text
from headwise.lab.train import TrainedModel, held_out, loss_of, quality, train

SMALL = {"task": "relations", "layers": 1, "width": 16, "batch": 7, "steps": 5}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_relations_targets_are_the_symbols_at_the_offsets() -> None:
    batch = Relations(length=13).batch(3, seeded(0))
    for t in range(13):
        for i, offset in enumerate((1, 3, 6, 10)):
            want = batch.inputs[:, t - offset] if t >= offset else torch.full((3,), IGNORED)
            assert torch.equal(batch.targets[:, t, i], want)


def test_text_targets_are_the_next_letters_and_its_end_is_held_out() -> None:
    task = Text(length=11)
    batch = task.batch(5, seeded(0))
    assert torch.equal(batch.targets[:, :-1, 0], batch.inputs[:, 1:])
    whole = torch.cat((task.train, task.test))
    assert "".join(task.letters[i] for i in whole[:10]) == "Sir Walter"
    assert len(task.test) == pytest.approx(len(whole) / 10, abs=2)
    assert task.encode("Ann#e") == task.encode("Anne")
    share = Counter(task.train.tolist())
    assert task.chance() == pytest.approx(
        -sum(n / len(task.train) * torch.tensor(n / len(task.train)).log().item() for n in share.values()), abs=1e-5
    )


def test_ignored_targets_do_not_count_in_the_loss() -> None:
    targets = torch.tensor([[[1, IGNORED], [0, 2]]])
    logits = torch.randn(1, 2, 6, generator=seeded(0))
    log_probabilities = [
        logits[0, 0, :3].log_softmax(0)[1],
        logits[0, 1, :3].log_softmax(0)[0],
        logits[0, 1, 3:].log_softmax(0)[2],
    ]
    assert loss_of(logits, targets).item() == pytest.approx(-sum(log_probabilities).item() / 3, abs=1e-6)


def test_equal_recipes_give_equal_models_and_other_seeds_others() -> None:
    first, second, other = (train(Recipe(heads=2, seed=seed, **SMALL)) for seed in (5, 5, 7))
    assert first.curve == second.curve and first.curve != other.curve
    assert all(torch.equal(a, b) for a, b in zip(first.decoder.parameters(), second.decoder.parameters(), strict=True))


def test_training_learns_and_reports_when_it_does_not() -> None:
    recipe = Recipe(heads=2, seed=1, relations=1, **SMALL | {"steps": 150, "batch": 32, "rate": 1e-2})
    model = train(recipe)
    assert model.learned and model.loss < 0.5 * model.chance
    frozen = train(Recipe(heads=2, seed=1, relations=1, **SMALL | {"steps": 150, "batch": 32, "rate": 0.0}))
    assert not frozen.learned
    assert not TrainedModel(recipe, model.decoder, [(1, float("nan"), 0.0)], model.chance).learned


def test_the_held_out_data_is_always_the_same() -> None:
    first, second = held_out(Text(length=5), 2, 3), held_out(Text(length=5), 2, 3)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))


def test_without_scale_scores_grow_by_the_root_of_the_head_size() -> None:
    plain, bare = (build(Recipe(heads=2, seed=1, scale=scale, **SMALL)) for scale in (True, False))
    x = torch.randn(2, 7, 16, generator=seeded(0))
    a, b = (model.blocks[0].attention.weights(x) for model in (plain, bare))
    rescaled = (a.log() * 8**0.5).softmax(-1)
    assert torch.allclose(b, rescaled, atol=1e-5) and not torch.allclose(a, b, atol=1e-2)


def test_a_model_without_w_o_has_no_such_weights_and_runs() -> None:
    model = build(Recipe(heads=2, seed=1, mix=False, **SMALL))
    assert not any("W_O" in name for name in model.state_dict())
    model(torch.zeros(1, 3, dtype=torch.long))


def test_the_gpt2_of_transformers_matches_the_lab_model() -> None:
    recipe = Recipe(task="text", heads=4, seed=2, width=32, steps=2)
    model = build(recipe).eval()
    batch = held_out(task_of(recipe), 1, 3)[0]
    with torch.no_grad():
        assert torch.allclose(as_gpt2(model)(batch.inputs).logits, model(batch.inputs), atol=1e-5)
    loss, right = quality(model, task_of(recipe), batches=1)
    assert 0 <= right <= 1 and loss > 0


def test_the_store_reuses_models_of_equal_recipes_only(tmp_path: Path) -> None:
    lab = Lab(DEFAULT, work=tmp_path)
    first = lab.model(heads=2, seed=1, **SMALL)
    assert len(lab.new_pieces) == 1
    second_lab = Lab(DEFAULT, work=tmp_path)
    second = second_lab.model(heads=2, seed=1, **SMALL)
    assert second_lab.new_pieces == [] and second.curve == first.curve
    assert all(torch.equal(a, b) for a, b in zip(first.decoder.parameters(), second.decoder.parameters(), strict=True))
    second_lab.model(heads=4, seed=1, **SMALL)
    assert len(second_lab.new_pieces) == 1
    assert not list(tmp_path.glob("*.pt")) and len(list(tmp_path.glob("*.safetensors"))) == 2


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="there is no task 'chess'; there are relations and text"):
        build(Recipe(task="chess", heads=1, seed=0))
