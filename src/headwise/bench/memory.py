"""Peak memory above the inputs, each measurement in a process of its own, since the peak of a process never falls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HeadwiseError

GOAL = 10**9  # bytes
TOKENS, HEADS, DIM, WINDOW = 16_384, 8, 64, 512
MEASUREMENTS = {"head_stats": "head_stats", "attend-window": f"attend, causal window {WINDOW}"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The inputs of a measurement."""

    tokens: int = TOKENS
    heads: int = HEADS
    dim: int = DIM


def peak(name: str, sizes: Sizes) -> int:
    """Bytes that one call takes above its inputs, measured in a fresh process."""
    return measure_in_process("headwise.bench.memory", name, sizes.tokens, sizes.heads, sizes.dim)


def measure_in_process(module: str, name: str, *arguments: int) -> int:
    """The peak that `python -m module name arguments...` prints as JSON; a failure is one line."""
    command = [sys.executable, "-m", module, name, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise HeadwiseError(f"measuring the memory of {name} failed: {last}")
    return int(json.loads(run.stdout)["peak"])


def _measure(name: str, sizes: Sizes) -> int:
    """The same within this process, after a small call that loads what stays in memory."""
    import torch

    import headwise

    calls: dict[str, Callable[..., Any]] = {
        "head_stats": headwise.head_stats,
        "attend-window": lambda q, k, v: headwise.attend(q, k, v, causal=True, window=(WINDOW - 1, 0)),
    }
    small = torch.randn(3, 1, sizes.heads, min(sizes.tokens, WINDOW), sizes.dim)
    q, k, v = torch.randn(3, 1, sizes.heads, sizes.tokens, sizes.dim)
    with torch.no_grad():
        calls[name](*small)
        return peak_above(lambda: calls[name](q, k, v))


def peak_above(call: Callable[[], Any]) -> int:
    """Bytes by which memory peaks during the call; where the peak cannot be reset, an earlier one may hide some."""
    before = _reset_peak()
    call()
    return _peak() - before


def _reset_peak() -> int:
    """Bytes in use now. Where the kernel allows it, the peak is reset to them."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    """Peak bytes so far. ru_maxrss is the second choice: on Linux a process inherits it from its parent."""
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    sys.stdout.write(json.dumps({"peak": _measure(name, Sizes(*map(int, numbers)))}))
