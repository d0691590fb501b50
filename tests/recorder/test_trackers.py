"""TensorBoard and Weights & Biases: what they are given, and that neither is imported."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

from headwise import Recorder
from headwise.recorder.trackers import head_maps, scalars
from helpers.training import batches, log_entry, logged_layers, small_gpt2, train


class Writer:
    """What a SummaryWriter has."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.images: dict[tuple[str, int], Any] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_image(self, tag: str, img_tensor: Any, global_step: int, dataformats: str = "CHW") -> None:
        assert dataformats == "HWC"
        self.images[tag, global_step] = img_tensor


def test_tensorboard_gets_scalars_and_a_picture_of_every_statistic() -> None:
    model, writer = small_gpt2(), Writer()
    with Recorder(model, every=2, path=None, writer=writer) as recorder:
        train(model, batches(2))
    entry = recorder.entry
    assert entry is not None
    entropies = [x for values in entry.values.values() for x in values["entropy"]]
    assert writer.scalars["headwise/entropy/min", 2] == min(entropies)
    assert writer.scalars["headwise/entropy/self.1", 2] == pytest.approx(np.mean(entry.values["self", 1]["entropy"]))
    assert ("headwise/max_logit/max", 1) in writer.scalars and writer.scalars["headwise/alarms", 2] == 0
    picture = writer.images["headwise/entropy/self heads", 2]
    assert picture.dtype == np.uint8 and picture.shape == (2 * 16, 3 * 16, 3)


class Run:
    """What an active run has."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, data: dict[str, Any], commit: bool = True) -> None:
        assert not commit, "it would advance the step of the training loop's own logs"
        self.logged.append(data)


@pytest.mark.parametrize(("active", "wanted", "count"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_an_active_run_of_wandb_gets_the_same(
    active: bool, wanted: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    package = types.SimpleNamespace(run=run if active else None, Image=lambda picture: ("image", picture.shape))
    monkeypatch.setitem(sys.modules, "wandb", package)
    model = small_gpt2()
    with Recorder(model, path=None, wandb=wanted):
        train(model, batches(1))
    assert len(run.logged) == count
    if count:
        [data] = run.logged
        assert data["headwise/step"] == 1 and data["headwise/entropy/self heads"] == ("image", (32, 48, 3))
        assert data["headwise/first/mean"] > 0


def test_trackers_are_not_imported() -> None:
    code = "import sys, headwise.recorder.recorder; print([x for x in sys.modules if x in ('wandb', 'tensorboard')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_numbers_that_are_not_finite_are_left_out() -> None:
    entry = log_entry(3, entropy=[np.nan, 2.0, 4.0], twin=[np.nan] * 3)
    numbers = scalars(entry)
    assert numbers["headwise/entropy/self.0"] == 3.0 and "headwise/twin/self.0" not in numbers
    picture = head_maps(entry, logged_layers())["headwise/entropy/self heads"]
    assert (picture[:16, :16] == 128).all() and not (picture[:16, 16:32] == 128).all()


def test_a_larger_value_is_lighter() -> None:
    picture = head_maps(log_entry(3, first=[0.0, 0.5, 1.0]), logged_layers())["headwise/first/self heads"]
    lightness = [int(picture[0, head * 16].sum()) for head in range(3)]
    assert lightness == sorted(lightness) and lightness[0] < lightness[2]
