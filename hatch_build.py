"""Build the native kernel with the system's C compiler, when the package is built or installed.

Without a compiler the package installs all the same and computes in PyTorch; `headwise.explain` says so.
`python hatch_build.py` builds it in place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # only needed while a package is built
    BuildHookInterface = object

KERNEL = Path(__file__).parent / "src/headwise/attention/kernel"
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


def build(cc: list[str], machine: str, target: Path, flags: list[str] = FLAGS) -> None:
    """Compile the sources for every instruction set of the machine into one shared library."""
    paths = PATHS.get(machine, OTHERS)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [("threads.c", "threads", [f'-DHEADWISE_SOURCE="{source_hash()}"'])]
        jobs += [("attention.c", name, options.split()) for name, options in paths.items()]
        objects = [str(Path(folder) / f"{name}.o") for _, name, _ in jobs]
        for (source, _, options), made in zip(jobs, objects, strict=True):
            subprocess.run([*cc, *flags, *options, "-c", str(KERNEL / source), "-o", made], check=True)
        fresh = target.with_suffix(f".{os.getpid()}")  # a process that has the old one loaded keeps it
        subprocess.run([*cc, "-shared", *objects, "-o", str(fresh), "-lm", "-lpthread"], check=True)
        fresh.replace(target)


def build_here() -> str | None:
    """Build in place. Gives why not, or None."""
    cc = compiler()
    if cc is None:
        return "no C compiler was found (cc, gcc or clang; or set CC)"
    if sys.platform == "win32":
        return "the native kernel needs POSIX threads"
    machine = platform.machine().lower()
    try:
        build(cc, NAMES.get(machine, machine), KERNEL / BINARY)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{' '.join(cc)} failed: {error}"
    return None


class NativeKernel(BuildHookInterface):  # type: ignore[misc, valid-type, unused-ignore]
    """One wheel a platform serves every Python: the library is called through ctypes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        why_not = build_here()
        if why_not:
            (KERNEL / BINARY).unlink(missing_ok=True)
            self.app.display_warning(f"headwise without its native kernel: {why_not}")
            return
        build_data["artifacts"].append(f"src/headwise/attention/kernel/{BINARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    problem = build_here()
    sys.exit(f"not built: {problem}" if problem else 0)
