"""Build the native kernel with the system's C compiler, when the package is built or installed.

Without a compiler the package still installs, and computes in PyTorch: the terminal and `headwise.explain` say why.
`python hatch_build.py` builds the kernel in place, `python hatch_build.py driver TARGET FLAG...` its test driver.

HEADWISE_WHEEL is the platform tag of a wheel for another platform, whose compiler is $CC, or "any" for a wheel without
the kernel; tools/wheels.py builds them all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # only needed while a package is built
    BuildHookInterface = object

PACKAGE = "headwise/attention/backends/native"  # in a wheel
KERNEL = Path(__file__).parent / "src" / PACKAGE
BINARIES = {
    "macosx": "kernel.dylib",
    "win": "kernel.dll",
}  # by a platform tag's first word; as in library.py
BINARY = "kernel.so"  # elsewhere
NOTE = "kernel.txt"  # in the place of the binary: why there is none
PLATFORM, ANY = "HEADWISE_WHEEL", "any"
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


def binary_name(platform: str) -> str:
    """The file name of the kernel on the platform of a tag, such as macosx_11_0_arm64."""
    return BINARIES.get(re.split("[-_0-9]", platform)[0], BINARY)


def machine_of(cc: list[str]) -> tuple[str, bool]:
    """The processor that a compiler compiles for (x86_64, aarch64, ...), and whether for Windows."""
    answer = subprocess.run([*cc, "-dumpmachine"], check=False, capture_output=True, text=True)
    if not answer.stdout.strip():  # zig prints the machine, but fails, for a target with a version of glibc
        answer.check_returncode()
    name = answer.stdout.split("-")[0].strip()
    return MACHINE_NAMES.get(name, name), "windows" in answer.stdout or "mingw" in answer.stdout


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
    machine, for_windows = machine_of(cc)
    for name, flags in PATHS.get(machine, OTHER_MACHINES).items():
        sources.append((KERNEL / "attention.c", name, flags.split()))
        sources.append((KERNEL / "backward.c", f"backward_{name}", flags.split()))
    if driver is not None:
        sources.append((driver, "driver", [f"-I{KERNEL}"]))
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{name}.o") for _, name, _ in sources]

        def compile_source(source: tuple[Path, str, list[str]], output: str) -> None:
            path, _, flags = source
            command = [*cc, *FLAGS, *extra_flags, *flags, "-c", path.name, "-o", output]
            subprocess.run(command, check=True, cwd=path.parent)  # the binary repeats the path in its assertions

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each takes seconds
            list(pool.map(compile_source, sources, objects))
        shared = ["-shared"] if driver is None else []
        if target.suffix == ".dylib":
            shared.append(f"-Wl,-install_name,@rpath/{target.name}")
        libraries = ["-lm"] if for_windows else ["-lm", "-lpthread"]
        linked = Path(folder) / target.name
        subprocess.run([*cc, *extra_flags, *shared, *objects, "-o", str(linked), *libraries], check=True)
        temporary = target.with_suffix(f".{os.getpid()}")
        shutil.move(linked, temporary)
        temporary.replace(target)  # processes that have the old library loaded keep it


def try_build(target: Path) -> str | None:
    """Build the library, or write a note beside it. Returns None, or why it was not possible."""
    problem, cc = None, compiler()
    if sys.platform == "win32" and "CC" not in os.environ:
        problem = "on Windows it comes with the wheels that are built elsewhere (make wheels)"
    elif cc is None:
        problem = "no C compiler was found (cc, gcc or clang; or set CC); install one and reinstall headwise"
    else:
        try:
            build(cc, target)
        except (OSError, subprocess.CalledProcessError) as error:
            problem = f"{' '.join(cc)} failed: {error}"
    note = target.with_name(NOTE)
    note.unlink(missing_ok=True)
    if problem:
        target.unlink(missing_ok=True)
        note.write_text(problem)
    return problem


def show_on_terminal(message: str) -> None:
    """Write to the terminal itself, where there is one: pip shows nothing of what a build that succeeds prints."""
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\n{message}\n")


class NativeKernel(BuildHookInterface):  # type: ignore[misc, valid-type, unused-ignore]
    """Adds the kernel to wheels. One wheel per platform serves every Python: the library is called through ctypes."""

    folder: Path | None = None  # of the binary, until it is in the wheel

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        platform = os.environ.get(PLATFORM) or sysconfig.get_platform()
        binary = binary_name(platform)
        if version == "editable":  # it reads all files where they are
            problem = try_build(KERNEL / binary)
        else:
            self.folder = Path(tempfile.mkdtemp())
            for path in sorted((Path(__file__).parent / "docs/lab").glob("*.json")):
                build_data["force_include"][str(path)] = f"headwise/lab/results/{path.name}"
            problem = self.include_kernel(platform, binary, build_data)
        if problem is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
        elif platform != ANY:
            if os.environ.get(PLATFORM):
                raise RuntimeError(f"no kernel for {platform}: {problem}")
            self.app.display_warning(f"headwise without its native kernel: {problem}")
            show_on_terminal(f"headwise was installed without its native kernel, and computes in PyTorch: {problem}")

    def include_kernel(self, platform: str, binary: str, build_data: dict[str, Any]) -> str | None:
        """Add the kernel, or the note that says why there is none, to a wheel. Returns the note's text, or None."""
        if platform == ANY:
            problem: str | None = "this wheel is for any platform; install one for yours, or build one from the source"
            (self.folder / NOTE).write_text(problem or "")
        else:
            problem = try_build(self.folder / binary)
        name = NOTE if problem else binary
        build_data["force_include"][str(self.folder / name)] = f"{PACKAGE}/{name}"
        return problem

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        Path(sys.argv[2]).parent.mkdir(exist_ok=True, parents=True)
        driver = Path(__file__).parent / "tests/kernel/driver.c"
        build(compiler() or ["cc"], Path(sys.argv[2]), sys.argv[3:], driver)
        sys.exit()
    problem = try_build(KERNEL / binary_name(sysconfig.get_platform()))
    sys.exit(f"not built: {problem}" if problem else 0)
