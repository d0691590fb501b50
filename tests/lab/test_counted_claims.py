"""The claims that train nothing: what they compute, and how their verdicts depend on the figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwise.attention.nn.module import MultiHeadAttention
from headwise.lab.claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Verdict
from headwise.lab.claims import c01_same_cost, c02_fused, c05_slices, c11_depth, c12_cards, c13_attribution
from headwise.lab.races import ratios, seconds
from headwise.lab.store import TINY, Lab
from headwise.timing.interleaved_race import Mismatch

# --- times ---


def test_races_run_once_per_start_and_are_read_from_the_store_after(tmp_path: Any) -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in ("slow", "fast")}
    lab = Lab(TINY, work=tmp_path)
    races = seconds(lab, "trial", {"a": 1}, lambda: ways)
    assert len(races) == len(lab.starts) and {frozenset(race) for race in races} == {frozenset(ways)}
    before = len(calls)
    assert seconds(lab, "trial", {"a": 1}, lambda: ways) == races and len(calls) == before
    assert ratios([{"slow": 6.0, "fast": 2.0}, {"slow": 5.0, "fast": 10.0}], "slow", "fast") == [3.0, 0.5]


def same_time(**times_by_heads: tuple[float, float]) -> Verdict:
    races = [{name.strip("h"): times[i] for name, times in times_by_heads.items()} for i in (0, 1)]
    return c01_same_cost._same_time({"seconds": {"some": races}, "where": "one thread"})


@pytest.mark.parametrize(
    ("by_heads", "word"),
    [
        ({"h1": (1.0, 1.0), "h12": (1.2, 1.1), "h768": (1.2, 1.25)}, HOLDS),
        ({"h6": (1.0, 1.0), "h12": (1.2, 1.1), "h768": (1.3, 1.4)}, ONLY_IF),
        ({"h6": (1.0, 1.0), "h12": (1.3, 1.4), "h768": (1.3, 1.4)}, NOT),
        ({"h6": (1.0, 1.0), "h12": (1.1, 1.4), "h768": (1.3, 1.4)}, CANNOT_TELL),
        ({"h6": (1.0, 1.0), "h12": (1.1, 1.1), "h768": (1.1, 1.4)}, CANNOT_TELL),
    ],
)
def test_same_time_verdict_requires_agreement_of_every_race(
    by_heads: dict[str, tuple[float, float]], word: str
) -> None:
    assert same_time(**by_heads).word == word


def test_same_time_verdict_names_the_range_of_head_sizes() -> None:
    narrow = same_time(h1=(1.0, 1.0), h12=(1.1, 1.1), h48=(1.2, 1.2), h96=(1.2, 1.4), h192=(1.2, 1.2), h768=(2.0, 2.0))
    assert narrow.only_if == "d_k is at least 16"
    middle = same_time(h1=(2.0, 2.0), h2=(1.3, 1.2), h12=(1.0, 1.0), h24=(1.2, 1.2), h48=(1.5, 1.5))
    assert middle.only_if == "d_k is at least 32 and less than 384"


def fused(*cases: tuple[int, list[float]]) -> Verdict:
    rows = [{"heads": 2, "tokens": t, "batch": 1, "way": "small", "races": [], "ratio": ratio} for t, ratio in cases]
    rows[0]["where"] = "one thread"
    return c02_fused._judge("it is", rows, 2.0, "a part", lambda case: int(case["tokens"]))


def test_fused_verdict_requires_every_race_or_names_the_size_limit() -> None:
    assert fused((5, [2.0, 3.0]), (7, [2.5, 2.1])).word == HOLDS
    assert fused((5, [1.9, 3.0]), (7, [0.5, 2.1])).word == NOT
    small = fused((5, [3.0, 3.0]), (7, [2.5, 2.5]), (11, [1.0, 3.0]), (13, [4.0, 4.0]))
    assert small.only_if == "the parts are small: up to 7.0e+00 multiply-adds in a part"
    assert "in 3 of 4 cases" in small.because
    large = fused((5, [1.0, 1.0]), (7, [2.5, 2.5]))
    assert large.only_if == "the sizes suit it: 2 heads, 7 tokens, batch 1"


def test_implementations_with_different_outputs_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(c02_fused.contestants((4, 5, 3), "cpu")) >= {"one", "three", "small", "call", "loop", "textbook loop"}
    monkeypatch.setattr(c02_fused, "textbook", lambda q, k, v: v)
    with pytest.raises(Mismatch, match="textbook"):
        c02_fused.contestants((4, 5, 3), "cpu")


# --- counts ---


@pytest.mark.parametrize("tokens", [5, 1536])
def test_counted_multiply_adds_match_the_formula(tokens: int) -> None:
    for heads in (1, 12):
        counts = c01_same_cost._flops(heads, tokens)
        assert counts["projections"] == 4 * tokens * 768**2
        assert counts["attention"] == 2 * tokens**2 * 768
        assert counts["exponentials"] == heads * tokens**2


def test_textbook_attention_matches_the_module() -> None:
    layer = MultiHeadAttention(768, 12)
    x = torch.randn(1, 5, 768)
    assert torch.allclose(c01_same_cost.textbook(layer, x), layer(x), atol=1e-5)


def test_bert_parameters_are_counted_per_part() -> None:
    bert = c01_same_cost._bert()
    assert bert["built"] == {"attention": 28_348_416, "ffn": 56_669_184, "embeddings": 23_835_648, "rest": 628_992}
    assert bert["weights"] == c01_same_cost.WEIGHTS
    verdict = c01_same_cost._of_bert({"bert": bert})
    assert verdict.word == HOLDS and "56,669,184 (51.8%)" in verdict.because
    assert c01_same_cost._of_bert({"bert": bert | {"built": bert["built"] | {"ffn": 1}}}).word == NOT


# --- slices ---


def sliced_layer() -> MultiHeadAttention:
    """The layer that the sentence is about: head i projects only the embedding's i-th slice."""
    layer = MultiHeadAttention(12, 3, bias=False)
    blocks = torch.block_diag(*[torch.ones(4, 4)] * 3)
    with torch.no_grad():
        for linear in (layer.W_Q, layer.W_K, layer.W_V):
            linear.weight.mul_(blocks)
    return layer


def test_gradients_distinguish_sliced_from_full_projections() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 7, 12, generator=random)
    whole = c05_slices.slice_gradients(MultiHeadAttention(12, 3), x, 1, random)
    assert whole["reached"] == 1 and whole["own_share"] < 0.9 and whole["outside"] == 0 < whole["inside"]
    slices = [c05_slices.slice_gradients(sliced_layer(), x, head, random) for head in range(3)]
    assert all(head["reached"] == pytest.approx(1 / 3) and head["own_share"] == 1 for head in slices)
    figures = {"untrained": [slices], "minilm": [slices]}
    assert c05_slices.verdicts(figures)[0].word == HOLDS
    assert c05_slices.verdicts({"untrained": [[whole]], "minilm": [[whole]]})[0].word == NOT
    leaky = whole | {"outside": 0.1}
    assert c05_slices.verdicts({"untrained": [[leaky]], "minilm": [[whole]]})[1].word == NOT


# --- cards ---


def test_expert_verdicts_change_with_the_figures_of_the_cards() -> None:
    figures = c12_cards.run(Lab(TINY))
    assert [verdict.word for verdict in c12_cards.verdicts(figures)] == [HOLDS, NOT, NOT]
    assert figures["cards"]["mixtral-8x7b"]["experts"] == 8 and not figures["cards"]["bert-base"]["experts"]
    grown = figures["cards"]["mixtral-8x7b"]["parameters"] | {"attention": 7, "ffn": 10**12}
    confused = figures | {"twice_the_experts": figures["twice_the_experts"] | {"parameters": grown}}
    assert c12_cards.verdicts(confused)[2].word == HOLDS
    reading = figures | {"running": figures["running"] | {"beside": 0.1}}
    assert c12_cards.verdicts(reading)[1].word == HOLDS
    assert c12_cards.verdicts(figures | {"built": 12})[0].word == NOT


# --- depth ---


def model(local: list[float], syntactic: list[float], abstract: list[float]) -> dict[str, Any]:
    names = [*c11_depth.SYNTACTIC[: len(syntactic)], *c11_depth.ABSTRACT[: len(abstract)]]
    rows = {name: {"depth": depth, "found": True} for name, depth in zip(names, syntactic + abstract, strict=True)}
    stats = {"local": local, "low": local, "high": local, "equal_local": [0.1], "tokens": 7, "corpus": "words"}
    return {"local": stats, "relations": rows, "layers": 6}


def test_depth_verdicts_are_given_per_model_and_combined() -> None:
    early = model([0.6, 0.6, 0.1, 0.1, 0.2, 0.2], [0.0, 0.1, 0.2, 0.2], [0.8, 0.9, 1.0, 1.0])
    late = model([0.1, 0.1, 0.1, 0.1, 0.2, 0.2], [0.8, 0.9, 1.0, 1.0], [0.0, 0.1, 0.2, 0.2])
    words = [[verdict.word for verdict in c11_depth.verdicts(figures)] for figures in ({"a": early}, {"b": late})]
    assert words == [[HOLDS] * 3, [NOT] * 3]
    assert [str(verdict) for verdict in c11_depth.verdicts({"a": early, "b": late})] == [
        "holds only if the model is a"
    ] * 3
    first_verdict = c11_depth.verdicts({"a": early, "b": late | {"local": None}})[0]
    assert first_verdict.word == HOLDS and first_verdict.because.endswith("No atlas of b is bundled.")
    few = model([0.2] * 6, [0.0, 0.1], [0.9])
    assert [verdict.word for verdict in c11_depth.verdicts({"c": few})] == [NOT, CANNOT_TELL, CANNOT_TELL]


def test_chance_is_the_share_of_all_labellings() -> None:
    assert c11_depth.by_chance([1.0, 0.9], [0.0, 0.1, 0.2]) == pytest.approx(1 / 10)
    assert c11_depth.by_chance([0.0], [1.0, 1.0]) == 1


def test_depth_verdicts_say_which_models_texts_or_relations_they_need() -> None:
    between = model([0.13, 0.13, 0.1, 0.1, 0.1, 0.1], [0.0, 0.5, 1.0, 0.5], [0.1, 0.5, 1.0, 0.5])
    near, _, abstract = c11_depth.verdicts({"a": between})
    assert near.needs == "other models than a: it lies between 1 and 1.5 times, and more texts will not change that"
    count = c11_depth.relations_needed([0.1, 0.5, 1.0, 0.5], [0.0, 0.5, 1.0, 0.5])
    assert abstract.needs.startswith(f"about {count} relations of each kind that a follows, and not 4 and 4")
    between["local"] |= {"low": [0.09] * 6, "high": [0.2] * 6}
    assert c11_depth.verdicts({"a": between})[0].needs.startswith("more texts for a")


def test_four_times_the_variance_needs_four_times_the_relations() -> None:
    narrow, wide = ([0.5 - spread, 0.5, 0.5 + spread] for spread in (0.1, 0.2))
    few, many = (c11_depth.relations_needed(depths, depths) for depths in (narrow, wide))
    assert 4 * (few - 1) < many <= 4 * few
    half_width = 1.96 * (2 * 0.1**2 / few) ** 0.5
    assert half_width <= c11_depth.DEEPER / 2 < 1.96 * (2 * 0.1**2 / (few - 1)) ** 0.5


# --- attribution and patching ---


def agreement(**intervals: tuple[float, float]) -> list[Verdict]:
    rows = {
        name: {
            "prompts": 16,
            **{
                measure: {"correlation": sum(ends) / 2, "low": ends[0], "high": ends[1], "top": 7}
                for measure in c13_attribution.MEASURES
            },
        }
        for name, ends in intervals.items()
    }
    return c13_attribution.verdicts({"pairs": 16, "tasks": rows})


def test_agreement_of_rankings_is_judged_by_the_interval_of_every_task() -> None:
    assert agreement(ioi=(0.85, 0.95), successor=(0.8, 0.9))[0].word == HOLDS
    assert agreement(ioi=(0.3, 0.7), successor=(0.5, 0.79))[0].word == NOT
    some = agreement(ioi=(0.85, 0.95), successor=(0.3, 0.5))[1]
    assert (some.word, some.only_if) == (ONLY_IF, "the task is ioi")
    unclear = agreement(ioi=(0.85, 0.95), successor=(0.7, 0.9))[0]
    assert unclear.word == CANNOT_TELL and "successor" in unclear.needs


def test_rankings_of_real_heads_are_compared_with_exact_patching() -> None:
    figures = c13_attribution.run(Lab(TINY))
    (row,) = figures["tasks"].values()
    assert row["prompts"] == 2 and len(row["strongest"]) == c13_attribution.TOP
    for measure in c13_attribution.MEASURES:
        assert -1 <= row[measure]["correlation"] <= 1
    assert c13_attribution.tables(figures) and c13_attribution.charts(figures)
