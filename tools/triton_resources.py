"""Compile the Triton kernels for GPUs that are not there, and write what they use into benchmarks/README.md.

    python tools/triton_resources.py                  # some minutes
    python tools/triton_resources.py fp16 dropout     # only the cases with these words in their names, printed

Registers per thread, bytes of registers that ptxas spills to memory, and shared memory per program, as the compilers of
the triton wheel report them. Nothing is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
import triton
from markdown_sections import write_section
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from headwise.attention.backends.protocol import ExtraOutputs
from headwise.attention.backends.triton import backward, kernel, launch
from headwise.attention.call import AttentionCall, StatsRequest, build_call

README = Path(__file__).parents[1] / "benchmarks" / "README.md"
SECTION = "triton"
TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
KERNELS = {"attend": kernel, "query_gradients": backward, "key_gradients": backward}
BATCH, HEADS, KV_HEADS, TOKENS = 2, 4, 2, 200


class Resources(NamedTuple):
    """What one compiled kernel uses."""

    kernel: str
    registers: int  # per thread
    spilled: int  # bytes per thread, written and read
    shared: int  # bytes per program


@dataclass
class AbsentDriver:
    """A GPU that is not there: enough of it to compile for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)  # compiled kernels are cached by it

    def get_current_stream(self, device: Any = None) -> int:
        return 0


class Compiler:
    """In place of a kernel: compiles it where it would be launched, and leaves its outputs as they are."""

    def __init__(self, name: str, target: GPUTarget, compiled: list[Resources]):
        self.name, self.target, self.compiled = name, target, compiled
        self.kernel = getattr(KERNELS[name], name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_kernel(*arguments: Any, **options: Any) -> None:
            result = self.kernel.warmup(*arguments, grid=grid, **options)
            registers, spilled = (0, 0) if self.target.backend != "cuda" else assemble(result.asm["ptx"], self.target)
            self.compiled.append(Resources(self.name, registers, spilled, result.metadata.shared))

        return compile_kernel


def assemble(ptx: str, target: GPUTarget) -> tuple[int, int]:
    """Registers per thread and bytes spilled, by ptxas with the options that Triton gives it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        arch = re.search(r"^\.target (\S+?),? *(debug)?$", ptx, re.MULTILINE)
        assert arch is not None
        options = ["-lineinfo", "-v", "--regAllocOptLevel=2", f"--gpu-name={arch[1]}"]
        command = [get_ptxas(target.arch).path, *options, str(source), "-o", str(source.with_suffix(".o"))]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers is not None and spills, log
    return int(registers[1]), sum(map(int, spills))


@contextmanager
def compiling(target: GPUTarget) -> Iterator[list[Resources]]:
    """Kernels launched inside are compiled for the target instead; what they use is appended to the list."""
    compiled: list[Resources] = []
    triton.runtime.driver.set_active(AbsentDriver(target))
    originals = {name: getattr(module, name) for name, module in KERNELS.items()}
    interpreting, launch.interpreting = launch.interpreting, True  # CPU tensors are launched here
    try:
        for name, module in KERNELS.items():
            setattr(module, name, Compiler(name, target, compiled))
        yield compiled
    finally:
        launch.interpreting = interpreting
        for name, module in KERNELS.items():
            setattr(module, name, originals[name])


@dataclass(frozen=True)
class Case:
    """A call to compile for."""

    dtype: torch.dtype
    dim: int
    options: dict[str, Any]
    stats: bool = False
    value_dim: int | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k and v of no particular values."""
        widths = self.dim, self.dim, self.value_dim or self.dim
        heads = HEADS, KV_HEADS, KV_HEADS
        return tuple(torch.zeros(BATCH, h, TOKENS, n, dtype=self.dtype) for h, n in zip(heads, widths, strict=True))

    def call(self) -> AttentionCall:
        """The call, validated."""
        return replace(build_call(*self.tensors(), **self.options), seed=0)

    def launch(self) -> None:
        """Forward and backward."""
        (q, k, v), call = self.tensors(), self.call()
        marks = torch.ones(BATCH, TOKENS, dtype=torch.bool)
        request = StatsRequest(marks, {"marked": marks}) if self.stats else None
        launch.run(q, k, v, call, ExtraOutputs(stats=request, lse=True))
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), torch.zeros(q.shape[:3])
        launch.backward(out, q, k, v, out, lse, call)


HALF, SINGLE, CAUSAL = torch.float16, torch.float32, {"causal": True}
EVERYTHING: dict[str, Any] = {
    "mask": torch.zeros(BATCH, 1, TOKENS, TOKENS), "window": [(9, 3), (None, 0), (40, 0), (7, None)],
    "keep_first": [4, 0, 1, 60], "lengths": torch.tensor([3, 4]), "starts": torch.tensor([0, 1]),
    "offset": torch.tensor([0, 1]), "softcap": 3.0, "sinks": torch.zeros(HEADS), "slopes": torch.zeros(HEADS),
    "dropout": 0.1,
}  # fmt: skip
CASES = {
    "fp16, causal": Case(HALF, 64, CAUSAL),
    "fp16, causal, dropout": Case(HALF, 64, {**CAUSAL, "dropout": 0.1}),
    "fp16, causal, wide": Case(HALF, 128, CAUSAL),
    "fp16, causal, dropout, wide": Case(HALF, 128, {**CAUSAL, "dropout": 0.1}),
    "fp16, causal, widest": Case(HALF, launch.WIDEST, CAUSAL),
    "fp16, every option and statistics": Case(HALF, 64, EVERYTHING, stats=True),
    "fp32, causal": Case(SINGLE, 64, CAUSAL),
    "fp32, causal, wide": Case(SINGLE, 128, CAUSAL),
    "fp32, causal, widest": Case(SINGLE, launch.WIDEST, CAUSAL),
    "fp32, every option and statistics": Case(SINGLE, 64, EVERYTHING, stats=True),
}
COLUMNS = {"attend": "forward", "query_gradients": "dQ", "key_gradients": "dK, dV"}


def measure(names: list[str]) -> dict[str, dict[str, dict[str, Resources]]]:
    """By target, case and kernel."""
    results: dict[str, dict[str, dict[str, Resources]]] = {}
    for target, gpu in TARGETS.items():
        for name in names:
            sys.stderr.write(f"{target}: {name}\n")
            with compiling(gpu) as compiled:
                CASES[name].launch()
            results.setdefault(target, {})[name] = {used.kernel: used for used in compiled}
    return results


def table(results: dict[str, dict[str, dict[str, Resources]]]) -> str:
    """One row per case and target."""
    header = ["call", "width", "GPU", *COLUMNS.values()]
    lines = ["| " + " | ".join(header) + " |", "|---|--:|---|--:|--:|--:|"]
    for target, by_case in results.items():
        for name, used in by_case.items():
            cells = [name, str(CASES[name].dim), target, *(describe(used[kernel]) for kernel in COLUMNS)]
            lines.append("| " + " | ".join(cells) + " |")
    cells = f"Registers per thread / bytes spilled / KB of shared memory; triton {triton.__version__} and its ptxas."
    return "\n".join([*lines, "", cells])


def describe(used: Resources) -> str:
    """The figures of one kernel."""
    return f"{used.registers} / {used.spilled:,} / {used.shared / 1024:.0f}"


if __name__ == "__main__":
    selected = [name for name in CASES if all(word in name for word in sys.argv[1:])]
    results = measure(selected)
    if len(selected) == len(CASES):
        write_section(README, SECTION, table(results))
    else:
        sys.stdout.write(table(results) + "\n")
