"""The Triton kernel: run in an interpreter, compiled for absent GPUs, never imported for CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.attention.backends.triton import launch

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(not launch.installed(), reason="triton is not installed")


def run(*command: str, **environment: str) -> str:
    given = {**os.environ, "HEADWISE_KERNEL": "", **environment}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=600, env=given, cwd=HERE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_triton_kernel_passes_its_tests_in_the_interpreter():
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "in_interpreter.py", TRITON_INTERPRET="1")
    assert "passed" in said and "skipped" not in said


@needs_triton
@pytest.mark.full
def test_triton_kernel_passes_a_long_campaign_in_the_interpreter():
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "full", "in_interpreter.py", TRITON_INTERPRET="1")


def test_calls_on_the_cpu_never_import_triton():
    code = """
import sys, torch, headwise
q, k, v = torch.randn(3, 1, 2, 5, 8)
headwise.head_stats(q, k, v, causal=True)
print("native" in headwise.explain(q, k, v) or "sdpa" in headwise.explain(q, k, v), "triton" in sys.modules)
"""
    assert run("-c", code).split() == ["True", "False"]


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from headwise import attend, head_stats
from headwise.attention.backends.triton import kernel, launch

class Driver:
    "A GPU that is not there: enough of it to compile for."
    def get_current_target(self): return GPUTarget({target})
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

class Compiled:
    def __getitem__(self, grid):
        return lambda *given, **how: print(real.warmup(*given, grid=grid, **how).metadata.shared)

real, kernel.attend, launch.interpreting = kernel.attend, Compiled(), True
triton.runtime.driver.set_active(Driver())
q, k, v = torch.randn(3, 2, 4, 200, 64, dtype=torch.float16)
mask, marks = torch.zeros(2, 1, 200, 200), torch.ones(2, 200, dtype=torch.bool)
head_stats(
    q, k[:, :2], v[:, :2], mask=mask, window=(9, 3), lengths=torch.tensor([3, 4]), offset=torch.tensor([0, 1]),
    softcap=3.0, sinks=torch.zeros(4), gates=torch.ones(2, 4), classes={{"some": marks}}, queries=marks,
)
attend(q, k, v, mask=mask > 0)
x = torch.randn(1, 1, 40, launch.WIDEST)
attend(x, x, x)
"""


@needs_triton
@pytest.mark.parametrize("target", ['"cuda", 80, 32', '"hip", "gfx942", 64'])
def test_triton_kernel_compiles_for_gpus_and_fits_their_shared_memory(target, tmp_path):
    said = run("-c", COMPILE.format(target=target), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    shared = [int(line) for line in said.split()]
    assert len(shared) == 3 and max(shared) <= 64 * 1024  # the least that any of them has
