"""Atlas as a value: it loads without torch, prints, exports and compares; similarity of heads."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise
from headwise.roles.atlas.bundled import NAMES, bundled_atlas
from headwise.roles.atlas.checkpoint import save_tallies
from headwise.roles.atlas.file_format import SUMS
from headwise.roles.atlas.from_sums import is_from_sums
from headwise.roles.atlas.similarity import HeadSimilarity, head_similarity
from headwise.roles.atlas.stability import measure_stability
from helpers.role_heads import HEADS, VOCABULARY, circuit, encoder, texts, tokenizer


@pytest.fixture(scope="module")
def atlas() -> headwise.Atlas:
    return headwise.atlas(encoder(np.arange(len(VOCABULARY))), texts(53), tokenizer(), name="built by hand")


def test_a_saved_atlas_opens_without_torch(atlas: headwise.Atlas, tmp_path: Path) -> None:
    atlas.save(tmp_path / "a.json", sums=True)
    script = """
import sys
for name in ("torch", "transformers", "pandas", "matplotlib", "rich", "typer"):
    sys.modules[name] = None
import headwise
atlas = headwise.Atlas.load(sys.argv[1])
print(len(atlas.roles), atlas.scores["previous"]["self"].shape, atlas.tally is not None)
atlas.to_csv(sys.argv[2])
print(atlas)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.json"), str(tmp_path / "a.csv")],
        capture_output=True, text=True, env=dict(os.environ), check=False,
    )  # fmt: skip
    assert run.stderr == ""
    first, *rest = run.stdout.splitlines()
    assert first == f"{len(atlas.roles)} (1, {len(HEADS)}) True"
    assert "\n".join(rest) == str(atlas)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[0] == "kind,layer,head,original,score,value,low,high,spread,baseline"
    assert len(lines) == 1 + len(atlas.scores) * len(HEADS)


def test_an_atlas_with_names_that_are_not_utf_8_is_saved_and_loaded(atlas: headwise.Atlas, tmp_path: Path) -> None:
    """A file name of undecodable bytes, which Python has as lone surrogates."""
    named = dataclasses.replace(atlas, about={**atlas.about, "model": "a\udcff\x1b b"})
    named.save(tmp_path / "a.json", sums=True)
    assert headwise.Atlas.load(tmp_path / "a.json").model == named.model


def test_a_loaded_atlas_equals_the_saved_one(atlas: headwise.Atlas, tmp_path: Path) -> None:
    atlas.save(tmp_path / "a.json")
    loaded = headwise.Atlas.load(tmp_path / "a.json")
    assert [role[:4] for role in loaded.roles] == [role[:4] for role in atlas.roles]
    assert loaded.to_json() == atlas.to_json()
    assert loaded.tally is None
    with pytest.raises(headwise.HeadwiseError, match="merging needs the sums behind an atlas; save it with sums=True"):
        loaded.merge(atlas)
    with pytest.raises(headwise.HeadwiseError, match="opened without its sums; they cannot be saved"):
        loaded.save(tmp_path / "b.json", sums=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "this is no atlas"),
        ("[1]", "this is no atlas"),
        ("{", "no atlas: it is not JSON"),
        ('{"headwise": "atlas", "format": 9}', "this atlas's format 9 is newer than this headwise, which reads 1"),
        ('{"headwise": "atlas", "format": 1, "scores": 3}', "this atlas is damaged"),
    ],
)
def test_loading_refuses_a_file_that_is_no_atlas(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(headwise.HeadwiseError, match=rf"a\.json' .*{message}"):
        headwise.Atlas.load(tmp_path / "a.json")
    with pytest.raises(headwise.HeadwiseError, match="cannot be read: No such file"):
        headwise.Atlas.load(tmp_path / "b.json")


def change_value(data: Any, path: str, value: Any) -> Any:
    """A copy of JSON with one value replaced, or removed where the value is Ellipsis."""
    data = copy.deepcopy(data)
    *way, last = path.split("/")
    node = data
    for step in way:
        node = node[int(step)] if isinstance(node, list) else node[step]
    if value is ...:
        del node[last]
    else:
        node[int(last) if isinstance(node, list) else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model", 7, "model must be a text, got 7"),
        ("layers", [], r"layers must be an object, got \[\]"),
        ("layers", {}, "layers, heads and ways must be of the same kinds of attention"),
        ("layers/self", [-1], r"layers.self\[0\] must be a whole number from 0 on, got -1"),
        ("layers/self", [0, 0], "layers of 'self' must be different numbers in order, with heads for each"),
        ("heads/self", [[0, 1]], "must have the shape"),
        ("heads/self/0", [], r"heads.self\[0\] has no heads"),
        ("heads/self/0/3", True, "must be a whole number from 0 on, got True"),
        ("ways/self", "sideways", "'self' must attend one of both ways, causal, cross, got 'sideways'"),
        ("scores/entropy/self/score/0/2", "much", "must be a finite number, got 'much'"),
        ("scores/entropy/self/score/0/2", 1e999, "must be a finite number, got inf"),
        ("scores/entropy/self/low", [], r"entropy self low must have the shape \(1, 7\)"),
        ("scores/entropy/self/baseline", [1.0, 2.0], r"entropy self baseline must have the shape \(1,\)"),
        ("scores/entropy/self/high", ..., "'high' is missing"),
        ("scores/entropy/elsewhere", {}, "'elsewhere' is missing"),
        ("about", None, "about must be an object, got None"),
        ("about/texts", ..., "'texts' is missing"),
        ("about/tokens", "7", "tokens must be a whole number from 0 on, got '7'"),
        ("about/notes", [7], r"notes\[0\] must be a text, got 7"),
        ("relations", {"format": "headwise relations 1"}, "these relations are damaged: 'heads' is missing"),
        ("relations", 7, "these are no relations: their format is 7"),
    ],
)
def test_loading_refuses_a_damaged_atlas_with_its_reason(
    atlas: headwise.Atlas, path: str, value: Any, message: str
) -> None:
    data = json.loads(json.dumps(atlas.to_json()))
    assert headwise.Atlas.from_json(data).to_json() == data
    with pytest.raises(headwise.HeadwiseError, match=message) as caught:
        headwise.Atlas.from_json(change_value(data, path, value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, r"it is not JSON \(its JSON is nested too deeply\)"),
        ('{"headwise": NaN}', r"it is not JSON \(NaN is not JSON\)"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("7" * 5000, "it is not JSON"),
        ("", "it is not JSON"),
    ],
)
def test_loading_refuses_json_that_is_nested_too_deeply_or_not_finite(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(headwise.HeadwiseError, match=message):
        headwise.Atlas.load(tmp_path / "a.json")


def test_loading_refuses_the_sums_of_another_atlas(tmp_path: Path, atlas: headwise.Atlas) -> None:
    assert atlas.tally is not None
    atlas.save(tmp_path / "a.json", sums=True)
    assert headwise.Atlas.load(tmp_path / "a.json").tally is not None
    assert is_from_sums(atlas, atlas.tally, [atlas.repetition])
    other = copy.deepcopy(atlas.tally)
    next(iter(other.sums.values())).top[2] *= 1.5
    save_tallies(tmp_path / f"a.json{SUMS}", {"tally": other, "probe": atlas.repetition}, {})
    with pytest.raises(headwise.HeadwiseError, match="holds the sums of another atlas than .*a.json'; remove it"):
        headwise.Atlas.load(tmp_path / "a.json")
    atlas.save(tmp_path / "a.json")  # without sums: those of before do not stay beside it
    assert headwise.Atlas.load(tmp_path / "a.json").tally is None


def test_an_atlas_prints_as_a_table_by_role(atlas: headwise.Atlas) -> None:
    shown = str(atlas)
    assert shown.startswith("built by hand: 7 heads (1 layers, both ways); 53 texts")
    assert "previous        1  0.0 0.9" in shown
    assert "none; nearest is" in shown  # a role that no head has
    assert "of the 7 heads have no clean role.\n29% attend only to sinks: the first token" in shown


def test_heads_are_found_in_any_spelling_and_rows_name_each_once(atlas: headwise.Atlas) -> None:
    assert len(atlas) == len(list(atlas)) == 7
    assert (
        atlas.roles_of("0.3") == atlas.roles_of((0, 3)) == atlas.roles_of(("self", 0, 3)) == atlas.roles_of("self 0.3")
    )
    with pytest.raises(headwise.HeadwiseError, match="there is no head"):
        atlas.roles_of("0.7")
    with pytest.raises(headwise.HeadwiseError, match="a head is written layer.head, such as 3.1, got 'x'"):
        atlas.roles_of("x")
    with pytest.raises(headwise.HeadwiseError, match="there is no role 'nosy'; there are previous"):
        atlas.heads_with("nosy")


def test_frames_and_parquet_have_every_number(atlas: headwise.Atlas, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is in the test extra")
    frame = atlas.frame()
    assert frame.loc[("self", 0, 0), "previous"] == pytest.approx(atlas.scores["previous"]["self"][0, 0], abs=1e-4)
    assert len(frame) == 7 and set(frame.columns) == set(atlas.scores)
    assert list(atlas.roles_frame()["role"]) == [role.role for role in atlas.roles]
    atlas.to_parquet(tmp_path / "a.parquet")
    assert len(pandas.read_parquet(tmp_path / "a.parquet")) == 7 * len(atlas.scores)


def test_without_pandas_the_error_names_the_package(atlas: headwise.Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(headwise.HeadwiseError, match=r"DataFrames need pandas: pip install 'headwise\[tables\]'"):
        atlas.frame()


def test_diff_lists_roles_gained_and_lost(atlas: headwise.Atlas) -> None:
    corpus = texts(53)
    other = encoder(np.arange(len(VOCABULARY)))
    width = other.config.hidden_size // len(HEADS)
    attention = other.encoder.layer[0].attention.self
    for projection in (attention.query, attention.key):  # the head after "previous" becomes what that one is
        projection.weight[width : 2 * width] = projection.weight[:width]
        projection.bias[width : 2 * width] = projection.bias[:width]
    changes = atlas.diff(headwise.atlas(other, corpus, tokenizer(), name="changed"))
    assert [(role.name, role.role) for role in changes.gained] == [("0.1", "previous")]
    assert [(role.name, role.role) for role in changes.lost] == [("0.1", "next")]
    assert {change.head for change in changes.moved} == {1}
    assert "+ 0.1 previous" in str(changes) and "- 0.1 next" in str(changes)
    assert json.loads(json.dumps(changes.to_json()))["gained"][0]["role"] == "previous"
    no_changes = atlas.diff(atlas)
    assert (no_changes.gained, no_changes.lost, no_changes.moved, no_changes.gone) == ([], [], [], [])
    assert len(no_changes.kept) == len(atlas.roles)


def test_stability_of_two_corpora(atlas: headwise.Atlas) -> None:
    other = headwise.atlas(encoder(np.arange(len(VOCABULARY))), texts(61, seed=7), tokenizer())
    result = measure_stability(atlas, other)
    assert result.labels > 0.8 and result.roles > 0.8 and result.correlation["previous"] > 0.7
    assert "of the heads have the same roles" in str(result)
    with pytest.raises(headwise.HeadwiseError, match="not of the same heads"):
        measure_stability(atlas, headwise.atlas(circuit(), texts(7), tokenizer(around=False)))


def test_similarity_is_the_jensen_shannon_divergence_of_rows() -> None:
    """Against the definition, on all queries of one text."""
    import torch

    torch.manual_seed(0)
    model, words = circuit(), tokenizer(around=False)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.normal_(0, 0.2)
    [text] = texts(1)
    [similarity] = head_similarity(model, [text], words, queries=1000).values()
    ids = torch.tensor([words(text)["input_ids"]])
    with torch.no_grad(), headwise.watch(model.transformer, weights=True) as seen:
        model.transformer(ids)
    rows = torch.cat([layer.weights[0] for layer in seen.layers]).double().numpy()  # (N, T, T)

    def entropy(p: Any) -> Any:
        return -(p * np.log(np.where(p > 0, p, 1))).sum(-1)

    for i, j in np.ndindex(4, 4):
        divergence = (entropy((rows[i] + rows[j]) / 2) - (entropy(rows[i]) + entropy(rows[j])) / 2).mean()
        assert similarity.divergence[i, j] == pytest.approx(divergence, abs=1e-6)
    assert similarity.queries == ids.shape[1]
    assert similarity.heads == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_equal_heads_are_in_one_cluster() -> None:
    model = encoder(np.arange(len(VOCABULARY)))
    width = model.config.hidden_size // len(HEADS)
    attention = model.encoder.layer[0].attention.self
    for projection in (attention.query, attention.key):
        projection.weight[-width:] = projection.weight[:width]
    [alike] = head_similarity(model, texts(29), tokenizer()).values()
    assert alike.clusters()[0] == [(0, 0), (0, 6)]
    assert sum(len(group) for group in alike.clusters()) == 7
    assert alike.nearest((0, 0), 1)[0][0] == (0, 6)
    points = alike.map()
    far = np.linalg.norm(points[:, None] - points, axis=-1)
    assert far[0, 6] < 1e-5 < far[0, 1]
    assert 0 < alike.redundancy()[0] < 1
    result = json.loads(json.dumps(alike.to_json()))
    assert result["clusters"] == [["0.0", "0.6"]] and len(result["map"]) == 7
    with pytest.raises(headwise.HeadwiseError, match="there is no head"):
        alike.nearest((9, 9))


def test_the_map_keeps_distances_that_fit_in_a_plane() -> None:
    places = np.random.default_rng(0).normal(size=(11, 2))
    squared = ((places[:, None] - places) ** 2).sum(-1)
    points = HeadSimilarity("self", [(0, i) for i in range(11)], squared, 1).map()
    np.testing.assert_allclose(((points[:, None] - points) ** 2).sum(-1), squared, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_bundled_atlases_load_with_all_their_scores(name: str) -> None:
    atlas = bundled_atlas(name)
    assert atlas is not None and atlas.model == name
    assert atlas.about["texts"] >= 5000 and len(atlas) == {"minilm": 72, "smollm2": 270}[name]
    assert atlas.about["likeness"]["self"]["map"]
    assert bundled_atlas("other") is None


def test_the_bundled_decoder_has_its_probes_with_what_the_model_itself_can_do() -> None:
    atlas = bundled_atlas("smollm2")
    assert atlas is not None
    facts = atlas.about["probes"]
    assert list(facts) == ["retrieval", "streaming", "copying", "successor", "function"]
    assert facts["retrieval"]["prompts"] == 30 and facts["retrieval"]["low"] > 0.5
    assert facts["function"]["accuracy"] > facts["function"]["shuffled"]
    assert {head[:3] for head in atlas.heads_with("induction")} <= {head[:3] for head in atlas.heads_with("retrieval")}
    assert atlas.heads_with("successor") == []  # which docs/atlas.md says too
