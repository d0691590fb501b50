"""Random calls of the kernel's C driver under sanitizers and emulators. The driver compares them with plain loops.

A variant whose compiler or emulator is not installed is counted, and does not fail.
"""

from __future__ import annotations

import platform
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from campaigns import Report
from campaigns._kill import run

SHORT, LONG = 40, 40_000  # calls; the short form has one variant, tests/attention/test_native.py the others
WARNINGS = "-Wall -Wextra -Werror"  # in tests only: a newer compiler may find something new to warn of
ROOT = Path(__file__).parents[2]
CALLS_PER_RUN = 2_000
TIMEOUT = 1_200.0


@dataclass(frozen=True)
class Variant:
    """One way to build and run the driver."""

    compiler: str = "cc"
    flags: str = WARNINGS
    runner: str = ""

    def missing(self) -> str | None:
        """The tool that is not installed, or None."""
        tools = (self.compiler, *self.runner.split()[:1])
        return next((tool for tool in tools if not shutil.which(tool)), None)

    def build(self, target: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "hatch_build.py"), "driver", str(target), *self.flags.split()]
        return run(command, CC=self.compiler)

    def run(self, driver: Path, calls: int, seed: int) -> str | None:
        """Run random calls on every path. Returns None, or the output of a run that failed."""
        process = run([*self.runner.split(), str(driver), str(calls), str(seed)], TIMEOUT)
        if process.returncode == 0 and process.stdout.endswith("\n0 wrong\n"):
            return None
        return f"exit {process.returncode}: {process.stdout[-1500:]}{process.stderr[-1500:]}"


SANITIZED = "ASan and UBSan"
VARIANTS = {
    SANITIZED: Variant(flags="-g -O0 -fsanitize=address,undefined -fno-sanitize-recover=all"),
    "TSan": Variant(flags="-g -O1 -fsanitize=thread"),
    "as it is": Variant(),
    "NEON": Variant("aarch64-linux-gnu-gcc", f"{WARNINGS} -static", "qemu-aarch64"),
}
if platform.machine() == "x86_64":
    # the binary contains AVX2 and AVX-512 code, none of which may run here
    VARIANTS["a processor without AVX"] = Variant(runner="qemu-x86_64 -cpu Nehalem")
    VARIANTS["a processor without F16C"] = Variant(runner="qemu-x86_64 -cpu Haswell,-f16c")


def campaign(tries: int, seed: int) -> Report:
    """Run at least `tries` calls, as many for every variant that can be built."""
    report, draw = Report(), random.Random(seed)
    names = [SANITIZED] if tries <= SHORT else list(VARIANTS)
    per_variant = -(-tries // len(names))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            variant, driver = VARIANTS[name], Path(folder) / name.replace(" ", "-")
            report.tries += per_variant
            build = None if variant.missing() else variant.build(driver)
            if build is None or (build.returncode and "fsanitize" in variant.flags):
                report.count(f"cannot be built: {name}")
                continue
            if build.returncode:
                report.failures.append(f"{name} was not built: {build.stderr[-500:]}")
                continue
            for first in range(0, per_variant, CALLS_PER_RUN):
                number = draw.randrange(1, 1 << 40)
                calls = min(CALLS_PER_RUN, per_variant - first)
                wrong = variant.run(driver, calls, number)
                report.count(f"runs: {name}")
                if wrong is not None:
                    report.failures.append(f"{name}, driver {calls} {number}: {wrong}")
    return report
