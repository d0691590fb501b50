"""The machine that a benchmark ran on; results mean little without it."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from pathlib import Path

from ..errors import HeadwiseError

INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile", "neon", "asimd", "sve")

RESTRICTIONS = {  # an instruction set -> the variables that hold PyTorch, its libraries and our kernel to it
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "HEADWISE_KERNEL": "avx2",
    },
}


def restricted_to() -> str:
    """The older instruction set that this process is held to, or ""."""
    return next((isa for isa, variables in RESTRICTIONS.items() if variables.items() <= os.environ.items()), "")


def restrict_instructions(isa: str, arguments: list[str]) -> None:
    """Start this process again, held to an older instruction set: libraries choose theirs when they are loaded.

    Args:
        isa: "avx2".
        arguments: of the command line, without the program's name.
    """
    if isa not in RESTRICTIONS:
        raise HeadwiseError(f"there is no instruction set {isa!r} to go back to; there is {', '.join(RESTRICTIONS)}")
    if restricted_to() != isa:
        command = [sys.executable, "-m", "headwise", *arguments]
        os.execve(sys.executable, command, {**os.environ, **RESTRICTIONS[isa]})


def describe_machine() -> dict[str, str | int]:
    """CPU, cores, threads, instruction sets and versions, for a JSON report."""
    import torch

    return {
        "cpu": processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "instructions": " ".join(_instructions()),
        "restricted": restricted_to(),
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


@functools.cache
def processor() -> str:
    """The name of the CPU."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def machine_summary(machine: dict[str, str | int]) -> str:
    """One line from what `describe_machine` gave."""
    restriction = f", all restricted to {machine['restricted']}" if machine.get("restricted") else ""
    return (
        "{cpu}, {cores} cores, {threads} threads; {instructions} (torch uses {torch_cpu}{restriction}); "
        "torch {torch}, Python {python}, {os}".format(restriction=restriction, **machine)
    )


def _cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _instructions() -> list[str]:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return [name for name in INSTRUCTION_SETS if name in flags] or ["instruction sets unknown"]


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    line = re.search(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE)
    return line.group(1).strip() if line else ""
