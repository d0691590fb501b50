"""Plan as data: it is read, printed and compared without torch and without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headwise import HeadwiseError
from headwise.plans import Plan

LAYERS = (("self", 0, 6, 2), ("self", 1, 6, 2))


def test_plans_do_not_import_torch() -> None:
    code = "import sys, headwise; headwise.Plan({}, ()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_prints_the_heads_of_every_layer() -> None:
    assert str(Plan({0: [1, 5]}, LAYERS, notes=("a note",))).splitlines() == [
        "remove 2 of 12 heads (by hand, budget: heads)",
        "           0  █·█ ██·  4 of 6",
        "           1  ███ ███  6 of 6",
        "a note",
    ]


def test_diff_lists_the_heads_that_only_one_plan_removes() -> None:
    first, second = Plan({0: [1, 5], 1: [2]}, LAYERS), Plan({0: [1, 3], 1: [2]}, LAYERS)
    assert first.diff(second) == "- layer 0: 5\n+ layer 0: 3"
    assert first.diff(first) == "the same heads"


def test_a_plan_for_other_layers_is_refused() -> None:
    plan = Plan({0: [1]}, LAYERS)
    plan.check_layers(LAYERS, "BertModel")
    with pytest.raises(
        HeadwiseError, match=r"another model: 2 layers of 6 heads, but BertModel has 1 layers of 5 heads"
    ):
        plan.check_layers((("self", 0, 5, 5),), "BertModel")
