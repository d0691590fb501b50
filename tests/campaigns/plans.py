"""Tampered files of pruning: plans, recovery checkpoints and reports, changed at random and read again.

Reading one gives what it says or a HeadwiseError of one line; never another error, and never a plan that does not hold
together.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns import Report

SHORT, LONG = 60, 10_000
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 5, 6, 1 << 16, 1 << 31, 1 << 63, 10**40, -(10**40), 0.5, -0.5, 1e308, float("nan"),
    float("inf"), "", "self", "0", "x" * 3000, "\0", "\x1b[2J", "\ud800", [], {}, [[]], [1, 1], ["a"], {"self": 0.5},
    [[[[[[]]]]]],
)  # fmt: skip


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    kinds: tuple[tuple[str, Callable[[Any], Callable[[random.Random, Path], str]]], ...] = (
        ("plan", lambda setting: _plan),
        ("recovery", lambda setting: setting.recovery),
        ("report", lambda setting: _report),
    )
    setting = _Setting()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(tries):
            name, check_of = kinds[(0, 0, 1, 0, 2)[number % 5]]
            chance = random.Random(f"{seed} {number}")
            report.tries += 1
            try:
                report.count(f"{name} {check_of(setting)(chance, Path(folder))}")
            except Exception as error:
                report.failures.append(
                    f"try {number} of seed {seed}, a {name}: {type(error).__name__}: {str(error)[:200]}"
                )
    return report


def _check_refusal(error: Exception) -> str:
    """One line, not too long to read."""
    words = str(error)
    assert "\n" not in words and 10 < len(words) < 1500, f"not one readable line: {words[:300]!r}"
    return "refused"


def _plan(chance: random.Random, folder: Path) -> str:
    from headwise import HeadwiseError, Plan

    file = folder / "plan.json"
    file.write_bytes(_change_text(_change_json(_a_plan(), chance), chance))
    try:
        plan = Plan.load(file)
    except HeadwiseError as error:
        return _check_refusal(error)
    counts = {(kind, layer): query for kind, layer, query, _ in plan.layers}
    assert len(counts) == len(plan.layers)
    several_kinds = len({kind for kind, _ in counts}) > 1
    for key, heads in plan.heads.items():
        query = counts[key] if several_kinds else counts[plan.layers[0][0], key]
        assert len(set(heads)) == len(heads) and all(0 <= head < query for head in heads)
    assert str(plan) and Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    return "read"


def _a_plan() -> dict[str, Any]:
    from headwise import Plan

    layers = tuple((kind, layer, 6, 2) for kind in ("encoder", "decoder") for layer in range(3))
    return Plan(
        {("encoder", 1): [2, 3], ("decoder", 0): [5]}, layers, keep={"encoder": 0.5}, notes=("a note",)
    ).to_json()


def _report(chance: random.Random, folder: Path) -> str:
    """A report beside a checkpoint is looked at only to see which recovery is safe: it is never an error."""
    from headwise import HeadwiseError
    from headwise.prune.output_directory import check_output

    out = folder / "out"
    out.mkdir(exist_ok=True)
    content = {"recovery_run": "0" * 32, "quality": {"full": {"value": 1.0}}}
    (out / "pruning.json").write_bytes(_change_text(_change_json(content, chance), chance))
    try:
        check_output(out, overwrite=False)
    except HeadwiseError as error:
        return _check_refusal(error)
    raise AssertionError("a directory that is not empty was let pass")


class _Setting:
    """A small model with a checkpoint of its recovery, made once."""

    def __init__(self) -> None:
        self.setting: tuple[Any, Any, Any, bytes] | None = None

    def _make(self, folder: Path) -> tuple[Any, Any, Any, bytes]:
        import headwise
        from headwise.prune.recovery import recover
        from helpers import prunable_models  # of tests/prune

        full = prunable_models.build("bert", num_hidden_layers=1, intermediate_size=7)
        pruned = headwise.prune_heads(full, {0: [1]})
        batches = [prunable_models.inputs("bert")]
        file = folder / "whole.safetensors"
        recover(copy.deepcopy(pruned), full, batches, 3, checkpoint=file, keep=True)
        return pruned, full, batches, file.read_bytes()

    def recovery(self, chance: random.Random, folder: Path) -> str:
        import torch

        from headwise import HeadwiseError
        from headwise.prune.recovery import recover
        from headwise.prune.recovery_checkpoint import run_id

        self.setting = self.setting or self._make(folder)
        pruned, full, batches, whole = self.setting
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        change = chance.randrange(4)
        if change == 0:
            content = _change_text(whole, chance)
        elif change == 1:
            header["__metadata__"] = _change_json(header["__metadata__"], chance)
            content = _safetensors_bytes(header, whole[8 + length :])
        elif change == 2:  # a header of the right form whose losses are tampered with
            losses = _change_json({"losses": json.loads(header["__metadata__"]["losses"])}, chance)
            text = json.dumps(losses.get("losses") if isinstance(losses, dict) else losses)
            header["__metadata__"]["losses"] = chance.choice([text, text[: len(text) // 2], "[" * 9999])
            content = _safetensors_bytes(header, whole[8 + length :])
        else:
            content = _safetensors_bytes(_change_json(header, chance), whole[8 + length :])
        file = folder / "kept.safetensors"
        file.write_bytes(content)
        run_id(file)
        model = copy.deepcopy(pruned)
        try:
            recover(model, full, batches, 3, checkpoint=file, keep=True)
        except HeadwiseError as error:
            pairs = zip(model.parameters(), pruned.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), "a refused checkpoint changed the model"
            return _check_refusal(error)
        return "read"


def _safetensors_bytes(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def _change_json(value: Any, chance: random.Random) -> Any:
    """A copy with one to three of its parts replaced, removed or doubled."""
    result = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(result))
        if not places:
            return chance.choice(VALUES)
        holder, key = chance.choice(places)
        action = chance.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif action == 2:
            holder[key] = copy.deepcopy(chance.choice(places)[0])
        else:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
    return result


def _places(value: Any, depth: int = 0) -> Any:
    """(holder, key) of all that is inside a JSON value."""
    if depth > 20:
        return
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key], depth + 1)


def _change_text(value: Any, chance: random.Random) -> bytes:
    """Bytes, or JSON as bytes; now and then cut, doubled, or with a few bytes replaced."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode("utf-8", "surrogatepass")
    change = chance.randrange(4 if isinstance(value, bytes) else 10)
    position = chance.randrange(len(text) + 1)
    if change == 0:
        return text[:position]
    if change == 1:
        return text[:position] + text[chance.randrange(len(text) + 1) :]
    if change == 2:
        return (
            text[:position] + bytes(chance.randrange(256) for _ in range(chance.randint(1, 9))) + text[position + 1 :]
        )
    if change == 3 and chance.random() < 0.2:
        return chance.choice([b"[", b'{"a":', b'{"layers":[']) * 50_000
    return text
