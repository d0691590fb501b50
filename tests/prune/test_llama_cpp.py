"""GGUF files that headwise wrote, in llama.cpp itself: the logits are those of the model. `make interop` runs this."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from helpers.small_gguf import build_model, write_gguf

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama_cpp is not installed", allow_module_level=True)

UNEVEN = {0: [0, 1], 2: [1, 4]}
IDS = [1, 17, 31, 8, 99, 54, 5, 61]
TEXT = "The capital of France is Paris. The old man and the sea"
FACTOR = 8.0  # of rounding in float32, which is measured: a wrong order of rows differs by the logits' own size


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    if request.node.get_closest_marker("full") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def logits_in_llama_cpp(file: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """(tokens, vocabulary), computed by llama.cpp in float32, with a cache in float32."""
    from llama_cpp import GGML_TYPE_F32, Llama

    model = Llama(
        str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32
    )
    model.eval(ids)
    scores = np.array(model.scores[: len(ids)])
    model.close()
    return scores


def distance(model: Any, file: Path, ids: list[int]) -> float:
    """The largest difference of the logits, relative to the largest logit."""
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].float().numpy()
    return float(np.abs(logits_in_llama_cpp(file, ids) - expected).max() / np.abs(expected).max())


def rounding(model: Any, ids: list[int]) -> float:
    """How far the model's own logits in float32 are from those in float64, relative to the largest."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens).logits
        return float((model(tokens).logits - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("form", ["even", "uneven", "zeroed", "compensated", "merged"])
def test_llama_cpp_computes_the_logits_of_the_model(model_type: str, form: str, tmp_path: Path) -> None:
    changes = {"head_dim": 128} if model_type == "qwen3" else {}
    source = write_gguf(tmp_path / "source.gguf", build_model(model_type, **changes))
    model = headwise.load(source)
    theirs = distance(model, source, IDS)  # the same file, without any code of headwise
    assert theirs < 1e-3, "llama.cpp does not compute what transformers does"
    if form == "merged":
        smaller, _ = headwise.group_kv_heads(model, kv_heads=1)
    else:
        heads: Any = UNEVEN if form in ("uneven", "zeroed") else {layer: [0, 1] for layer in range(3)}
        means: Any = {"compensate": "mean", "batches": [{"input_ids": torch.tensor([IDS])}]}
        smaller = headwise.prune_heads(model, heads, **means if form == "compensated" else {})
    written = tmp_path / "model.gguf"
    if model_type == "qwen3" and form in ("uneven", "compensated"):
        with pytest.raises(headwise.UnsupportedError, match="without norms of queries and keys"):
            headwise.save(smaller, written)
        return
    headwise.save(smaller, written, form="zeroed" if form == "zeroed" else None)
    assert distance(smaller, written, IDS) <= FACTOR * max(theirs, rounding(smaller, IDS))


@pytest.mark.full
def test_an_uneven_smollm2_computes_its_logits_in_llama_cpp(tmp_path: Path) -> None:
    from llama_cpp import Llama

    model, tokenizer = headwise.load("smollm2"), headwise.tokenizer("smollm2")
    heads = {layer: [layer % 9, (layer + 4) % 9] for layer in range(0, 30, 3)} | {1: [0, 1, 2], 4: [3, 4, 5, 6, 7, 8]}
    pruned = headwise.prune_heads(model, heads)
    headwise.save(model, tmp_path / "whole.gguf")
    headwise.save(pruned, tmp_path / "pruned.gguf")
    ids = tokenizer(TEXT)["input_ids"]
    theirs = distance(model, tmp_path / "whole.gguf", ids)
    assert theirs < 1e-3
    assert distance(pruned, tmp_path / "pruned.gguf", ids) <= FACTOR * max(theirs, rounding(pruned, ids))
    reader = Llama(str(tmp_path / "pruned.gguf"), n_ctx=64, vocab_only=True, verbose=False)
    assert reader.tokenize(TEXT.encode(), add_bos=False) == ids, "the tokenizer is another one"
