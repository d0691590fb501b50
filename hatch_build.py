"""Build the native kernel with the system's C compiler, when the package is built or installed.

Without a compiler the package still installs, and computes in PyTorch; `headwise.explain` says so.
`python hatch_build.py` builds the kernel in place, `python hatch_build.py driver TARGET FLAG...` its test driver.
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
# no -ffast-math: when linking it changes how the whole process treats subnormals
# no -march=native: a wheel runs on other machines
FLAGS = "-O3 -std=gnu11 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno -fno-trapping-math".split()
PATHS = {  # attention.c and backward.c are compiled once per instruction set; cpu.h checks for exactly these
    "x86_64": {
        "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
        "avx2": "-mavx2 -mfma -mf16c",
        "plain": "",
    },
    "aarch64": {"neon": "", "plain": "-DHEADWISE_PLAIN"},
}
OTHER_MACHINES = {"plain": ""}
MACHINE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def compiler() -> list[str] | None:
    """The C compiler: $CC, or the first of the usual names."""
    if os.environ.get("CC"):
        return os.environ["CC"].split()
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [path] if path else None


def source_hash(folder: Path = KERNEL) -> str:
    """Hash of all C sources and headers, compiled into the binary so that a stale one is noticed."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
    return hashlib.sha256(text).hexdigest()[:16]


def machine_of(cc: list[str]) -> str:
    """The processor that a compiler compiles for: x86_64, aarch64, ..."""
    answer = subprocess.run([*cc, "-dumpmachine"], check=False, capture_output=True, text=True)
    if not answer.stdout.strip():  # zig prints the machine, but fails, for a target with a version of glibc
        answer.check_returncode()
    name = answer.stdout.split("-")[0].strip()
    return MACHINE_NAMES.get(name, name)


def build(cc: list[str], target: Path, extra_flags: Sequence[str] = (), driver: Path | None = None) -> None:
    """Compile the sources for all instruction sets of the machine into a shared library or a test driver.

    Args:
        cc: the compiler and its own arguments
        target: the file to write
        extra_flags: for compiling and linking, such as sanitizers
        driver: C source with a `main`; the sources are linked with it instead of into a library
    """
    sources: list[tuple[Path, str, list[str]]] = [  # source, name of the object file, flags
        (KERNEL / "kernel.c", "kernel", [f'-DHEADWISE_SOURCE="{source_hash()}"']),
        (KERNEL / "threads.c", "threads", []),
    ]
    for name, flags in PATHS.get(machine_of(cc), OTHER_MACHINES).items():
        sources.append((KERNEL / "attention.c", name, flags.split()))
        sources.append((KERNEL / "backward.c", f"backward_{name}", flags.split()))
    if driver is not None:
        sources.append((driver, "driver", [f"-I{KERNEL}"]))
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{name}.o") for _, name, _ in sources]

        def compile_source(source: tuple[Path, str, list[str]], output: str) -> None:
            path, _, flags = source
            subprocess.run([*cc, *FLAGS, *extra_flags, *flags, "-c", str(path), "-o", output], check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each takes seconds
            list(pool.map(compile_source, sources, objects))
        temporary = target.with_suffix(f".{os.getpid()}")  # processes that have the old library loaded keep it
        shared = ["-shared"] if driver is None else []
        subprocess.run([*cc, *extra_flags, *shared, *objects, "-o", str(temporary), "-lm", "-lpthread"], check=True)
        temporary.replace(target)


def build_here() -> str | None:
    """Build in place. Returns None, or why it was not possible."""
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
    """Adds the kernel to wheels. One wheel per platform serves every Python: the library is called through ctypes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "standard":  # an editable install reads the results where they are
            for path in sorted((Path(__file__).parent / "docs/lab").glob("*.json")):
                build_data["force_include"][str(path)] = f"headwise/lab/results/{path.name}"
        problem = build_here()
        if problem:
            (KERNEL / BINARY).unlink(missing_ok=True)
            self.app.display_warning(f"headwise without its native kernel: {problem}")
            return
        build_data["artifacts"].append(f"src/headwise/attention/backends/native/{BINARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        Path(sys.argv[2]).parent.mkdir(exist_ok=True, parents=True)
        driver = Path(__file__).parent / "tests/kernel/driver.c"
        build(compiler() or ["cc"], Path(sys.argv[2]), sys.argv[3:], driver)
        sys.exit()
    problem = build_here()
    sys.exit(f"not built: {problem}" if problem else 0)
