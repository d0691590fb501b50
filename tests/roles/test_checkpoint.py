"""Checkpoints: a damaged file is refused in one line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import headwise
from headwise.roles.atlas import corpus
from headwise.roles.atlas.checkpoint import load_tallies
from helpers.role_heads import circuit, texts, tokenizer


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted, with sums that were added up and others that wait."""
    file = tmp_path_factory.mktemp("run") / "unfinished.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        with pytest.raises(KeyboardInterrupt):
            measure(file, lambda finished, total: signal.raise_signal(signal.SIGINT) if finished > 23 else None)
    return file


def small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(corpus, "WINDOW", 13)
    patch.setattr(corpus, "PAIRS", 3000)
    patch.setattr("headwise.roles.atlas.accumulator.TEXTS_AT_ONCE", 11)


def measure(file: Path, progress: Any = None) -> headwise.Atlas:
    words = tokenizer(around=False)
    return headwise.atlas(circuit(), texts(41), words, name="m", resume=file, replicates=3, progress=progress)


def parts(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with safe_open(file, framework="numpy") as opened:
        arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # this is no dict
        return arrays, json.loads(opened.metadata()["facts"])


def edited(arrays: dict[str, np.ndarray], facts: dict[str, Any], change: Any) -> None:
    exec(change, {"arrays": arrays, "facts": facts, "tally": facts["tallies"]["tally"], "np": np})


TOP, WAITS = "arrays['tally/self/0/top']", "arrays['extra/0/self/0/top']"
CHANGES = {
    f"{TOP} = {TOP}[:, 1:]": "top of self layer 0 is float64 .*, expected float64",
    f"{TOP} = {TOP}.astype(np.float32)": "top of self layer 0 is float32",
    f"{TOP}[0, 0, 0] = np.nan": "top of self layer 0 has values that are not finite",
    "del arrays['tally/self/0/bottom']": "'self/0/bottom' is missing",
    "arrays['tally/self/0/bottom'][0, 0] = -1": "self layer 0 has counts that are negative, or too close to zero",
    "arrays['tally/self/0/bottom'][0, 0] = 1e-320": "self layer 0 has counts that are negative, or too close to zero",
    "arrays['extra/0/self/0/bottom'][0, 0] = -7": "a batch has counts that are negative, or too close to zero",
    "arrays['tally/self/9/top'] = np.zeros(3)": "array 'self/9/top' belongs to no layer",
    "arrays['other'] = np.zeros(3)": "array 'other' belongs to no sums",
    "tally['replicates'] = 2**60": "expected float64",
    "tally['texts'] = '7'": "texts must be a whole number from 0 on, got '7'",
    "tally['layers'].append(['self', 0])": "a layer is listed twice",
    "tally['layers'] = 7": "layers must be a list, got 7",
    "tally['ways'] = {'self': 'sideways'}": "ways are {'self': 'sideways'} for names of self",
    "tally['seen'] = -1": "seen must be a whole number of 64 bits, got -1",
    "del tally['names']": "'names' is missing",
    "facts['tallies'] = []": r"tallies must be an object, got \[\]",
    "facts['more'] = None": "more must be an object, got None",
    "del facts['tallies']['tally']": "belongs to no sums",
    "facts['more']['window'] = -13": "window must be a whole number from 0 on, got -13",
    "facts['more']['batches'] = 10**6": "unfinished run with other texts",
    "facts['more']['window'] = 10**6": "unfinished run with other texts",
    "facts['more']['texts'] = None": "texts must be a text, got None",
    "facts['more']['texts'] = 'a'": "unfinished run with other texts",
    "facts['more']['asked'] = 7": "unfinished run with another version of headwise, other weights",
    "facts['more']['asked']['format'] = 1": "unfinished run with another version of headwise;",
    "facts['more']['waiting'] = None": "waiting must be a list, got None",
    "facts['more']['waiting'][0]['tokens'] = -1": "tokens must be a whole number from 0 on, got -1",
    "facts['more']['waiting'].pop()": "array '.*' belongs to no batch",
    f"{WAITS} = {WAITS}[:, :, 1:]": "a batch has arrays float64",
    f"{WAITS}[0] = np.inf": "a batch has values that are not finite",
    "arrays['extra/0/identities'] = np.zeros(2)": "identities of batch 0 are float64",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_checkpoint_is_refused_with_its_reason(
    change: str, unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    arrays, facts = parts(unfinished)
    edited(arrays, facts, change)
    file = tmp_path / "unfinished.safetensors"
    save_file(arrays, file, {"headwise-sums": "1", "facts": json.dumps(facts)})
    before = file.read_bytes()
    with pytest.raises(headwise.HeadwiseError, match=CHANGES[change]) as caught:
        measure(file)
    assert "\n" not in str(caught.value) and file.read_bytes() == before


def test_an_undamaged_checkpoint_is_resumed(unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    file = tmp_path / "unfinished.safetensors"
    file.write_bytes(unfinished.read_bytes())
    assert load_tallies(file).tallies["tally"].texts < 41
    assert measure(file).about["texts"] == 41 and not file.exists()


@pytest.mark.parametrize(
    "metadata",
    [{}, {"headwise-sums": "9", "facts": "{}"}, {"headwise-sums": "1"}, {"headwise-sums": "1", "facts": "[" * 100_000},
     {"headwise-sums": "1", "facts": "7"}, {"headwise-sums": "1", "facts": "{}"}],
)  # fmt: skip
def test_a_checkpoint_with_another_header_is_refused(metadata: dict[str, str], tmp_path: Path) -> None:
    save_file({"x": np.zeros(3)}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(headwise.CheckpointError, match="cannot be read|holds no sums of an atlas"):
        load_tallies(tmp_path / "a.safetensors")


@pytest.mark.parametrize("cut", [0, 5, 8, 200, -1])
def test_a_truncated_checkpoint_is_refused(cut: int, unfinished: Path, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(unfinished.read_bytes()[:cut])
    with pytest.raises(headwise.CheckpointError, match="cannot be read: .*; remove it to begin again"):
        load_tallies(tmp_path / "a.safetensors")
    with pytest.raises(headwise.CheckpointError, match="it is not a file; remove it to begin again"):
        load_tallies(tmp_path)
