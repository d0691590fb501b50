"""Importance scores equal their definitions; plans meet their budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise import HeadwiseError
from headwise.models.structure.heads import w_o
from headwise.models.structure.sites import attention_sites
from headwise.plans import Plan
from headwise.prune import HeadScores, registry
from headwise.prune.attention_layers import AttentionLayer, attention_layers
from headwise.prune.importance import merge_examples
from headwise.prune.objective import embedding_distance
from headwise.prune.plan import cost, plan_in_steps
from helpers.prunable_models import build, inputs

SCORES = registry.scores()


def causal(name: str = "llama") -> Any:
    return build(name, transformers.AutoModelForCausalLM)


def classifier() -> Any:
    return build("bert", transformers.AutoModelForSequenceClassification, num_labels=3)


def make_batches(name: str, count: int = 2, **extra: Any) -> list[dict[str, Any]]:
    return [inputs(name, seed) | extra for seed in range(count)]


@pytest.mark.parametrize("score", [name for name, score in SCORES.items() if not score.trained])
@pytest.mark.parametrize(
    ("name", "kinds"), [("bert", ["self"]), ("llama", ["self"]), ("t5", ["encoder", "decoder", "cross"])]
)
def test_every_score_gives_finite_tables_with_intervals_for_every_kind(score: str, name: str, kinds: list[str]) -> None:
    model = build(name)
    scores = headwise.importance(model, make_batches(name), score)
    assert list(scores) == kinds
    for kind in kinds:
        assert scores[kind].shape == (3, {"bert": 5, "llama": 6, "t5": 5}[name])
        assert np.isfinite(scores[kind]).all()
        assert (scores.low[kind] <= scores[kind] + 1e-9).all() and (scores[kind] <= scores.high[kind] + 1e-9).all()
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model was changed"
    if score not in ("magnitude", "random"):
        assert scores.count == 6


def test_michel_is_the_gradient_of_a_gate_on_each_head_per_example() -> None:
    model, batch = classifier(), inputs("bert") | {"labels": torch.tensor([0, 2, 1])}
    scores = headwise.importance(model, [batch], "michel")
    expected = torch.zeros(3, 5)
    for example in range(3):
        gates = torch.ones(3, 5, requires_grad=True)
        example_inputs = {key: x[example : example + 1] for key, x in batch.items() if key != "labels"}
        with headwise.mask_heads(model, gates):
            logits = model(**example_inputs).logits
        torch.nn.functional.cross_entropy(logits, batch["labels"][example : example + 1]).backward()
        expected += gates.grad.abs() / 3
    expected /= expected.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(scores["self"], expected, rtol=1e-4, atol=1e-6)


def test_ablation_is_the_loss_without_a_head_minus_the_loss() -> None:
    model, batch = causal(), inputs("llama")
    scores = headwise.importance(model, [batch], "ablation")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    def loss() -> float:
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1].transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        return float((losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean())

    with headwise.mask_heads(model, {1: [4]}):
        loss_without_head = loss()
    assert scores["self"][1, 4] == pytest.approx(loss_without_head - loss(), abs=1e-5)


def test_output_is_the_mean_norm_that_a_head_adds_to_the_residual_stream() -> None:
    model, batch = build("gpt2"), inputs("gpt2")
    batch["attention_mask"][:] = 1
    with torch.no_grad(), headwise.watch(model, outputs=0) as seen:
        model(**batch)
    weight = model.h[0].attn.c_proj.weight.detach().view(5, 12, 60)
    added = torch.einsum("bhtd,hdw->bhtw", seen[0].outputs, weight)
    scores = headwise.importance(model, [batch], "output")
    np.testing.assert_allclose(scores["self"][0], added.norm(dim=-1).mean((0, 2)), rtol=1e-4)


def test_zeroed_heads_rank_last_in_every_score_that_runs_the_model() -> None:
    model = causal()
    heads = {0: [2], 2: [5]}
    zeroed = headwise.prune_heads(model, heads, zero=True)
    for score in ("michel", "michel-token", "ablation", "output", "variance"):
        scores = headwise.importance(zeroed, make_batches("llama"), score)["self"]
        assert {tuple(map(int, head)) for head in np.argwhere(np.abs(scores) < 1e-7)} == {(0, 2), (2, 5)}, score


def score_separately(model: Any, batches: list[Any], name: str, parts: int, **options: Any) -> list[np.ndarray]:
    """The rows of all examples, from batches that are scored one at a time, as several ranks do."""
    rows: dict[int, list[np.ndarray]] = {}
    for part in range(parts):
        for number in range(part, len(batches), parts):
            scores = headwise.importance(model, [batches[number]], name, seed=3, batch_numbers=[number], **options)
            rows[number] = scores.examples
    return [
        np.concatenate(layer_rows) for layer_rows in zip(*(rows[number] for number in range(len(batches))), strict=True)
    ]


@pytest.mark.parametrize("name", SCORES)
def test_batches_scored_separately_merge_exactly_if_and_only_if_a_score_is_additive(name: str) -> None:
    """A rank scores some of the batches: its rows must not depend on the others, or the score is not additive."""
    model = build("bert").double()
    batches = make_batches("bert", 5)
    options: dict[str, Any] = {"steps": 7} if name == "l0" else {}
    whole = headwise.importance(model, batches, name, seed=3, **options)
    rows = score_separately(model, batches, name, 2, **options)
    if not SCORES[name].additive:
        assert any(a.shape != b.shape or not np.allclose(a, b) for a, b in zip(rows, whole.examples, strict=True))
        with pytest.raises(HeadwiseError, match=f"score '{name}' is not additive over batches"):
            merge_examples(model, batches, name, None, "head", rows)
        return
    merged = merge_examples(model, batches, name, None, "head", rows)
    for table in ({"self": merged["self"]}, merged.low, merged.high):
        assert np.isfinite(table["self"]).all()
    for a, b in ((merged, whole), (merged.low, whole.low), (merged.high, whole.high)):
        np.testing.assert_allclose(a["self"], b["self"], rtol=1e-4, atol=1e-7)
    assert (merged.objective, merged.relative, merged.count) == (whole.objective, whole.relative, whole.count)
    assert merged.relative and merged.count == 15


def test_scores_of_kv_groups_and_layers_are_sums_over_heads_except_for_ablation() -> None:
    model = causal()
    head = headwise.importance(model, make_batches("llama"), "output")
    group = headwise.importance(model, make_batches("llama"), "output", unit="kv")
    layer = headwise.importance(model, make_batches("llama"), "output", unit="layer")
    assert group["self"].shape == (3, 2) and layer["self"].shape == (3, 1)
    np.testing.assert_allclose(group["self"], head["self"].reshape(3, 2, 3).sum(-1))
    np.testing.assert_allclose(layer["self"][:, 0], head["self"].sum(-1))
    layer_ablation = headwise.importance(model, make_batches("llama"), "ablation", unit="layer")
    head_ablation = headwise.importance(model, make_batches("llama"), "ablation")
    assert abs(layer_ablation["self"][0, 0] - head_ablation["self"][0].sum()) > 1e-3  # effects of removal do not add up


def test_gradient_scores_refuse_a_loss_whose_gradient_is_zero_at_the_full_model() -> None:
    model, batch = build("bert"), inputs("bert")
    with torch.no_grad():
        full = model(**batch)

    def squared_distance(out, batch):
        return ((out.last_hidden_state - full.last_hidden_state) ** 2).flatten(1).sum(1)

    with pytest.raises(HeadwiseError, match="has no slope here"):
        headwise.importance(model, [batch], "michel", squared_distance)
    assert headwise.importance(model, [batch], "ablation", squared_distance)["self"].min() > 0
    assert float(embedding_distance(full, batch, full).abs().max()) < 1e-6


def test_without_labels_the_objective_follows_from_the_kind_of_model() -> None:
    masked_lm = build("bert", transformers.AutoModelForMaskedLM)
    for model, name, objective in [
        (causal(), "llama", "language-model loss of the text"),
        (masked_lm, "bert", "labels drawn from its own softmax"),
        (build("bert"), "bert", "the embedding along random directions"),
        (build("vit"), "vit", "the embedding along random directions"),
    ]:
        scores = headwise.importance(model, make_batches(name), "michel")
        assert scores.objective == objective
        assert np.isfinite(scores["self"]).all() and scores["self"].max() > 0


def test_l0_gates_close_a_head_whose_output_is_noise() -> None:
    """The same head's gate stays open while its output is useful, and closes when it is noise."""
    model = classifier()
    batches = [inputs("bert", seed) for seed in range(12)]
    with torch.no_grad():
        for batch in batches:
            batch["labels"] = model(**batch).logits.argmax(-1)
    _, out = w_o(model, attention_sites(model)[2])
    noise = torch.Generator().manual_seed(0)

    def replace_by_noise(linear: Any, args: Any) -> Any:
        x = args[0].clone()
        x[..., 24:36] = 12 * torch.randn(x[..., 24:36].shape, generator=noise)  # head 2, of width 12
        return (x,)

    options: dict[str, Any] = {"steps": 150, "strength": 0.02}
    intact = headwise.importance(model, batches, "l0", **options)["self"]
    hook = out.register_forward_pre_hook(replace_by_noise)
    with_noise = headwise.importance(model, batches, "l0", **options)["self"]
    hook.remove()
    assert intact[2, 2] > 0.8
    assert with_noise[2, 2] < 0.5 < np.median(with_noise)


def test_rank_correlation_shares_ties_and_refuses_scores_of_other_heads() -> None:
    model = causal()
    scores = headwise.importance(model, make_batches("llama"), "output")
    assert scores.correlation(scores) == pytest.approx(1)
    with pytest.raises(HeadwiseError, match="of other heads"):
        scores.correlation(headwise.importance(model, make_batches("llama"), "output", unit="kv"))


def test_the_bootstrap_interval_covers_the_true_mean_about_95_times_in_100() -> None:
    random = np.random.default_rng(1)
    layer = AttentionLayer("self", 0, 2, 2, "x")
    hits = 0
    for _ in range(100):
        scores = HeadScores([layer], "made", "head", "", [random.normal([1, 3], 1, (40, 2))], False, False)
        hits += bool(scores.low["self"][0, 1] <= 3 <= scores.high["self"][0, 1])
    assert 85 <= hits <= 100


def table(rows: list[list[float]]) -> dict[str, np.ndarray]:
    return {"self": np.array(rows)}


def test_a_plan_removes_the_least_important_heads_and_every_layer_keeps_one() -> None:
    scores = table([[9, 8, 7, 6], [1, 2, 3, 4]])
    assert headwise.plan(scores, 0.5).heads == {0: [3], 1: [0, 1, 2]}
    assert headwise.plan(scores, 0.5, allow_empty=True).heads == {1: [0, 1, 2, 3]}
    assert headwise.plan(scores, 0.5, per="layer").heads == {0: [2, 3], 1: [0, 1]}
    assert headwise.plan(scores, 1.0).heads == {}
    with pytest.raises(HeadwiseError, match=r"keep=0.1 cannot be met .* the nearest is keep=0.2500"):
        headwise.plan(scores, 0.1)


def test_budgets_of_cache_and_parameters_are_met_by_whole_kv_groups() -> None:
    model = causal()
    scores = headwise.importance(model, make_batches("llama"), "output")
    by_group = headwise.plan(scores, 0.5, unit="kv")
    assert all(heads in ([0, 1, 2], [3, 4, 5]) for heads in by_group.heads.values())
    cache = headwise.plan(scores, 0.67, budget="cache")
    assert len(cache.heads) == 2 and all(len(heads) == 3 for heads in cache.heads.values())
    parameters = headwise.plan(scores, 0.7, budget="parameters", unit="kv")
    full = sum(cost(layer, set(), "parameters") for layer in attention_layers(model))
    remaining = sum(
        cost(layer, set(parameters.heads.get(layer.index, ())), "parameters") for layer in attention_layers(model)
    )
    assert remaining <= 0.7 * full
    pruned = headwise.prune_heads(model, parameters)
    saved = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in pruned.parameters())
    assert saved == full - remaining, "a plan counts the parameters that surgery removes"
    by_head = headwise.plan(scores, 0.7)
    assert any("even out groups" in note for note in by_head.notes)


def test_each_kind_of_attention_can_have_its_own_share() -> None:
    model = build("t5")
    scores = headwise.importance(model, make_batches("t5"), "random")
    plan = headwise.plan(scores, {"encoder": 0.4, "cross": 0.8})
    removed = {
        kind: sum(len(h) for k, h in plan.heads.items() if k[0] == kind) for kind in ("encoder", "decoder", "cross")
    }
    assert removed == {"encoder": 9, "decoder": 0, "cross": 3}
    headwise.prune_heads(model, plan)
    with pytest.raises(HeadwiseError, match="no 'middle' attention; its kinds are encoder, decoder, cross"):
        headwise.plan(scores, {"middle": 0.4})


def test_layers_that_share_a_module_lose_the_same_heads() -> None:
    model = build("albert")
    plan = headwise.plan(headwise.importance(model, make_batches("bert"), "output"), 0.6)
    assert len({tuple(heads) for heads in plan.heads.values()}) == 1 and len(plan.heads) == 3
    headwise.prune_heads(model, plan)


def test_a_plan_saves_loads_compares_and_can_be_edited_by_hand(tmp_path: Path) -> None:
    model = causal()
    scores = headwise.importance(model, make_batches("llama"), "output")
    plan = headwise.plan(scores, 0.5)
    plan.save(tmp_path / "plan.json")
    assert headwise.Plan.load(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    document["layers"][1]["remove"] = [3]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    edited = headwise.Plan.load(tmp_path / "plan.json")
    assert edited.heads[1] == [3]
    assert plan.diff(plan) == "the same heads" and "layer 1" in plan.diff(edited)
    assert "remove 9 of 18 heads" in str(plan) and "█" in str(plan)
    with pytest.raises(HeadwiseError, match=r"this plan is for another model: 3 layers of 6 heads, but BertModel has"):
        headwise.prune_heads(build("bert"), plan)
    for change, message in [
        ({"layers": [{"kind": "self"}]}, "not a plan that headwise wrote"),
        ({"headwise_plan": 2}, "format 2 is newer than this headwise"),
    ]:
        (tmp_path / "plan.json").write_text(json.dumps(document | change))
        with pytest.raises(HeadwiseError, match=message):
            headwise.Plan.load(tmp_path / "plan.json")
    document["layers"][1]["remove"] = [6]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(HeadwiseError, match="self layer 1 has no head 6; its heads are 0 to 5"):
        headwise.Plan.load(tmp_path / "plan.json")
    with pytest.raises(HeadwiseError, match="there is no plan at"):
        headwise.Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "layers must be a list, got 3"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [None]}, r"layers\[0\] must be an object, got None"),
        ({"layers": [{"kind": 5}]}, r"layers\[0\].kind must be a text, got 5"),
        ({"row": {"layer": -1}}, r"layers\[1\].layer must be a whole number from 0 on, got -1"),
        ({"row": {"layer": 0}}, "self layer 0 is listed twice"),
        ({"row": {"layer": True}}, r"layers\[1\].layer must be a whole number from 0 on, got True"),
        ({"row": {"heads": 10**9}}, r"layers\[1\].heads is 1000000000, which is more than 65536"),
        ({"row": {"kv_heads": 0}}, r"6 heads and 0 KV heads; kv_heads must divide heads"),
        ({"row": {"kv_heads": 4}}, r"6 heads and 4 KV heads; kv_heads must divide heads"),
        ({"row": {"remove": [1, 1]}}, "self layer 1 loses head 1 twice"),
        ({"row": {"remove": [1.5]}}, r"layers\[1\].remove\[0\] must be a whole number from 0 on, got 1.5"),
        ({"row": {"remove": "12"}}, r"layers\[1\].remove must be a list, got '12'"),
        ({"keep": 1e999}, "Infinity is not JSON"),
        ({"keep": {"self": 2}}, "keep must be a share from 0 to 1, or one per kind, got {'self': 2}"),
        ({"budget": "euro"}, "budget must be one of heads, parameters, cache, latency, got 'euro'"),
        ({"notes": [1]}, r"notes\[0\] must be a text, got 1"),
        ({"score": None}, "score must be a text, got None"),
        ({"headwise_plan": "x" * 500}, "format 'x+... is none; this headwise reads 1"),
    ],
)
def test_a_tampered_plan_file_is_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    layers = tuple(("self", index, 6, 2) for index in range(3))
    document = Plan({1: [3, 4]}, layers).to_json()
    document["layers"][1] |= change.pop("row", {})
    (tmp_path / "plan.json").write_text(json.dumps(document | change))
    with pytest.raises(headwise.CheckpointError, match=message) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 100_000, '{"headwise_plan": ' + "9" * 9999, "[]", "", "\0", '{"a": NaN}'])
def test_a_plan_file_that_is_not_a_json_object_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(headwise.CheckpointError, match=r"plan\.json' .*not a plan that headwise wrote"):
        Plan.load(tmp_path / "plan.json")


def test_rescoring_between_steps_keeps_one_of_two_redundant_heads() -> None:
    """Heads 0 and 1 of the last layer are copies; the loss needs one of them, and does not change with both."""
    model = build("gpt2")
    attention, last = model.h[2].attn, 2
    with torch.no_grad():
        model.h[2].mlp.c_proj.weight.zero_()
        qkv = attention.c_attn
        for start in (0, 60, 120):  # W_Q, W_K, W_V: head 1 becomes head 0
            qkv.weight[:, start + 12 : start + 24] = qkv.weight[:, start : start + 12]
            qkv.bias[start + 12 : start + 24] = qkv.bias[start : start + 12]
        attention.c_proj.weight[12:24] = attention.c_proj.weight[:12]
    recorded: dict[str, Any] = {}
    attention.c_proj.register_forward_hook(lambda linear, args, out: recorded.update(out=out))
    batches = make_batches("gpt2", 2)

    def layer_output(batch: Any, removed: list[int]) -> Any:
        with torch.no_grad(), headwise.mask_heads(model, {last: removed}):
            model(**batch)
        return recorded["out"]

    batch_indices = {tuple(batch["input_ids"].flatten().tolist()): i for i, batch in enumerate(batches)}
    full_outputs = [layer_output(batch, []) for batch in batches]
    head_outputs = [
        [full_outputs[i] - layer_output(batch, [head]) for head in range(5)] for i, batch in enumerate(batches)
    ]

    def loss(out: Any, batch: Any) -> Any:
        """10 if both twins are removed; else a little for each of the other heads that is."""
        i = batch_indices[tuple(batch["input_ids"].flatten().tolist())]
        missing = (full_outputs[i] - recorded["out"]).flatten()
        basis = torch.stack([head_outputs[i][head].flatten() for head in (0, 2, 3, 4)], 1)
        share = torch.linalg.lstsq(basis, missing[:, None]).solution[:, 0]  # of the twins' common part 0, 1 or 2
        return (10 * (share[0] > 1.5) + share[1:].sum()).expand(3)

    scores = headwise.importance(model, batches, "ablation", loss)
    in_one_step = headwise.plan(scores, 0.6, per="layer").heads[last]
    in_two_steps = plan_in_steps(model, batches, 0.6, "ablation", 2, loss=loss, per="layer").heads[last]
    assert in_one_step == [0, 1], "each twin alone is dispensable"
    assert len({0, 1} & set(in_two_steps)) == 1, "once one is removed, the other is not"

    def damage(removed: list[int]) -> float:
        with torch.no_grad(), headwise.mask_heads(model, {last: removed}):
            return float(loss(model(**batches[0]), batches[0])[0])

    assert damage(in_two_steps) < damage(in_one_step) - 5


def test_one_batch_and_ids_of_32_bits_are_scored_as_a_list_of_long_ones() -> None:
    model = causal()
    ids = inputs("llama")["input_ids"]
    expected = headwise.importance(model, [{"input_ids": ids}])["self"]
    short = ids.int()
    for batches in ({"input_ids": ids}, ids, [short], [{"input_ids": short, "labels": short}]):
        np.testing.assert_allclose(headwise.importance(model, batches)["self"], expected, rtol=1e-5, atol=1e-6)
    labels = torch.tensor([0, 2, 1])
    by_label = [headwise.importance(classifier(), make_batches("bert", 1, labels=x)) for x in (labels, labels.int())]
    np.testing.assert_allclose(by_label[0]["self"], by_label[1]["self"], rtol=1e-5, atol=1e-6)


def test_bad_arguments_of_importance_and_plan_are_named() -> None:
    model, batches = build("bert"), make_batches("bert")
    for call, message in [
        (
            lambda: headwise.importance(model, batches, "taylor"),
            "there is no score 'taylor'; there are ablation, confidence",
        ),
        (lambda: headwise.importance(model, [], "michel"), "michel needs batches"),
        (
            lambda: headwise.importance(model, ["text"], "michel"),
            "a batch is a dict of model inputs, a tensor or a tuple",
        ),
        (lambda: headwise.importance(model, batches, unit="neuron"), "unit must be one of head, kv, layer"),
        (lambda: headwise.importance(model, make_batches("bert", labels=torch.zeros(3))), "gives no logits for labels"),
        (lambda: headwise.importance(model, batches, "l0", speed=3), "l0 has no option 'speed'; it has steps,"),
        (lambda: headwise.importance(model, batches, steps=3), "michel has no option 'steps'; it has none"),
        (lambda: headwise.importance(model, batches, seed=-1), "seed must be a whole number from 0 to 429.*-1"),
        (lambda: headwise.importance(model, batches, seed=10**30), "seed must be a whole number from 0 to 429"),
        (lambda: headwise.importance(model, batches, seed=0.5), "seed must be a whole number from 0 to 429"),
        (lambda: headwise.importance(model, batches, loss=lambda o, b: o[0]), "loss gave shape"),
        (lambda: headwise.plan(3), r"scores are \{kind: \(layers, heads\)\}, .*, got int"),
        (lambda: headwise.plan(table([[1.0]]), 60), "keep is a share from 0 to 1, such as 0.6, got 60"),
        (
            lambda: headwise.plan(table([[1.0]]), budget="euro"),
            "budget must be one of heads, parameters, cache, latency",
        ),
        (lambda: headwise.plan(table([[1.0]]), budget="latency"), 'budget="latency" needs model='),
        (lambda: headwise.plan({}), "there are no scores to plan with"),
        (
            lambda: headwise.plan(table([[np.nan, np.nan]])),
            "scores of self layer 0 are not finite; only heads that",
        ),
        (lambda: headwise.plan(table([[1.0, 2.0], [1.0, np.inf]])), "the scores of self layer 1 are not finite"),
        (lambda: headwise.plan(table([[1.0, np.nan, 2.0]])), "the scores of self layer 0 are not finite"),
        (lambda: headwise.importance(model, "text"), "batches is a list of batches of model inputs, got str"),
        (lambda: plan_in_steps(model, batches, 0.5, steps=0), "steps must be a whole number of at least 1"),
    ]:
        with pytest.raises(HeadwiseError, match=message):
            call()
