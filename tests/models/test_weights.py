"""Options of watch: weights, rows, links, outputs and classes; names of layers; refused values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models.watching import call_reader, lazy_masks
from helpers.eager_weights import assert_same, record_calls, statistics
from helpers.model_families import BY_NAME, build
from helpers.model_inputs import BATCH, LENGTH, SOURCE, inputs

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, dict[str, Tensor], list[Tensor]]:
    """A model, its input and eager's output_attentions."""
    family = BY_NAME["bert"]
    arguments = inputs(family, "right")
    with torch.no_grad():
        attentions = build(family, "eager")(**arguments, output_attentions=True).attentions
    return build(family), arguments, list(attentions)


def run_watched(model: nn.Module, arguments: dict[str, Tensor], **settings: Any) -> Any:
    with torch.no_grad(), headwise.watch(model, **settings) as seen:
        model(**arguments)
    return seen


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_weights_equal_eager_attentions(bert: Any) -> None:
    model, arguments, attentions = bert
    seen = run_watched(model, arguments, weights=True)
    for layer, eager in zip(seen.layers, attentions, strict=True):
        close(layer.weights, eager)
        close(seen.layers[layer.index].weights[0, 4], eager[0, 4])


def test_weights_of_chosen_layers_heads_and_rows(bert: Any) -> None:
    model, arguments, attentions = bert
    seen = run_watched(model, arguments, weights={2: [4, 1], 3: 0}, rows=[5, -1, 0])
    for layer in seen.layers[:2]:
        with pytest.raises(HeadwiseError, match="no weights were kept; watch with weights=True"):
            layer.weights  # noqa: B018
    recorded = seen[2].weights
    assert (
        tuple(recorded.tensor.shape) == (BATCH, 2, 3, LENGTH)
        and recorded.heads == [4, 1]
        and recorded.rows == [5, 12, 0]
    )
    close(recorded[1, 4], attentions[2][1, 4, [5, 12, 0]])
    close(recorded[:, 1], attentions[2][:, 1, [5, 12, 0]])
    close(recorded[0, 1, 0], attentions[2][0, 1, 5])
    close(seen[3].weights[2, 0], attentions[3][2, 0, [5, 12, 0]])
    with pytest.raises(HeadwiseError, match="head 2 was not kept; heads 4, 1 were"):
        recorded[0, 2]
    assert "heads=[4, 1]" in repr(recorded)


def test_rows_that_no_call_has_are_named_in_the_error(bert: Any) -> None:
    model, arguments, attentions = bert
    for rows, missing in (([100], "100"), ([0, -14, 13], "-14, 13")):
        with pytest.raises(HeadwiseError, match=f"rows {missing} were not in any call: the longest had 13 queries"):
            run_watched(model, arguments, weights=True, rows=rows)
    close(
        run_watched(model, arguments, weights={1: [2]}, rows=[3, 3, -10])[1].weights[0, 2],
        attentions[1][0, 2, [3, 3, 3]],
    )
    with torch.no_grad(), headwise.watch(model, weights=1, rows=[15, 2]) as seen:  # each row is in one of the calls
        model(**arguments)
        model(torch.arange(4, 21)[None])
    assert [tuple(recorded.shape) for recorded in seen[1].all_weights] == [(BATCH, 5, 1, LENGTH), (1, 5, 2, 17)]
    with pytest.raises(HeadwiseError, match="rows says which rows of weights to keep, and no weights are"):
        headwise.watch(model, rows=[1])


def test_a_decoding_step_without_the_chosen_rows_records_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = build(BY_NAME["mistral"], auto=AutoModelForCausalLM)
    for large in (False, True):
        if large:
            monkeypatch.setattr(lazy_masks, "LARGE", 0)
        with torch.no_grad(), headwise.watch(model, weights={2: [1]}, rows=[5]) as seen:
            model.generate(
                torch.arange(4, 15)[None], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
            )
        assert [recorded.tensor.shape[2] for recorded in seen[2].all_weights] == [1, 0, 0]


def test_weights_of_chosen_heads_are_indexed_by_sequence_and_head(bert: Any) -> None:
    model, arguments, _ = bert
    recorded = run_watched(model, arguments, weights={2: [4, 1]}, rows=[5, 0])[2].weights
    for at, message in (
        (0, "is indexed by sequence and head, .b, head., got .0."),
        ((0,), "is indexed by sequence and head"),
        ((0, slice(None)), "a head is a number, got slice"),
        ((0, True), "a head is a number, got True"),
        ((0, 0), "head 0 was not kept; heads 4, 1 were"),
        ((9, 4), "has no .9, 4.: index 9 is out of bounds"),
        ((0, 4, 2), "has no .0, 4, 2.: index 2 is out of bounds"),
    ):
        with pytest.raises(HeadwiseError, match=message) as caught:
            recorded[at]
        assert "\n" not in str(caught.value)
    with pytest.raises(HeadwiseError, match="`.tensor` has all that was kept"):
        list(recorded)
    assert len(recorded) == BATCH


@pytest.mark.parametrize("wanted", [2, [2], ("self", 2), [("self", 2)], "encoder.layer.2.attention.self", {2: True}])
def test_layers_are_chosen_by_number_kind_or_path(bert: Any, wanted: Any) -> None:
    model, arguments, attentions = bert
    seen = run_watched(model, arguments, weights=wanted, rows=range(2, 7))
    close(seen[2].weights, attentions[2][:, :, 2:7])
    assert seen[2] is seen["self", 2] is seen["encoder.layer.2.attention.self"] is seen["layer.2.attention.self"]
    assert [bool(layer.all_weights) for layer in seen.layers] == [False, False, True, False]


def test_links_are_the_strongest_keys(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments, attentions = bert
    monkeypatch.setattr(call_reader, "ROWS", 5)
    seen = run_watched(model, arguments, links=3)
    for layer, eager in zip(seen.layers, attentions, strict=True):
        links = layer.links(3)
        top = eager.topk(3, -1)
        close(links.weights, top.values)
        close(eager.gather(-1, links.keys), links.weights)
        assert torch.equal(layer.links(1).keys, links.keys[..., :1])
        with pytest.raises(
            HeadwiseError, match="3 links of each query were kept, got links\\(4\\); watch with links=4"
        ):
            layer.links(4)
        with pytest.raises(HeadwiseError, match="no weights were kept"):
            layer.weights  # noqa: B018
    with pytest.raises(HeadwiseError, match="no links were kept; watch with links=2"):
        run_watched(model, arguments)[0].links(2)
    assert run_watched(model, arguments, links=50)[0].links(50).keys.shape[-1] == LENGTH  # the call has no more keys


@pytest.mark.parametrize("name", ["llama4_text", "gemma3_text"])
def test_links_under_masks_that_are_made_block_by_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_masks, "LARGE", 0)
    monkeypatch.setattr(call_reader, "ROWS", 4)
    family = BY_NAME[name]
    arguments = inputs(family, None)
    with torch.no_grad(), record_calls() as calls:
        build(family, "eager")(**arguments)
    seen = run_watched(build(family), arguments, links=2, weights=True, rows=[11, 3, 7])
    for layer, call in zip(seen.layers, calls, strict=True):
        close(layer.links(2).weights, call.weights.topk(2, -1).values)
        close(layer.weights, call.weights[:, :, [11, 3, 7]])


def test_outputs_of_chosen_heads(bert: Any) -> None:
    model, arguments, _ = bert
    every = run_watched(model, arguments, outputs=True)[1].outputs
    assert tuple(every.shape) == (BATCH, 5, LENGTH, 12)
    selected = run_watched(model, arguments, outputs={1: [3, 0]})
    assert torch.equal(selected[1].outputs[:, 3], every[:, 3]) and torch.equal(
        selected[1].outputs.tensor, every[:, [3, 0]]
    )
    with pytest.raises(HeadwiseError, match="no outputs were kept; watch with outputs=True"):
        selected[0].outputs  # noqa: B018


def test_class_shares_equal_summed_weights(bert: Any) -> None:
    model, arguments, attentions = bert
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    classes = {"odd": ids % 2 == 1, "entropy": ids > 50}  # a class may have the name of a statistic
    seen = run_watched(model, arguments, classes=classes)
    for layer, eager in zip(seen.layers, attentions, strict=True):
        expected = statistics(eager, mask, exists=mask, classes=classes)
        assert_same(layer.stats, expected, rtol=1e-3, atol=1e-3)
        share = expected["share:odd"].sum(0) / expected["count"].sum(0)
        np.testing.assert_allclose(layer.stats.share("odd"), share, rtol=1e-3, atol=1e-5)


def test_classes_are_given_by_kind_for_encoder_decoders() -> None:
    family = BY_NAME["bart"]
    model, arguments = build(family), inputs(family, "right")
    source, target = arguments["input_ids"] > 50, arguments["decoder_input_ids"] > 50
    seen = run_watched(model, arguments, classes={"cross": {"high": source}, "decoder": {"high": target}})
    assert "share:high" in seen["cross", 0].stats and "share:high" not in seen["encoder", 0].stats
    assert tuple(source.shape) == (BATCH, SOURCE)
    with pytest.raises(HeadwiseError, match="with 3 kinds of attention give classes by kind: cross, decoder, encoder"):
        headwise.watch(model, classes={"high": source})


def test_kinds_and_layer_numbers_of_every_family() -> None:
    family = BY_NAME["bart"]
    model = build(family)
    seen = run_watched(model, inputs(family, "right"))
    assert [layer.key for layer in seen.layers] == [
        ("encoder", 0), ("encoder", 1), ("encoder", 2), ("decoder", 0), ("decoder", 1), ("cross", 0), ("cross", 1),
    ]  # fmt: skip
    assert seen["cross", 1].name == "decoder.layers.1.encoder_attn"
    assert "distance" not in seen["cross", 1].stats and "distance" in seen["decoder", 1].stats
    assert repr(seen["cross", 1]) == "Layer(cross 1, 4 heads, decoder.layers.1.encoder_attn)"
    heads = seen["encoder", 0].heads
    assert (heads.width, heads.query, heads.kv, heads.dim, heads.value_dim) == (60, 5, 5, 12, 12)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("qwen3", (60, 6, 2, 16, 16)),
        ("deepseek_v3", (60, 6, 6, 18, 14)),
        ("gpt_bigcode-mqa", (60, 5, 1, 12, 12)),
        ("gpt2", (60, 5, 5, 12, 12)),
        ("t5", (60, 5, 5, 7, 7)),
    ],
)
def test_layers_know_their_head_counts_and_widths(name: str, heads: tuple[int, ...]) -> None:
    family = BY_NAME[name]
    layer = run_watched(build(family), inputs(family, "right")).layers[1]
    assert (layer.heads.width, layer.heads.query, layer.heads.kv, layer.heads.dim, layer.heads.value_dim) == heads


@pytest.mark.parametrize("name", ["jamba", "bamba", "zamba", "qwen3_next", "lfm2"])
def test_hybrid_models_keep_their_own_layer_numbers(name: str) -> None:
    family = BY_NAME[name]
    seen = run_watched(build(family), inputs(family, "right"))
    assert tuple(layer.index for layer in seen.layers) == family.layers
    assert seen[family.layers[1]] is seen.layers[1]
    missing = next(i for i in range(6) if i not in family.layers)
    with pytest.raises(HeadwiseError, match=f"no self layer {missing} in .*; its layers are"):
        seen[missing]


def test_albert_counts_the_calls_of_its_shared_module() -> None:
    family = BY_NAME["albert-groups"]
    seen = run_watched(build(family), inputs(family, "right"), weights=5)
    assert [layer.index for layer in seen.layers] == list(range(8))  # four layers with two modules each
    names = [layer.name.removeprefix("encoder.albert_layer_groups.") for layer in seen.layers]
    first, second = (["{0}.albert_layers.0.attention", "{0}.albert_layers.1.attention"] for _ in range(2))
    assert names == [*(name.format(0) for name in first * 2), *(name.format(1) for name in second * 2)]
    assert [bool(layer.all_weights) for layer in seen.layers] == [i == 5 for i in range(8)]


def test_unseen_names_the_layers_that_were_not_called() -> None:
    family = BY_NAME["llava"]
    model, arguments = build(family), inputs(family, "right")
    text = {"input_ids": arguments["input_ids"][:, 16:], "attention_mask": arguments["attention_mask"][:, 16:]}
    seen = run_watched(model, text)
    assert {layer.kind for layer in seen.layers} == {"language_model"}
    assert len(seen.unseen) == 3 and all(name.startswith("vision_tower.") for name in seen.unseen)
    with pytest.raises(HeadwiseError, match="vision_tower layer 1 was not called while the model was watched"):
        seen["vision_tower", 1]


def test_statistics_add_up_over_calls(bert: Any) -> None:
    model, arguments, _ = bert
    parts = [
        {"input_ids": torch.randint(4, 90, (batch, length))} for batch, length in ((1, 5), (2, 17), (3, 1), (5, 13))
    ]
    with torch.no_grad(), headwise.watch(model) as seen:
        for batch in [arguments, *parts]:
            model(**batch)
    separate = [run_watched(model, batch) for batch in [arguments, *parts]]
    for at, layer in enumerate(seen.layers):
        total = separate[0].layers[at].stats
        for part in separate[1:]:
            total = total + part.layers[at].stats
        assert layer.stats == total == layer.prefill
        assert layer.decode is None
    assert seen.to_json()["layers"][1]["stats"] == seen[1].stats.to_json()
    assert repr(seen) == "Watch(BertModel, 4 layers seen)"


def test_a_module_watched_alone_is_one_layer_without_a_name() -> None:
    module = headwise.MultiHeadAttention(6, 2)
    with headwise.watch(module) as seen:
        module(torch.randn(1, 3, 6))
    assert repr(seen) == "Watch(MultiHeadAttention, 1 layer seen)"
    assert repr(seen.layers) == "[Layer(self 0, 2 heads)]"


def test_memory_grows_only_with_what_is_recorded(bert: Any) -> None:
    model, arguments, _ = bert

    def recorded(**settings: Any) -> int:
        seen = run_watched(model, arguments, **settings)
        lists = (
            layer.all_weights + layer.all_outputs + [x for pair in layer.all_links for x in pair]
            for layer in seen.layers
        )
        tensors = [getattr(x, "tensor", x) for values in lists for x in values]
        return sum(x.untyped_storage().nbytes() // x.element_size() for x in tensors)

    rows = BATCH * LENGTH
    assert recorded() == 0
    assert recorded(weights={1: [2]}) == rows * LENGTH
    assert recorded(weights={1: [2]}, rows=[3, 4]) == BATCH * 2 * LENGTH
    assert recorded(links=2) == 4 * 5 * rows * 2 * 2  # keys and weights, of four layers with five heads
    assert recorded(outputs={0: [1, 3]}) == rows * 2 * 12


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weights": 9}, "no self layer 9 in BertModel; its layers are 0 to 3"),
    ({"weights": {1: [5]}}, "head 5 does not exist; there are 5, 0 to 4"),
    ({"weights": {1: "a"}}, "heads of self layer 1 must be a list of numbers, got 'a'"),
    ({"weights": {1: None}}, "heads of self layer 1 must be a list of numbers, got None"),
    (
        {"weights": {1: [2], "layer.1.attention.self": [3]}},
        "self layer 1 is named twice, as 1 and as 'layer.1",
    ),
    ({"weights": ("cross", 1)}, "no 'cross' attention in BertModel; it has self"),
    ({"outputs": "encoder.layer.0.output"}, "no attention at 'encoder.layer.0.output'; there are"),
    ({"weights": 1.5}, "a layer is a number, \\(kind, number\\) or a module's path, got 1.5"),
    ({"links": -1}, "links must be a number of keys of at least 0, got -1"),
    ({"links": True}, "links must be a number of keys of at least 0, got True"),
    ({"rows": 3}, "rows must be numbers of queries, got 3"),
    ({"rows": ["a"]}, "rows must be numbers of queries, got \\['a'\\]"),
    ({"classes": [1]}, "classes must be {name: \\(B, T\\) bool}, got list"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_unknown_layers_heads_rows_and_classes_are_refused(bert: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message) as caught:
        headwise.watch(bert[0], **settings)
    assert "\n" not in str(caught.value)


def test_classes_of_the_wrong_shape_are_named(bert: Any) -> None:
    model, arguments, _ = bert
    with pytest.raises(HeadwiseError, match="odd"):
        run_watched(model, arguments, classes={"odd": torch.ones(BATCH + 1, LENGTH, dtype=torch.bool)})


def test_a_model_that_ran_without_attention_is_an_error() -> None:
    family = BY_NAME["bert"]
    model = build(family)

    class Other(nn.Module):
        def forward(self, hidden: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
            return hidden, None

    watching = headwise.watch(model)
    for layer in model.encoder.layer:
        layer.attention = Other()
    with pytest.raises(UnsupportedError, match="BertModel ran, but none of its attention layers asked"), watching:
        model(**inputs(family, None))
