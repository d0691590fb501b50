"""Scores against what they are defined as; plans against their budgets."""

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
from headwise.models.structure import sites
from headwise.prune.importance import SCORES, merged, places
from headwise.prune.importance import score as register
from headwise.prune.objective import distance
from headwise.prune.plan import Plan, cost, in_steps
from headwise.prune.scores import Place, Scores
from helpers.prunable_models import build, inputs


def causal(name: str = "llama") -> Any:
    return build(name, transformers.AutoModelForCausalLM)


def classifier() -> Any:
    return build("bert", transformers.AutoModelForSequenceClassification, num_labels=3)


def batches(name: str, count: int = 2, **more: Any) -> list[dict[str, Any]]:
    return [inputs(name, seed) | more for seed in range(count)]


@pytest.mark.parametrize("score", [name for name in SCORES if name != "l0"])
@pytest.mark.parametrize(
    ("name", "kinds"), [("bert", ["self"]), ("llama", ["self"]), ("t5", ["encoder", "decoder", "cross"])]
)
def test_every_score_of_every_kind(score: str, name: str, kinds: list[str]) -> None:
    model = build(name)
    found = headwise.importance(model, batches(name), score)
    assert list(found) == kinds
    for kind in kinds:
        assert found[kind].shape == (3, {"bert": 5, "llama": 6, "t5": 5}[name])
        assert np.isfinite(found[kind]).all()
        assert (found.low[kind] <= found[kind] + 1e-9).all() and (found[kind] <= found.high[kind] + 1e-9).all()
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model was left changed"
    if score not in ("magnitude", "random"):
        assert found.count == 6


def test_michel_is_the_gradient_of_the_gates_example_by_example() -> None:
    model, batch = classifier(), inputs("bert") | {"labels": torch.tensor([0, 2, 1])}
    found = headwise.importance(model, [batch], "michel")
    want = torch.zeros(3, 5)
    for example in range(3):
        gates = torch.ones(3, 5, requires_grad=True)
        one = {key: x[example : example + 1] for key, x in batch.items() if key != "labels"}
        with headwise.mask_heads(model, gates):
            logits = model(**one).logits
        torch.nn.functional.cross_entropy(logits, batch["labels"][example : example + 1]).backward()
        want += gates.grad.abs() / 3
    want /= want.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(found["self"], want, rtol=1e-4, atol=1e-6)


def test_ablation_is_the_loss_without_a_head_minus_the_loss() -> None:
    model, batch = causal(), inputs("llama")
    found = headwise.importance(model, [batch], "ablation")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    def loss() -> float:
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1].transpose(1, 2)
        each = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        return float((each.sum(1) / (labels[:, 1:] != -100).sum(1)).mean())

    with headwise.mask_heads(model, {1: [4]}):
        without = loss()
    assert found["self"][1, 4] == pytest.approx(without - loss(), abs=1e-5)


def test_output_is_the_mean_norm_of_what_a_head_adds() -> None:
    model, batch = build("gpt2"), inputs("gpt2")
    batch["attention_mask"][:] = 1
    with torch.no_grad(), headwise.watch(model, outputs=0) as seen:
        model(**batch)
    weight = model.h[0].attn.c_proj.weight.detach().view(5, 12, 60)
    added = torch.einsum("bhtd,hdw->bhtw", seen[0].outputs, weight)
    found = headwise.importance(model, [batch], "output")
    np.testing.assert_allclose(found["self"][0], added.norm(dim=-1).mean((0, 2)), rtol=1e-4)


def test_a_head_that_does_nothing_is_last_in_every_score_that_looks_at_it() -> None:
    model = causal()
    heads = {0: [2], 2: [5]}
    dead = headwise.prune_heads(model, heads, zero=True)
    for score in ("michel", "michel-token", "ablation", "output", "variance"):
        found = headwise.importance(dead, batches("llama"), score)["self"]
        assert {tuple(map(int, at)) for at in np.argwhere(np.abs(found) < 1e-7)} == {(0, 2), (2, 5)}, score


def by_parts(model: Any, given: list[Any], name: str, parts: int, **options: Any) -> list[np.ndarray]:
    """The rows of all examples, from batches that are scored in so many places, each by itself."""
    rows: dict[int, list[np.ndarray]] = {}
    for part in range(parts):
        for number in range(part, len(given), parts):
            found = headwise.importance(model, [given[number]], name, seed=3, numbers=[number], **options)
            rows[number] = found.examples
    return [np.concatenate(each) for each in zip(*(rows[number] for number in range(len(given))), strict=True)]


@pytest.mark.parametrize("name", SCORES)
def test_a_score_says_rightly_whether_it_comes_apart_by_batches(name: str) -> None:
    """A rank scores some of the batches: what it finds must not depend on the others, or be marked as such."""
    model = build("bert").double()
    given = batches("bert", 5)
    options: dict[str, Any] = {"steps": 7} if name == "l0" else {}
    whole = headwise.importance(model, given, name, seed=3, **options)
    rows = by_parts(model, given, name, 2, **options)
    if not SCORES[name].additive:
        assert any(a.shape != b.shape or not np.allclose(a, b) for a, b in zip(rows, whole.examples, strict=True))
        with pytest.raises(HeadwiseError, match=f"score '{name}' does not come apart by batches"):
            merged(model, given, name, None, "head", rows)
        return
    got = merged(model, given, name, None, "head", rows)
    for table in ({"self": got["self"]}, got.low, got.high):
        assert np.isfinite(table["self"]).all()
    for a, b in ((got, whole), (got.low, whole.low), (got.high, whole.high)):
        np.testing.assert_allclose(a["self"], b["self"], rtol=1e-6, atol=1e-12)
    assert (got.objective, got.relative, got.count) == (whole.objective, whole.relative, whole.count)
    assert got.relative and got.count == 15


def test_a_score_must_say_what_it_is_and_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="additive"):
        register("mine", signed=False, normed=False, loss="no loss")  # type: ignore[call-arg]
    monkeypatch.setattr("headwise.prune.importance.SCORES", dict(SCORES))

    @register("mine", signed=False, normed=False, additive=True, loss="no loss")
    def mine(setting: Any) -> list[np.ndarray]:
        return [np.ones((1, place.query)) for place in setting.places]

    with pytest.raises(HeadwiseError, match=r"score 'mine' gave 1 rows for 6 examples; .* say additive=False"):
        headwise.importance(build("bert"), batches("bert"), "mine")


def test_units_add_up() -> None:
    model = causal()
    head = headwise.importance(model, batches("llama"), "output")
    group = headwise.importance(model, batches("llama"), "output", unit="kv")
    layer = headwise.importance(model, batches("llama"), "output", unit="layer")
    assert group["self"].shape == (3, 2) and layer["self"].shape == (3, 1)
    np.testing.assert_allclose(group["self"], head["self"].reshape(3, 2, 3).sum(-1))
    np.testing.assert_allclose(layer["self"][:, 0], head["self"].sum(-1))
    whole = headwise.importance(model, batches("llama"), "ablation", unit="layer")
    single = headwise.importance(model, batches("llama"), "ablation")
    assert abs(whole["self"][0, 0] - single["self"][0].sum()) > 1e-3  # ablations do not add up, and are not made to


def test_a_distance_to_the_full_model_has_no_slope_and_is_refused() -> None:
    model, batch = build("bert"), inputs("bert")
    with torch.no_grad():
        full = model(**batch)

    def flat(out, given):
        return ((out.last_hidden_state - full.last_hidden_state) ** 2).flatten(1).sum(1)

    with pytest.raises(HeadwiseError, match="has no slope here"):
        headwise.importance(model, [batch], "michel", flat)
    assert headwise.importance(model, [batch], "ablation", flat)["self"].min() > 0
    assert float(distance(full, batch, full).abs().max()) < 1e-6


def test_without_labels_each_kind_of_model_has_its_own_way() -> None:
    masked_lm = build("bert", transformers.AutoModelForMaskedLM)
    for model, name, words in [
        (causal(), "llama", "language-model loss of the text"),
        (masked_lm, "bert", "labels drawn from its own softmax"),
        (build("bert"), "bert", "the embedding along random directions"),
        (build("vit"), "vit", "the embedding along random directions"),
    ]:
        found = headwise.importance(model, batches(name), "michel")
        assert found.objective == words
        assert np.isfinite(found["self"]).all() and found["self"].max() > 0


def test_gates_learn_to_close_a_head_that_is_pure_noise() -> None:
    """The same head stays open while it does its work, and is shut when its output is noise."""
    model = classifier()
    given = [inputs("bert", seed) for seed in range(12)]
    with torch.no_grad():
        for batch in given:
            batch["labels"] = model(**batch).logits.argmax(-1)
    _, out = sites.w_o(model, sites.sites(model)[2])
    noise = torch.Generator().manual_seed(0)

    def spoil(linear: Any, args: Any) -> Any:
        x = args[0].clone()
        x[..., 24:36] = 12 * torch.randn(x[..., 24:36].shape, generator=noise)  # head 2, of width 12
        return (x,)

    how: dict[str, Any] = {"steps": 150, "strength": 0.02}
    sound = headwise.importance(model, given, "l0", **how)["self"]
    hook = out.register_forward_pre_hook(spoil)
    spoilt = headwise.importance(model, given, "l0", **how)["self"]
    hook.remove()
    assert sound[2, 2] > 0.8
    assert spoilt[2, 2] < 0.5 < np.median(spoilt)


def test_ranks() -> None:
    model = causal()
    one = headwise.importance(model, batches("llama"), "output")
    assert one.correlation(one) == pytest.approx(1)
    with pytest.raises(HeadwiseError, match="of other heads"):
        one.correlation(headwise.importance(model, batches("llama"), "output", unit="kv"))


def test_the_interval_covers_the_mean_of_many_examples() -> None:
    random = np.random.default_rng(1)
    place = Place("self", 0, 2, 2, "x")
    hits = 0
    for _ in range(100):
        found = Scores([place], "made", "head", "", [random.normal([1, 3], 1, (40, 2))], False, False)
        hits += bool(found.low["self"][0, 1] <= 3 <= found.high["self"][0, 1])
    assert 85 <= hits <= 100


def table(rows: list[list[float]]) -> dict[str, np.ndarray]:
    return {"self": np.array(rows)}


def test_the_least_important_go_and_every_layer_keeps_one() -> None:
    scores = table([[9, 8, 7, 6], [1, 2, 3, 4]])
    assert headwise.plan(scores, 0.5).heads == {0: [3], 1: [0, 1, 2]}
    assert headwise.plan(scores, 0.5, allow_empty=True).heads == {1: [0, 1, 2, 3]}
    assert headwise.plan(scores, 0.5, per="layer").heads == {0: [2, 3], 1: [0, 1]}
    assert headwise.plan(scores, 1.0).heads == {}
    with pytest.raises(HeadwiseError, match=r"keep=0.1 cannot be met .* the nearest is keep=0.2500"):
        headwise.plan(scores, 0.1)


def test_groups_and_the_budgets_that_only_they_meet() -> None:
    model = causal()
    scores = headwise.importance(model, batches("llama"), "output")
    by_group = headwise.plan(scores, 0.5, unit="kv")
    assert all(heads in ([0, 1, 2], [3, 4, 5]) for heads in by_group.heads.values())
    cache = headwise.plan(scores, 0.67, budget="cache")
    assert len(cache.heads) == 2 and all(len(heads) == 3 for heads in cache.heads.values())
    parameters = headwise.plan(scores, 0.7, budget="parameters", unit="kv")
    full = sum(cost(place, set(), "parameters") for place in places(model))
    left = sum(cost(place, set(parameters.heads.get(place.index, ())), "parameters") for place in places(model))
    assert left <= 0.7 * full
    pruned = headwise.prune_heads(model, parameters)
    gone = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in pruned.parameters())
    assert gone == full - left, "the plan's arithmetic is the surgery's"
    single = headwise.plan(scores, 0.7)
    assert any("even out groups" in note for note in single.notes)


def test_kinds_have_budgets_of_their_own() -> None:
    model = build("t5")
    scores = headwise.importance(model, batches("t5"), "random")
    made = headwise.plan(scores, {"encoder": 0.4, "cross": 0.8})
    removed = {
        kind: sum(len(h) for k, h in made.heads.items() if k[0] == kind) for kind in ("encoder", "decoder", "cross")
    }
    assert removed == {"encoder": 9, "decoder": 0, "cross": 3}
    headwise.prune_heads(model, made)
    with pytest.raises(HeadwiseError, match="no 'middle' attention here; there are encoder, decoder, cross"):
        headwise.plan(scores, {"middle": 0.4})


def test_layers_of_one_module_lose_the_same() -> None:
    model = build("albert")
    made = headwise.plan(headwise.importance(model, batches("bert"), "output"), 0.6)
    assert len({tuple(heads) for heads in made.heads.values()}) == 1 and len(made.heads) == 3
    headwise.prune_heads(model, made)


def test_a_plan_is_data(tmp_path: Path) -> None:
    model = causal()
    scores = headwise.importance(model, batches("llama"), "output")
    made = headwise.plan(scores, 0.5)
    made.save(tmp_path / "plan.json")
    assert headwise.Plan.load(tmp_path / "plan.json") == made
    given = json.loads((tmp_path / "plan.json").read_text())
    given["layers"][1]["remove"] = [3]
    (tmp_path / "plan.json").write_text(json.dumps(given))
    edited = headwise.Plan.load(tmp_path / "plan.json")
    assert edited.heads[1] == [3]
    assert made.diff(made) == "the same heads" and "layer 1" in made.diff(edited)
    assert "remove 9 of 18 heads" in str(made) and "█" in str(made)
    with pytest.raises(HeadwiseError, match=r"this plan is for another model: 3 layers of 6 heads, but BertModel has"):
        headwise.prune_heads(build("bert"), made)
    for change, words in [
        ({"layers": [{"kind": "self"}]}, "not a plan that headwise wrote"),
        ({"headwise_plan": 2}, "of version 2"),
    ]:
        (tmp_path / "plan.json").write_text(json.dumps(given | change))
        with pytest.raises(HeadwiseError, match=words):
            headwise.Plan.load(tmp_path / "plan.json")
    given["layers"][1]["remove"] = [6]
    (tmp_path / "plan.json").write_text(json.dumps(given))
    with pytest.raises(HeadwiseError, match="self layer 1 has no head 6; its heads are 0 to 5"):
        headwise.Plan.load(tmp_path / "plan.json")
    with pytest.raises(HeadwiseError, match="there is no plan at"):
        headwise.Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 3}, "layers must be a list, got 3"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [None]}, r"layers\[0\] must be an object, got None"),
        ({"layers": [{"kind": 5}]}, r"layers\[0\].kind must be a text, got 5"),
        ({"row": {"layer": -1}}, r"layers\[1\].layer must be a whole number from 0 on, got -1"),
        ({"row": {"layer": 0}}, "self layer 0 is there twice"),
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
        ({"headwise_plan": "x" * 500}, "of version 'x+...; 1 is known"),
    ],
)
def test_a_plan_that_was_tampered_with_is_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    layers = tuple(("self", index, 6, 2) for index in range(3))
    given = Plan({1: [3, 4]}, layers).to_json()
    given["layers"][1] |= change.pop("row", {})
    (tmp_path / "plan.json").write_text(json.dumps(given | change))
    with pytest.raises(headwise.CheckpointError, match=words) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 100_000, '{"headwise_plan": ' + "9" * 9999, "[]", "", "\0", '{"a": NaN}'])
def test_a_plan_that_is_no_json_object_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(headwise.CheckpointError, match="not a plan that headwise wrote"):
        Plan.load(tmp_path / "plan.json")


def test_scoring_again_between_steps_beats_one_shot_where_heads_stand_in_for_each_other() -> None:
    """Heads 0 and 1 of the last layer write the same; the loss cares that one of them does, not how many do."""
    model = build("gpt2")
    attention, last = model.h[2].attn, 2
    with torch.no_grad():
        model.h[2].mlp.c_proj.weight.zero_()
        qkv = attention.c_attn
        for start in (0, 60, 120):  # W_Q, W_K, W_V: head 1 becomes head 0
            qkv.weight[:, start + 12 : start + 24] = qkv.weight[:, start : start + 12]
            qkv.bias[start + 12 : start + 24] = qkv.bias[start : start + 12]
        attention.c_proj.weight[12:24] = attention.c_proj.weight[:12]
    read: dict[str, Any] = {}
    attention.c_proj.register_forward_hook(lambda linear, args, out: read.update(out=out))
    given = batches("gpt2", 2)

    def written(batch: Any, off: list[int]) -> Any:
        with torch.no_grad(), headwise.mask_heads(model, {last: off}):
            model(**batch)
        return read["out"]

    ids = {tuple(batch["input_ids"].flatten().tolist()): i for i, batch in enumerate(given)}
    whole = [written(batch, []) for batch in given]
    parts = [[whole[i] - written(batch, [head]) for head in range(5)] for i, batch in enumerate(given)]

    def loss(out: Any, batch: Any) -> Any:
        """10 if neither twin writes; else a little for each of the other heads that is missing."""
        i = ids[tuple(batch["input_ids"].flatten().tolist())]
        missing = (whole[i] - read["out"]).flatten()
        basis = torch.stack([parts[i][head].flatten() for head in (0, 2, 3, 4)], 1)
        share = torch.linalg.lstsq(basis, missing[:, None]).solution[:, 0]  # of the twins' common part 0, 1 or 2
        return (10 * (share[0] > 1.5) + share[1:].sum()).expand(3)

    scores = headwise.importance(model, given, "ablation", loss)
    once = headwise.plan(scores, 0.6, per="layer").heads[last]
    steps = in_steps(model, given, 0.6, "ablation", 2, scoring={"loss": loss}, per="layer").heads[last]
    assert once == [0, 1], "alone, each twin can be spared"
    assert len({0, 1} & set(steps)) == 1, "once one is gone, the other cannot"

    def damage(off: list[int]) -> float:
        with torch.no_grad(), headwise.mask_heads(model, {last: off}):
            return float(loss(model(**given[0]), given[0])[0])

    assert damage(steps) < damage(once) - 5


def test_bad_input() -> None:
    model = build("bert")
    for call, words in [
        (lambda: headwise.importance(model, batches("bert"), "taylor"), "there is no score 'taylor'; there are michel"),
        (lambda: headwise.importance(model, [], "michel"), "michel needs batches"),
        (lambda: headwise.importance(model, ["text"], "michel"), "a batch is a dict of model inputs or a tensor"),
        (lambda: headwise.importance(model, batches("bert"), unit="neuron"), "unit must be one of head, kv, layer"),
        (lambda: headwise.importance(model, batches("bert", labels=torch.zeros(3))), "gives no logits for labels"),
        (lambda: headwise.importance(model, batches("bert"), "l0", speed=3), "l0 has no option 'speed'; it has steps,"),
        (lambda: headwise.importance(model, batches("bert"), steps=3), "michel has no option 'steps'; it has none"),
        (lambda: headwise.importance(model, batches("bert"), seed=-1), "seed must be a whole number from 0 to 429.*-1"),
        (lambda: headwise.importance(model, batches("bert"), seed=10**30), "seed must be a whole number from 0 to 429"),
        (lambda: headwise.importance(model, batches("bert"), seed=0.5), "seed must be a whole number from 0 to 429"),
        (lambda: headwise.importance(model, batches("bert"), loss=lambda o, b: o[0]), "loss gave shape"),
        (lambda: headwise.plan(table([[1.0]]), 60), "keep is a share from 0 to 1, such as 0.6, got 60"),
        (
            lambda: headwise.plan(table([[1.0]]), budget="euro"),
            "budget must be one of heads, parameters, cache, latency",
        ),
        (lambda: headwise.plan(table([[1.0]]), budget="latency"), 'budget="latency" needs model='),
        (lambda: headwise.plan({}), "there are no scores to plan with"),
        (lambda: in_steps(model, batches("bert"), 0.5, steps=0), "steps must be a whole number of at least 1"),
    ]:
        with pytest.raises(HeadwiseError, match=words):
            call()
