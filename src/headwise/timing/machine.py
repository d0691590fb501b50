"""The machine a benchmark ran on, in words: figures mean little without it."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from ..errors import HeadwiseError

INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile", "neon", "asimd", "sve")

LESSER = {  # an instruction set -> what makes PyTorch, its libraries and our kernel use no better one
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "HEADWISE_KERNEL": "avx2",
    },
}


def restricted_to() -> str:
    """The lesser instruction set that this process was told to use, or ""."""
    return next((isa for isa, told in LESSER.items() if told.items() <= os.environ.items()), "")


def restrict(isa: str, arguments: list[str]) -> None:
    """Begin anew with a lesser instruction set, since libraries choose theirs when they are loaded."""
    if isa not in LESSER:
        raise HeadwiseError(f"there is no instruction set {isa!r} to go back to; there is {', '.join(LESSER)}")
    if restricted_to() != isa:
        command = [sys.executable, "-m", "headwise", *arguments]
        os.execve(sys.executable, command, {**os.environ, **LESSER[isa]})


def describe() -> dict[str, str | int]:
    """CPU, cores, threads, instruction sets, versions."""
    import torch

    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "instructions": " ".join(_instructions()),
        "restricted": restricted_to(),
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def in_words(machine: dict[str, str | int]) -> str:
    lesser = f", all restricted to {machine['restricted']}" if machine.get("restricted") else ""
    return (
        "{cpu}, {cores} cores, {threads} threads; {instructions} (torch uses {torch_cpu}{lesser}); "
        "torch {torch}, Python {python}, {os}".format(lesser=lesser, **machine)
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
