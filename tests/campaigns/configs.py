"""Configs that nobody meant, as dicts and files: a card or one line of a HeadwiseError, nothing else, and soon."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import headwise
from headwise.card import read
from headwise.card.config.defaults import defaults, model_types
from headwise.card.sources.presets import FAMOUS
from headwise.terminal import CONTROL

from . import Report
from ._limits import Hang, limited

SHORT, LONG = 200, 25_000
LONGEST = 1500  # characters of a message
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 40, 2**31, 2**63, 10**9, 10**12, 10**300, -(10**400), 1.0, 1.5, -0.0, 1e300,
    float("inf"), float("-inf"), float("nan"), "", "12", "full_attention", "sliding_attention", "\x1b[31m", "\ud800",
    "a\nb", [], {}, [[]], [0], [1, 2, 3], [None], ["full_attention"] * 3, ["x"] * 20_000, [1] * 20_000, {"a": 1},
    [-1], [True], {"model_type": "llama"}, {"num_attention_heads": 3}, "llama", "bert", "x" * 10_000, {"": {}}, [{}],
    {"model_type": 3},
)  # fmt: skip
# Numbers that json.dumps does not write so, put into the text of a file.
RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "9" * 5000,
    "-" + "9" * 5000,
    "1" * 4300,
    "1E+400",
    "0.1e-400",
    "1e18",
    "-0",
)
WHOLE = (
    "",
    " ",
    "[]",
    "1",
    "null",
    "{",
    "[" * 100_000,
    '{"a":' * 100_000,
    "\ufeff{}",
    '{"a":1,"a":2}',
    "{}" * 3,
    "\x00",
)


def bases() -> list[dict[str, Any]]:
    """Every famous shape, and what each model type of transformers assumes."""
    types = [{"model_type": name, **_public(defaults(name))} for name in model_types()]
    return [*FAMOUS.values(), *types]


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """Without the notes of the table of defaults."""
    plain = {key: value for key, value in config.items() if not key.startswith("_")}
    return {key: _public(value) if isinstance(value, dict) else value for key, value in plain.items()}


def mutated(base: dict[str, Any], keys: list[str], chance: random.Random) -> dict[str, Any]:
    """A real config with keys dropped, values put in that do not belong, and configs nested into it."""
    config = copy.deepcopy(base)
    for _ in range(chance.choice((1, 1, 2, 3, 5))):
        place = _somewhere(config, chance)
        kind = chance.random()
        if kind < 0.15 and place:
            del place[chance.choice(list(place))]
        elif kind < 0.55:
            place[chance.choice(list(place) or keys)] = _fresh(chance.choice(ODD))
        elif kind < 0.85:
            place[chance.choice(keys)] = _fresh(chance.choice(ODD))
        elif kind < 0.95:
            place[chance.choice(("text_config", "vision_config", "encoder", "decoder"))] = copy.deepcopy(base)
        else:
            deep: Any = chance.choice(ODD)
            for _ in range(chance.choice((3, 50, 3_000))):
                deep = {chance.choice(("a", "text_config")): deep} if chance.random() < 0.8 else [deep]
            place[chance.choice(keys)] = deep
    return config


def _fresh(value: Any) -> Any:
    """A value of its own where it may be changed later."""
    return copy.deepcopy(value) if isinstance(value, dict) else value


def _somewhere(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The config itself, or one nested in it."""
    inner = [value for value in config.values() if isinstance(value, dict)]
    return _somewhere(chance.choice(inner), chance) if inner and chance.random() < 0.4 else config


def as_text(config: dict[str, Any], chance: random.Random) -> str:
    """The config as a file has it, sometimes with a number that is none, sometimes cut or overwritten."""
    try:
        text = json.dumps(config)
    except (RecursionError, ValueError):
        return chance.choice(WHOLE)
    kind = chance.random()
    if kind < 0.3:
        places = [position for position, sign in enumerate(text) if sign == ":"]
        position = chance.choice(places) if places else 0
        return text[: position + 1] + chance.choice(RAW) + "," + text[position + 1 :].partition(",")[2]
    if kind < 0.4:
        position = chance.randrange(len(text) + 1)
        return (
            text[:position]
            + chance.choice(("", "\x00", "{", "]", '"', "\ufffe", "9" * 5000))
            + text[position + chance.randrange(9) :]
        )
    return chance.choice(WHOLE) if kind < 0.42 else text


def use_card(card: headwise.card.Card) -> None:
    """All that a reader may ask of a card."""
    json.dumps(card.to_json())
    card.explain()
    card.cache(4096)
    card.flops(4096)
    card.longest_context(2**34)


def outcome(source: Any) -> str:
    """ "card" or "refused"; a failure in words else."""
    try:
        with limited():
            use_card(read(source))
    except headwise.HeadwiseError as error:
        message = str(error)
        if "\n" in message or len(message) > LONGEST or CONTROL.search(message):
            return f"a message of {len(message)} characters: {message[:200]!r}"
        return "refused"
    except Hang:
        return "no end"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "card"


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    base_configs = bases()
    keys = sorted({key for base in base_configs for key in base} | {"architectures", "per_layer_config", "layer_types"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for number in range(tries):
            chance = random.Random(f"{seed} {number}")
            config = mutated(chance.choice(base_configs), keys, chance)
            source: Any = config
            if chance.random() < 0.6:
                path.write_text(as_text(config, chance), encoding="utf-8", errors="surrogatepass")
                source = path
            result = outcome(source)
            report.tries += 1
            report.count(result if result in ("card", "refused") else "failed")
            if result not in ("card", "refused"):
                report.failures.append(f"seed {seed} try {number} ({'file' if source is path else 'dict'}): {result}")
    for ending in ("card", "refused"):
        if tries >= SHORT and report.counts.get(ending, 0) < tries / 10:
            report.failures.append(
                f"seed {seed}: hardly a try ends as {ending}; the mutations are too weak or too strong"
            )
    return report
