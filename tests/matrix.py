"""The tests under other instruction sets, thread counts, kernels, orders and loads than this machine's own.

`python tests/matrix.py [name ...] [-- pytest arguments]` runs the whole suite once per configuration and prints the
counts (`make matrix`); test_matrix.py runs the kernel-facing tests of each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUSY = "while True: pass"
SEED = 17  # the same for all workers of a run


@dataclass(frozen=True)
class Configuration:
    """How to run the tests. Several settings share a run, so that few runs cover all of them."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    load: int = 0  # busy processes beside the tests
    needs: str = ""  # a processor flag of /proc/cpuinfo


def threads(count: int) -> dict[str, str]:
    oversubscribed = count > (
        os.cpu_count() or 1
    )  # threads that spin while they wait would take the cores of those that work
    # MKL_DYNAMIC: else MKL, and PyTorch after it, lowers the count to the number of cores
    counts = {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "MKL_DYNAMIC": "FALSE"}
    return counts | ({"OMP_WAIT_POLICY": "passive"} if oversubscribed else {})


CONFIGURATIONS = {
    "ATen default, kernel off, 1 thread": Configuration(
        {"ATEN_CPU_CAPABILITY": "default", "HEADWISE_KERNEL": "off", **threads(1)}
    ),
    "ATen avx2, kernel plain, 4 threads": Configuration(
        {"ATEN_CPU_CAPABILITY": "avx2", "HEADWISE_KERNEL": "plain", **threads(4)}, needs="avx2"
    ),
    "ATen avx2, kernel avx2, 2 threads, random order": Configuration(
        {"ATEN_CPU_CAPABILITY": "avx2", "HEADWISE_KERNEL": "avx2", **threads(2)},
        ("--random-order", f"--random-order-seed={SEED}"),
        needs="avx2",
    ),
    "ATen avx512, kernel avx512, 2 threads": Configuration(
        {"ATEN_CPU_CAPABILITY": "avx512", "HEADWISE_KERNEL": "avx512", **threads(2)}, needs="avx512dq"
    ),
    "as it is, under a load of 8": Configuration(load=8),
}


def available() -> dict[str, Configuration]:
    """The configurations that this processor can run."""
    info = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", info.read_text())) if info.exists() else set()
    return {
        name: configuration
        for name, configuration in CONFIGURATIONS.items()
        if not configuration.needs or configuration.needs in flags
    }


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many busy processes beside the body."""
    workers = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in workers:
            process.kill()
            process.wait()


def run(configuration: Configuration, arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Pytest under a configuration, with compiled code of its own: inductor's cache knows no instruction sets."""
    with tempfile.TemporaryDirectory() as cache, load(configuration.load):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **configuration.environment}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *configuration.arguments, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names, pytest_arguments = arguments[:end], arguments[end + 1 :]
    failures = 0
    for name, configuration in available().items():
        if names and name not in names:
            continue
        start = time.monotonic()
        process = run(configuration, pytest_arguments, timeout=4 * 3600)
        lines = process.stdout.strip().splitlines() or [process.stderr[-500:]]
        sys.stdout.write(f"{name}: {lines[-1]} ({time.monotonic() - start:.0f} s)\n")
        sys.stdout.writelines(f"  {line}\n" for line in lines if line.startswith(("FAILED", "ERROR")))
        sys.stdout.flush()
        failures += process.returncode != 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
