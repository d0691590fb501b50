"""Effects: ratios of means, intervals, files and tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import headwise
from headwise import Effects
from headwise.circuits.effects import EffectLayer, EffectsAbout
from headwise.errors import CheckpointError, HeadwiseError
from headwise.ui.overlays import to_overlays


@pytest.fixture
def effects() -> Effects:
    random = np.random.default_rng(0)
    layers = [EffectLayer("self", 0, 3), EffectLayer("self", 1, 2), EffectLayer("cross", 0, 2)]
    examples = [random.normal(size=(11, layer.heads)) for layer in layers]
    about = EffectsAbout("patching", "how", "a metric", 1.5, notes=("a note",), details={"steps": 3})
    return Effects(layers, examples, about, scale=np.linspace(1, 3, 11), rest={"embedding": random.normal(size=11)})


def test_an_effect_is_the_ratio_of_two_means(effects: Effects) -> None:
    assert effects["self"].shape == (2, 3)
    assert np.isnan(effects["self"][1, 2])
    np.testing.assert_allclose(effects["self"][1, :2], effects.examples[1].mean(0) / 2)
    assert effects.rest["embedding"] == pytest.approx(effects.rest_examples["embedding"].mean() / 2)


def test_intervals_contain_the_effects_and_shrink_with_more_prompts(effects: Effects) -> None:
    low, high = effects.interval["self"][:, 0]
    assert ((low < effects["self"][0]) & (effects["self"][0] < high)).all()
    more = Effects(
        effects.layers, [np.tile(rows, (16, 1)) for rows in effects.examples], effects.about,
        scale=np.tile(effects.scale, 16),
    )  # fmt: skip
    assert (np.diff(more.interval["self"], axis=0)[0, 0] < 0.5 * (high - low)).all()


def test_saved_effects_are_the_same_when_loaded(effects: Effects, tmp_path: Path) -> None:
    effects.examples[1][:, 1] = np.nan  # a head that was left out
    effects = Effects(effects.layers, effects.examples, effects.about, scale=effects.scale, rest=effects.rest_examples)
    effects.save(tmp_path / "effects.json")
    loaded = Effects.load(tmp_path / "effects.json")
    for kind in effects:
        np.testing.assert_array_equal(loaded[kind], effects[kind])
        np.testing.assert_array_equal(loaded.interval[kind], effects.interval[kind])
    assert (loaded.about, loaded.rest) == (effects.about, effects.rest)
    assert json.loads((tmp_path / "effects.json").read_text())["format"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "newer than this headwise"),
        ({"headwise": "atlas"}, "is missing"),
        ({"layers": [{"kind": "self", "layer": 0, "heads": 4}] * 3}, "another shape"),
        ({"scale": [1.0]}, "another shape"),
        ({"value": "high"}, "finite number"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(effects: Effects, change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Effects.from_json({**effects.to_json(), **change})


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no table of effects"):
        Effects.load(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a table of effects"):
        Effects.load(tmp_path / "broken.json")


def test_the_strongest_heads_come_first_whatever_their_sign(effects: Effects) -> None:
    strongest = effects.strongest(7)
    sizes = [abs(row.effect) for row in strongest]
    assert len(strongest) == 7
    assert sizes == sorted(sizes, reverse=True)
    assert f"layer {strongest[0].layer} head {strongest[0].head}" in str(effects)


def test_effects_of_other_heads_do_not_correlate(effects: Effects) -> None:
    assert effects.correlation(effects) == pytest.approx(1)
    assert effects.correlation({kind: -table for kind, table in effects.items()}) == pytest.approx(-1)
    with pytest.raises(HeadwiseError, match="of other heads"):
        effects.correlation({"self": np.zeros((2, 2))})


def test_plans_and_the_map_take_effects(effects: Effects) -> None:
    plan = headwise.plan(effects, keep=0.5)
    assert plan.removed == 3
    overlays = to_overlays(effects)
    assert list(overlays.tables) == ["patching"]


def test_a_dataframe_has_one_row_per_head(effects: Effects) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is in the test extra")
    frame = effects.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["kind", "layer", "head", "effect", "low", "high"]
    assert len(frame) == 7
