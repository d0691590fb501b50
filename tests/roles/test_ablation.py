"""Ablation: masking heads that carry a task damages it more than random heads; masking others does not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headwise.errors import HeadwiseError, UnsupportedError
from headwise.roles.ablation import ablate, tasks
from headwise.roles.ablation.ablate import LESS, MORE, SAME, Ablation, ablate_heads, head_counts, random_heads
from headwise.roles.relations.gold import GoldLink, Sentence
from headwise.roles.relations.probe_set.sentences import probe_sentences
from helpers import relation_heads


def task_of(model: Any, carrying: set[tuple[int, int]], units: int = 13) -> tasks.Task:
    """The more of these heads are masked, seen in W_O's own input, the worse."""
    ids = torch.tensor([[2, 5, 12, 17, 3]])

    def score() -> np.ndarray:
        masked_count = 0
        hooks = []

        def look(layer: int) -> Any:
            def hook(linear: Any, args: Any) -> None:
                nonlocal masked_count
                magnitudes = args[0].unflatten(-1, (HEADS, -1)).abs().amax((0, 1, 3))
                masked_count += sum(
                    float(magnitudes[head]) == 0 for carrying_layer, head in carrying if carrying_layer == layer
                )

            return hook

        for layer, module in enumerate(model.encoder.layer):
            hooks.append(module.attention.output.dense.register_forward_pre_hook(look(layer)))
        with torch.no_grad():
            model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        return masked_count + np.linspace(0, 1, units)

    return tasks.Task("made up", "what is gone", model, score)


HEADS = 31


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.BertConfig(
        vocab_size=len(relation_heads.SPECIAL + relation_heads.WORDS), hidden_size=2 * HEADS, num_hidden_layers=2,
        num_attention_heads=HEADS, intermediate_size=5, max_position_embeddings=31,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def test_masking_heads_that_carry_a_task_damages_more_than_random_heads(model: Any) -> None:
    result = ablate_heads(task_of(model, {(0, 2), (1, 1)}), [("self", 0, 2), ("self", 1, 1)], draws=23)
    assert (result.whole, result.damage) == (pytest.approx(0.5), pytest.approx(2))
    assert result.random == (0.0,) * 23 and result.verdict == MORE and result.units == 13
    assert result.low == result.high == pytest.approx(2)
    assert "without 0.2, 1.1: what is gone 0.500 +2.0000" in str(result) and str(result).endswith(MORE)
    assert Ablation.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_masking_heads_without_a_part_in_a_task_is_no_different_from_random_heads(model: Any) -> None:
    assert ablate_heads(task_of(model, set()), [("self", 1, 0)]).verdict == SAME
    other_heads = {(layer, head) for layer in (0, 1) for head in range(HEADS)} - {(1, 0)}
    assert ablate_heads(task_of(model, other_heads), [("self", 1, 0)]).verdict == LESS


def test_too_few_random_draws_give_no_verdict(model: Any) -> None:
    assert ablate_heads(task_of(model, {(0, 2)}), [("self", 0, 2)], draws=7).verdict == SAME


def test_ablation_restores_the_model_and_depends_on_the_seed_alone(model: Any) -> None:
    task = task_of(model, {(0, 0)})
    before = task.score()
    assert ablate_heads(task, [("self", 0, 2)], seed=3) == ablate_heads(task, [("self", 0, 2)], seed=3)
    assert (task.score() == before).all()


def test_random_heads_are_other_heads_of_the_same_layers() -> None:
    counts = {("self", 0): 5, ("self", 1): 3, ("cross", 0): 7}
    selected = (("self", 0, 1), ("self", 0, 2), ("self", 1, 0), ("cross", 0, 6))
    seen = set()
    for seed in range(31):
        random_set = random_heads(counts, selected, np.random.default_rng(seed))
        assert len(set(random_set)) == 4 and not set(random_set) & set(selected)
        assert sorted(head[:2] for head in random_set) == sorted(head[:2] for head in selected)
        seen.update(random_set)
    assert len(seen) == 3 + 2 + 6  # every other head has its turn


def test_random_heads_come_from_other_layers_where_a_layer_has_too_few() -> None:
    counts = {("self", 0): 3, ("self", 1): 5}
    selected = (("self", 0, 0), ("self", 0, 1))
    random_set = random_heads(counts, selected, np.random.default_rng(0))
    assert ("self", 0, 2) in random_set and len(random_set) == 2 and any(layer == 1 for _, layer, _ in random_set)
    with pytest.raises(HeadwiseError, match="7 heads of 8: too few others are left"):
        random_heads(
            counts, [("self", 0, i) for i in range(3)] + [("self", 1, i) for i in range(4)], np.random.default_rng(0)
        )


def test_no_random_set_of_heads_is_drawn_twice() -> None:
    """One head of three: two others in its layer, then those of the other layer, and then there are no more."""
    counts = {("self", 0): 3, ("self", 1): 5}
    sets = list(ablate._distinct_sets(counts, [("self", 0, 1)], np.random.default_rng(0), 20))
    assert len(sets) == len(set(sets)) == 7 and set(sets[:2]) == {(("self", 0, 0),), (("self", 0, 2),)}
    many_sets = list(ablate._distinct_sets({("self", 0): 31}, [("self", 0, 1)], np.random.default_rng(0), 20))
    assert len(set(many_sets)) == 20


def test_ablation_refuses_missing_heads_and_zero_draws(model: Any) -> None:
    task = task_of(model, set())
    with pytest.raises(HeadwiseError, match="no heads to mask"):
        ablate_heads(task, [])
    with pytest.raises(HeadwiseError, match=r"no self head 1\.31 in BertModel"):
        ablate_heads(task, [("self", 1, 31)])
    with pytest.raises(HeadwiseError, match="at least 1 random draw"):
        ablate_heads(task, [("self", 1, 1)], draws=0)
    assert head_counts(model) == {("self", 0): 31, ("self", 1): 31}


# tasks


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=17, max_position_embeddings=131,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


TEXTS = ["a0 x1 n0 x2", "x3 x4", "a1 n1 x5 x6 x7 x8"]


def test_text_task_of_a_causal_model_is_the_loss_of_transformers() -> None:
    model, tokenizer = llama(), relation_heads.tokenizer()
    got = tasks.text_task(model, tokenizer, TEXTS).score()
    losses = []
    for text in sorted(TEXTS, key=lambda t: len(t.split())):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    assert got == pytest.approx(losses, rel=1e-4)


def test_text_task_of_a_whole_encoder_is_zero(model: Any) -> None:
    task = tasks.text_task(model, relation_heads.tokenizer(), TEXTS)
    assert task.score() == pytest.approx(np.zeros(3), abs=1e-6) and "cosine" in task.words
    result = ablate_heads(task, [("self", 0, 1)], draws=2)
    assert result.damage > 1e-6


def test_relation_task_measures_how_far_source_words_move(model: Any) -> None:
    sentences = relation_heads.sentences(17)
    task = tasks.relation_task(model, relation_heads.tokenizer(), sentences, "adjective > noun")
    assert task.score() == pytest.approx(np.zeros(34), abs=1e-6)  # two pairs a sentence
    assert ablate_heads(task, [("self", 1, 0)], draws=1).damage > 1e-6
    with pytest.raises(HeadwiseError, match="no sentence has a link 'nothing'"):
        tasks.relation_task(model, relation_heads.tokenizer(), sentences, "nothing")


def test_repetition_task_scores_the_second_half_alone() -> None:
    model, tokenizer = llama(), relation_heads.tokenizer()
    task = tasks.repetition_task(model, tokenizer)
    assert len(task.score()) == tasks.SEQUENCES * tasks.HALF_LENGTH
    assert (task.score() == tasks.repetition_task(model, tokenizer).score()).all()
    assert (task.score() != tasks.repetition_task(model, tokenizer, seed=1).score()).any()
    seen: list[Any] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    task.score()
    hook.remove()
    half = tasks.HALF_LENGTH
    assert (seen[0][:, -half:] == seen[0][:, -2 * half : -half]).all()
    with torch.no_grad():
        chances = model(input_ids=seen[0]).logits.log_softmax(-1)
    second = [
        -float(chances[0, position - 1, seen[0][0, position]]) for position in range(half, 2 * half)
    ]  # nothing comes before
    assert task.score()[:half] == pytest.approx(second, rel=1e-4)


def test_repetition_and_agreement_tasks_refuse_an_encoder(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="does not predict the next token; it repeats nothing"):
        tasks.repetition_task(model, relation_heads.tokenizer())
    with pytest.raises(UnsupportedError, match="does not predict the next token, so no verb either"):
        tasks.agreement_task(model, relation_heads.tokenizer(), probe_sentences()[:3])


def test_agreement_task_compares_the_two_forms_of_the_next_verb() -> None:
    """A model that has learnt nothing but one word, said by its output bias."""
    model, tokenizer = llama(), relation_heads.tokenizer()
    tokenizer.add_tokens(["is", "are"])
    model.resize_token_embeddings(31)
    likes = torch.zeros(31)
    likes[tokenizer.convert_tokens_to_ids("is")] = 3.0
    hook = model.lm_head.register_forward_hook(lambda module, args, out: torch.zeros_like(out) + likes)
    things = [s for s in probe_sentences() if {"is", "are"} & set(s.words) and s.document.startswith("agreement")][:20]
    odds = tasks.agreement_task(model, tokenizer, things).score()
    hook.remove()
    assert odds.tolist() == [pytest.approx(-3 if "is" in sentence.words else 3) for sentence in things]


def test_text_task_refuses_texts_of_less_than_two_tokens(model: Any) -> None:
    with pytest.raises(HeadwiseError, match="no text of two tokens or more"):
        tasks.text_task(model, relation_heads.tokenizer(), [""])
    assert ablate.SIGNIFICANT == 0.05


class Arrived(Exception):
    """A batch has come to a model."""


@pytest.mark.parametrize("task", ["text", "causal text", "words", "repeat", "agreement"])
def test_tasks_send_their_batches_to_the_device_of_the_model(task: str) -> None:
    """On the device "meta", which every machine has."""
    words = relation_heads.tokenizer()
    if task in ("text", "words"):
        model: Any = relation_heads.model().to("meta")
    else:
        sizes = {"vocab_size": len(words), "n_positions": 131, "n_embd": 15, "n_layer": 2, "n_head": 3}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval().to("meta")

    def arrive(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        raise Arrived({name: x.device.type for name, x in inputs.items()})

    model.register_forward_pre_hook(arrive, with_kwargs=True)
    sentences = relation_heads.sentences(7)
    verbs = [Sentence("the cat is", ((0, 3), (4, 7), (8, 10)), (GoldLink("verb > subject", 2, (1,)),))]
    texts = [sentence.text for sentence in sentences]
    scores = {
        "text": lambda: tasks.text_task(model, words, texts).score(),
        "causal text": lambda: tasks.text_task(model, words, texts).score(),
        "words": lambda: tasks.relation_task(model, words, sentences, "adjective > noun").score(),
        "repeat": lambda: tasks.repetition_task(model, words).score(),
        "agreement": lambda: tasks.agreement_task(model, words, verbs).score(),
    }
    with pytest.raises(Arrived) as caught:
        scores[task]()
    assert caught.value.args == ({"input_ids": "meta", "attention_mask": "meta"},)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heads": [[1]]}, "the ablation cannot be read"),
        ({"random": []}, "it names no heads, or no random draws"),
        ({"whole": "much"}, "whole must be a finite number, got 'much'"),
        ({"units": -1}, "units must be a whole number from 0 on, got -1"),
    ],
)
def test_a_damaged_ablation_file_is_refused_with_its_reason(values: dict[str, Any], message: str) -> None:
    plain = Ablation("loss", (("self", 1, 2),), 0.5, 0.25, 0.125, 0.375, (0.0, 0.1), 7)
    assert Ablation.from_json(json.loads(json.dumps(plain.to_json()))) == plain
    with pytest.raises(HeadwiseError, match=message):
        Ablation.from_json(plain.to_json() | values)
    with pytest.raises(HeadwiseError, match="'task' is missing"):
        Ablation.from_json({name: x for name, x in plain.to_json().items() if name != "task"})
