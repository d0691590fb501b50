"""Kernel-facing tests under other instruction sets, thread counts, kernels and orders; `make matrix` runs them all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import matrix

KERNEL = ("tests/attention/test_attend.py", "tests/attention/test_stats.py")
# a load changes times alone, and makes everything slow: `make matrix` has it
CONFIGURATIONS = {name: configuration for name, configuration in matrix.available().items() if not configuration.load}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kernel_equals_the_specification_in_every_configuration(name: str) -> None:
    process = matrix.run(CONFIGURATIONS[name], [*KERNEL, "-k", "attend_equals or stats_equal"], timeout=2400)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-1000:]
    assert " passed" in process.stdout


def test_settings_reach_the_tests(tmp_path: Path) -> None:
    """A configuration that does nothing would pass every time."""
    script = (
        "import torch, headwise\n"
        "def test_settings():\n"
        "    q = torch.ones(1, 1, 3, 4)\n"
        "    assert 'plain C' in headwise.explain(q, q, q) and torch.get_num_threads() == 1\n"
        "    assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
    )
    settings = {"HEADWISE_KERNEL": "plain", "ATEN_CPU_CAPABILITY": "default", **matrix.threads(1)}
    file = tmp_path / "test_settings.py"
    file.write_text(script)
    process = matrix.run(matrix.Configuration(settings), ["--rootdir", str(tmp_path), "-c", os.devnull, str(file)], 300)
    assert process.returncode == 0, process.stdout[-2000:]
