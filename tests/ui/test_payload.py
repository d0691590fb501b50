"""The data of the page: the numbers of `inspect`, small, and nothing of size T x T x heads for long texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.circuits.effects import EffectLayer, Effects, EffectsAbout
from headwise.inspection.examples import SENTENCE
from headwise.models.structure.heads import w_o
from headwise.models.structure.sites import attention_sites
from headwise.ui import capture, overlays, pack, page, payload
from helpers import small_checkpoints
from helpers.adapted_layers import Adapted

ANIMAL = SENTENCE


def decoded(text: str, kind: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def tiny(kind: str, text: str = "The animal was too tired.", **options: Any) -> capture.Pass:
    return capture.run(
        text,
        small_checkpoints.sharp(small_checkpoints.MODELS[kind]()),
        tokenizer=small_checkpoints.TOKENIZERS[kind](),
        **options,
    )


def test_statistics_and_weights_equal_those_of_inspect(
    run: Callable[..., capture.Pass], minilm: tuple[Any, Any]
) -> None:
    pass_ = run()
    run_data = payload.data(pass_)["runs"][0]
    expected = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], pieces=True)
    for name, table in expected.stats.items():
        assert np.array(run_data["stats"][name]) == pytest.approx(table, abs=2e-5), name
        assert np.array(run_data["equal"][name]) == pytest.approx(expected.equal[name], abs=2e-5), name
    for row, weights in enumerate(expected.weights):
        stored = decoded(run_data["weights"][row]["data"]).reshape(weights.shape)
        assert stored == pytest.approx(weights, abs=1e-6)
    assert [(standout["kind"], *standout["head"]) for standout in run_data["standouts"]] == [
        (kind.name, head.layer, head.head) for kind in expected.kinds for head in expected.standouts(kind)
    ]
    assert run_data["follow"] == {"word": 8, "to": 2, "head": [3, 1], "why": "a pronoun"}
    assert run_data["texts"][0]["words"][8] == "it" and run_data["texts"][0]["words"][2] == "animal"


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_baseline_and_standouts_match_inspect_on_other_models(kind: str) -> None:
    model, tokenizer = small_checkpoints.sharp(small_checkpoints.MODELS[kind]()), small_checkpoints.TOKENIZERS[kind]()
    text = "The animal didn't cross the street."
    run_data = payload.data(capture.run(text, model, tokenizer=tokenizer))["runs"][0]
    expected = headwise.inspect(text, model, tokenizer=tokenizer)
    for name, row in expected.equal.items():
        assert np.array(run_data["equal"][name]) == pytest.approx(row, abs=2e-5)
    layer = run_data["layers"][0]
    assert (layer["heads"], layer["kv"]) == {"bert": (5, 5), "gpt2": (3, 3), "llama": (6, 2)}[kind]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_steps_and_contributions_add_up_to_the_layer_output(kind: str) -> None:
    pass_ = tiny(kind)
    model = small_checkpoints.sharp(small_checkpoints.MODELS[kind]())
    run_data = payload.data(pass_)["runs"][0]
    for row, record in enumerate(pass_.layers):
        step, layer = run_data["steps"][row], run_data["layers"][row]
        tokens = len(pass_.texts[0].pieces)
        q = decoded(step["q"]).reshape(layer["heads"], tokens, -1)
        k = decoded(step["k"]).reshape(layer["kv"], tokens, -1).repeat(layer["heads"] // layer["kv"], 0)
        overlays = q @ k.transpose(0, 2, 1) * step["scale"]
        if step["causal"]:
            overlays = np.where(np.tril(np.ones((tokens, tokens), bool)), overlays, -np.inf)
        weights = np.exp(overlays - overlays.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        assert weights == pytest.approx(record.rows(list(range(tokens))), abs=1e-4)
    # the norm of the sum of all parts is what W_O gave in the model
    layer_outputs: list[torch.Tensor] = []
    linear = w_o(model, attention_sites(model)[1])[1]
    hook = linear.register_forward_hook(lambda module, args, out: layer_outputs.append(out))
    with torch.no_grad():
        model(torch.tensor([pass_.texts[0].ids]))
    hook.remove()
    assert decoded(run_data["output"][1]["total"]) == pytest.approx(layer_outputs[0][0].norm(dim=-1).numpy(), rel=1e-4)
    parts = decoded(run_data["output"][0]["parts"]).reshape(len(run_data["output"][0]["heads"]), tokens, -1)
    norms = decoded(run_data["output"][0]["norms"]).reshape(-1, tokens)[run_data["output"][0]["heads"]]
    assert np.linalg.norm(parts, axis=-1) == pytest.approx(norms, rel=1e-4)


def test_contributions_through_a_w_o_with_an_adapter_are_left_out() -> None:
    model, tokenizer = (
        small_checkpoints.sharp(small_checkpoints.MODELS["llama"]()),
        small_checkpoints.TOKENIZERS["llama"](),
    )
    attention = model.get_submodule(attention_sites(model)[0].name)
    attention.o_proj = Adapted(attention.o_proj)
    run_data = payload.data(capture.run("The animal was tired.", model, tokenizer=tokenizer))["runs"][0]
    assert run_data["output"][0] is None and run_data["output"][1] is not None


def test_norms_from_the_gram_matrix_equal_direct_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tiny("bert").layers[0]
    few = decoded(payload.output(seen, [])["norms"])
    outputs = seen.outputs
    seen.outputs = np.concatenate([outputs] * 4, 1)  # more tokens than a head is wide
    assert seen.outputs.shape[1] > seen.outputs.shape[2]
    many = decoded(payload.output(seen, [])["norms"]).reshape(len(outputs), -1)[:, : outputs.shape[1]]
    assert many == pytest.approx(few.reshape(len(outputs), -1), rel=1e-3, abs=1e-5)


def test_encoder_decoder_and_cross_attention_are_separate_kinds() -> None:
    config = transformers.BartConfig(
        vocab_size=307, d_model=15, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=5, encoder_ffn_dim=17, decoder_ffn_dim=17, max_position_embeddings=53,
    )  # fmt: skip
    model = small_checkpoints.sharp(transformers.BartForConditionalGeneration(config))
    pass_ = capture.run(
        "The animal was tired.", model, tokenizer=small_checkpoints.byte_level(), target="It was too wide and tired."
    )
    run_data = payload.data(pass_, heads=["cross 0.4"])["runs"][0]
    kinds = [(layer["kind"], layer["heads"], layer["from"], layer["to"]) for layer in run_data["layers"]]
    assert kinds == [("encoder", 3, 0, 0), ("encoder", 3, 0, 0), ("decoder", 5, 1, 1), ("cross", 5, 1, 0)]
    assert run_data["stats"]["previous"][3] is None and run_data["stats"]["entropy"][3] is not None
    shape = 5, len(pass_.texts[1].pieces), len(pass_.texts[0].pieces)
    assert decoded(run_data["weights"][3]["data"]).reshape(shape).sum(-1) == pytest.approx(1, abs=1e-5)
    assert run_data["chosen"] == [[3, 4]]


def test_heads_that_are_off_contribute_nothing(run: Callable[..., capture.Pass]) -> None:
    pass_ = run(off={3: [1, 7]})
    run_data = payload.data(pass_)["runs"][0]
    assert run_data["off"] == [[3, 1], [3, 7]]
    norms = decoded(run_data["output"][3]["norms"]).reshape(12, -1)
    assert (norms[[1, 7]] == 0).all() and (norms[0] > 0).all()
    assert pass_.unmasked_output is not None and not torch.equal(
        pass_.output.last_hidden_state, pass_.unmasked_output.last_hidden_state
    )


def test_scores_are_assigned_to_the_layers_of_their_kind(run: Callable[..., capture.Pass]) -> None:
    table = np.arange(72.0).reshape(6, 12)
    run_data = payload.data(run(), scores={"importance": {"self": table}})["runs"][0]
    assert run_data["scores"]["importance"] == table.tolist()
    with pytest.raises(
        headwise.ShapeError,
        match=r"importance of self attention must be \(layers, heads\) = \(6, 12\) here, got \(2, 12\)",
    ):
        payload.data(run(), scores={"importance": {"self": table[:2]}})


class Importance(dict[str, Any]):
    name = "michel"


@pytest.mark.parametrize(
    "scores",
    [
        {"michel": {"self": np.arange(72.0).reshape(6, 12)}},
        Importance(self=np.arange(72.0).reshape(6, 12)),
        {
            "score": "michel",
            "unit": "head",
            "heads": [{"kind": "self", "layer": n // 12, "head": n % 12, "score": float(n)} for n in range(72)],
        },
    ],
)
def test_scores_are_accepted_in_every_form(scores: Any, run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    run_data = payload.data(run(), scores=scores)["runs"][0]
    assert run_data["scores"] == {"michel": np.arange(72.0).reshape(6, 12).tolist()}
    if "heads" in scores:
        (tmp_path / "a.json").write_text(json.dumps(scores))
        assert overlays.read_overlays([tmp_path / "a.json"]) == overlays.to_overlays(scores)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (7, r"scores must be \{name: .* got int"),
        ({"a": {"self": [[1.0] * 12] * 6}, "b": 7}, "got int for 'b'"),
        ({"a": {"cross": [[1.0]]}}, "a has cross attention; minilm has self"),
        ({"a": {"self": [["x"]]}}, "must be .layers, heads. of numbers"),
        ({"score": "michel", "unit": "kv", "heads": []}, "of kv units; the map shows heads"),
        ({"score": "michel", "heads": [{"kind": "self"}]}, "not as headwise writes them: KeyError"),
        ({"headwise": "atlas", "scores": {"a": {"self": {"score": [[1]], "baseline": 7.5}}}}, "this atlas is not as"),
        ({"headwise": "atlas", "scores": {"a": {"self": {"score": [], "baseline": [[]]}}}}, "this atlas is not as"),
        (
            {"headwise": "atlas", "scores": {"a": {"self": {"score": [], "baseline": [10**400]}}}},
            "this atlas is not as",
        ),
        ({"headwise": "atlas", "scores": {"a": {"self": [1]}}}, "this atlas is not as headwise writes it"),
    ],
)
def test_scores_of_another_shape_are_refused(scores: Any, words: str, run: Callable[..., capture.Pass]) -> None:
    with pytest.raises(headwise.HeadwiseError, match=words):
        payload.data(run(), scores=scores)


def head_effects(unit: str = "head") -> Effects:
    """Effects of minilm's heads on three prompts: the mean of head h of layer l is 12 l + h - 40."""
    layers = [EffectLayer("self", layer, 12) for layer in range(6)]
    examples = [12.0 * layer + np.arange(12.0) - 40 + np.array([[-1.0], [0.0], [1.0]]) for layer in range(6)]
    return Effects(layers, examples, EffectsAbout("direct effect", "by hand", "logit of ' a'", 2.5, unit=unit))


def test_effects_and_their_files_colour_the_map_around_zero(run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    effects = head_effects()
    effects.save(tmp_path / "effects.json")
    pass_ = run()
    for scores in (effects, effects.to_json(), overlays.read_overlays([tmp_path / "effects.json"])):
        run_data = payload.data(pass_, scores=scores)["runs"][0]
        assert run_data["scores"] == {"direct effect": (np.arange(72.0).reshape(6, 12) - 40).tolist()}
        assert run_data["about"] == {"direct effect": "by hand; logit of ' a' = 2.5"}
        assert run_data["signed"] == ["direct effect"]
    assert payload.data(pass_, scores={"michel": {"self": effects["self"]}})["runs"][0]["signed"] == []
    with pytest.raises(headwise.HeadwiseError, match="effects of kv heads; the map shows query heads"):
        payload.data(pass_, scores=head_effects(unit="kv"))


def test_overlays_of_several_files_are_joined(run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    head_effects().save(tmp_path / "effects.json")
    (tmp_path / "scores.json").write_text(json.dumps({"x": {"self": [[1.0] * 12] * 6}}))
    joined = overlays.read_overlays([tmp_path / "effects.json", tmp_path / "scores.json", tmp_path / "effects.json"])
    assert list(joined.tables) == ["direct effect", "x"] and joined.signed == ["direct effect"]
    assert list(payload.data(run(), scores=joined)["runs"][0]["scores"]) == ["direct effect", "x"]


# --- storage of weights ---


def weights_of(heads: int, queries: int, keys: int) -> np.ndarray:
    weights = np.random.default_rng(3).random((heads, queries, keys), np.float32) ** 8
    return weights / weights.sum(-1, keepdims=True)


def in_blocks(weights: np.ndarray, step: int) -> Any:
    return ((first, weights[:, first : first + step]) for first in range(0, weights.shape[1], step))


def test_weight_stored_in_a_byte_is_within_its_error() -> None:
    weights = weights_of(3, 17, 23)
    top, coded = pack.root_bytes(weights)
    back = np.array(top)[:, None, None] * (coded / 255.0) ** 2
    step = np.array(top)[:, None, None] * (((coded + 0.5) / 255.0) ** 2 - (coded / 255.0) ** 2)
    assert (abs(back - weights) <= step + 1e-7).all()


def test_numbers_stored_as_shares_are_within_half_a_step() -> None:
    values = weights_of(2, 5, 7) * 13
    stored = pack.share_words(values)
    back = decoded(stored["data"], "<u2").reshape(2, 5, 7) * (stored["top"] / 65535)
    assert back == pytest.approx(values, abs=stored["top"] / 65535)


@pytest.mark.parametrize("step", [1, 5, 7, 64])
def test_reduced_matrix_accumulated_in_blocks_equals_the_whole(step: int) -> None:
    weights = weights_of(2, 41, 37)
    reduced = pack.Reduced(weights.shape, 6)
    for first, block in in_blocks(weights, step):
        reduced.add(first, block)
    for i in range(7):
        for j in range(7):
            square = weights[:, 6 * i : 6 * i + 6, 6 * j : 6 * j + 6]
            assert reduced.largest[:, i, j] == pytest.approx(square.max((1, 2)))
            assert reduced.mean[:, i, j] == pytest.approx(square.mean((1, 2)), rel=1e-5)


def test_stored_links_are_the_strongest_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "EXACT", 0)
    monkeypatch.setattr(pack, "BYTES", 0)
    weights = weights_of(2, 41, 37)
    size = pack.Size(rows=82, weights=weights.size, longest=41)
    stored = pack.pack_links(in_blocks(weights, 10), weights.shape, size)
    keys = decoded(stored["keys"], "<u1").reshape(2, 41, 8)
    assert (keys == np.argsort(-weights, -1)[..., :8]).all()
    assert decoded(stored["weights"], "<u2").reshape(2, 41, 8) / 65535 == pytest.approx(
        np.take_along_axis(weights, keys.astype(int), -1), abs=1e-5
    )


@pytest.mark.parametrize(
    ("longest", "form", "kind", "links"),
    [(16, "f32", "u1", 8), (100, "u8", "u1", 8), (257, "links", "u2", 8), (70_000, "links", "u4", 1)],
)
def test_form_of_the_weights_depends_on_their_number(longest: int, form: str, kind: str, links: int) -> None:
    size = pack.Size(rows=144 * longest, weights=144 * longest**2, longest=longest)
    assert (size.form, size.number(), size.links) == (form, np.dtype(kind), links)


def bert_base_sized(tokens: int) -> capture.Pass:
    """144 heads over so many tokens, each head narrow to save time: what is stored does not depend on it."""
    config = small_checkpoints.bert(
        hidden_size=96, num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=tokens, vocab_size=101
    )
    text = " ".join(["animal", "street", "tired", "because"] * (tokens // 4))[: 8 * tokens]
    return capture.run(
        text,
        small_checkpoints.sharp(transformers.BertModel(config)),
        tokenizer=small_checkpoints.word_piece(),
        truncate=True,
    )


def test_144_heads_of_256_tokens_take_less_than_3_megabytes() -> None:
    pass_ = bert_base_sized(256)
    assert len(pass_.texts[0].pieces) == 256
    whole, _ = page.page(payload.data(pass_))
    assert len(whole.encode()) < 3e6


@pytest.mark.full
def test_144_heads_of_2048_tokens_take_less_than_25_megabytes() -> None:
    pass_ = bert_base_sized(2048)
    assert len(pass_.texts[0].pieces) == 2048
    whole, _ = page.page(payload.data(pass_))
    assert len(whole.encode()) < 25e6


def test_payload_is_valid_json(run: Callable[..., capture.Pass]) -> None:
    json.dumps(payload.data(run()), allow_nan=False)


# --- mistakes ---


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("9.1", "there is no layer 9; minilm has layers 0, 1, 2"),
        ("3.12", "there is no head 3.12; layer 3 has heads 0 to 11"),
        ("x", "a head is written layer.head, such as 3.1, got 'x'"),
    ],
)
def test_heads_that_do_not_exist_are_named(head: str, words: str, run: Callable[..., capture.Pass]) -> None:
    with pytest.raises(headwise.HeadwiseError, match=words):
        payload.data(run(), heads=[head])


def test_target_is_refused_without_a_decoder(run: Callable[..., capture.Pass]) -> None:
    with pytest.raises(headwise.HeadwiseError, match="minilm has no decoder beside its encoder"):
        run(target="x")


def test_text_with_too_many_tokens_is_refused(run: Callable[..., capture.Pass]) -> None:
    with pytest.raises(headwise.HeadwiseError, match="16 tokens, 15 are allowed here"):
        run(max_tokens=15)


def test_stopped_pass_removes_its_hooks(run: Callable[..., capture.Pass], minilm: tuple[Any, Any]) -> None:
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) == 3

    with pytest.raises(capture.StoppedError):
        run(stop=stop)
    assert len(calls) == 3
    assert not any(module._forward_pre_hooks for module in minilm[0].modules())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        '{"headwise": "atlas", "roles": 3}',
        '{"headwise": "atlas", "roles": [3], "scores": {}}',
        '{"headwise": "atlas", "about": [], "scores": {}}',
        '{"headwise": "atlas", "about": {"texts": "many"}, "scores": {}}',
        '{"headwise": "atlas", "scores": {"x": 3}}',
        '{"score": "x", "heads": [{"kind": "self", "layer": 0, "head": 1000000000, "score": 1}]}',
        '{"score": "x", "heads": [{"kind": "self", "layer": 1e999, "head": 0, "score": 1}]}',
        '{"x": {"self": [[1]]}, "y": 3}',
        '{"headwise": "effects"}',
        '{"headwise": "effects", "format": 1, "layers": [{"kind": "self", "layer": 0, "heads": 1e999}]}',
    ],
    ids=lambda text: text[:40],
)
def test_invalid_score_files_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(
        headwise.HeadwiseError,
        match="is not JSON|nested too deeply|headwise writes|headwise wrote|up to 10,000|must be|hold an obj",
    ) as e:
        overlays.read_overlays([path])
    assert "\n" not in str(e.value)
