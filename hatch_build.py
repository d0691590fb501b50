"""Build the native kernel with the system's C compiler, when the package is built or installed.

Without a compiler the package installs all the same and computes in PyTorch; `headwise.explain` says so.
`python hatch_build.py` builds it in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # only needed while a package is built
    BuildHookInterface = object

KERNEL = Path(__file__).parent / "src/headwise/attention/backends/native"
BINARY = "kernel.so"
# no -ffast-math: at link time it changes how the whole process treats subnormals; no -march=native: wheels travel
FLAGS = "-O3 -std=gnu11 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno -fno-trapping-math".split()
PATHS = {  # attention.c is compiled once for each of these
    "x86_64": {
        "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
        "avx2": "-mavx2 -mfma -mf16c",
        "plain": "",
    },
    "aarch64": {"neon": "", "plain": "-DHEADWISE_PLAIN"},
}
OTHERS = {"plain": ""}
NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def compiler() -> list[str] | None:
    """The C compiler: $CC, or the first of the usual names."""
    if os.environ.get("CC"):
        return os.environ["CC"].split()
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else None


def source_hash(folder: Path = KERNEL) -> str:
    """Names the sources: baked into the binary, so that one older than they are is noticed."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
    return hashlib.sha256(text).hexdigest()[:16]


def machine_of(cc: list[str]) -> str:
    """What a compiler compiles for: x86_64, aarch64, ..."""
    said = subprocess.run([*cc, "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    name = said.split("-")[0].strip()
    return NAMES.get(name, name)


def build(cc: list[str], target: Path, more: Sequence[str] = (), driver: Path | None = None) -> None:
    """Compile the sources for every instruction set of the machine into one shared library, or with a test driver."""
    jobs = [(KERNEL / "threads.c", "threads", [f'-DHEADWISE_SOURCE="{source_hash()}"'])]
    jobs += [
        (KERNEL / "attention.c", name, options.split()) for name, options in PATHS.get(machine_of(cc), OTHERS).items()
    ]
    if driver is not None:
        jobs.append((driver, "driver", [f"-I{KERNEL}"]))
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{name}.o") for _, name, _ in jobs]

        def compile_source(job: tuple[Path, str, list[str]], made: str) -> None:
            subprocess.run([*cc, *FLAGS, *more, *job[2], "-c", str(job[0]), "-o", made], check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # an instruction set takes seconds, and they wait for nothing
            list(pool.map(compile_source, jobs, objects))
        fresh = target.with_suffix(f".{os.getpid()}")  # a process that has the old one loaded keeps it
        kind = ["-shared"] if driver is None else []
        subprocess.run([*cc, *more, *kind, *objects, "-o", str(fresh), "-lm", "-lpthread"], check=True)
        fresh.replace(target)


def build_here() -> str | None:
    """Build in place. Gives why not, or None."""
    cc = compiler()
    if cc is None:
        return "no C compiler was found (cc, gcc or clang; or set CC)"
    if sys.platform == "win32":
        return "the native kernel needs POSIX threads"
    try:
        build(cc, KERNEL / BINARY)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{' '.join(cc)} failed: {error}"
    return None


class NativeKernel(BuildHookInterface):  # type: ignore[misc, valid-type, unused-ignore]
    """One wheel a platform serves every Python: the library is called through ctypes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "standard":  # an editable install reads the results where they are
            for path in sorted((Path(__file__).parent / "docs/lab").glob("*.json")):
                build_data["force_include"][str(path)] = f"headwise/lab/results/{path.name}"
        why_not = build_here()
        if why_not:
            (KERNEL / BINARY).unlink(missing_ok=True)
            self.app.display_warning(f"headwise without its native kernel: {why_not}")
            return
        build_data["artifacts"].append(f"src/headwise/attention/backends/native/{BINARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:  # driver TARGET FLAG...: the test driver, for `make sanitize` and `make neon`
        Path(sys.argv[2]).parent.mkdir(exist_ok=True, parents=True)
        driver = Path(__file__).parent / "tests/kernel/driver.c"
        build(compiler() or ["cc"], Path(sys.argv[2]), sys.argv[3:], driver)
        sys.exit()
    problem = build_here()
    sys.exit(f"not built: {problem}" if problem else 0)
