"""Probes of the atlas: needles, long texts and few-shot prompts, on heads that are known by construction."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

import headwise
from headwise.attention import reference
from headwise.models.structure.config_sizes import max_positions
from headwise.models.watching.watcher import watch
from headwise.roles.atlas import add_probes
from headwise.roles.atlas.build import encoder_of
from headwise.roles.atlas.observer import Observer
from headwise.roles.atlas.probes import few_shot, function_vectors, needle_prompts, needles, streaming
from headwise.roles.atlas.probes.long_text import paragraphs, passage, sentences
from headwise.roles.atlas.probes.retrieval import measure_retrieval
from headwise.roles.atlas.probes.run import probe_names, probes_of
from headwise.roles.atlas.probes.subject import Subject
from helpers.role_heads import MARKS, SPECIAL, VOCABULARY, WORDS, circuit, encoder, texts, tokenizer

NEEDLE_WORDS = sorted(
    {word for text in (*needles.PEOPLE, *needles.THINGS, *needles.PLACES) for word in text.split()}
    | set("Question : Where did hide the Answer hid ?".split())
)
LONG_VOCABULARY = [*SPECIAL, *MARKS, *dict.fromkeys([*WORDS, *NEEDLE_WORDS])]
HAYSTACK = [f"{' '.join(WORDS[i : i + 5])}." for i in range(2, 22)]
ROLES = ("retrieval", "streaming", "copying", "suppression", "successor", "function")


def subject_of(model: Any, words: Any, replicates: int = 20) -> Subject:
    observer = Observer.of(model)
    observer.ways = {"self": "causal"}
    encoder = encoder_of(observer.model, words, 512)
    return Subject(model, observer, encoder, max_positions(observer.model), 0, replicates)


def tiny_llama(vocabulary: int, **options: Any) -> Any:
    torch.manual_seed(3)
    settings = {
        "vocab_size": vocabulary, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 13, "max_position_embeddings": 257,
        "initializer_range": 0.3,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | options))).double().eval()


def scores_of(tally: Any, name: str, layers: int) -> np.ndarray:
    """(layers, heads + 1); the last column is the baseline."""
    column = tally.names["self"].index(name)
    return np.stack([tally.sums["self", i].means()[column] for i in range(layers)])


# --- needles ---


@pytest.fixture(scope="module")
def long_words() -> Any:
    return tokenizer(around=False, vocabulary=LONG_VOCABULARY)


def test_the_answer_of_a_needle_prompt_is_the_needles_own_tokens(long_words: Any) -> None:
    prompts = needle_prompts(long_words, (61, 97), (0.0, 0.5, 1.0), 2, texts=HAYSTACK)
    assert len(prompts) == 12 and len({prompt.name for prompt in prompts}) == 12
    for prompt in prompts:
        needle, answer = ([prompt.ids[i] for i in span] for span in (prompt.needle_span, prompt.answer_span))
        assert needle == answer == long_words(prompt.answer)["input_ids"]
        assert len(prompt.ids) <= prompt.length and prompt.answer_span.stop == len(prompt.ids)
        assert prompt.needle_span.stop < prompt.answer_span.start
        assert [i + 1 for i in prompt.queries] == list(prompt.answer_span)


def test_needles_lie_at_their_depth_between_two_sentences(long_words: Any) -> None:
    text = needle_prompts(long_words, (97,), (0.0, 0.5, 1.0), texts=HAYSTACK)
    end = long_words.convert_tokens_to_ids(".")
    starts = []
    for prompt in text:
        lead = prompt.needle_span.start - 5  # person hid the (thing)
        assert lead == 0 or prompt.ids[lead - 1] == end
        starts.append(lead / len(prompt.ids))
    assert starts[0] == 0 and 0.15 < starts[1] < 0.45 and starts[2] > starts[1]


def test_needle_prompts_depend_on_the_seed_alone(long_words: Any) -> None:
    first, same, other = (
        [prompt.ids for prompt in needle_prompts(long_words, (97,), (0.5,), 3, seed, texts=HAYSTACK)]
        for seed in (1, 1, 2)
    )
    assert first == same and first != other


def test_two_splits_share_neither_paragraphs_nor_needles() -> None:
    halves = [paragraphs(split=(i, 2)) for i in range(2)]
    assert not set(halves[0]) & set(halves[1]) and sum(map(len, halves)) == len(paragraphs())
    words = tokenizer(around=False, vocabulary=LONG_VOCABULARY)
    answers = [
        {prompt.answer for prompt in needle_prompts(words, (73,), (0.5,), 40, split=(i, 2), texts=HAYSTACK)}
        for i in range(2)
    ]
    assert len(answers[0]) > 4 and not answers[0] & answers[1]


def test_no_word_of_an_answer_is_twice_in_its_needle() -> None:
    for place in needles.PLACES:
        for thing in needles.THINGS:
            assert len(set(f"hid the {thing} {place}".split())) == len(f"hid the {thing} {place}".split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (20,)}, "a needle and its question do not fit into 20 tokens"),
        ({"lengths": (4001,)}, r"the texts have \d+ tokens and [\d,]+ are needed; give more texts"),
        ({"lengths": ()}, "needles need lengths, depths from 0 to 1"),
        ({"depths": (1.5,)}, "needles need lengths, depths from 0 to 1"),
        ({"split": (2, 2)}, r"split is \(i, n\) with 0 <= i < n, got \(2, 2\)"),
    ],
)
def test_needles_that_cannot_be_made_are_refused_in_words(
    long_words: Any, options: dict[str, Any], message: str
) -> None:
    arguments = {"lengths": (97,), "depths": (0.5,), "texts": HAYSTACK} | options
    with pytest.raises(headwise.HeadwiseError, match=message):
        needle_prompts(long_words, **arguments)


def test_a_tokenizer_without_the_needles_words_is_refused_in_words() -> None:
    with pytest.raises(headwise.UnsupportedError, match="the tokenizer does not know the words of the needles"):
        needle_prompts(tokenizer(around=False), (97,), (0.5,), texts=HAYSTACK)


# --- retrieval ---


def test_a_head_built_to_find_the_next_token_is_a_retrieval_head_and_the_others_are_not(long_words: Any) -> None:
    model = circuit(len(LONG_VOCABULARY), 97)
    prompts = needle_prompts(long_words, (73, 97), (0.2, 0.8), 3, texts=HAYSTACK)
    measurement = measure_retrieval(subject_of(model, long_words), prompts)
    scores = scores_of(measurement.tally, "retrieval", 2)
    # the first token alone may be missed: the question repeats the words before it
    tokens = sum(len(prompt.answer_span) for prompt in prompts)
    assert scores[1, 0] >= (tokens - len(prompts)) / tokens
    assert scores[0, 0] == scores[1, 1] == 0  # which attend to the previous and to the first token
    chance = np.mean([1 / (i + 1) for prompt in prompts for i in prompt.queries])
    np.testing.assert_allclose(scores[:, 2], chance, rtol=1e-12)


def test_without_its_first_layer_the_circuit_does_not_retrieve(long_words: Any) -> None:
    broken = circuit(len(LONG_VOCABULARY), 97)
    broken.transformer.h[0].attn.c_proj.weight.zero_()
    prompts = needle_prompts(long_words, (97,), (0.2, 0.8), 2, texts=HAYSTACK)
    scores = scores_of(measure_retrieval(subject_of(broken, long_words), prompts).tally, "retrieval", 2)
    assert scores[1, 0] < 0.1


def test_retrieval_scores_and_accuracy_equal_those_of_eager_attention(long_words: Any) -> None:
    model = tiny_llama(len(LONG_VOCABULARY))
    prompts = needle_prompts(long_words, (89,), (0.1, 0.9), 2, texts=HAYSTACK)
    measurement = measure_retrieval(subject_of(model, long_words), prompts)
    model.set_attn_implementation("eager")
    hits, right, tokens = np.zeros((2, 3)), 0, 0
    for prompt in prompts:
        with torch.no_grad():
            output = model(torch.tensor([prompt.ids]), output_attentions=True)
        for query, target in zip(prompt.queries, prompt.needle_span, strict=True):
            strongest = torch.stack([layer[0, :, query].argmax(-1) for layer in output.attentions])
            hits += (strongest == target).numpy()
            right += int(output.logits[0, query].argmax()) == prompt.ids[target]
            tokens += 1
    np.testing.assert_allclose(scores_of(measurement.tally, "retrieval", 2)[:, :3], hits / tokens, rtol=1e-12)
    assert measurement.facts["accuracy"] == pytest.approx(right / tokens, abs=1e-4)
    assert measurement.facts["low"] <= measurement.facts["accuracy"] <= measurement.facts["high"]
    assert "the scores mean little" in measurement.facts["words"]  # of a random model


def test_a_model_without_unembedding_retrieves_with_unknown_accuracy(long_words: Any) -> None:
    prompts = needle_prompts(long_words, (89,), (0.5,), texts=HAYSTACK)
    facts = measure_retrieval(subject_of(tiny_llama(len(LONG_VOCABULARY)).model, long_words), prompts).facts
    assert facts["accuracy"] is None and "has no unembedding" in facts["words"]


# --- streaming ---


def test_the_weight_in_a_window_is_the_ratio_of_two_sums_of_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(lse of the first and recent keys - lse of all keys), query by query, in float64."""
    monkeypatch.setattr(streaming, "QUERIES", 10_000)
    model = tiny_llama(53)
    ids = torch.randint(53, (1, 47), generator=torch.Generator().manual_seed(0))
    readings: list[Any] = []
    with torch.no_grad(), watch(model, stats=False, each=lambda layer, reading, real: readings.append(reading)):
        model(ids)
    for reading in readings:
        sums = streaming.window_sums(reading, [16])
        q, k = (x.numpy() for x in (reading.q, reading.k))
        scale = reading.options["scale"]
        full = reference.softmax(q, k, causal=True, scale=scale).lse
        short = reference.softmax(q, k, causal=True, window=(15, 0), keep_first=4, scale=scale).lse
        expected = np.exp(short - full)[0, :, 20:].mean(-1)
        np.testing.assert_allclose(sums.top[0, 0, :-1] / sums.bottom[0, 0], expected, rtol=1e-12)
        equal = np.mean([20 / (query + 1) for query in range(20, 47)])
        assert sums.top[0, 0, -1] / sums.bottom[0, 0] == pytest.approx(equal, rel=1e-12)


@pytest.fixture(scope="module")
def streaming_atlas() -> headwise.Atlas:
    return headwise.atlas(circuit(), texts(7), tokenizer(around=False), probes=["streaming"])


def test_heads_that_attend_to_near_and_first_tokens_keep_their_weight_in_a_window(
    streaming_atlas: headwise.Atlas,
) -> None:
    scores, baseline = (table["streaming-16"]["self"] for table in (streaming_atlas.scores, streaming_atlas.baseline))
    assert scores[0, 0] > 0.95  # the previous token
    assert scores[1, 1] > 0.95  # the first token
    assert scores[0, 1] == pytest.approx(baseline[0], abs=0.02)  # everywhere
    assert "streaming" not in streaming_atlas.scores  # there are no positions for a window of 256
    assert streaming_atlas.about["probes"]["streaming"]["windows"] == [16]


def test_a_model_of_its_own_window_is_compared_with_equal_attention_in_that_window() -> None:
    config = transformers.MistralConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=13, max_position_embeddings=97, sliding_window=11,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    measurement = streaming.measure(subject_of(model, tokenizer(around=False)))
    np.testing.assert_allclose(scores_of(measurement.tally, "streaming-16", 1), 1, atol=1e-6)


def test_a_passage_is_cut_to_its_length_or_has_whole_sentences() -> None:
    rows = [[i] * (3 + i % 5) for i in range(40)]
    random = np.random.default_rng(0)
    for length in (5, 17, 61):
        whole, cut = passage(rows, length, random), passage(rows, length, random, cut=True)
        assert sum(map(len, cut)) == length
        assert whole and sum(map(len, whole)) <= length and all(row in rows for row in whole)
    assert sentences(["One. Two? Three"]) == ["One.", "Two?", "Three"]


# --- few-shot prompts and function vectors ---

TASK_WORDS = sorted({word for text in few_shot.TASKS.values() for word in re.findall(r"\w+", text)})


@pytest.fixture(scope="module")
def task_words() -> Any:
    return tokenizer(around=False, vocabulary=[*SPECIAL, ":", *TASK_WORDS])


def test_shuffled_examples_have_each_others_answers_and_other_last_words(task_words: Any) -> None:
    prompts = few_shot.few_shot_prompts(task_words, 6, 6)
    answers = {task: dict(pair.split() for pair in text.split(", ")) for task, text in few_shot.TASKS.items()}
    last_words: dict[bool, set[tuple[str, str]]] = {}
    for shuffled, group in ((False, prompts.right), (True, prompts.shuffled)):
        assert len(group) == 6 * len(few_shot.TASKS)
        for prompt in group:
            words = [word for word in task_words.convert_ids_to_tokens(prompt.ids) if word != ":"]
            examples = list(zip(words[:-1:2], words[1::2], strict=True))
            assert len(examples) == few_shot.SHOTS and words[-1] not in words[:-1:2]
            assert all((answers[prompt.task][word] == label) != shuffled for word, label in examples)
            assert task_words.convert_ids_to_tokens(prompt.answer) == answers[prompt.task][words[-1]]
            last_words.setdefault(shuffled, set()).add((prompt.task, words[-1]))
    assert not last_words[False] & last_words[True]


def test_tasks_without_answers_of_one_token_are_refused_in_words() -> None:
    with pytest.raises(headwise.UnsupportedError, match="too few answers of the bundled tasks"):
        few_shot.few_shot_prompts(tokenizer(around=False), 2, 2)


def test_the_rise_of_a_head_equals_that_of_a_hook_written_by_hand(
    task_words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_vectors, "COUNT", 3)
    monkeypatch.setattr(function_vectors, "SHUFFLED", 2)
    model = tiny_llama(len(task_words))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:] = 0  # head 1.2 writes nothing
    measurement = function_vectors.measure(subject_of(model, task_words))
    scores = scores_of(measurement.tally, "function", 2)
    prompts = few_shot.few_shot_prompts(task_words, 3, 2)
    layer, head = 0, 1
    w_o = model.model.layers[layer].self_attn.o_proj
    part = slice(8 * head, 8 * (head + 1))
    rises = []
    for task in few_shot.TASKS:
        outputs: list[torch.Tensor] = []
        hook = w_o.register_forward_pre_hook(lambda module, args, outputs=outputs: outputs.append(args[0][0, -1, part]))
        with torch.no_grad():
            for prompt in prompts.right:
                if prompt.task == task:
                    model(torch.tensor([prompt.ids]))
        hook.remove()
        mean = torch.stack(outputs).mean(0)

        def put(module: Any, args: Any, mean: torch.Tensor = mean) -> Any:
            changed = args[0].clone()
            changed[0, -1, part] = mean
            return (changed,)

        for prompt in prompts.shuffled:
            if prompt.task == task:
                ids = torch.tensor([prompt.ids])
                with torch.no_grad():
                    before = model(ids).logits[0, -1].float().softmax(-1)[prompt.answer]
                    hook = w_o.register_forward_pre_hook(put)
                    after = model(ids).logits[0, -1].float().softmax(-1)[prompt.answer]
                    hook.remove()
                rises.append(float(after - before))
    # probabilities are of float32, so each is exact to its precision
    assert scores[layer, head] == pytest.approx(np.mean(rises), abs=2 * torch.finfo(torch.float32).eps)
    assert scores[layer, head] != 0 and scores[1, 2] == 0
    np.testing.assert_allclose(scores[:, 3], scores[:, :3].mean(), rtol=1e-9)
    assert not model.training and not model.lm_head._forward_pre_hooks


def test_function_vectors_of_a_model_without_unembedding_are_refused_in_words(task_words: Any) -> None:
    model = tiny_llama(len(task_words)).model
    with pytest.raises(headwise.UnsupportedError, match="LlamaModel has no unembedding"):
        function_vectors.measure(subject_of(model, task_words))


# --- the atlas ---


def test_probes_are_named_one_by_one_or_all() -> None:
    assert probe_names(["streaming", "retrieval"]) == ["retrieval", "streaming"]
    assert probe_names("all") == probe_names(["all"]) and probe_names(()) == []
    with pytest.raises(headwise.HeadwiseError, match="there is no probe 'needles'; there are retrieval, streaming"):
        headwise.atlas(circuit(), texts(3), tokenizer(around=False), probes="needles")


@pytest.mark.parametrize(
    ("role", "probes"),
    [
        ("suppression", ["copying"]),
        ("streaming", ["retrieval", "streaming"]),
        ("successor", ["successor"]),
        ("first", []),
    ],
)
def test_a_role_names_the_probes_that_decide_it(role: str, probes: list[str]) -> None:
    assert probes_of(role) == probes


def test_an_encoder_has_no_probes_and_the_atlas_says_why() -> None:
    atlas = headwise.atlas(encoder(np.ones(len(VOCABULARY))), texts(5), tokenizer(), probes="all")
    assert not set(ROLES) & set(atlas.scores)
    assert "retrieval was not measured: probes are for decoders; this model attends to later tokens too" in str(atlas)


def test_what_does_not_apply_to_a_decoder_is_said_in_words() -> None:
    atlas = headwise.atlas(circuit(), texts(5), tokenizer(around=False), probes=["retrieval", "function"])
    reasons = {name: facts["not measured"] for name, facts in atlas.about["probes"].items()}
    assert "this model has 43 positions" in reasons["retrieval"]
    assert "too few answers of the bundled tasks" in reasons["function"]


def test_an_atlas_with_probes_is_saved_loaded_and_merged(streaming_atlas: headwise.Atlas, tmp_path: Path) -> None:
    streaming_atlas.save(tmp_path / "atlas.json", sums=True)
    loaded = headwise.Atlas.load(tmp_path / "atlas.json")
    assert loaded.to_json() == streaming_atlas.to_json() and list(loaded.probes) == ["streaming"]
    assert "streaming-16" in {row["score"] for row in loaded.rows()}
    other = headwise.atlas(circuit(), texts(9, seed=1), tokenizer(around=False))
    for merged in (loaded.merge(other), other.merge(loaded)):
        np.testing.assert_array_equal(
            merged.scores["streaming-16"]["self"], streaming_atlas.scores["streaming-16"]["self"]
        )
        assert merged.about["probes"] == streaming_atlas.about["probes"]


def test_sums_with_probes_have_a_format_that_earlier_versions_refuse(
    streaming_atlas: headwise.Atlas, tmp_path: Path
) -> None:
    plain = headwise.atlas(circuit(), texts(7), tokenizer(around=False))
    for number, atlas in (("1", plain), ("2", streaming_atlas)):
        atlas.save(tmp_path / "atlas.json", sums=True)
        with safe_open(tmp_path / "atlas.json.sums.safetensors", framework="numpy") as file:
            assert file.metadata()["headwise-sums"] == number


def test_an_atlas_without_probes_lacks_their_roles_and_prints_as_before(streaming_atlas: headwise.Atlas) -> None:
    plain = headwise.atlas(circuit(), texts(7), tokenizer(around=False))
    document = plain.to_json()
    assert "probes" not in document["about"] and not set(ROLES) & set(document["scores"])
    old = headwise.Atlas.from_json(json.loads(json.dumps(document)))
    assert not any(f"\n{role} " in str(old) for role in ROLES) and "Probes" not in str(old)
    assert old.diff(streaming_atlas).lost == []
    for name, kinds in plain.scores.items():
        np.testing.assert_array_equal(streaming_atlas.scores[name]["self"], kinds["self"], err_msg=name)


def test_probes_added_to_a_saved_atlas_equal_those_measured_with_it(
    streaming_atlas: headwise.Atlas, tmp_path: Path
) -> None:
    words, model = tokenizer(around=False), circuit()
    headwise.atlas(model, texts(7), words).save(tmp_path / "atlas.json")
    added = add_probes(headwise.Atlas.load(tmp_path / "atlas.json"), model, words, probes=["streaming"])
    assert added.to_json() == streaming_atlas.to_json()
    other = circuit()
    other.transformer.h[0].attn.c_proj.weight.zero_()
    with pytest.raises(headwise.HeadwiseError, match="was measured with other weights"):
        add_probes(streaming_atlas, other, words)


def test_how_far_a_head_looks_is_no_clean_role() -> None:
    words = tokenizer(around=False)
    model = tiny_llama(len(words), max_position_embeddings=600).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()  # every head attends to all tokens equally
    atlas = headwise.atlas(model, texts(5), words, probes="streaming")
    assert {role.role for role in atlas.roles} == {"broad"}
    atlas.scores["streaming"]["self"][:] = atlas.low["streaming"]["self"][:] = 0.99
    atlas.scores["broad"]["self"][:] = 0
    assert {role.role for role in atlas.roles} == {"streaming"} and atlas.unnamed == 1 and atlas.sink_only == 0
