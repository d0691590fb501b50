"""The machine a benchmark ran on, in words: figures mean little without it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile", "neon", "asimd", "sve")


def describe() -> dict[str, str | int]:
    """CPU, cores, threads, instruction sets, versions."""
    import torch

    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "instructions": " ".join(_instructions()),
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def in_words(machine: dict[str, str | int]) -> str:
    return (
        "{cpu}, {cores} cores, {threads} threads; {instructions} (torch uses {torch_cpu}); "
        "torch {torch}, Python {python}, {os}".format(**machine)
    )


def _cores() -> int:
    """Those this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _instructions() -> list[str]:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return [name for name in INSTRUCTION_SETS if name in flags] or ["instruction sets unknown"]


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""
