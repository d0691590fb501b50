"""Scores are found automatically, can be registered from outside, and are held to the facts they state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise
from headwise import HeadwiseError
from headwise.prune import Score, ScoringRun, registry, score
from headwise.prune import scores as bundled
from helpers.prunable_models import build, inputs

FACTS: dict[str, Any] = {
    "signed": False,
    "normalised": False,
    "additive": False,
    "trained": False,
    "runs_model": False,
    "loss": "none",
}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the registry for each test; the bundled scores are in it."""
    monkeypatch.setattr(registry, "_SCORES", dict(registry.scores()))


def layer_index(run: ScoringRun) -> list[np.ndarray]:
    return [np.full((1, len(run.units(layer))), float(layer.index)) for layer in run.layers]


def test_every_module_of_the_scores_package_is_the_score_of_its_name() -> None:
    files = [path.stem for path in Path(bundled.__path__[0]).glob("*.py") if path.stem != "__init__"]
    assert sorted(registry.scores()) == sorted(name.replace("_", "-") for name in files)
    assert all(score.name == name for name, score in registry.scores().items())


@pytest.mark.parametrize("fact", FACTS)
def test_no_fact_about_a_score_can_be_left_out(fact: str) -> None:
    facts = {name: value for name, value in FACTS.items() if name != fact}
    with pytest.raises(TypeError, match=fact):
        score("mine", **facts)
    with pytest.raises(TypeError, match=fact):
        Score(name="mine", function=layer_index, options=(), **facts)


def test_a_decorated_function_is_a_score_everywhere() -> None:
    assert score("layer-index", **FACTS)(layer_index) is layer_index
    scores = headwise.importance(build("llama"), [], "layer-index", unit="kv")
    np.testing.assert_array_equal(scores["self"], [[0, 0], [1, 1], [2, 2]])
    assert headwise.plan(scores, 0.5).score == "layer-index"
    with pytest.raises(HeadwiseError, match="there is no score 'best'; there are .*, layer-index$"):
        headwise.importance(build("llama"), [], "best")


def test_an_additive_score_must_give_one_row_per_example() -> None:
    score("mine", **FACTS | {"additive": True, "runs_model": True})(layer_index)
    with pytest.raises(HeadwiseError, match=r"score 'mine' gave 1 rows for 6 examples; .* say additive=False"):
        headwise.importance(build("bert"), [inputs("bert", seed) for seed in range(2)], "mine")


def test_options_that_a_score_declares_reach_it() -> None:
    received: dict[str, float] = {}

    def reads_options(run: ScoringRun) -> list[np.ndarray]:
        received.update(run.options)
        return layer_index(run)

    score("mine", **FACTS, options=("power",))(reads_options)
    headwise.importance(build("bert"), [], "mine", power=2)
    assert received == {"power": 2}
    with pytest.raises(HeadwiseError, match="mine has no option 'pover'; it has power"):
        headwise.importance(build("bert"), [], "mine", pover=2)


def test_a_name_is_taken_once_unless_the_same_function_comes_again() -> None:
    with pytest.raises(HeadwiseError, match=r"there is a score 'michel' already, headwise\.prune\.scores\.michel\.mi"):
        score("michel", **FACTS)(layer_index)
    score("mine", **FACTS)(layer_index)
    score("mine", **FACTS | {"signed": True})(layer_index)
    assert registry.find_score("mine").signed


def test_an_unknown_use_of_the_loss_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="loss of a score must be one of gradient, damage, none, got 'slope'"):
        score("mine", **FACTS | {"loss": "slope"})(layer_index)


PLUGIN = """
from headwise.prune import score

@score("from-plugin", signed=False, normalised=False, additive=False, trained=False, runs_model=False, loss="none")
def from_plugin(run):
    return []
"""


def test_installed_packages_add_scores_and_a_broken_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package_with_a_score.py").write_text(PLUGIN)
    installed = tmp_path / "plugin-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[headwise.scores]\nworks = package_with_a_score\nfails = package_that_is_missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry._load_plugins.cache_clear()
    with pytest.warns(UserWarning, match=r"'package_that_is_missing' \(entry point 'fails'\) are left out: No module"):
        assert registry.find_score("from-plugin").function([]) == []


def test_the_decorator_is_reached_from_the_root() -> None:
    assert headwise.prune.score is score
