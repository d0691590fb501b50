"""A thousand files that nobody meant: a card or one line, never a traceback, never long."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwise
from headwise.card.famous import FAMOUS
from headwise.card.nodes import defaults

LONG = 2.0  # seconds that no card may take, on a machine that is busy

odd = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from([10**12, 10**300, -1, 2**63, "12", "full_attention", 1e300, []]),
)  # fmt: skip
values = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TYPES = ("llama", "gemma3_text", "gemma4_text", "deepseek_v3", "qwen3_next", "falcon", "t5", "whisper", "bert",
"llava", "clip",
         "swin", "qwen2_5_vl", "opt", "modernbert", "mpt", "albert", "gpt_neo", "deberta-v2", "mllama",
         "unheard-of")  # fmt: skip
BASES = [*FAMOUS.values(), *({"model_type": name, **defaults(name)} for name in TYPES)]
KEYS = sorted(
    {key for base in BASES for key in base} | {"architectures", "per_layer_config", "layer_types", "model_type"}
)


@st.composite
def mutilated(draw: st.DrawFn) -> dict[str, Any]:
    """A real config with keys dropped and values put in that do not belong."""
    config = dict(draw(st.sampled_from(BASES)))
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=4)):
        config.pop(key, None)
    return config | draw(st.dictionaries(st.sampled_from(KEYS), values, max_size=4))


def outcome(path: Path) -> str:
    """ "card" or "error"; the card is used as a reader would."""
    started = time.perf_counter()
    try:
        card = headwise.card.read(path)
        json.dumps(card.to_json())
        card.explain()
        card.cache(4096)
        card.flops(4096)
        return "card"
    except headwise.HeadwiseError as error:
        return _checked(str(error))
    finally:
        assert time.perf_counter() - started < LONG


def _checked(message: str) -> str:
    assert "\n" not in message
    assert len(message) < 1500
    return "error"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any") / "config.json"


seen: dict[str, int] = {}


@settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(mutilated())
def test_mutilated_configs(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config))
    found = outcome(path)
    seen[found] = seen.get(found, 0) + 1


def test_mutilated_configs_were_of_both_kinds() -> None:
    if seen:  # the test above may not be in the selection
        assert min(seen.get("card", 0), seen.get("error", 0)) > 50


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(values)
def test_random_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
    outcome(path)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.sampled_from(["config.json", "w.safetensors", "m.gguf"]))
def test_cut_and_overwritten_bytes(path: Path, junk: bytes, at: int, name: str) -> None:
    text = json.dumps(FAMOUS["gpt-oss-20b"]).encode()
    starts = {"config.json": b"", "w.safetensors": len(text).to_bytes(8, "little"), "m.gguf": b"GGUF\x03\0\0\0"}
    whole = starts[name] + text
    file = path.with_name(name)
    file.write_bytes(whole[:at] + junk + whole[at + len(junk) :][: at % 7 * 60])
    outcome(file)
