"""Each verdict on invented figures: which measurements lead to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headwise.lab.claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF
from headwise.lab.claims import c03_one_head as c03
from headwise.lab.claims import c04_heads_against_size as c04
from headwise.lab.claims import c06_specialise as c06
from headwise.lab.claims import c07_output as c07
from headwise.lab.claims import c08_removing as c08
from headwise.lab.claims import c09_scale as c09
from headwise.lab.claims import c10_shared_keys as c10


def words(verdicts: list[Any]) -> list[str]:
    return [verdict.word for verdict in verdicts]


def one_head(single: list[float], longer: list[float], enough: list[float]) -> dict[str, Any]:
    return {
        "accuracy": {"1": single, "2": single, "4": enough, "8": enough},
        "accuracy_one_head_longer": longer,
        "accuracy_one_relation": [1.0, 1.0],
        "averaging": 0.3,
        "weights_of_one_head": [[0.4, 0.3, 0.2, 0.1]],
        "left_by_one_head": {str(k): c03.left_by_one_head(k) for k in (1, 2, 4, 8)},
        "pointing": {"1": 0.06, "2": 1.0},
        "off_by": {str(d): c03.off_by(32, d, 0) for d in (8, 16, 31)},
    }


@pytest.mark.parametrize(
    ("one", "longer", "enough", "want"),
    [
        ([0.30, 0.31], [0.32, 0.33], [0.99, 0.98], [HOLDS, HOLDS]),
        ([0.70, 0.80], [0.82, 0.83], [0.99, 0.98], [NOT, HOLDS]),
        ([0.70, 0.80], [0.96, 0.97], [0.99, 0.98], [NOT, ONLY_IF]),
        ([0.96, 0.97], [0.96, 0.97], [0.99, 0.98], [NOT, NOT]),
        ([0.80, 0.97], [0.96, 0.97], [0.99, 0.98], [NOT, ONLY_IF]),
        ([0.80, 0.97], [0.90, 0.97], [0.99, 0.98], [NOT, CANNOT_TELL]),
        ([0.33, 0.80], [0.80, 0.80], [0.99, 0.98], [CANNOT_TELL, HOLDS]),
        ([0.30, 0.31], [0.32, 0.33], [0.50, 0.98], [CANNOT_TELL, CANNOT_TELL]),
    ],
)
def test_one_head_verdicts_follow_the_accuracies(
    one: list[float], longer: list[float], enough: list[float], want: list[str]
) -> None:
    assert words(c03.verdicts(one_head(one, longer, enough))) == [*want, NOT, HOLDS]


def test_exact_figures_of_one_head_match_their_formulas() -> None:
    assert c03.left_by_one_head(1) == pytest.approx(0, abs=1e-12)
    assert [c03.left_by_one_head(k) for k in (2, 4, 8)] == pytest.approx([1 / 2, 3 / 4, 7 / 8])
    assert c03.pointing(31, 2, 5) == 1 and c03.pointing(31, 1, 5) <= 2 / 31
    assert c03.off_by(13, 12, 1) < 1e-12 < c03.off_by(13, 11, 1)
    assert c03.averaging(2, 3) == pytest.approx((2 * 1 / 3 + 1 * 2 / 3) / 2)  # two of three symbols: equal or not


def sweep(loss: dict[str, list[float]], blind: float = 3.0) -> dict[str, Any]:
    return {"loss": loss, "accuracy": loss, "blind": [blind, blind], "learned": True}


GOOD, BAD = [1.0, 1.1], [2.0, 2.1]
HILL = {"1": BAD, "8": GOOD, "64": [2.9, 2.95]}
SLOPE = {"1": GOOD, "8": BAD, "64": [2.5, 2.4]}
FLAT = {"1": [1.2, 1.0], "8": [1.0, 1.1], "64": [1.3, 1.2]}


@pytest.mark.parametrize(
    ("relations", "text", "want"),
    [
        (HILL, HILL, [HOLDS, HOLDS, ONLY_IF]),
        (FLAT, FLAT, [NOT, CANNOT_TELL, CANNOT_TELL]),
        (SLOPE, SLOPE, [CANNOT_TELL, NOT, CANNOT_TELL]),
        (HILL, SLOPE, [CANNOT_TELL, ONLY_IF, CANNOT_TELL]),
        (HILL, FLAT, [ONLY_IF, CANNOT_TELL, CANNOT_TELL]),
    ],
)
def test_head_count_verdicts_follow_the_losses(
    relations: dict[str, Any], text: dict[str, Any], want: list[str]
) -> None:
    figures = {"tasks": {"relations": sweep(relations), "text": sweep(text)}, "survey": {"sizes": {"64": 3, "128": 1}}}
    assert words(c04.verdicts(figures)) == want
    figures["tasks"]["text"]["learned"] = False
    assert set(words(c04.verdicts(figures))) == {CANNOT_TELL}


def test_the_survey_reads_the_published_shapes() -> None:
    survey = c04.survey()
    assert survey["famous"]["bert-base"] == {"width": 768, "heads": 12, "kv": 12, "dim": 64}
    assert survey["sizes"][64] > 200 and survey["counts"][12] > 100


def specialise(**changes: Any) -> dict[str, Any]:
    return {
        "learned": True,
        "before": [0.01, 0.02],
        "after": [0.3, 0.4],
        "between": {"any": [0.4], "same number": [0.41], "matched": [0.1]},
        "twins": {"all equal": [0.0, 0.0], "W_O differs": [0.1, 0.2], "all equal, dropout 0.1": [0.1, 0.3]},
        "atlas": [[["0.1", "previous", 0.8]], [["0.3", "previous", 0.7], ["1.0", "self", 0.6]]],
    } | changes


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, [HOLDS, HOLDS, HOLDS, ONLY_IF]),
        ({"after": [0.01, 0.02]}, [NOT, HOLDS, HOLDS, ONLY_IF]),
        ({"before": [0.2, 0.2]}, [CANNOT_TELL, HOLDS, HOLDS, ONLY_IF]),
        (
            {"between": {"any": [0.4, 0.4], "same number": [0.1, 0.1], "matched": [0.1, 0.3]}},
            [HOLDS, NOT, CANNOT_TELL, ONLY_IF],
        ),
        ({"between": {"any": [0.4], "same number": [0.4], "matched": [0.3]}}, [HOLDS, HOLDS, NOT, ONLY_IF]),
        ({"twins": {"all equal": [0.0, 0.2], "W_O differs": [0.1, 0.2]}}, [HOLDS, HOLDS, HOLDS, NOT]),
        ({"twins": {"all equal": [0.0, 0.0], "W_O differs": [0.0, 0.0]}}, [HOLDS, HOLDS, HOLDS, HOLDS]),
        ({"learned": False}, [CANNOT_TELL, CANNOT_TELL, CANNOT_TELL, ONLY_IF]),
    ],
)
def test_specialisation_verdicts_follow_the_distances(changes: dict[str, Any], want: list[str]) -> None:
    assert words(c06.verdicts(specialise(**changes))) == want


def test_roles_common_to_all_starts_are_named() -> None:
    assert "every run has a head with the atlas's role 'previous'" in c06.verdicts(specialise())[2].because
    assert "No role" in c06.verdicts(specialise(atlas=[[["0.1", "previous", 0.8]], []]))[2].because


def test_heads_are_matched_by_the_best_permutation() -> None:
    table = np.array([[0.9, 0.1, 0.8], [0.2, 0.9, 0.9], [0.9, 0.9, 0.3]])
    assert c06.matched_distance(table) == pytest.approx(0.2)


def output(**changes: Any) -> dict[str, Any]:
    losses = {"intact": 1.0, "collapsed": 1.5, "retrained": 1.1, "intact_retrained": 1.0, "layer": 0, "head": 1}
    return {
        "gradients": {
            "with W_O": {"before": 0.0, "after": 0.4, "end": 0.5},
            "without": {"before": 0.0, "after": 0.0, "end": 0.3},
        },
        "scalars": 1e-16,
        "ranks": [4.0, 5.0],
        "loss": [1.0, 1.0],
        "loss_without": [1.1, 1.2],
        "learned": True,
        "collapsed": [losses, losses],
    } | changes


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, [ONLY_IF, HOLDS, NOT, HOLDS]),
        ({"loss_without": [1.001, 1.002]}, [ONLY_IF, NOT, NOT, HOLDS]),
        ({"loss_without": [1.001, 1.2]}, [ONLY_IF, CANNOT_TELL, NOT, HOLDS]),
        ({"learned": False}, [ONLY_IF, CANNOT_TELL, NOT, CANNOT_TELL]),
        ({"scalars": 0.1}, [ONLY_IF, HOLDS, CANNOT_TELL, HOLDS]),
    ],
)
def test_w_o_verdicts_follow_the_losses(changes: dict[str, Any], want: list[str]) -> None:
    assert words(c07.verdicts(output(**changes))) == want


@pytest.mark.parametrize(
    ("retrained", "want"), [(1.1, HOLDS), (1.45, NOT), (1.35, ONLY_IF), ((1.1, 1.45), CANNOT_TELL)]
)
def test_collapsed_head_verdict_follows_the_loss_after_retraining(retrained: Any, want: str) -> None:
    ends = retrained if isinstance(retrained, tuple) else (retrained, retrained)
    collapsed = [output()["collapsed"][0] | {"retrained": end} for end in ends]
    assert c07.verdicts(output(collapsed=collapsed))[3].word == want


def test_heads_meet_verdict_follows_the_gradients() -> None:
    leaking = output()["gradients"]
    leaking["with W_O"]["before"] = 0.1
    assert c07.verdicts(output(gradients=leaking))[0].word == NOT
    unmixed = output()["gradients"]
    unmixed["without"]["end"] = 0.0
    assert c07.verdicts(output(gradients=unmixed))[0].word == HOLDS


def test_gradients_between_heads_are_zero_before_w_o() -> None:
    gradients = c07.gradients(seed=5)
    assert gradients["with W_O"]["before"] == 0 and gradients["without"]["after"] == 0
    assert gradients["with W_O"]["after"] > 0.01 and gradients["without"]["end"] > 0.01


UNHARMED, HALF_HARMED, ALL_HARMED = [0.0] * 6, [0.0] * 3 + [0.1] * 3, [0.1] * 6


@pytest.mark.parametrize(
    ("small", "real", "back", "want"),
    [
        ([UNHARMED, UNHARMED], [UNHARMED], 1.001, [HOLDS, HOLDS]),
        ([ALL_HARMED, HALF_HARMED], [HALF_HARMED], 1.1, [NOT, NOT]),
        ([ALL_HARMED, HALF_HARMED], [UNHARMED], 1.001, [ONLY_IF, HOLDS]),
        ([ALL_HARMED, UNHARMED], [UNHARMED], 1.001, [CANNOT_TELL, HOLDS]),
    ],
)
def test_removal_verdicts_follow_the_damage(small: list[Any], real: list[Any], back: float, want: list[str]) -> None:
    figures = {
        "learned": True,
        "small": [{"michel": [row], "random": [[0.2] * 6]} for row in small],
        "real": {"minilm": {"michel": real, "random": [[0.2] * 6]}},
        "retrained": [{"intact": 1.0, "half": back}] * 2,
    }
    assert words(c08.verdicts(figures)) == [*want, HOLDS]
    figures["small"][0]["random"] = [[-0.1] * 6]
    assert c08.verdicts(figures)[2].word == CANNOT_TELL
    figures["small"][1]["random"] = figures["real"]["minilm"]["random"] = [[-0.1] * 6]
    assert c08.verdicts(figures)[2].word == NOT
    figures["learned"] = False
    assert set(words(c08.verdicts(figures))) == {CANNOT_TELL}


def test_removable_share_stops_at_the_first_damage() -> None:
    assert c08.removable([[0.0, 0.005, 0.02, 0.0, 0.0, 0.0]]) == 0.25
    assert c08.removable([[0.02] * 6]) == 0


def scaled(unit: float, small: float, worse: dict[int, list[float]], entropy: float = 0.4) -> dict[str, Any]:
    start = {
        "unit variance, with 1/√d_k": 0.9,
        "unit variance, without 1/√d_k": unit,
        "weights of std 0.02, with 1/√d_k": 0.9,
        "weights of std 0.02, without 1/√d_k": small,
    }
    trained = {}
    for d, losses in worse.items():
        base = {"d_k": d, "learned": True, "entropy": [0.5, 0.5]}
        trained[f"{d} True"] = base | {"scaled": True, "loss": [1.0, 1.0]}
        trained[f"{d} False"] = base | {"scaled": False, "loss": losses, "entropy": [entropy, entropy]}
    return {"at_start": {name: {"64": {"gradient": x}} for name, x in start.items()}, "trained": trained}


@pytest.mark.parametrize(
    ("figures", "want"),
    [
        (scaled(0.3, 0.8, {8: [1.1, 1.2], 64: [1.1, 1.2]}), [ONLY_IF, HOLDS, NOT]),
        (scaled(0.3, 0.3, {8: [1.0, 1.0], 64: [1.1, 1.2]}), [HOLDS, ONLY_IF, NOT]),
        (scaled(0.8, 0.8, {8: [1.0, 1.0], 64: [1.0, 1.0]}, entropy=0.1), [NOT, NOT, HOLDS]),
        (scaled(0.3, 0.8, {8: [1.0, 1.1], 64: [1.1, 1.2]}), [ONLY_IF, CANNOT_TELL, NOT]),
    ],
)
def test_scale_verdicts_follow_gradients_losses_and_entropies(figures: dict[str, Any], want: list[str]) -> None:
    assert words(c09.verdicts(figures)) == want


def shared(losses: dict[int, list[float]], speed: list[float], cache: int = 256) -> dict[str, Any]:
    quality = {
        str(kv): {"loss": values, "learned": True, "cache": kv * cache, "parameters": 1}
        for kv, values in losses.items()
    }
    return {"quality": quality, "speed": {str(100 * 4**i): {"8": x, "1": 1.0} for i, x in enumerate(speed)}}


EQUAL, HIGHER, MIXED = [1.0, 1.0], [1.1, 1.1], [1.0, 1.1]


@pytest.mark.parametrize(
    ("losses", "speed", "want"),
    [
        ({8: EQUAL, 4: EQUAL, 2: EQUAL, 1: HIGHER}, [1.5, 2.0], [HOLDS, HOLDS, HOLDS, HOLDS]),
        ({8: EQUAL, 4: EQUAL, 2: HIGHER, 1: EQUAL}, [1.0, 2.0], [ONLY_IF, NOT, HOLDS, ONLY_IF]),
        ({8: EQUAL, 4: HIGHER, 2: HIGHER, 1: MIXED}, [1.0, 1.0], [NOT, CANNOT_TELL, HOLDS, NOT]),
        ({8: EQUAL, 4: MIXED, 2: EQUAL, 1: HIGHER}, [1.5, 1.0], [CANNOT_TELL, HOLDS, HOLDS, CANNOT_TELL]),
    ],
)
def test_shared_key_verdicts_follow_losses_cache_and_speed(
    losses: dict[int, list[float]], speed: list[float], want: list[str]
) -> None:
    assert words(c10.verdicts(shared(losses, speed))) == want
    figures = shared(losses, speed)
    figures["quality"]["1"]["cache"] += 4
    figures["quality"]["8"]["learned"] = False
    assert words(c10.verdicts(figures))[:3] == [CANNOT_TELL, CANNOT_TELL, NOT]
