"""The Triton kernel: run in an interpreter, compiled for absent GPUs, never imported for CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.attention.backends.triton import launch
from helpers.tools import TOOLS

HERE = Path(__file__).parent
IN_INTERPRETER = sorted(path.name for path in HERE.glob("in_interpreter*.py"))
needs_triton = pytest.mark.skipif(not launch.installed(), reason="triton is not installed")


def run(*command: str, timeout: int = 1200, **environment: str) -> str:
    variables = {**os.environ, "HEADWISE_KERNEL": "", **environment}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=variables,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize("file", IN_INTERPRETER)
def test_triton_kernels_pass_their_tests_in_the_interpreter(file):
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")
    assert "passed" in said and "skipped" not in said


@needs_triton
@pytest.mark.full
def test_triton_kernel_passes_a_long_campaign_in_the_interpreter():
    long = [file for file in IN_INTERPRETER if "mark.full" in (HERE / file).read_text(encoding="utf-8")]
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "full", *long, timeout=7200, TRITON_INTERPRET="1")


def test_calls_on_the_cpu_never_import_triton():
    code = """
import sys, torch, headwise
q, k, v = torch.randn(3, 1, 2, 5, 8)
headwise.head_stats(q, k, v, causal=True)
print("native" in headwise.explain(q, k, v) or "sdpa" in headwise.explain(q, k, v), "triton" in sys.modules)
"""
    assert run("-c", code).split() == ["True", "False"]


COMPILE = """
import sys
sys.path.append({tools!r})
import triton_resources
from triton.backends.compiler import GPUTarget
for case in triton_resources.CASES.values():
    if case.stats or case.dim == triton_resources.launch.WIDEST:
        with triton_resources.compiling(GPUTarget({target})) as compiled:
            case.launch()
        print(*(used.shared for used in compiled))
"""


@needs_triton
@pytest.mark.parametrize(
    ("target", "limit"), [('"cuda", 80, 32', 99), ('"cuda", 90, 32', 99), ('"hip", "gfx942", 64', 64)]
)
def test_triton_kernels_compile_for_gpus_and_fit_their_shared_memory(target, limit, tmp_path):
    """limit: in KB, the least that any of the manufacturer's GPUs from that generation on has."""
    code = COMPILE.format(target=target, tools=str(TOOLS))
    said = run("-c", code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    shared = [int(word) for word in said.split()]
    assert len(shared) == 4 * 3  # four cases; the output, dQ, and dK with dV
    assert max(shared) <= limit * 1024
